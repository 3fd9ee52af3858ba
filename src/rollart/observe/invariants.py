"""The invariants I1-I8, checked from the journal as events happen, in every simulated and every real run.

    I1  a trained trajectory is at most alpha versions old; each sampled token has one version, never a falling one
    I2  a dispatched trajectory gets exactly one fate; what is trained was good; nothing is forgotten
    I3  an environment is closed before its trajectory ends; nothing runs for a group that has ended
    I4  open + ready + training groups never exceed (alpha + 1) * batch + spare
    I5  an engine's version never goes back; what serves is live; no token is newer than its engine's weights
    I6  publishes do not overlap; slots are freed only when the schedule allows it (weights live, for `rollart`)
    I7  a step ends within its budget; a failed member is replaced while replacements are left
    I8  sampled tokens are counted once, and the wasted share stays under its limit

Keeps true: constant work per event (per token segment where a trajectory ends), and memory for groups in flight only.
Waits for nothing. What no event shows is checked by its owner: KV of older weights by the engine, deadlines by
`core.changed` (Stalled), a standstill by the virtual-time loop (Deadlock, NoProgress).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from rollart.control.settings import FreeSlots
from rollart.core import events as ev
from rollart.core.errors import InvariantViolated
from rollart.core.types import Fate, Outcome, Trajectory, TrajectoryId, Version


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """What a run promises.

    alpha: staleness bound, versions. bounded: whether the schedule enforces it always (not only at the start).
    slots: most groups open, ready or in training. free: when the schedule frees the slots of a trained batch.
    group_size: members of a group. max_replacements: failed members replaced per group.
    pinned: engines that serve evaluation and do not follow the live version.
    step_seconds: most loop seconds between two steps. wasted_share: most wasted sampled tokens by share of all that
    were settled, looked at from `wasted_after` settled tokens on.
    """

    alpha: int
    slots: int
    group_size: int
    free: FreeSlots = FreeSlots.LIVE
    bounded: bool = True
    max_replacements: int = 0
    pinned: Collection[str] = ()
    step_seconds: float = math.inf
    wasted_share: float = 1.0
    wasted_after: int = 100_000


@dataclass(slots=True)
class _Running:
    """A trajectory between start and end."""

    opened: bool = False
    sampled: int = 0
    newest: Version = 0


@dataclass(slots=True)
class _Ended:
    """A good trajectory that waits for its fate."""

    oldest: Version | None
    sampled: int


@dataclass(slots=True)
class _Group:
    """A group until it has ended and its last trajectory is settled (spares may still close when it is trained).

    `restored`: members from before a crash, unseen here.
    """

    restored: int = 0
    open: bool = True
    ready: bool = False
    slot: bool = True  # holds a slot of its own; in training its batch holds it
    training: bool = False
    running: dict[TrajectoryId, _Running] = field(default_factory=dict)
    ended: dict[TrajectoryId, _Ended] = field(default_factory=dict)
    last: int = -1
    failures: int = 0
    owed: bool = False


class Invariants:
    """A journal subscriber. The first `keep` violations are in `violations`; `strict`: raise InvariantViolated too."""

    def __init__(self, bounds: Bounds, *, strict: bool = True, keep: int = 100) -> None:
        self.bounds, self.strict, self._keep = bounds, strict, keep
        self.violations: list[str] = []
        self.fates: Counter[Fate] = Counter()
        """Trajectories by final fate."""
        self.tokens: Counter[Fate] = Counter()
        """Sampled tokens by final fate."""
        self.dispatched = self.sampled = 0
        self.trainer: Version = 0
        self.live: Version = -1
        self._groups: dict[int, _Group] = {}
        self._restoring = False  # until the first group opens, a resumed run settles what it cannot take over
        self._held = 0  # groups that hold a slot and are not in training
        self._training: dict[Version, int] = {}
        self._evals: dict[TrajectoryId, _Running] = {}
        self._loaded: dict[str, Version] = {}
        self._up: dict[str, None] = {}
        self._publishing: Version | None = None
        self._last_step: float | None = None
        self._handlers: dict[type, Callable[[float, Any], None]] = {
            ev.RunStarted: self._run_started, ev.RunEnded: self._run_ended,
            ev.GroupOpened: self._group_opened, ev.GroupReady: self._group_ready, ev.GroupEnded: self._group_ended,
            ev.TrajectoryStarted: self._trajectory_started, ev.TrajectoryEnded: self._trajectory_ended,
            ev.EnvironmentOpened: self._environment_opened, ev.EnvironmentClosed: self._environment_closed,
            ev.TurnEnded: self._turn_ended, ev.TurnMoved: self._turn_moved, ev.Settled: self._settled,
            ev.BatchTaken: self._batch_taken, ev.StepEnded: self._step_ended,
            ev.PublishStarted: self._publish_started, ev.WeightsPublished: self._weights_published,
            ev.WeightsLoaded: self._weights_loaded, ev.WeightsLive: self._weights_live,
            ev.SlotsFreed: self._slots_freed, ev.EngineDown: self._engine_down, ev.EngineUp: self._engine_up,
            ev.EvalTrajectory: self._eval_trajectory, ev.EvalEnded: self._eval_ended,
        }

    def on(self, at: float, event: ev.Event) -> None:
        handler = self._handlers.get(type(event))
        if handler is not None:
            handler(at, event)

    def close(self) -> None:
        """The run has ended and nothing will be resumed: every trajectory must have its fate."""
        for number, group in self._groups.items():
            for id in (*group.running, *group.ended):
                self.fail("I2", f"{id} was dispatched and has no fate at the end")
            if group.open:
                self.fail("I2", f"group {number} was opened and never ended")
        for id, running in self._evals.items():
            if running.opened:
                self.fail("I3", f"the environment of {id} is still open at the end")
        if sum(self.tokens.values()) != self.sampled:
            self.fail("I8", f"{self.sampled} tokens were sampled, {sum(self.tokens.values())} were given a fate")
        self._check_waste(0)

    def fail(self, name: str, what: str) -> None:
        """Invariant `name` is broken. The first failure is the one to tell: what follows from it repeats it."""
        if len(self.violations) < self._keep:
            self.violations.append(f"{name}: {what}")
        if self.strict:
            raise InvariantViolated(self.violations[0])

    # -- groups and trajectories ----------------------------------------------------------------------------------

    def _run_started(self, at: float, event: ev.RunStarted) -> None:
        self.trainer, self._last_step, self._restoring = event.version, at, event.resumed

    def _run_ended(self, at: float, event: ev.RunEnded) -> None:
        for number, group in self._groups.items():
            for id in group.running:
                self.fail("I3", f"{id} still runs for group {number} when the run ends")

    def _group(self, id: TrajectoryId, what: str) -> _Group | None:
        group = self._groups.get(id.group)
        if group is None or not group.open:
            self.fail("I3", f"{what} of {id}, whose group is not open")
            return None
        if group.owed:
            group.owed = False
            self.fail("I7", f"a failed member of group {id.group} was not replaced although replacements are left")
        return group

    def _group_opened(self, at: float, event: ev.GroupOpened) -> None:
        self._restoring = False
        if event.group in self._groups:
            self.fail("I2", f"group {event.group} was opened twice")
        self._groups[event.group] = _Group(restored=event.restored)
        self._held += 1
        used = self._held + sum(self._training.values())
        if used > self.bounds.slots:
            self.fail("I4", f"{self._held} groups open or ready + {used - self._held} in training exceed "
                             f"{self.bounds.slots} slots")

    def _group_ready(self, at: float, event: ev.GroupReady) -> None:
        group, members = self._groups.get(event.group.id), event.group.members
        if group is not None:
            group.ready = True
        if group is None or not 0 < len(members) <= self.bounds.group_size:
            self.fail("I2", f"group {event.group.id} is ready with {len(members)} members, at most "
                             f"{self.bounds.group_size} are wanted" + (", and it is not open" if group is None else ""))
            return
        seen = sum(member.id in group.ended for member in members)
        if len({member.id for member in members}) != len(members) or seen < len(members) - group.restored:
            self.fail("I2", f"group {event.group.id} is ready with members that are not its own, each once: "
                             f"{', '.join(str(member.id) for member in members)}")

    def _group_ended(self, at: float, event: ev.GroupEnded) -> None:
        if self._restoring:
            return
        group = self._groups.get(event.group)
        if group is None or not group.open:
            self.fail("I2", f"group {event.group} ended, and is not open")
            return
        if group.running:
            self.fail("I3", f"group {event.group} ended while {', '.join(map(str, group.running))} still run")
        if group.owed:
            self.fail("I7", f"group {event.group} ended with a failed member that was not replaced although "
                             f"replacements are left")
        group.open = False
        if not event.kept and (group.ended or group.training):
            self.fail("I2", f"group {event.group} was given up, and {', '.join(map(str, group.ended))} got no fate")
        self._let_go(event.group, group)

    def _let_go(self, number: int, group: _Group) -> None:
        """The slot of a group without good members left is free; one that has also ended is forgotten."""
        if group.ended or group.restored > 0:
            return
        if group.slot and (group.ready or not group.open):
            group.slot = False
            self._held -= 1
        if not group.open:
            del self._groups[number]

    def _trajectory_started(self, at: float, event: ev.TrajectoryStarted) -> None:
        id, group = event.id, self._groups.get(event.id.group)
        if group is None or not group.open:
            self.fail("I3", f"{id} was started, and its group is not open")
            return
        group.owed = False
        if id.member <= group.last:
            self.fail("I2", f"{id} was started after member {group.last} of its group: ids are used once, in order")
        group.last = max(group.last, id.member)
        group.running[id] = _Running()
        self.dispatched += 1

    def _trajectory_ended(self, at: float, event: ev.TrajectoryEnded) -> None:
        trajectory, id = event.trajectory, event.trajectory.id
        group = self._group(id, "the end")
        running = group.running.pop(id, None) if group else None
        if group is None or running is None:
            self.fail("I2", f"{id} ended, and is not running: never started, or ended twice")
            return
        self._check_ended(trajectory, running)
        self.sampled += trajectory.sampled
        if event.fate is Fate.IN_FLIGHT:
            if not trajectory.good:
                self.fail("I2", f"{id} waits to be trained with outcome {trajectory.outcome} and score "
                                 f"{trajectory.score}")
            group.ended[id] = _Ended(trajectory.oldest, trajectory.sampled)
            return
        self._count(event.fate, trajectory.sampled)
        if trajectory.outcome is Outcome.FAILED:
            group.failures += 1
            group.owed = (group.failures <= self.bounds.max_replacements
                          and len(group.ended) + group.restored < self.bounds.group_size)

    def _check_ended(self, trajectory: Trajectory, running: _Running) -> None:
        id = trajectory.id
        if running.opened:
            self.fail("I3", f"{id} ended before its environment was closed")
        if trajectory.sampled != running.sampled:
            self.fail("I8", f"{id} ends with {trajectory.sampled} sampled tokens, its turns had {running.sampled}")
        newest = 0
        for number, turn in enumerate(trajectory.turns):
            completion, last = turn.completion, -1
            if not completion.segments or completion.segments[0][1] != 0:
                self.fail("I1", f"{id} turn {number}: the version segments do not begin at token 0")
            for version, start in completion.segments:
                if version < newest or start <= last or start >= max(1, len(completion.tokens)):
                    self.fail("I1", f"{id} turn {number}: after version {newest}, segments {completion.segments} do "
                                     f"not give {len(completion.tokens)} tokens one version each, never a falling one")
                newest, last = version, start

    def _count(self, fate: Fate, sampled: int) -> None:
        self.fates[fate] += 1
        self.tokens[fate] += sampled

    def _settled(self, at: float, event: ev.Settled) -> None:
        for id in () if self._restoring else event.ids:
            group = self._groups.get(id.group)
            ended = group.ended.pop(id, None) if group else None
            if group is None or (ended is None and group.restored <= 0):
                self.fail("I2", f"{id} was settled as {event.fate}, and is not waiting for a fate")
                continue
            if ended is None:
                group.restored -= 1
            else:
                self._count(event.fate, ended.sampled)
            if event.fate is Fate.TRAINED:
                self._check_trained(id, group, ended, event.step)
            self._let_go(id.group, group)

    def _check_trained(self, id: TrajectoryId, group: _Group, ended: _Ended | None, step: Version | None) -> None:
        if not group.training or step is None:
            self.fail("I2", f"{id} was settled as trained, and is in no batch")
        elif self.bounds.bounded and ended is not None and ended.oldest is not None \
                and step - ended.oldest > self.bounds.alpha:
            self.fail("I1", f"{id} was trained at version {step} with tokens of version {ended.oldest}, the bound is "
                             f"{self.bounds.alpha}")

    # -- environments and turns -----------------------------------------------------------------------------------

    def _run(self, id: TrajectoryId, what: str) -> _Running | None:
        if id.kind == "e":
            return self._evals.setdefault(id, _Running())
        group = self._group(id, what)
        running = group.running.get(id) if group else None
        if running is None:
            self.fail("I3", f"{what} of {id}, which is not running")
        return running

    def _environment_opened(self, at: float, event: ev.EnvironmentOpened) -> None:
        if running := self._run(event.id, "an environment"):
            if running.opened:
                self.fail("I3", f"{event.id} opened a second environment")
            running.opened = True

    def _environment_closed(self, at: float, event: ev.EnvironmentClosed) -> None:
        if running := self._run(event.id, "a closed environment"):
            if not running.opened:
                self.fail("I3", f"{event.id} closed an environment that is not open")
            running.opened = False

    def _turn_ended(self, at: float, event: ev.TurnEnded) -> None:
        running = self._run(event.id, "a turn")
        if running is None:
            return
        if not running.opened:
            self.fail("I3", f"turn {event.turn} of {event.id} ended without an open environment")
        running.sampled += event.sampled
        if not running.newest <= event.oldest <= event.newest:
            self.fail("I5", f"turn {event.turn} of {event.id} has tokens of versions {event.oldest} to {event.newest} "
                             f"after a turn of version {running.newest}")
        running.newest = event.newest
        if event.newest > self._loaded.get(event.engine, -1):
            self.fail("I5", f"turn {event.turn} of {event.id} has tokens of version {event.newest}, but "
                             f"{event.engine} has loaded {self._loaded.get(event.engine, 'none')}")

    def _turn_moved(self, at: float, event: ev.TurnMoved) -> None:
        self._run(event.id, "a moved turn")

    def _eval_trajectory(self, at: float, event: ev.EvalTrajectory) -> None:
        running = self._evals.pop(event.trajectory.id, None)
        if running is not None:
            self._check_ended(event.trajectory, running)

    def _eval_ended(self, at: float, event: ev.EvalEnded) -> None:
        for id in [id for id in self._evals if id.group == event.number]:
            self.fail("I3", f"{id} still runs after its evaluation")

    # -- steps, weights, slots ------------------------------------------------------------------------------------

    def _batch_taken(self, at: float, event: ev.BatchTaken) -> None:
        if event.version != self.trainer:
            self.fail("I6", f"a batch is taken at version {event.version} while the trainer stands at {self.trainer}")
        self._training[event.version + 1] = len(event.groups)
        for number in event.groups:
            group = self._groups.get(number)
            if group is None or group.training:
                self.fail("I2", f"group {number} is in a batch, and was "
                                 + ("in one before" if group else "not ready"))
                continue
            group.training = True
            self._held -= group.slot
            group.slot = False
            if not self.bounds.bounded:
                continue
            for id, ended in group.ended.items():
                if ended.oldest is not None and event.version - ended.oldest > self.bounds.alpha:
                    self.fail("I1", f"{id} is trained at version {event.version} with tokens of version "
                                     f"{ended.oldest}, the bound is {self.bounds.alpha}")
        if self.bounds.bounded and max(event.staleness, default=0) > self.bounds.alpha:
            self.fail("I1", f"a batch reports staleness {max(event.staleness)}, the bound is {self.bounds.alpha}")

    def _step_ended(self, at: float, event: ev.StepEnded) -> None:
        if event.version != self.trainer + 1:
            self.fail("I6", f"a step ended at version {event.version}, the trainer stood at {self.trainer}")
        self.trainer = event.version
        if self._last_step is not None and at - self._last_step > self.bounds.step_seconds:
            self.fail("I7", f"the step to version {event.version} took {at - self._last_step:.0f} s, the budget is "
                             f"{self.bounds.step_seconds:.0f} s")
        self._last_step = at
        if self.bounds.free is not FreeSlots.LIVE:
            self._training.pop(event.version, None)
        self._check_waste(self.bounds.wasted_after)

    def _check_waste(self, after: int) -> None:
        settled = sum(self.tokens.values())
        wasted = settled - self.tokens[Fate.TRAINED] - self.tokens[Fate.FILTERED]
        if settled > after and wasted > self.bounds.wasted_share * settled:
            self.fail("I8", f"{wasted} of {settled} sampled tokens were wasted, the limit is a share of "
                             f"{self.bounds.wasted_share:g}")

    def _publish_started(self, at: float, event: ev.PublishStarted) -> None:
        if self._publishing is not None:
            self.fail("I6", f"the publish of version {event.version} started before version {self._publishing} "
                             "was live")
        if event.version > self.trainer:
            self.fail("I6", f"version {event.version} is published while the trainer stands at {self.trainer}")
        self._publishing = event.version

    def _weights_published(self, at: float, event: ev.WeightsPublished) -> None:
        if event.manifest.version != self._publishing:
            self.fail("I6", f"version {event.manifest.version} was published, the publish under way is "
                             f"{self._publishing}")

    def _weights_loaded(self, at: float, event: ev.WeightsLoaded) -> None:
        before = self._loaded.get(event.engine, -1)
        if event.version < before:
            self.fail("I5", f"{event.engine} went back from version {before} to {event.version}")
        if event.version > self.trainer:
            self.fail("I5", f"{event.engine} loaded version {event.version}, the trainer stands at {self.trainer}")
        self._loaded[event.engine] = event.version

    def _weights_live(self, at: float, event: ev.WeightsLive) -> None:
        if event.version != self._publishing:
            self.fail("I6", f"version {event.version} is live, the publish under way is {self._publishing}")
        self._publishing = None
        if event.version < self.live:
            self.fail("I5", f"the live version went back from {self.live} to {event.version}")
        self.live = event.version
        for engine in self._up:
            self._check_serves(engine)

    def _check_serves(self, engine: str) -> None:
        if engine not in self.bounds.pinned and self._loaded.get(engine, -1) < self.live:
            self.fail("I5", f"{engine} serves version {self._loaded.get(engine, 'none')} while version {self.live} "
                             "is live")

    def _engine_up(self, at: float, event: ev.EngineUp) -> None:
        self._up[event.engine] = None
        self._check_serves(event.engine)

    def _engine_down(self, at: float, event: ev.EngineDown) -> None:
        self._up.pop(event.engine, None)

    def _slots_freed(self, at: float, event: ev.SlotsFreed) -> None:
        if event.version > self.live:
            self.fail("I6", f"the slots of version {event.version} were freed while version {self.live} was live")
        freed = self._training.pop(event.version, 0)
        if freed != event.groups:
            self.fail("I4", f"{event.groups} slots of version {event.version} were freed, its batch held {freed}")
