"""The ledger: which task went where, exactly once, on disk (SQLite, WAL).

Keeps true: I2 at any instant and after kill -9; what is on disk is always the run as it was after some event, never
half of one. A group's row and the task source's state change in one transaction, so that no task is lost. A finished
trajectory's tokens stay until a checkpoint holds the step that used them. (Latencies are those until the last step.)

Nothing but SQLite opens its files while it is open: closing any other handle on them in this process would drop
SQLite's locks (POSIX locks belong to process and file), and the next reader would truncate or remove what is in use.

Waits for the disk only: writes gather in a transaction that is committed every COMMIT_SECONDS and at each barrier (a
batch was trained, a step ended, a checkpoint was written, the run starts or ends). The write-ahead log goes into the
database in a thread of its own, since that is what syncs; `flush(durable=True)`, before a checkpoint, syncs by itself.
"""

from __future__ import annotations

import json
import os
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from importlib import resources
from pathlib import Path
from typing import Any

from rollart.core import events as ev
from rollart.core.errors import ConfigError, InvariantViolated, RunError
from rollart.core.types import Fate, Restored, Task, TrajectoryId, Unfinished, Version
from rollart.observe import latency
from rollart.observe.accounts import Accounts, Flight
from rollart.observe.payload import decode, encode, task_dict

SCHEMA = "1"
COMMIT_SECONDS = 0.2
SWEEP_SECONDS = 5.0
DROP_SECONDS = 0.004
"""Spent per commit on freeing payloads that are no longer needed."""
EVAL_SAMPLES = 12
"""Evaluation trajectories kept whole per domain, for the report."""
FIRST_SAMPLES = 4
"""Trained trajectories of the first steps, one a step, kept whole for the report."""

_RECORDED = frozenset({
    ev.RunStarted, ev.RunEnded, ev.GroupOpened, ev.GroupReady, ev.GroupEnded, ev.TrajectoryStarted, ev.TrajectoryEnded,
    ev.Settled, ev.StepEnded, ev.CheckpointSaved, ev.EvalStarted, ev.EvalTrajectory, ev.EvalEnded})
"""Events that are written: the others go on (environments are closed) where the ledger cannot be written any more."""


class Ledger:
    """A journal subscriber that owns `run.db`; `accounts` are the same figures in memory.

    Raises ConfigError for a database of another version, RunError when the disk is full.
    """

    def __init__(self, path: str | Path, *, commit_seconds: float = COMMIT_SECONDS,
                 clock: Callable[[], float] = time.time) -> None:
        self.path, self._commit_seconds, self._clock = Path(path), commit_seconds, clock
        self._sweeper: threading.Thread | None = None
        self._failed: RunError | None = None
        self._file: os.stat_result | None = None
        self._committed = self._swept = time.monotonic()
        with self._errors():
            self._db = sqlite3.connect(self.path, isolation_level=None, timeout=5.0)
            for pragma in ("journal_mode=WAL", "synchronous=NORMAL", "wal_autocheckpoint=0"):
                self._db.execute(f"PRAGMA {pragma}")
            self._open_schema()
            with self._whole():
                self._load()
        self._file = os.stat(self.path)

    def _open_schema(self) -> None:
        if not self._db.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone():
            schema = resources.files(__package__).joinpath("schema.sql").read_text()
            self._db.executescript(f"BEGIN; {schema} INSERT INTO meta VALUES ('schema', '{SCHEMA}'); COMMIT;")
        try:
            found = self._meta("schema")
        except sqlite3.OperationalError:
            found = "unknown"
        if found != SCHEMA:
            raise ConfigError(f"{self.path} has ledger schema {found}, this version of rollart needs {SCHEMA}: "
                              "go on with the version that began the run, or start a new one with --run")

    def _load(self) -> None:
        """Fill the counters from the database."""
        self.accounts = accounts = Accounts()
        for domain, fate, reason, n, sampled in self._db.execute(
                "SELECT domain, fate, reason, count(*), coalesce(sum(sampled), 0) FROM trajectories GROUP BY 1, 2, 3"):
            fate = Fate(fate)
            accounts.tokens[domain][fate] += sampled
            if fate is not Fate.IN_FLIGHT:
                accounts.fates[domain][fate] += n
            if fate not in (Fate.IN_FLIGHT, Fate.TRAINED):
                accounts.count_reason(fate, reason, n)
        for group, member, domain, ended, sampled in self._db.execute(
                "SELECT grp, member, domain, outcome IS NOT NULL, coalesce(sampled, 0) FROM trajectories "
                "WHERE fate = 'in_flight' ORDER BY 1, 2"):
            accounts.in_flight[TrajectoryId(group, member)] = Flight(domain, bool(ended), sampled)
        self._latencies: latency.Latencies = self._meta("latencies") or {}
        self._droppable: list[tuple[int, int]] = []
        self._first_kept = self._db.execute("SELECT count(*) FROM payloads WHERE keep = 1").fetchone()[0]
        self._evicted = True  # there may be some: look at the next task source state
        self._eval_kept = Counter[str]()
        self._eval_tasks = {(domain, task) for domain, task in self._db.execute(
            "SELECT domain, task FROM eval_trajectories WHERE body IS NOT NULL AND (version, number) = "
            "(SELECT version, number FROM eval_trajectories ORDER BY 1, 2 LIMIT 1)")}

    # ---- events

    def on(self, at: float, event: ev.Event) -> None:
        self.accounts.on(at, event)
        if isinstance(event, ev.EnvironmentOpened | ev.EnvironmentClosed):
            self._environment(event)
        barrier = False
        if type(event) in _RECORDED:
            with self._errors():
                barrier = self._write(event)
        if barrier or time.monotonic() - self._committed >= self._commit_seconds:
            self.flush()

    def _write(self, event: ev.Event) -> bool:
        """Put one event into the open transaction; true if it is to be committed at once."""
        match event:
            case ev.TrajectoryStarted(id=id, domain=domain):
                self._do("INSERT INTO trajectories (grp, member, domain, started_at) VALUES (?, ?, ?, ?)",
                         id.group, id.member, domain, self._clock())
            case ev.TrajectoryEnded():
                self._trajectory_ended(event)
            case ev.Settled():
                self._settled(event)
                if event.fate is Fate.TRAINED:
                    return True  # before any checkpoint that holds this step
            case ev.GroupOpened(group=group, task=task, born=born):
                self._do("INSERT INTO groups (id, domain, task, born, state) VALUES (?, ?, ?, ?, 'open') ON CONFLICT "
                         "DO UPDATE SET born = excluded.born, state = 'open', reason = ''",
                         group, task.domain, json.dumps(task_dict(task), separators=(",", ":")), born)
                self._source(event.source)
            case ev.GroupReady(group=ready):
                self._do("UPDATE groups SET state = 'ready' WHERE id = ?", ready.id)
            case ev.GroupEnded(group=group, kept=kept, reason=reason):
                if not kept:
                    self._do("UPDATE groups SET state = 'ended', reason = ? WHERE id = ?", reason, group)
                self._source(event.source)
            case ev.CheckpointSaved(version=version):
                self._drop_payloads(version)
                self._set_meta("checkpoint", version)
                return True
            case ev.EvalStarted() | ev.EvalTrajectory():
                self._evaluation(event)
            case ev.EvalEnded():
                self._evaluation(event)
                return True
            case ev.RunStarted(steps=steps):
                self._do("INSERT OR IGNORE INTO meta VALUES ('started_at', ?)", json.dumps(self._clock()))
                self._set_meta("steps", steps)
                self._do("DELETE FROM meta WHERE key = 'ended'")
                return True
            case ev.RunEnded(version=version, reason=reason):
                self._set_meta("latencies", self._latencies)
                self._set_meta("ended", {"reason": reason, "version": version, "at": self._clock()})
                return True
            case ev.StepEnded():
                self._set_meta("latencies", self._latencies)
                return True
        return False

    def _environment(self, event: ev.EnvironmentOpened | ev.EnvironmentClosed) -> None:
        flight = self.accounts.in_flight.get(event.id)
        if flight is None:  # of an evaluation
            return
        if isinstance(event, ev.EnvironmentOpened):
            latency.add(self._latencies, flight.domain, "open", event.seconds)
            latency.add(self._latencies, flight.domain, "retries", 1.0, event.attempts - 1)
        else:
            for seconds in event.calls:
                latency.add(self._latencies, flight.domain, "step", seconds)

    def _source(self, state: Mapping[str, Any]) -> None:
        """The newest task source state: it has the tasks of the groups that were evicted before."""
        self._set_meta("source", state)
        if self._evicted:
            self._do("UPDATE groups SET state = 'ended' WHERE state = 'evicted'")
            self._evicted = False

    def _trajectory_ended(self, event: ev.TrajectoryEnded) -> None:
        t, key = event.trajectory, (event.trajectory.id.group, event.trajectory.id.member)
        reason = "" if event.fate is Fate.IN_FLIGHT else t.error
        self._do("UPDATE trajectories SET fate = ?, reason = ?, outcome = ?, oldest = ?, newest = ?, reward = ?, "
                 "success = ?, prompt = ?, sampled = ?, total = ?, turns = ?, seconds = ?, ended_at = ? "
                 "WHERE grp = ? AND member = ?",
                 event.fate.value, reason, t.outcome.value, t.oldest, t.newest, t.score and t.score.value,
                 t.score and t.score.success, len(t.prompt), t.sampled, t.length, len(t.turns),
                 json.dumps(dict(t.seconds)), self._clock(), *key)
        if event.fate is Fate.IN_FLIGHT:
            self._do("INSERT INTO payloads (grp, member, body) VALUES (?, ?, ?)", *key, encode(t))

    def _settled(self, event: ev.Settled) -> None:
        rows = [(id.group, id.member) for id in event.ids]
        self._many("UPDATE trajectories SET fate = ?, reason = ?, step = ? WHERE grp = ? AND member = ?",
                   [(event.fate.value, event.reason, event.step, *row) for row in rows])
        if event.step is None:  # no step used them, so losing a step cannot bring them back
            self._many("DELETE FROM payloads WHERE grp = ? AND member = ?", rows)
            self._evict({group for group, _ in rows})
        elif event.fate is Fate.TRAINED:
            self._keep_first(rows[0])

    def _evict(self, groups: set[int]) -> None:
        """A ready group without members left: the next task source state has its task, the newest one not yet."""
        for group in sorted(groups):
            self._do("UPDATE groups SET state = 'evicted' WHERE id = ? AND state = 'ready' AND NOT EXISTS (SELECT 1 "
                     "FROM trajectories WHERE grp = id AND fate IN ('in_flight', 'trained', 'filtered'))", group)
        self._evicted = True

    def _keep_first(self, row: tuple[int, int]) -> None:
        """One trajectory of each of the first batches stays, as a sample for the report."""
        if self._first_kept < FIRST_SAMPLES:
            self._first_kept += 1
            self._do("UPDATE payloads SET keep = 1 WHERE grp = ? AND member = ?", *row)

    def _drop_payloads(self, version: Version) -> None:
        """A checkpoint of `version` holds all steps before it: their tokens may go, but for a sample."""
        done = ("FROM payloads p JOIN trajectories t USING (grp, member) WHERE p.keep != 1 AND t.fate != 'in_flight' "
                "AND (t.step IS NULL OR t.step < ?)")
        self._do("UPDATE payloads SET keep = 0 WHERE keep = 2")
        self._do(f"UPDATE payloads SET keep = 2 WHERE (grp, member) IN (SELECT g, m FROM "
                 f"(SELECT max(grp) g, member m, t.domain {done} AND t.fate = 'trained' GROUP BY t.domain))", version)
        self._droppable = self._db.execute(f"SELECT grp, member {done} AND keep = 0", (version,)).fetchall()

    def _drop_some(self, seconds: float) -> None:
        """Freeing a large payload takes a while, so it is done a little at each commit."""
        until = time.monotonic() + seconds
        while self._droppable and time.monotonic() < until:
            self._many("DELETE FROM payloads WHERE grp = ? AND member = ? AND keep = 0", self._droppable[-8:])
            del self._droppable[-8:]

    def _evaluation(self, event: ev.EvalStarted | ev.EvalTrajectory | ev.EvalEnded) -> None:
        key = event.version, event.number
        if isinstance(event, ev.EvalStarted):
            self._do("DELETE FROM eval_trajectories WHERE version = ? AND number = ?", *key)
            self._do("DELETE FROM evaluations WHERE version = ? AND number = ?", *key)
            self._eval_kept.clear()
        elif isinstance(event, ev.EvalTrajectory):
            t, domain = event.trajectory, event.trajectory.task.domain
            first = not self._db.execute("SELECT 1 FROM evaluations LIMIT 1").fetchone()
            body = None
            if self._eval_kept[domain] < EVAL_SAMPLES and (first or (domain, t.task.id) in self._eval_tasks):
                body = encode(t)
                self._eval_kept[domain] += 1
                if first:
                    self._eval_tasks.add((domain, t.task.id))
            self._do("INSERT OR REPLACE INTO eval_trajectories VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                     *key, t.id.member, domain, t.task.id, t.outcome.value, t.score and t.score.value,
                     t.score and t.score.success, t.sampled, len(t.turns), body)
        else:
            self._many("INSERT OR REPLACE INTO evaluations VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                       [(*key, r.domain, r.tasks, r.success, r.reward, r.failed, event.seconds)
                        for r in event.results])
            self._do("UPDATE eval_trajectories SET body = NULL WHERE body IS NOT NULL AND (version, number) < (?, ?) "
                     "AND (version, number) > (SELECT version, number FROM evaluations ORDER BY 1, 2 LIMIT 1)", *key)

    # ---- after a crash

    def recover(self, version: Version) -> Restored:
        """Bring the accounts to where the checkpoint of `version` can go on, and say what is unfinished.

        Running episodes are gone: cancelled. What steps from `version` on consumed is in flight again if its tokens
        are still here, otherwise cancelled. Doing it twice changes nothing more. Raises ConfigError, and changes
        nothing, where steps before `version` are missing: the ledger is not the one that the checkpoint belongs to.
        """
        has = "EXISTS (SELECT 1 FROM payloads p WHERE p.grp = trajectories.grp AND p.member = trajectories.member)"
        ended = "EXISTS (SELECT 1 FROM groups WHERE id = trajectories.grp AND state = 'ended')"
        lost = "fate IN ('trained', 'filtered') AND step >= ?"
        with self._errors():
            steps = self._db.execute("SELECT count(DISTINCT step) FROM trajectories WHERE step < ? AND "
                                     "fate IN ('trained', 'filtered')", (version,)).fetchone()[0]
            if steps < version:
                raise behind(self.path, steps, version)
            self._do(f"UPDATE trajectories SET fate = 'in_flight', reason = '', step = NULL WHERE {lost} AND {has}",
                     version)
            self._do(f"UPDATE trajectories SET fate = 'cancelled', reason = 'its step was lost' WHERE {lost}", version)
            self._do(f"UPDATE trajectories SET fate = 'cancelled', reason = 'crash', ended_at = coalesce(ended_at, ?) "
                     f"WHERE fate = 'in_flight' AND (outcome IS NULL OR NOT {has} OR {ended})", self._clock())
            self._do("DELETE FROM payloads WHERE keep = 0 AND (grp, member) IN (SELECT grp, member FROM trajectories "
                     "WHERE fate != 'in_flight')")
            self._do("DELETE FROM evaluations WHERE version > ?", version)
            self._do("DELETE FROM eval_trajectories WHERE version > ?", version)
            self._do("UPDATE groups SET state = 'open' WHERE state IN ('ready', 'evicted') AND (NOT EXISTS (SELECT 1 "
                     "FROM trajectories WHERE grp = id AND fate IN ('trained', 'filtered')) OR EXISTS (SELECT 1 "
                     "FROM trajectories WHERE grp = id AND fate = 'in_flight'))")
            self.flush()
            with self._whole():
                self._load()
                groups = tuple(self._unfinished(*row) for row in self._db.execute(
                    "SELECT id, task, born FROM groups WHERE state = 'open' ORDER BY id"))
                next_group = self._db.execute("SELECT coalesce(max(id) + 1, 0) FROM groups").fetchone()[0]
                source = self._meta("source")
        return Restored(groups, source, next_group)

    def _unfinished(self, group: int, task: str, born: Version) -> Unfinished:
        finished = tuple(decode(body) for (body,) in self._db.execute(
            "SELECT p.body FROM payloads p JOIN trajectories t USING (grp, member) "
            "WHERE grp = ? AND t.fate = 'in_flight' ORDER BY member", (group,)))
        started = self._db.execute("SELECT coalesce(max(member) + 1, 0) FROM trajectories WHERE grp = ?",
                                   (group,)).fetchone()[0]
        return Unfinished(group, Task(**json.loads(task)), born, finished, started)

    # ---- the database

    def flush(self, *, durable: bool = False) -> None:
        """Commit now: a crash after this loses nothing of before; if `durable`, a power cut neither.

        Raises RunError where run.db is no longer at its path: what is written would go nowhere.
        """
        with self._errors():
            self._drop_some(DROP_SECONDS)
            if self._db.in_transaction:
                self._db.execute("COMMIT")
            if durable:  # a commit under FULL syncs the whole log, what was committed before included
                self._db.execute("PRAGMA synchronous=FULL")
                self._set_meta("durable_at", self._clock())
                self._db.execute("COMMIT")
                self._db.execute("PRAGMA synchronous=NORMAL")
            if self._gone():
                raise self._refused()
            self._committed = time.monotonic()
            if self._committed - self._swept > SWEEP_SECONDS and not (self._sweeper and self._sweeper.is_alive()):
                self._swept = self._committed
                self._sweeper = threading.Thread(target=_sweep, args=(self.path,), name="ledger-sweep", daemon=True)
                self._sweeper.start()

    def close(self) -> None:
        try:
            if not self._failed:
                with self._errors():
                    self._drop_some(30.0)
                self.flush()
                if self._sweeper:
                    self._sweeper.join(30.0)
                with self._errors():
                    self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
                    with suppress(sqlite3.OperationalError):  # a reader is at it: it stays a database with a log
                        self._db.execute("PRAGMA journal_mode=DELETE")  # one file, that a reader adds no others to
        finally:
            self._db.close()

    def _gone(self) -> bool:
        try:
            return self._file is not None and not os.path.samestat(os.stat(self.path), self._file)
        except OSError:
            return True

    def _refused(self, why: sqlite3.DatabaseError | None = None) -> RunError:
        """What every later write is refused with."""
        if why is None or self._gone():  # then what SQLite says of it is beside the point
            self._failed = RunError(f"the ledger {self.path} was removed or replaced under the run: start anew, or "
                                    f"put the ledger back from a copy before --resume {self.path.parent}")
        else:
            self._failed = RunError(f"the ledger {self.path} cannot be used ({why}): see that its disk has room and "
                                    f"can be written, then continue with --resume {self.path.parent}")
        return self._failed

    def _do(self, statement: str, *values: Any) -> None:
        self._many(statement, [values])

    def _many(self, statement: str, rows: list[tuple[Any, ...]]) -> None:
        if not self._db.in_transaction:
            self._db.execute("BEGIN")
        self._db.executemany(statement, rows)

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """What is read inside was written by a ledger: SQLite does not notice damage to what its pages hold."""
        try:
            yield
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"{self.path} is damaged ({error}): put back the run.db and run.db-wal from a copy, or "
                              "start a new run from the newest checkpoint (model.path)") from error

    def _meta(self, key: str) -> Any:
        row = self._db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return row and (row[0] if key == "schema" else json.loads(row[0]))

    def _set_meta(self, key: str, value: Any) -> None:
        self._do("INSERT OR REPLACE INTO meta VALUES (?, ?)", key, json.dumps(value, default=dict))

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """A failed write is the last one: what came after it would stand beside a gap."""
        if self._failed:
            raise self._failed
        try:
            yield
        except sqlite3.IntegrityError as error:
            raise InvariantViolated(f"I2: the ledger has this already: {error}") from error
        except sqlite3.DatabaseError as error:
            failed = self._refused(error)
            if self._db.in_transaction:
                with suppress(sqlite3.DatabaseError):
                    self._db.execute("ROLLBACK")
            raise failed from error


def _sweep(path: Path) -> None:
    """Move the write-ahead log into the database; readers and the writer go on meanwhile."""
    with suppress(sqlite3.OperationalError):  # nothing is lost: the next commit reports what is wrong
        db = sqlite3.connect(f"{path.resolve().as_uri()}?mode=rw", uri=True, isolation_level=None, timeout=5.0)
        with closing(db):
            db.execute("PRAGMA wal_checkpoint(PASSIVE)")


def behind(path: Path, steps: int, version: Version) -> ConfigError:
    return ConfigError(f"{path} has {steps} of the {version} steps that the run's checkpoint of version {version} was "
                       "trained by: put back the run.db and run.db-wal that belong to it, or start a new run from the "
                       "checkpoint (model.path)")
