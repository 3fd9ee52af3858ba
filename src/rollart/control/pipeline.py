"""The whole run on one page.

    RolloutScheduler --open groups--> SampleBuffer --oldest batch--> Trainer.step
          ^                               ^                               |
          |  slots freed, once live       |  advance(version)             v
          +-------------------------------+----- LLMProxy.update <-- Trainer.publish   (overlaps the next step)

The six steps of the paper, per version: (1) get_batch: wait for a full batch, then evict what no later one may hold;
(2) suspend, (3) update, (4) resume, (5) recompute KV of what is in flight; (6) train_step, beside rollout. Steps 2-5
run as soon as the published weights can be read, not only at the next get_batch: rollout is on newer weights for
longer, and with alpha = 0 there is no batch to wait for before them.

waits for                                        | woken by
rollout    : a free slot                         | weights live (or the schedule's moment), a group that was given up
train      : a full batch, the previous publish  | a complete group; the end of WeightSync.sync
sync       : Trainer.publish, [one_off: end of   | the trainer; the last open group
             the round], every live engine       | the engines
supervisor : a lost engine                       | the cluster, the proxy
evaluation : its own episodes                    | (nobody waits for it but the end of the run)
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Protocol

from rollart.algo.samples import MadeBatch, make_batch
from rollart.algo.settings import AlgoSettings
from rollart.control.evaluation import Evaluator
from rollart.control.rollout_scheduler import RolloutScheduler
from rollart.control.sample_buffer import SampleBuffer
from rollart.control.settings import Overlap, Schedule
from rollart.control.supervisor import Supervisor
from rollart.control.weight_sync import WeightSync
from rollart.core.changed import Changed
from rollart.core.clock import now
from rollart.core.errors import RunError, TrainerLost
from rollart.core.events import (
    BatchTaken,
    CheckpointSaved,
    Noted,
    RunEnded,
    RunStarted,
    Settled,
    SlotsFreed,
    StepEnded,
)
from rollart.core.ports import Journal, TaskSource, Trainer
from rollart.core.ranges import above, at_least
from rollart.core.types import Fate, Group, Restored, StepReport, Version


class Checkpoints(Protocol):
    """Where checkpoints go. `save` asks the trainer before it waits for anything, and returns once the complete marker
    is written; the ledger is flushed before it."""

    async def save(self, version: Version, state: Mapping[str, Any], trainer: Trainer) -> str: ...


@dataclass(frozen=True, kw_only=True)
class PipelineSettings:
    """steps: optimizer steps in all. checkpoint_every, eval_every: steps (0: at the end only; evaluation is also done
    before the first step). step_seconds: deadline of one optimizer step, and of one checkpoint. max_empty_batches: so
    many batches in a row with nothing to train on end the run."""

    steps: int = 100
    checkpoint_every: int = 10
    eval_every: int = 0
    step_seconds: float = 3600.0
    max_empty_batches: int = 10

    def __post_init__(self) -> None:
        at_least(self, 1, "steps", "max_empty_batches")
        at_least(self, 0, "checkpoint_every", "eval_every")
        above(self, 0, "step_seconds")


class Pipeline:
    """One run. `stop()` asks it to end after the current step, resumable."""

    def __init__(self, settings: PipelineSettings, *, algo: AlgoSettings, buffer: SampleBuffer, changed: Changed,
                 rollout: RolloutScheduler, sync: WeightSync, supervisor: Supervisor, trainer: Trainer,
                 tasks: TaskSource, journal: Journal, checkpoints: Checkpoints | None = None,
                 evaluator: Evaluator | None = None) -> None:
        self.settings, self.algo, self.buffer, self.changed = settings, algo, buffer, changed
        self.rollout, self.sync, self.supervisor, self.trainer = rollout, sync, supervisor, trainer
        self.tasks, self.journal, self.checkpoints, self.evaluator = tasks, journal, checkpoints, evaluator
        self._syncing: asyncio.Task[None] | None = None
        self._evaluating: asyncio.Task[object] | None = None
        self._stop = False
        self._empty = 0  # batches in a row
        self._diverged = False  # the last step could make no update: its weights may be no good
        self._saving: asyncio.Task[None] | None = None
        self._saved: Version | None = None

    def stop(self) -> None:
        """End after the step under way, with a checkpoint; `run` then returns False."""
        self._stop = True
        self.changed.notify()

    async def run(self, restored: Restored | None = None) -> bool:
        """Train to `settings.steps`. True if it got there, False if it was stopped. Raises RunError, PortError."""
        buffer = self.buffer
        first = buffer.version
        self._saved = first if restored and first else None
        self.journal.emit(RunStarted(first, self.settings.steps, restored is not None))
        if restored:
            self.rollout.restore(restored)
        async with asyncio.TaskGroup() as nursery:
            supervising = nursery.create_task(self.supervisor.run(nursery), name="supervisor")
            await self.sync.sync(first, self._at_once)
            self._evaluate(nursery)
            rollout = nursery.create_task(self.rollout.run(nursery), name="rollout")
            while buffer.version < self.settings.steps and not self._stop:
                groups, waited = await self._get_batch()
                if not groups:
                    break
                report = await self._train(groups, waited)
                await self._join_sync()
                self._advance(groups, report)
                self._syncing = nursery.create_task(self._sync(buffer.version, nursery), name=f"sync {buffer.version}")
                await self._checkpoint(nursery)
            rollout.cancel()
            finished = buffer.version >= self.settings.steps
            await self._join_sync()
            await self._end(finished, nursery)
            supervising.cancel()
        self.journal.emit(RunEnded(buffer.version, "finished" if finished else "interrupted"))
        return finished

    async def _get_batch(self) -> tuple[tuple[Group, ...], float]:
        """Step 1. Empty when the run was stopped while waiting."""
        started = now()
        if self.schedule.waits_for_weights:
            await self._join_sync()
        await self.changed.until(lambda: self._stop or not self.buffer.missing(), who="train",
                                 what=f"a full batch of {self.buffer.batch_groups} groups",
                                 seconds=self.rollout.stall_seconds, explain=self.rollout.explain)
        if self._stop:
            return (), 0.0
        groups = self.buffer.take()
        evicted, hopeless = self.buffer.evict()
        for group in evicted:
            self._give_up(group, Fate.STALE, "beyond the staleness bound while it waited")
        if self.schedule.overlap is Overlap.NONE:
            self.rollout.drop(list(self.buffer.open), Fate.CANCELLED, "the batch is full")
        else:
            self.rollout.drop(hopeless, Fate.STALE, "beyond the staleness bound")
        self.changed.notify()
        return groups, now() - started

    @property
    def schedule(self) -> Schedule:
        return self.buffer.schedule

    async def _train(self, groups: Sequence[Group], waited: float) -> StepReport:
        """Step 6. Filtered trajectories are settled before the step, trained ones after it."""
        version = self.buffer.version
        made = make_batch(version, groups, self.algo)
        trained = tuple(dict.fromkeys(sample.trajectory for sample in made.batch.samples))
        oldest = {m.id: m.oldest for group in groups for m in group.members}
        self.journal.emit(BatchTaken(version, tuple(group.id for group in groups),
                                     tuple(version - (oldest[id] or 0) for id in trained), waited))
        try:
            async with asyncio.timeout(self.settings.step_seconds):
                report = await self.trainer.step(made.batch)
        except TimeoutError:
            raise TrainerLost(f"step {version}: no answer within {self.settings.step_seconds:g} s") from None
        reasons: dict[str, list[Any]] = {}
        for id, reason in made.filtered:
            reasons.setdefault(reason, []).append(id)
        for reason, ids in reasons.items():
            self.journal.emit(Settled(tuple(ids), Fate.FILTERED, reason, version))
        if trained:
            self.journal.emit(Settled(trained, Fate.TRAINED, "", version))
        self._look_at(made, report)
        return report

    def _look_at(self, made: MadeBatch, report: StepReport) -> None:
        """Tell of a step that changed nothing. Raises RunError when too many in a row had nothing to train on."""
        version = made.batch.version + 1
        self._diverged = bool(report.metrics.get("skipped")) and not report.metrics.get("updates")
        if skipped := report.metrics.get("skipped"):
            self.journal.emit(Noted(version, f"step {version}: {skipped:.0f} updates were left out, as their loss or "
                                    "gradient was not finite; lower learner.learning_rate"))
        self._empty = 0 if made.batch.samples else self._empty + 1
        if not self._empty:
            return
        reasons = Counter(reason for _, reason in made.filtered).most_common(3)
        told = f"nothing to train on ({', '.join(f'{n} trajectories: {reason}' for reason, n in reasons)})"
        if self._empty == 1:
            self.journal.emit(Noted(version, f"step {version} had {told}; it changes no weight"))
        if self._empty >= self.settings.max_empty_batches:
            raise RunError(f"{self._empty} batches in a row had {told}: look at the rewards, the filter and the limits "
                           f"in tokens and turns, or raise pipeline.max_empty_batches = {self._empty}")

    def _advance(self, groups: Sequence[Group], report: StepReport) -> None:
        """The trainer stands at the next version."""
        buffer = self.buffer
        buffer.advance(buffer.version + 1)
        members = [(m.task.domain, m.score) for group in groups for m in group.members if m.score]
        domains = sorted({domain for domain, _ in members})
        rewards = {d: fmean(s.value for domain, s in members if domain == d) for d in domains}
        successes = {d: fmean(float(s.success) for domain, s in members if domain == d) for d in domains}
        slots = {"free": buffer.free, "open": len(buffer.open), "ready": len(buffer.ready),
                 "training": sum(buffer.training.values())}
        self.journal.emit(StepEnded(buffer.version, report, rewards, successes, slots))
        buffer.check()
        self.changed.notify()

    def _give_up(self, group: Group, fate: Fate, reason: str) -> None:
        self.tasks.put_back(group.task)
        self.journal.emit(Settled(tuple(m.id for m in group.members), fate, reason))

    async def _sync(self, version: Version, nursery: asyncio.TaskGroup) -> None:
        """Steps 2-5, beside the next step; then the slots that paid for these weights are free."""
        await self.sync.sync(version, self._round_over)
        groups = self.buffer.live(version)
        self.journal.emit(SlotsFreed(version, groups))
        self.changed.notify()
        if self.settings.eval_every and version % self.settings.eval_every == 0 and version < self.settings.steps:
            self._evaluate(nursery)

    async def _at_once(self) -> None:
        return

    async def _round_over(self) -> None:
        if self.schedule.overlap is Overlap.ONE_OFF and self.buffer.version < self.settings.steps:
            await self.changed.until(lambda: self._stop or not self.buffer.open, who="sync",
                                     what="the end of the round", seconds=self.rollout.stall_seconds,
                                     explain=self.rollout.explain)

    async def _join_sync(self) -> None:
        if self._syncing:
            await self._syncing
            self._syncing = None

    async def _checkpoint(self, nursery: asyncio.TaskGroup, *, now_due: bool = False) -> None:
        """Begin one if it is due, after the one before; it is of this version, whatever is trained meanwhile. Weights
        under which no update could be made take no older one's place while the run goes on."""
        version, every = self.buffer.version, self.settings.checkpoint_every
        due = now_due or version == self.settings.steps or (every and version % every == 0 and not self._diverged)
        if self.checkpoints and due and self._saved != version:
            await self._join_checkpoint()
            self._saved = version
            self._saving = nursery.create_task(self._save(version, self.checkpoints), name=f"checkpoint {version}")
            await asyncio.sleep(0)  # the trainer is asked before its next step is

    async def _save(self, version: Version, checkpoints: Checkpoints) -> None:
        started = now()
        state = {"version": version, "evaluations": self.evaluator.number if self.evaluator else 0}
        try:
            async with asyncio.timeout(self.settings.step_seconds):
                path = await checkpoints.save(version, state, self.trainer)
        except TimeoutError:
            raise TrainerLost(f"checkpoint {version}: no answer within {self.settings.step_seconds:g} s") from None
        self.journal.emit(CheckpointSaved(version, path, now() - started))

    async def _join_checkpoint(self) -> None:
        if self._saving:
            await self._saving
            self._saving = None

    def _evaluate(self, nursery: asyncio.TaskGroup) -> None:
        """Evaluate the newest live weights beside training; skipped while an evaluation still runs."""
        if self.evaluator and self.sync.current and (self._evaluating is None or self._evaluating.done()):
            self._evaluating = nursery.create_task(self.evaluator.run(self.sync.current, self.sync), name="evaluation")

    async def _end(self, finished: bool, nursery: asyncio.TaskGroup) -> None:
        """Everything that still runs is ended and told; a finished run is evaluated once more."""
        await self.rollout.stop(keep=not finished)
        await self._checkpoint(nursery, now_due=True)
        await self._join_checkpoint()
        if self._evaluating and finished:
            await self._evaluating
        elif self._evaluating:
            self._evaluating.cancel()
        if finished:
            for group in list(self.buffer.ready.values()):
                del self.buffer.ready[group.id]
                self._give_up(group, Fate.CANCELLED, "the run has ended")
            self._evaluating = None
            self._evaluate(nursery)
            if self._evaluating:
                await self._evaluating
