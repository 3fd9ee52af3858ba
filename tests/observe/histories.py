"""Event histories for tests: a small world that emits what the control plane emits, at random, from a seed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from rollart.core import events as ev
from rollart.core.tokens import Counted, floats, ids
from rollart.core.types import (
    Completion,
    EvalResult,
    Fate,
    Finish,
    Group,
    Manifest,
    Message,
    Observation,
    Outcome,
    Restored,
    Score,
    StepReport,
    Task,
    Trajectory,
    TrajectoryId,
    Turn,
)

DOMAINS = ("frozen_lake", "calculator", "guess")


def make_task(index: int) -> Task:
    domain = DOMAINS[index % 3]
    return Task(f"{domain}:{index}", domain, {"seed": index, "size": [4, 4]})


def make_trajectory(id: TrajectoryId, task: Task, *, version: int = 0, success: bool = True, turns: int = 2,
                    tokens: int = 6, outcome: Outcome = Outcome.FINISHED, error: str = "", counted: bool = False,
                    say: Callable[[int], tuple[str, str]] = lambda turn: ("right", "You moved.")) -> Trajectory:
    """A whole trajectory. `say` gives the action and the environment's answer of a turn."""
    def made(n: int) -> Any:
        return Counted(n) if counted else ids(range(n))

    done = []
    for turn in range(turns):
        action, answer = say(turn)
        completion = Completion(made(tokens), floats() if counted else floats([-0.5] * tokens), ((version, 0),),
                                Finish.STOP, "engine-0")
        seen = Observation((Message("user", answer),), done=turn == turns - 1, facts={"success": success})
        done.append(Turn(completion, Counted(tokens) if counted else action, seen, made(4)))
    score = Score(float(success), success, {"outcome": float(success)}) if outcome is Outcome.FINISHED else None
    start = Observation((Message("system", "You are on a lake of ice."), Message("user", "Where do you go?")))
    seconds = {"open": 0.1, "generate": 0.8, "environment": 0.05, "score": 0.01}
    return Trajectory(id, task, made(20), start, tuple(done), outcome, score, error, seconds)


@dataclass
class OpenGroup:
    id: int
    task: int
    good: list[Trajectory] = field(default_factory=list)
    running: list[TrajectoryId] = field(default_factory=list)
    started: int = 0


class World:
    """Emits legal events. `checkpoint` is the version whose marker is on disk (it may be ahead of CheckpointSaved)."""

    SIZE = 3

    def __init__(self, seed: int, emit: Callable[[ev.Event], None], version: int = 0) -> None:
        self.random, self.emit = Random(seed), emit
        self.version = self.checkpoint = version
        self.drawn = 0
        self.returned: list[int] = []
        self.next_group = 0
        self.open: dict[int, OpenGroup] = {}
        self.ready: dict[int, OpenGroup] = {}
        self.queue: list[Any] = []
        self.consumed: dict[TrajectoryId, int] = {}
        """The step that consumed each trained or filtered trajectory."""

    def source(self) -> dict[str, Any]:
        return {"drawn": self.drawn, "returned": list(self.returned)}

    def restore(self, restored: Restored) -> None:
        if restored.source:
            self.drawn, self.returned = restored.source["drawn"], list(restored.source["returned"])
        self.next_group = restored.next_group
        for left in restored.groups:
            kept = [m for m in left.finished if m.newest is not None and m.newest <= self.version]
            if gone := tuple(m.id for m in left.finished if m not in kept):
                self.emit(ev.Settled(gone, Fate.STALE, "resume"))
            group = OpenGroup(left.id, int(left.task.id.split(":")[1]), kept, [], left.started)
            if self.random.random() < 0.2:
                self._give_up(group, Fate.CANCELLED)
                self.emit(ev.GroupEnded(group.id, False, "resume: no slot", self.source()))
            else:
                self.queue.append(group)

    def _give_up(self, group: OpenGroup, fate: Fate) -> None:
        if group.good:
            self.emit(ev.Settled(tuple(m.id for m in group.good), fate, "given up"))
        if fate is not Fate.FAILED:
            self.returned.append(group.task)

    def act(self) -> None:
        """One thing happens."""
        choice = self.random.random()
        if self.queue and choice < 0.3:
            self._open(self.queue.pop(0))
        elif choice < 0.15 and len(self.open) < 5:
            if self.returned:
                index = self.returned.pop(0)
            else:
                index, self.drawn = self.drawn, self.drawn + 1
            self.next_group += 1
            self._open(OpenGroup(self.next_group - 1, index))
        elif choice < 0.8 and self.open:
            self._member(self.random.choice(list(self.open.values())))
        elif choice < 0.84 and self.open:
            self._end(self.open.pop(self.random.choice(list(self.open))),
                      self.random.choice([Fate.STALE, Fate.CANCELLED, Fate.FAILED]))
        elif choice < 0.87 and self.ready:
            self._give_up(self.ready.pop(self.random.choice(list(self.ready))), Fate.STALE)
        elif len(self.ready) >= 2:
            self._step()

    def _open(self, group: OpenGroup) -> None:
        self.open[group.id] = group
        self.emit(ev.GroupOpened(group.id, make_task(group.task), self.version, self.source(), len(group.good)))

    def _member(self, group: OpenGroup) -> None:
        if len(group.good) >= self.SIZE:
            del self.open[group.id]
            self.ready[group.id] = group
            self.emit(ev.GroupReady(Group(group.id, make_task(group.task), self.version, tuple(group.good))))
            self._stop_members(group, Fate.CANCELLED)
            self.emit(ev.GroupEnded(group.id, True, "", self.source()))
        elif len(group.running) < self.SIZE + 1 - len(group.good):
            id = TrajectoryId(group.id, group.started)
            group.started += 1
            group.running.append(id)
            self.emit(ev.TrajectoryStarted(id, make_task(group.task).domain))
        else:
            id = group.running.pop(self.random.randrange(len(group.running)))
            if self.random.random() < 0.2:
                lost = make_trajectory(id, make_task(group.task), outcome=Outcome.FAILED, error="environment 7 hung")
                self.emit(ev.TrajectoryEnded(lost, Fate.FAILED))
            else:
                done = make_trajectory(id, make_task(group.task), version=self.version,
                                       success=self.random.random() < 0.5)
                group.good.append(done)
                self.emit(ev.TrajectoryEnded(done, Fate.IN_FLIGHT))

    def _stop_members(self, group: OpenGroup, fate: Fate) -> None:
        for id in group.running:
            ended = make_trajectory(id, make_task(group.task), outcome=Outcome.ABORTED, error="spare")
            self.emit(ev.TrajectoryEnded(ended, fate))
        group.running = []

    def _end(self, group: OpenGroup, fate: Fate) -> None:
        self._stop_members(group, fate)
        if self.random.random() < 0.5:
            self._give_up(group, fate)
            self.emit(ev.GroupEnded(group.id, False, str(fate), self.source()))
        else:  # the other order is as good
            self.returned += [group.task] if fate is not Fate.FAILED else []
            self.emit(ev.GroupEnded(group.id, False, str(fate), self.source()))
            if group.good:
                self.emit(ev.Settled(tuple(m.id for m in group.good), fate, "given up"))

    def _step(self) -> None:
        batch = [self.ready.pop(id) for id in sorted(self.ready)[:2]]
        members = [m for group in batch for m in group.good]
        stale = tuple(self.version - (m.oldest or 0) for m in members)
        self.emit(ev.BatchTaken(self.version, tuple(g.id for g in batch), stale, 0.5))
        filtered = [m for g in batch if len({m.score.value for m in g.good if m.score}) == 1 for m in g.good]
        trained = tuple(m.id for m in members if m not in filtered)
        self.consumed |= {m.id: self.version for m in members}
        if filtered:
            self.emit(ev.Settled(tuple(m.id for m in filtered), Fate.FILTERED, "all rewards alike", self.version))
        if trained:
            self.emit(ev.Settled(trained, Fate.TRAINED, "", self.version))
        self.version += 1
        report = StepReport(self.version, 1.5, 400, {"loss": 0.1, "logprob_gap": 1e-6})
        self.emit(ev.StepEnded(self.version, report, {"guess": 0.5}, {"guess": 0.5}, {"open": len(self.open)}))
        self.emit(ev.WeightsPublished(Manifest(self.version, "memory"), 0.2))
        if self.random.random() < 0.5:
            self.checkpoint = self.version
        if self.checkpoint == self.version and self.random.random() < 0.7:  # else: cut off before it could tell
            self.emit(ev.CheckpointSaved(self.version, f"checkpoints/{self.version:06d}", 0.1))


def evaluation(number: int, version: int, successes: dict[str, list[bool]]) -> list[ev.Event]:
    """All events of one evaluation: for each domain whether each of its tasks was solved."""
    tasks = [(domain, i, won) for domain, all_won in successes.items() for i, won in enumerate(all_won)]
    out: list[ev.Event] = [ev.EvalStarted(number, version, len(tasks))]
    for member, (domain, i, won) in enumerate(tasks):
        task = Task(f"{domain}:{1_000_000 + i}", domain)
        out.append(ev.EvalTrajectory(number, version, make_trajectory(TrajectoryId(number, member, "e"), task,
                                                                      version=version, success=won)))
    results = tuple(EvalResult(domain, version, len(won), sum(won) / len(won), sum(won) / len(won))
                    for domain, won in successes.items())
    return [*out, ev.EvalEnded(number, version, results, 2.0)]
