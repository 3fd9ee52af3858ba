"""Guess: find a secret number by halving. A few turns, each with much more to write than to read.

Keeps true: the agent reads `higher` or `lower` only, and only `guess N` at the end of its action counts; what it
writes before is its working, which no reward looks at. With the interval right, halving it never runs out of guesses.
An interval is written by the numbers next to it: 10..26 stands for 11 to 25:

    user 10..26     assistant 10..26 half 8 guess 18
    user higher     assistant 18..26 half 4 guess 22
    user lower      assistant 18..22 half 2 guess 20
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import Any

from rollart.core.clock import stream
from rollart.core.types import Action, Message, Observation, Task
from rollart.envs.domain import Domain, DomainSettings, Episode, Player

_GUESS = re.compile(r"(?:^|\s)guess (\d{1,6})$")


@dataclass(frozen=True, kw_only=True)
class GuessSettings(DomainSettings):
    """numbers: how many the secret is one of (numbers). starts: how many ranges there are: 10.., 11.., on (ranges).

    max_turns is the number of guesses; 15 numbers need 4 when every guess halves what is left.
    """

    numbers: int = 15
    starts: int = 20
    max_turns: int = 4
    max_tokens: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.numbers < 2 or self.starts < 1 or self.numbers + self.starts > 100_000:
            raise ValueError(f"numbers must be at least 2, starts at least 1, their sum at most 100000; "
                             f"got {self.numbers} and {self.starts}")
        if 2 ** self.max_turns <= self.numbers:
            raise ValueError(f"{self.numbers} numbers need {self.numbers.bit_length()} guesses; got max_turns "
                             f"{self.max_turns}")


class Guess(Domain):
    """Payload: `low`, `high` (the secret lies between them) and `secret`."""

    name = "guess"
    reward = "guess"
    rules = ("Find the secret number: 10..26 means above 10 and below 26. After each guess you read higher or lower. "
             "Write the interval that is left, its middle, and end with: guess N")
    Settings = GuessSettings

    def problem(self, rng: random.Random) -> dict[str, Any]:
        low = 10 + rng.randrange(self.settings.starts)
        high = low + self.settings.numbers + 1
        return {"low": low, "high": high, "secret": rng.randint(low + 1, high - 1)}

    def open(self, task: Task) -> Episode:
        return _Game(self, task)

    def player(self, task: Task, seed: int, error_rate: float) -> Player:
        return _Halver(task, stream(seed, "player", task.id), error_rate)

    def random_player(self, task: Task, seed: int) -> Player:
        return _Blind(task, stream(seed, "random", task.id))


class _Game(Episode):
    def __init__(self, domain: Domain, task: Task) -> None:
        self._domain, self._task = domain, task
        self._secret = int(task.payload["secret"])
        self._actions = self._valid = 0

    def first(self) -> Observation:
        asked = f"{self._task.payload['low']}..{self._task.payload['high']}"
        return Observation(self._domain.start(Message("user", asked)))

    def step(self, action: Action) -> Observation:
        found = _GUESS.search(str(action.text).strip())
        number = int(found[1]) if found else None
        self._actions += 1
        self._valid += number is not None
        success = number == self._secret
        if number is None:
            answer = "?"
        elif success:
            answer = "yes"
        else:
            answer = "higher" if number < self._secret else "lower"
        return Observation((Message("user", answer),), done=success or self._actions >= self._task.max_turns,
                           reward=float(success),
                           facts={"success": success, "secret": self._secret, "valid": self._valid,
                                  "actions": self._actions})


class _Halver:
    """Halves what is left. Errs by taking an answer for its opposite.

    What it does depends on its last interval and the answer only, and both can be read.
    """

    def __init__(self, task: Task, rng: random.Random, error_rate: float) -> None:
        self._low, self._high = int(task.payload["low"]), int(task.payload["high"])
        self._rng, self._error_rate = rng, error_rate
        self._guess: int | None = None

    def act(self, observation: Observation) -> str:
        answer = str(observation.messages[-1].content)
        if self._guess is not None:
            err = self._rng.random() < self._error_rate
            if (answer == "higher") != err:
                self._low = self._guess
            else:
                self._high = self._guess
        half = (self._high - self._low) // 2
        self._guess = self._low + half
        return f"{self._low}..{self._high} half {half} guess {self._guess}"


class _Blind:
    def __init__(self, task: Task, rng: random.Random) -> None:
        self._low, self._high, self._rng = int(task.payload["low"]), int(task.payload["high"]), rng

    def act(self, observation: Observation) -> str:
        return f"guess {self._rng.randint(self._low + 1, self._high - 1)}"
