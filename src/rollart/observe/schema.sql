-- The ledger of one run. `fate` is a core.types.Fate, times are Unix seconds, `seconds` is JSON by stage.

CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT) WITHOUT ROWID;

CREATE TABLE groups (
  id INTEGER PRIMARY KEY,
  domain TEXT NOT NULL,
  task TEXT NOT NULL,                      -- JSON of core.types.Task
  born INTEGER NOT NULL,
  state TEXT NOT NULL,                     -- open; ready (went to the buffer); evicted (from the buffer); ended (given up,
                                           -- and the task source's state has its task)
  reason TEXT NOT NULL DEFAULT ''
);

CREATE TABLE trajectories (
  grp INTEGER NOT NULL,
  member INTEGER NOT NULL,
  domain TEXT NOT NULL,
  fate TEXT NOT NULL DEFAULT 'in_flight',
  reason TEXT NOT NULL DEFAULT '',
  outcome TEXT,                            -- NULL while the episode runs
  oldest INTEGER, newest INTEGER,          -- versions of its sampled tokens
  reward REAL, success INTEGER,
  prompt INTEGER, sampled INTEGER, total INTEGER,   -- tokens
  turns INTEGER,
  seconds TEXT,
  started_at REAL NOT NULL, ended_at REAL,
  step INTEGER,                            -- the version whose step consumed it
  PRIMARY KEY (grp, member)
) WITHOUT ROWID;

-- Finished trajectories that a crash must not lose, until a checkpoint holds what they taught.
CREATE TABLE payloads (
  grp INTEGER NOT NULL,
  member INTEGER NOT NULL,
  keep INTEGER NOT NULL DEFAULT 0,         -- for the report: 1 of the first steps, 2 the newest of its domain
  body BLOB NOT NULL,
  PRIMARY KEY (grp, member)
);

CREATE TABLE evaluations (
  version INTEGER NOT NULL,
  number INTEGER NOT NULL,
  domain TEXT NOT NULL,
  tasks INTEGER NOT NULL,
  success REAL NOT NULL,
  reward REAL NOT NULL,
  failed INTEGER NOT NULL,
  seconds REAL NOT NULL,
  PRIMARY KEY (version, number, domain)
) WITHOUT ROWID;

CREATE TABLE eval_trajectories (
  version INTEGER NOT NULL,
  number INTEGER NOT NULL,
  member INTEGER NOT NULL,
  domain TEXT NOT NULL,
  task TEXT NOT NULL,                      -- the task's id
  outcome TEXT NOT NULL,
  reward REAL, success INTEGER,
  sampled INTEGER NOT NULL, turns INTEGER NOT NULL,
  body BLOB,                               -- a sample, of the first and the last evaluation
  PRIMARY KEY (version, number, member)
);
