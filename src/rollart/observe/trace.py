"""A run as a timeline for Perfetto (ui.perfetto.dev) or chrome://tracing: trainer, weights, and trajectories in lanes.

Keeps true: at most `limit` trajectories are drawn (the first ones), so the file stays small; times are the journal's.
"""

from __future__ import annotations

import heapq
import json
from pathlib import Path
from typing import Any

from rollart.core import events as ev
from rollart.core.errors import RunError
from rollart.core.types import TrajectoryId
from rollart.observe.run_folder import atomic_write

TRAINER, WEIGHTS, TRAJECTORIES, ENGINES = 1, 2, 3, 4
_NAMES = {TRAINER: "trainer", WEIGHTS: "weights", TRAJECTORIES: "trajectories", ENGINES: "engines"}


class Trace:
    """A journal subscriber; `write` makes the file."""

    def __init__(self, limit: int = 2_000) -> None:
        self._limit, self._begun = limit, 0
        self._events: list[dict[str, Any]] = [
            {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
            for pid, name in _NAMES.items()]
        self._lanes: list[int] = []
        self._highest = self._running = 0
        self._open: dict[TrajectoryId, tuple[float, int, str]] = {}
        self._since: dict[str, float] = {}

    def on(self, at: float, event: ev.Event) -> None:
        match event:
            case ev.TrajectoryStarted(id=id, domain=domain):
                self._count(at, 1)
                if self._begun < self._limit:
                    self._begun += 1
                    lane = heapq.heappop(self._lanes) if self._lanes else self._new_lane()
                    self._open[id] = (at, lane, domain)
            case ev.EnvironmentOpened(id=id, seconds=seconds):
                if id in self._open:
                    self._slice(TRAJECTORIES, self._open[id][1], "open", at - seconds, at)
            case ev.TurnEnded(id=id, turn=turn, engine=engine, sampled=sampled):
                if id in self._open:
                    self._instant(TRAJECTORIES, self._open[id][1], f"turn {turn}", at, engine=engine, tokens=sampled)
            case ev.TrajectoryEnded(trajectory=trajectory, fate=fate):
                self._count(at, -1)
                if found := self._open.pop(trajectory.id, None):
                    heapq.heappush(self._lanes, found[1])
                    self._slice(TRAJECTORIES, found[1], f"{found[2]} {trajectory.id}", found[0], at, fate=fate.value,
                                outcome=trajectory.outcome.value, turns=len(trajectory.turns),
                                seconds=dict(trajectory.seconds), error=trajectory.error)
            case ev.BatchTaken(version=version, waited=waited):
                self._slice(TRAINER, 1, f"waits for batch {version}", at - waited, at)
                self._since["step"] = at
            case ev.StepEnded(version=version, report=report):
                self._slice(TRAINER, 1, f"step {version}", self._since.get("step", at), at, tokens=report.tokens)
            case ev.PublishStarted(version=version):
                self._since["publish"] = at
            case ev.WeightsPublished(manifest=manifest):
                self._slice(WEIGHTS, 1, f"publish {manifest.version}", self._since.get("publish", at), at)
            case ev.WeightsLive(version=version, seconds=seconds):
                self._slice(WEIGHTS, 2, f"load {version}", at - seconds, at)
            case ev.EngineDown(engine=engine, reason=reason):
                self._instant(ENGINES, 1, f"{engine} down", at, reason=reason)
            case ev.EngineUp(engine=engine, version=version):
                self._instant(ENGINES, 1, f"{engine} up", at, version=version)

    def _new_lane(self) -> int:
        self._highest += 1
        return self._highest

    def _count(self, at: float, change: int) -> None:
        self._running += change
        self._add("C", TRAJECTORIES, 0, "running", at, {"trajectories": self._running})

    def _slice(self, pid: int, tid: int, name: str, start: float, end: float, **args: Any) -> None:
        self._add("X", pid, tid, name, start, args, dur=round((end - start) * 1e6))

    def _instant(self, pid: int, tid: int, name: str, at: float, **args: Any) -> None:
        self._add("i", pid, tid, name, at, args, s="t")

    def _add(self, kind: str, pid: int, tid: int, name: str, at: float, args: Any, **more: Any) -> None:
        self._events.append({"ph": kind, "name": name, "pid": pid, "tid": tid, "ts": round(at * 1e6), "args": args,
                             **more})

    def write(self, path: str | Path) -> None:
        """Raises RunError."""
        try:
            atomic_write(Path(path), json.dumps({"traceEvents": self._events, "displayTimeUnit": "ms"}))
        except OSError as error:
            raise RunError(f"{path} cannot be written: {error.strerror}") from error
