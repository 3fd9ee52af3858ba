"""Reading a ledger: what status, summary and report ask of run.db. Works while the run writes and after a crash.

Keeps true: nothing here writes, and the run that writes is not held up or harmed (SQLite's own locks arbitrate; a
reader's connection is read-only). A folder without run.db, or with one that has just begun, gives empty answers.
"""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rollart.algo.intervals import success_interval
from rollart.core.errors import RunError
from rollart.core.types import Fate, Trajectory
from rollart.observe.accounts import counted
from rollart.observe.latency import figures
from rollart.observe.payload import decode


class LedgerView:
    """Close it, or use `with`."""

    def __init__(self, path: str | Path) -> None:
        self._file = file = Path(path)
        address = file.resolve().as_uri()
        try:
            self._db, self.empty = _opened(f"{address}?mode=ro" if file.exists() else ":memory:")
        except sqlite3.OperationalError as error:
            log = file.with_name(f"{file.name}-wal")
            if log.exists() and log.stat().st_size:
                raise self._unreadable(error) from error
            with self._whole():  # nothing is in a log, nobody can write here
                self._db, self.empty = _opened(f"{address}?immutable=1")
        except sqlite3.DatabaseError as error:
            raise self._unreadable(error) from error

    def _unreadable(self, why: Exception) -> RunError:
        return RunError(f"the ledger {self._file} cannot be read ({why}): see that it is whole and may be read; in a "
                        "folder that cannot be written, copy the folder and look at the copy")

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """What is read inside is what a ledger writes: SQLite notices damage to its pages, not to what they hold."""
        try:
            yield
        except (sqlite3.DatabaseError, ValueError) as error:
            raise self._unreadable(error) from error

    def __enter__(self) -> LedgerView:
        return self

    def __exit__(self, *_: object) -> None:
        self._db.close()

    def _rows(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        with self._whole():
            return [] if self.empty else self._db.execute(query, values).fetchall()

    def meta(self, key: str) -> Any:
        """A note of the ledger (`started_at`, `ended`, `steps`, `checkpoint`), or None."""
        rows = self._rows("SELECT value FROM meta WHERE key = ?", key)
        with self._whole():
            return json.loads(rows[0][0]) if rows else None

    def by_domain(self) -> dict[str, dict[str, int]]:
        """{domain: {dispatched, trained, filtered, stale, failed, cancelled, in_flight}}."""
        fates: dict[str, Counter[Fate]] = {}
        rows = self._rows("SELECT domain, fate, count(*) FROM trajectories GROUP BY 1, 2 ORDER BY 1")
        with self._whole():
            for domain, fate, n in rows:
                fates.setdefault(domain, Counter())[Fate(fate)] = n
        return {domain: counted(counts, counts[Fate.IN_FLIGHT]) for domain, counts in fates.items()}

    def counts(self) -> dict[str, int]:
        """The same over all domains."""
        total: Counter[str] = Counter()
        for numbers in self.by_domain().values():
            total.update(numbers)
        return {name: total[name] for name in counted(Counter(), 0)}

    def tokens(self) -> dict[str, int]:
        """Sampled tokens of ended trajectories by fate."""
        return dict(self._rows("SELECT fate, coalesce(sum(sampled), 0) FROM trajectories GROUP BY 1"))

    def reasons(self) -> list[tuple[str, str, int]]:
        """(fate, reason, trajectories) of what was not trained, the most frequent first."""
        return [(fate, reason, n) for fate, reason, n in self._rows(
            "SELECT fate, reason, count(*) FROM trajectories WHERE fate NOT IN ('trained', 'in_flight') "
            "GROUP BY 1, 2 ORDER BY 3 DESC LIMIT 500")]

    def stage_seconds(self) -> dict[str, dict[str, float]]:
        """{domain: {stage: mean seconds}} of the trajectories that ended by themselves."""
        out: dict[str, dict[str, float]] = {}
        for domain, stage, seconds in self._rows(
                "SELECT domain, key, avg(value) FROM trajectories, json_each(trajectories.seconds) "
                "WHERE outcome IN ('finished', 'truncated') GROUP BY 1, 2 ORDER BY 1"):
            out.setdefault(domain, {})[stage] = seconds
        return out

    def environments(self) -> dict[str, dict[str, Any]]:
        """By domain: `latency.figures` of training, trajectories that an environment `failed`, `quarantined` tasks."""
        failed = dict(self._rows("SELECT domain, count(*) FROM trajectories WHERE outcome = 'failed' "
                                 "AND reason LIKE 'EnvironmentFailed%' GROUP BY 1"))
        bad: dict[str, list[str]] = {}
        for domain, task in self._rows("SELECT domain, task ->> 'id' FROM groups WHERE reason LIKE 'quarantined%' "
                                       "ORDER BY id DESC LIMIT 100"):
            bad.setdefault(domain, []).append(task)
        seen = self.meta("latencies") or {}
        return {domain: {**figures(seen.get(domain, {})), "failed": failed.get(domain, 0),
                         "quarantined": bad.get(domain, [])} for domain in sorted({*seen, *failed, *bad})}

    def evaluations(self) -> list[dict[str, Any]]:
        """All results, oldest first: {version, number, domain, tasks, success, reward, failed} and

        {attempts, rates, interval}: attempts at a task; their share that solved it, by the task's id; 95 % of success.
        """
        names = ("version", "number", "domain", "tasks", "success", "reward", "failed")
        results = [dict(zip(names, row, strict=True)) for row in self._rows(
            f"SELECT {', '.join(names)} FROM evaluations ORDER BY version, number, domain")]
        rates: dict[tuple[Any, ...], dict[str, float]] = {}
        attempts: dict[tuple[Any, ...], int] = {}
        for *key, task, rate, n in self._rows(
                "SELECT version, number, domain, task, avg(coalesce(success, 0) AND outcome IN ('finished', "
                "'truncated')), count(*) FROM eval_trajectories GROUP BY 1, 2, 3, 4"):
            rates.setdefault(tuple(key), {})[task] = rate
            attempts[tuple(key)] = n
        for result in results:
            key = result["version"], result["number"], result["domain"]
            mine = result["rates"] = rates.get(key, {})
            result["attempts"] = attempts.get(key, 1)
            result["interval"] = list(success_interval(list(mine.values()), result["attempts"]))
        return results

    def samples(self, domain: str, limit: int) -> list[tuple[Trajectory, int, Trajectory, int]]:
        """(before, its version, after, its version): the same held-out task in the first and the last evaluation.

        Those that were not solved before and are now come first, then those that changed otherwise.
        """
        ends = "SELECT version, number FROM evaluations WHERE domain = ?"
        rows = self._rows(
            "SELECT a.body, a.version, b.body, b.version FROM eval_trajectories a JOIN eval_trajectories b "
            f"USING (domain, task) WHERE (a.version, a.number) = ({ends} ORDER BY 1, 2 LIMIT 1) "
            f"AND (b.version, b.number) = ({ends} ORDER BY 1 DESC, 2 DESC LIMIT 1) AND a.version < b.version "
            "AND domain = ? AND a.body IS NOT NULL AND b.body IS NOT NULL "
            "ORDER BY coalesce(b.success, 0) - coalesce(a.success, 0) DESC, a.member LIMIT ?",
            domain, domain, domain, limit)
        with self._whole():
            return [(decode(before), v, decode(after), w) for before, v, after, w in rows]

    def trained_samples(self, domain: str) -> list[tuple[Trajectory, int]]:
        """(trajectory, the version that its step made) of the oldest and the newest kept training trajectory."""
        rows = self._rows(
            "SELECT body, step + 1 FROM payloads JOIN trajectories t USING (grp, member) "
            "WHERE t.domain = ? AND fate = 'trained' ORDER BY step, grp", domain)
        with self._whole():
            return [(decode(body), version) for body, version in ([rows[0], rows[-1]] if len(rows) > 1 else rows)]

    def recorded(self) -> list[Trajectory]:
        """Every scored trajectory whose text is still there: samples of training and of the evaluations."""
        bodies = self._rows("SELECT body FROM payloads UNION ALL SELECT body FROM eval_trajectories "
                            "WHERE body IS NOT NULL")
        with self._whole():
            return [trajectory for (body,) in bodies if (trajectory := decode(body)).score is not None]


def _opened(where: str) -> tuple[sqlite3.Connection, bool]:
    """A connection, and whether it has no ledger so far."""
    db = sqlite3.connect(where, uri=True, timeout=5.0)
    try:
        found = db.execute("SELECT count(*) FROM sqlite_master WHERE name = 'eval_trajectories'").fetchone()
    except sqlite3.DatabaseError:
        db.close()
        raise
    return db, not found[0]
