"""Guess: find a secret letter by halving. A few turns, each with much more to write than to read.

Keeps true: the agent reads the range that is left (the alphabet is a ring: after z comes a), and only `guess X` at the
end of its action counts; what it writes before is its working, which no reward looks at: the letters of the range,
parted at their middle. Whoever guesses the middle never runs out of guesses; whoever says `stop` gives up:

    user t-r        assistant tuvwxyzabcde f ghijklmnopqr guess f
    user t-e        assistant tuvwxy z abcde guess z
    user a-e        assistant ab c de guess c

Five guesses find the secret among up to 31 letters when each halves what is left; five blind ones find it among 24 to
26 in a fifth of the games.
"""

from __future__ import annotations

import random
import re
import string
from dataclasses import dataclass
from functools import partial
from typing import Any

from rollart.core.clock import stream
from rollart.core.types import Action, Message, Observation, Task
from rollart.envs.domain import CountedEpisode, Domain, DomainSettings, Episode, Player, Plays

_GUESS = re.compile(r"(?:^|\s)guess ([a-z])$")
_RING = string.ascii_lowercase


@dataclass(frozen=True, kw_only=True)
class GuessSettings(DomainSettings):
    """fewest, letters: how many letters the secret is one of, at least and at most (letters).

    max_turns is the number of guesses; 26 letters need 5 when every guess halves what is left.
    """

    fewest: int = 24
    letters: int = 26
    max_turns: int = 5
    max_tokens: int = 40

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 2 <= self.fewest <= self.letters <= len(_RING):
            raise ValueError(f"2 <= fewest <= letters <= {len(_RING)} is needed; got {self.fewest} and {self.letters}")
        if 2 ** self.max_turns <= self.letters:
            raise ValueError(f"{self.letters} letters need {self.letters.bit_length()} guesses; got max_turns "
                             f"{self.max_turns}")


class Guess(Domain):
    """Payload: `low`, `high` (the first and the last letter of the range) and `secret`."""

    name = "guess"
    reward = "guess"
    rules = ("Find the secret letter of a range. After each guess you read the range that is left. Write its letters, "
             "parted at their middle, and end with: guess X . Or give up: stop")
    Settings = GuessSettings

    def problem(self, rng: random.Random) -> dict[str, Any]:
        low, count = rng.randrange(len(_RING)), rng.randint(self.settings.fewest, self.settings.letters)
        letters = (_RING * 2)[low:low + count]
        return {"low": letters[0], "high": letters[-1], "secret": rng.choice(letters)}

    def open(self, task: Task) -> Episode:
        return _Game(self, task)

    def player(self, task: Task, seed: int, error_rate: float) -> Player:
        return Plays(partial(_halve, stream(seed, "player", task.id), error_rate))

    def random_player(self, task: Task, seed: int) -> Player:
        letters, rng = between(task.payload["low"], task.payload["high"]), stream(seed, "random", task.id)
        return Plays(lambda _: f"guess {rng.choice(letters)}")


def between(low: str, high: str) -> str:
    """The letters from `low` on to `high`, both included, around the ring."""
    turned = _RING[_RING.index(low):] + _RING[:_RING.index(low)]
    return turned[:turned.index(high) + 1]


class _Game(CountedEpisode):
    def __init__(self, domain: Domain, task: Task) -> None:
        super().__init__(domain, task)
        self._secret = str(task.payload["secret"])
        self._left = between(task.payload["low"], task.payload["high"])

    def first(self) -> Observation:
        return Observation(self._domain.start(Message("user", self._range())))

    def step(self, action: Action) -> Observation:
        found = _GUESS.search(str(action.text).strip())
        letter = found[1] if found else None
        stop = str(action.text).strip() == "stop"
        success = letter == self._secret
        if letter and letter in self._left and not success:
            self._left = next(part for part in self._left.split(letter) if self._secret in part)
        answer = "yes" if success else self._range() if letter else f"? {self._range()}"
        last = self._actions + 1 >= self._task.max_turns  # the game's own end, no cut-off
        return self._answer(Message("user", answer), valid=letter is not None or stop, success=success,
                            ended=success or stop or last, secret=self._secret)

    def _range(self) -> str:
        return f"{self._left[0]}-{self._left[-1]}"


def _halve(rng: random.Random, error_rate: float, observation: Observation) -> str:
    """Writes the range out and guesses its middle. Errs by guessing its first letter, or by giving up."""
    letters = between(*str(observation.messages[-1].content).removeprefix("? ").split("-"))
    err = rng.random() < error_rate
    if err and rng.random() < 0.5:
        return "stop"
    middle = 0 if err else len(letters) // 2
    parts = letters[:middle], letters[middle], letters[middle + 1:]
    return " ".join(part for part in parts if part) + f" guess {letters[middle]}"
