"""FrozenLake: walk over the ice to the goal without falling into a hole. Many short actions, much to read.

Keeps true: the walk is gymnasium's FrozenLake-v1 without slipping, on a solvable random map; the agent starts in the
upper left corner and the goal is in the lower right one. Every turn shows the whole lake:

    A..O        A: you   .: ice   O: hole   G: goal         actions: L D R U
    .O..
    ....
    O..G
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import Any

from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv, generate_random_map

from rollart.core.clock import stream
from rollart.core.ranges import between
from rollart.core.types import Action, Message, Observation, Task
from rollart.envs.domain import CountedEpisode, Domain, DomainSettings, Episode, Player, Plays

ACTIONS = "LDRU"  # gymnasium's numbering
_PREFERENCE = "DRLU"  # among equally short ways, so that the right action is one
_MOVES = {"L": (0, -1), "D": (1, 0), "R": (0, 1), "U": (-1, 0)}
_TILES = str.maketrans("SFH", "..O")


@dataclass(frozen=True, kw_only=True)
class FrozenLakeSettings(DomainSettings):
    """size: rows and columns of the lake (tiles). ice: chance of a tile to be ice, not a hole (fraction)."""

    size: int = 4
    ice: float = 0.7
    max_turns: int = 8
    max_tokens: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        between(self, 2, 32, "size")
        if not 0.3 <= self.ice < 1:
            raise ValueError(f"ice must be at least 0.3 and below 1; got {self.ice}")
        shortest = 2 * self.size - 2
        if self.max_turns < shortest:
            raise ValueError(f"size {self.size} takes at least {shortest} moves; got max_turns {self.max_turns}")


class FrozenLake(Domain):
    """Payload: `map`, the rows of the lake in gymnasium's letters. A map is kept if `max_turns` moves can solve it."""

    name = "frozen_lake"
    reward = "frozen_lake"
    rules = ("Walk from the upper left to the goal G. A is you, . is ice, O is a hole. "
             "Answer with one letter: L (left), D (down), R (right) or U (up).")
    Settings = FrozenLakeSettings

    def problem(self, rng: random.Random) -> dict[str, Any]:
        while True:
            rows = generate_random_map(self.settings.size, self.settings.ice, rng.getrandbits(31))
            if steps_to_goal(rows)[0, 0] <= self.settings.max_turns:
                return {"map": rows}

    def open(self, task: Task) -> Episode:
        return _Walk(self, task)

    def player(self, task: Task, seed: int, error_rate: float) -> Player:
        return Plays(partial(_walk, steps_to_goal(task.payload["map"]), stream(seed, "player", task.id), error_rate))

    def random_player(self, task: Task, seed: int) -> Player:
        return Plays(partial(_walk, {}, stream(seed, "random", task.id), 1.0))


def steps_to_goal(rows: list[str]) -> dict[tuple[int, int], int]:
    """Moves from each tile that reaches the goal, by breadth-first search from it."""
    size = len(rows)
    goal = (size - 1, size - 1)
    steps, queue = {goal: 0}, deque([goal])
    while queue:
        row, column = queue.popleft()
        for down, right in _MOVES.values():
            near = row + down, column + right
            if 0 <= near[0] < size and 0 <= near[1] < size and near not in steps and rows[near[0]][near[1]] != "H":
                steps[near] = steps[row, column] + 1
                queue.append(near)
    return steps


class _Walk(CountedEpisode):
    def __init__(self, domain: Domain, task: Task) -> None:
        super().__init__(domain, task)
        self._rows: list[str] = list(task.payload["map"])
        self._lake = FrozenLakeEnv(desc=self._rows, is_slippery=False)

    def first(self) -> Observation:
        state, _ = self._lake.reset(seed=0)
        self._state = int(state)
        return Observation(self._domain.start(Message("user", self._draw())))

    def step(self, action: Action) -> Observation:
        letter = str(action.text).strip()
        valid = len(letter) == 1 and letter in ACTIONS
        ended = False
        if valid:
            state, _, ended, _, _ = self._lake.step(ACTIONS.index(letter))
            self._state = int(state)
        return self._answer(Message("user", self._draw() if valid else "?\n" + self._draw()), valid=valid,
                            success=self._state == len(self._rows) ** 2 - 1, ended=ended)

    def close(self) -> None:
        self._lake.close()

    def _draw(self) -> str:
        size = len(self._rows)
        tiles = "".join(self._rows).translate(_TILES)
        tiles = tiles[:self._state] + "A" + tiles[self._state + 1:]
        return "\n".join(tiles[i:i + size] for i in range(0, size * size, size))


def _walk(steps: dict[tuple[int, int], int], rng: random.Random, error_rate: float, observation: Observation) -> str:
    """Takes the shortest way from where the drawing shows it; errs by a random move."""
    if rng.random() < error_rate:
        return rng.choice(ACTIONS)
    lines = str(observation.messages[-1].content).removeprefix("?\n").split("\n")
    row = next(i for i, line in enumerate(lines) if "A" in line)
    column = lines[row].index("A")

    def steps_after(letter: str) -> int:
        down, right = _MOVES[letter]
        return steps.get((row + down, column + right), len(steps))

    return min(_PREFERENCE, key=steps_after)
