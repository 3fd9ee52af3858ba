"""Task mixing: an endless stream over domains by weight, seeded and resumable.

Keeps true: the k-th new task depends on the seed and k only; a task that was put back comes before new ones; `state`
and `restore` lose and repeat nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rollart.core.clock import stream
from rollart.core.types import Task


@dataclass(frozen=True)
class Share:
    """One domain of the mix: its weight, and its task number `index` (0, 1, 2, ...)."""

    weight: float
    task: Callable[[int], Task]


class TaskMix:
    """TaskSource over weighted domains."""

    def __init__(self, shares: Mapping[str, Share], seed: int) -> None:
        weights = {name: share.weight for name, share in shares.items()}
        if any(weight < 0 for weight in weights.values()) or not sum(weights.values()):
            raise ValueError(f"the task mix needs domains with weights >= 0 that do not sum to 0; got {weights}")
        self._shares, self._seed = dict(shares), seed
        self._drawn = 0
        self._next = dict.fromkeys(self._shares, 0)
        self._returned: list[tuple[str, int]] = []

    def next(self) -> Task:
        """The next task: one that was put back, or a new one."""
        if self._returned:
            name, index = self._returned.pop(0)
        else:
            chance = stream(self._seed, "mix", self._drawn)
            self._drawn += 1
            name = chance.choices(list(self._shares), [share.weight for share in self._shares.values()])[0]
            index = self._next[name]
            self._next[name] += 1
        return self._shares[name].task(index)

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
        return {"drawn": self._drawn, "next": dict(self._next), "returned": [list(r) for r in self._returned]}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._drawn = int(state["drawn"])
        self._next.update({name: int(n) for name, n in state["next"].items() if name in self._next})
        self._returned = [(str(name), int(index)) for name, index in state["returned"] if name in self._shares]
