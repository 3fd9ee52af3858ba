"""metrics.jsonl: a line when the run starts or resumes, one a step, an evaluation, a change of the rewards' figures.

Keeps true: a line is whole or absent; `wall_seconds` never falls, also over resumes; after a resume at version v no
step after v is in the file (what those steps cost stays in the totals and in the rewards' figures). Seconds are the
journal's, so a simulated run reports simulated time. Waits for nothing.

    {"kind": "start", "version", "steps", "resumed", "staleness_bound", "wall_seconds", "idle_seconds"}
    {"kind": "step", "version", "wall_seconds", "idle_seconds", "waited", "seconds", "tokens", "staleness", "metrics",
     "rewards", "successes", "slots", "totals", "share", "weights", "stages", "failures"}
    {"kind": "evaluation", "number", "version", "wall_seconds", "seconds", "domains"}
    {"kind": "rewards", "version", "wall_seconds", "figures"}     whenever they have changed, at most twice a second
    {"kind": "note", "version", "wall_seconds", "text"}           a step that changed nothing, and why
    {"kind": "end", "version", "reason", "wall_seconds", "idle_seconds"}
"""

from __future__ import annotations

import json
import os
from collections import Counter, defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any

from rollart.core import events as ev
from rollart.core.errors import ConfigError, RunError
from rollart.core.types import Fate, Outcome
from rollart.observe.accounts import Accounts
from rollart.observe.run_folder import atomic_write


class Metrics:
    """A journal subscriber; place it after the one that fills `accounts` (the ledger)."""

    def __init__(self, path: str | Path, accounts: Accounts, *, staleness_bound: int) -> None:
        self.path, self._accounts, self._bound = Path(path), accounts, staleness_bound
        self._started: float | None = None
        self._at = self._wall_before = self._idle = 0.0
        self._version = 0
        self._batch: ev.BatchTaken | None = None
        self._weights: dict[str, float] = {}
        self._stages: defaultdict[str, Counter[str]] = defaultdict(Counter)  # seconds by domain and stage
        self._ended: Counter[str] = Counter()

    @property
    def wall_seconds(self) -> float:
        """How long the run has run so far, earlier processes included."""
        return self._wall_before + (self._at - self._started if self._started is not None else 0.0)

    def on(self, at: float, event: ev.Event) -> None:
        self._at = at
        match event:
            case ev.RunStarted():
                self._run_started(event)
            case ev.TrajectoryEnded(trajectory=trajectory):
                if trajectory.outcome is not Outcome.ABORTED:
                    self._ended[trajectory.task.domain] += 1
                    self._stages[trajectory.task.domain].update(trajectory.seconds)
            case ev.BatchTaken():
                self._batch = event
                self._idle += event.waited
            case ev.WeightsPublished(seconds=seconds):
                self._weights["publish_seconds"] = seconds
            case ev.WeightsFetched(seconds=seconds):
                self._weights["fetch_seconds"] = seconds
            case ev.WeightsLive(seconds=seconds):
                self._weights["live_seconds"] = seconds
            case ev.StepEnded():
                self._step_ended(event)
            case ev.EvalEnded():
                domains = {r.domain: {"tasks": r.tasks, "success": r.success, "reward": r.reward, "failed": r.failed,
                                      "pass_at": r.pass_at, "interval": r.interval} for r in event.results}
                self._write(kind="evaluation", number=event.number, version=event.version, seconds=event.seconds,
                            domains=domains)
            case ev.RewardsSampled(figures=figures):
                self._write(kind="rewards", version=self._version, figures=dict(figures))
            case ev.Noted():
                self._write(kind="note", version=event.version, text=event.text)
            case ev.RunEnded():
                self._write(kind="end", version=event.version, reason=event.reason, idle_seconds=round(self._idle, 3))

    def _run_started(self, event: ev.RunStarted) -> None:
        lines = read_metrics(self.path)
        self._started, self._version = self._at, event.version
        if self.path.exists():  # also where a crash has cut its only line
            self._wall_before = max((line["wall_seconds"] for line in lines), default=0.0)
            self._idle = max((line.get("idle_seconds", 0.0) for line in lines), default=0.0)
            kept = [line for line in lines if line["kind"] in ("start", "rewards") or line["version"] <= event.version]
            atomic_write(self.path, "".join(json.dumps(line) + "\n" for line in kept))
        self._write(kind="start", version=event.version, steps=event.steps, resumed=event.resumed,
                    staleness_bound=self._bound, idle_seconds=round(self._idle, 3))

    def _step_ended(self, event: ev.StepEnded) -> None:
        report, tokens = event.report, self._accounts.token_totals()
        self._version = event.version
        by_domain = self._accounts.by_domain()
        counts = self._accounts.counts()
        self._write(
            kind="step", version=event.version, idle_seconds=round(self._idle, 3),
            waited=self._batch.waited if self._batch else 0.0, seconds=report.seconds, tokens=report.tokens,
            staleness=staleness_of(self._batch.staleness if self._batch else ()), metrics=dict(report.metrics),
            rewards=dict(event.rewards), successes=dict(event.successes), slots=dict(event.slots),
            totals={"generated": tokens["generated"], "trained": tokens["trained"],
                    "wasted": {fate: tokens[fate] for fate in WASTED if tokens[fate]}, "counts": counts},
            share={name: {domain: round(numbers[name] / counts[name], 4) for domain, numbers in by_domain.items()}
                   for name in ("dispatched", "trained") if counts[name]},
            weights=self._weights, failures=dict(self._accounts.reasons[Fate.FAILED].most_common(10)),
            stages={domain: {stage: round(seconds / self._ended[domain], 4) for stage, seconds in stages.items()}
                    for domain, stages in self._stages.items()})
        self._weights, self._batch = {}, None
        self._stages.clear()
        self._ended.clear()

    def _write(self, **line: Any) -> None:
        line["wall_seconds"] = round(self.wall_seconds, 3)
        size = 0
        size = None
        try:
            with self.path.open("a") as file:
                size = file.tell()
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            if size is not None:  # what found room of it would spoil the next line
                with suppress(OSError):
                    os.truncate(self.path, size)
            raise RunError(f"{self.path} cannot be written ({error.strerror}): see that its disk has room, then "
                           f"continue with --resume {self.path.parent}") from error


WASTED = ("filtered", "stale", "failed", "cancelled")
"""Fates whose sampled tokens taught nothing."""


def staleness_of(values: tuple[int, ...]) -> dict[str, Any]:
    """{mean, max, histogram} of a batch's staleness in versions."""
    histogram = {str(value): n for value, n in sorted(Counter(values).items())}
    return {"mean": sum(values) / len(values) if values else 0.0, "max": max(values, default=0),
            "histogram": histogram}


_LINE: dict[str, Any] = {"kind": str, "version": int, "wall_seconds": int | float}
_LINES: dict[str, dict[str, Any]] = {
    "start": {"steps": int, "staleness_bound": int},
    "step": {"waited": int | float, "seconds": int | float, "staleness": dict, "successes": dict, "slots": dict,
             "metrics": dict, "weights": dict},
    "rewards": {"figures": dict}}
"""What the readers of a line, by its kind, ask of it."""


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """All whole lines of a metrics.jsonl; none if it is absent. A last line that a crash cut is left out.

    Raises ConfigError for a line that this did not write."""
    try:
        lines = Path(path).read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return []
    out: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        try:
            out.append(json.loads(line))
            for name, kind in (_LINE | _LINES.get(out[-1]["kind"], {})).items():
                if not isinstance(out[-1][name], kind):
                    raise ValueError(f"{name} is {out[-1][name]!r}")
        except (ValueError, RecursionError, TypeError, KeyError) as error:
            why = f"it has no {error}" if isinstance(error, KeyError) else error
            raise ConfigError(f"{path} line {number} is damaged ({why}): remove that line, or put the file back from "
                              "a copy") from None
    return out
