"""Task mixing: an endless stream over domains by weight, seeded and resumable.

Keeps true: the k-th new task depends on the seed and k only, and with a curriculum on the successes told so far; a task
that was put back comes before new ones; `state` and `restore` lose and repeat nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rollart.core.clock import stream
from rollart.core.events import Event, StepEnded
from rollart.core.types import Task

RISE, FALL, PACE = 0.7, 0.3, 0.25
"""A step whose success in a domain is at least RISE moves its stage up by PACE levels, one below FALL down."""


@dataclass(frozen=True)
class Share:
    """One domain of the mix: its weight, its task number `index` (0, 1, 2, ...), and its levels of difficulty.

    Number n is of level n % levels, 0 the easiest. The domain's stage, from 0 to levels - 1, says which level its new
    tasks have: stage 1.25 means level 1 in three tasks of four, else level 2.
    """

    weight: float
    task: Callable[[int], Task]
    levels: int = 1


class TaskMix:
    """TaskSource over weighted domains."""

    def __init__(self, shares: Mapping[str, Share], seed: int) -> None:
        weights = {name: share.weight for name, share in shares.items()}
        if any(weight < 0 for weight in weights.values()) or not sum(weights.values()):
            raise ValueError(f"the task mix needs domains with weights >= 0 that do not sum to 0; got {weights}")
        self._shares, self._seed = dict(shares), seed
        self._drawn = 0
        self._next = {name: [0] * share.levels for name, share in self._shares.items()}
        self._stage = dict.fromkeys(self._shares, 0.0)
        self._returned: list[tuple[str, int]] = []

    def next(self) -> Task:
        """The next task: one that was put back, or a new one."""
        if self._returned:
            name, index = self._returned.pop(0)
        else:
            chance = stream(self._seed, "mix", self._drawn)
            self._drawn += 1
            name = chance.choices(list(self._shares), [share.weight for share in self._shares.values()])[0]
            level = int(self._stage[name] + chance.random())
            index = self._next[name][level] * self._shares[name].levels + level
            self._next[name][level] += 1
        return self._shares[name].task(index)

    def on(self, at: float, event: Event) -> None:
        """As a subscriber of the journal: a step's successes move the stages."""
        for name, success in event.successes.items() if isinstance(event, StepEnded) else ():
            if name in self._shares:
                stage = self._stage[name] + PACE * ((success >= RISE) - (success < FALL))
                self._stage[name] = min(max(stage, 0.0), self._shares[name].levels - 1)

    def peek(self) -> Iterator[Task]:
        """The tasks that `next` will give, as long as none is put back meanwhile; endless."""
        ahead = TaskMix(self._shares, self._seed)
        ahead.restore(self.state())
        while True:
            yield ahead.next()

    def put_back(self, task: Task) -> None:
        """The task was not trained: it comes again. Its id ends in `/number`; works across a resume too."""
        name, index = task.domain, int(task.id.rsplit("/", 1)[-1])
        if name in self._shares and self._shares[name].task(index).id != task.id:
            raise ValueError(f"task {task.id} is not number {index} of {name}: did the domain's settings change?")
        if name in self._shares:
            self._returned.append((name, index))

    def state(self) -> Mapping[str, Any]:
        return {"drawn": self._drawn, "next": {name: list(counts) for name, counts in self._next.items()},
                "stage": dict(self._stage), "returned": [list(r) for r in self._returned]}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._drawn = int(state["drawn"])
        for name in self._shares.keys() & state["next"].keys():
            counts = state["next"][name][:self._shares[name].levels]
            self._next[name][:len(counts)] = counts
            self._stage[name] = min(state["stage"][name], self._shares[name].levels - 1)
        self._returned = [(str(name), int(index)) for name, index in state["returned"] if name in self._shares]
