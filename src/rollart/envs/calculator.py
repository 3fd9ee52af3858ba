"""Calculator: work out an expression with a tool that does one operation at a time.

Keeps true: the tool does the operation that it is asked for, also one that does not come first, and never evaluates
text; an answer counts only where the agent itself ends an action with `answer N`, so that the tool's right number earns
nothing. What stands before `calc N` or `answer N` is the agent's working and is not looked at. Every turn shows what is
left of the expression:

    user 2+3*2      assistant 2+3*2 calc 2      tool 2+6        (its second operation)
                    assistant 2+6 calc 1        tool 08         (a last number has two digits)
                    assistant 08 answer 08
"""

from __future__ import annotations

import operator
import random
import re
from dataclasses import dataclass
from functools import partial
from typing import Any

from rollart.core.clock import stream
from rollart.core.ranges import between
from rollart.core.types import Action, Message, Observation, Task
from rollart.envs.domain import CountedEpisode, Domain, DomainSettings, Episode, Player, Plays

_CALL = re.compile(r"(?:^|\s)calc ([1-9])$")
_ANSWER = re.compile(r"(?:^|\s)answer (-?\d{1,12})$")
_NUMBER = re.compile(r"(?<![0-9])-?\d+")
_OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}

Call = tuple[int, str, int]


@dataclass(frozen=True, kw_only=True)
class CalculatorSettings(DomainSettings):
    """smallest, largest: how many numbers an expression has (numbers). highest: the largest of them (from 1 on).

    An expression of n numbers needs n turns: n - 1 calls and the answer.
    """

    smallest: int = 3
    largest: int = 4
    highest: int = 9
    max_turns: int = 5
    max_tokens: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 2 <= self.smallest <= self.largest <= 6:
            raise ValueError(f"2 <= smallest <= largest <= 6 is required; got {self.smallest} and {self.largest}")
        between(self, 1, 99, "highest")
        if self.max_turns < self.largest:
            raise ValueError(f"largest {self.largest} needs as many turns; got max_turns {self.max_turns}")


class Calculator(Domain):
    """Payload: `numbers` and the `operators` between them; no right intermediate result is negative or above 99."""

    name = "calculator"
    reward = "calculator"
    rules = ("Work out the expression. The tool does the operation that you name by its place from the left: calc 2 . "
             "Multiply before you add or subtract. When one number is left, end with: answer 21")
    Settings = CalculatorSettings

    def problem(self, rng: random.Random) -> dict[str, Any]:
        while True:
            count = rng.randint(self.settings.smallest, self.settings.largest)
            numbers = [rng.randint(1, self.settings.highest) for _ in range(count)]
            operators = "".join(rng.choice("+-*") for _ in range(count - 1))
            if all(0 <= result <= 99 for result in results(numbers, operators)):
                return {"numbers": numbers, "operators": operators}

    def open(self, task: Task) -> Episode:
        return _Sum(self, task)

    def player(self, task: Task, seed: int, error_rate: float) -> Player:
        return Plays(partial(_solve, stream(seed, "player", task.id), error_rate))

    def random_player(self, task: Task, seed: int) -> Player:
        rng = stream(seed, "random", task.id)
        return Plays(lambda _: f"answer {rng.randint(0, 99)}" if rng.random() < 0.5 else f"calc {rng.randint(1, 3)}")


def apply(call: Call) -> int:
    """The result of one operation."""
    return int(_OPERATORS[call[1]](call[0], call[2]))


def pairs(numbers: list[int], operators: str) -> list[Call]:
    """The operations that stand in an expression, from the left."""
    return list(zip(numbers, operators, numbers[1:], strict=False))


def first_at(operators: str) -> int:
    """Which operation comes first: the leftmost product, else the leftmost."""
    return max(operators.find("*"), 0)


def reduce(numbers: list[int], operators: str, at: int) -> tuple[list[int], str]:
    """The expression with operation `at` replaced by its result."""
    result = apply(pairs(numbers, operators)[at])
    return [*numbers[:at], result, *numbers[at + 2:]], operators[:at] + operators[at + 1:]


def results(numbers: list[int], operators: str) -> list[int]:
    """The intermediate results in the right order; the last is the value."""
    out: list[int] = []
    while operators:
        at = first_at(operators)
        out.append(apply(pairs(numbers, operators)[at]))
        numbers, operators = reduce(numbers, operators, at)
    return out


def expression(numbers: list[int], operators: str) -> str:
    return "".join(f"{number}{sign}" for number, sign in zip(numbers, [*operators, ""], strict=True))


class _Sum(CountedEpisode):
    def __init__(self, domain: Domain, task: Task) -> None:
        super().__init__(domain, task)
        self._numbers, self._operators = list(task.payload["numbers"]), task.payload["operators"]
        self._target = results(self._numbers, self._operators)[-1]

    def first(self) -> Observation:
        return Observation(self._domain.start(Message("user", expression(self._numbers, self._operators))))

    def step(self, action: Action) -> Observation:
        text = str(action.text).strip()
        call, answer = _CALL.search(text), _ANSWER.search(text)
        at = int(call[1]) - 1 if call else len(self._operators)
        done = at < len(self._operators)
        if done:
            self._numbers, self._operators = reduce(self._numbers, self._operators, at)
        left = expression(self._numbers, self._operators) if self._operators else f"{self._numbers[0]:02d}"
        messages = () if answer else (Message("tool", left if done else f"? {left}"),)
        success = answer is not None and int(answer[1]) == self._target
        return self._answer(*messages, valid=bool(done or answer), success=success, ended=bool(answer),
                            target=self._target)


def _solve(rng: random.Random, error_rate: float, observation: Observation) -> str:
    """Writes down what is left and makes the right call. Errs by another operation first, and by the answer 00."""
    text = str(observation.messages[-1].content).removeprefix("? ")
    operators = "".join(_NUMBER.split(text))
    err = rng.random() < error_rate
    if not operators:
        return f"{text} answer {'00' if err else text}"
    at = first_at(operators)
    others = [other for other in range(len(operators)) if other != at]
    if err and (not others or rng.random() < 0.5):
        return f"{text} answer 00"
    return f"{text} calc {1 + (rng.choice(others) if err else at)}"
