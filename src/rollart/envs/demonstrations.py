"""A player's episodes as conversations, to imitate before reinforcement learning begins.

Keeps true: the same domain, split, seed and error rate give the same conversations in every process.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rollart.core.types import Action, Observation, Task
from rollart.envs.domain import Domain, Player, Split


@dataclass(frozen=True)
class Demonstration:
    """One played episode: `observations[i]` is the answer to `actions[i]`; both have one entry a turn."""

    task: Task
    start: Observation
    actions: tuple[str, ...]
    observations: tuple[Observation, ...]

    @property
    def success(self) -> bool:
        return bool(self.observations[-1].facts["success"])


def play_episode(domain: Domain, task: Task, player: Player) -> Demonstration:
    """Play one task to its end, at most `task.max_turns` actions."""
    episode = domain.open(task)
    try:
        start = observation = episode.first()
        actions: list[str] = []
        observations: list[Observation] = []
        while not observation.done and len(actions) < task.max_turns:
            actions.append(player.act(observation))
            observation = episode.step(Action(actions[-1]))
            observations.append(observation)
    finally:
        episode.close()
    return Demonstration(task, start, tuple(actions), tuple(observations))


def demonstrations(domain: Domain, count: int, *, split: Split = "train", seed: int = 0,
                   error_rate: float = 0.0) -> Iterator[Demonstration]:
    """The scripted player's episodes on tasks 0..count-1 of a split."""
    for index in range(count):
        task = domain.task(index, split)
        yield play_episode(domain, task, domain.player(task, seed, error_rate))
