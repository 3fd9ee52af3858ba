"""Calculator: work out an expression with a tool that does one operation at a time.

Keeps true: the tool reads two integers and an operator and never evaluates text; an answer counts only where the
agent itself writes `answer N`, so that the tool's echo of the right number earns nothing.

    user 3+4*2      assistant calc 4*2      tool 8
                    assistant calc 3+8      tool 11
                    assistant answer 11
"""

from __future__ import annotations

import operator
import random
import re
from dataclasses import dataclass
from typing import Any

from rollart.core.clock import stream
from rollart.core.types import Action, Message, Observation, Task
from rollart.envs.domain import Domain, DomainSettings, Episode, Player

_CALL = re.compile(r"calc (-?\d{1,6})([-+*])(-?\d{1,6})")
_ANSWER = re.compile(r"answer (-?\d{1,12})")
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
    max_tokens: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 2 <= self.smallest <= self.largest <= 6:
            raise ValueError(f"2 <= smallest <= largest <= 6 is required; got {self.smallest} and {self.largest}")
        if not 1 <= self.highest <= 99:
            raise ValueError(f"highest must lie between 1 and 99; got {self.highest}")
        if self.max_turns < self.largest:
            raise ValueError(f"largest {self.largest} needs as many turns; got max_turns {self.max_turns}")


class Calculator(Domain):
    """Payload: `numbers` and the `operators` between them; no intermediate result is negative or above 999."""

    name = "calculator"
    reward = "calculator"
    rules = ("Work out the expression. The tool does one operation of two numbers: calc 7*3 . "
             "Multiply before you add or subtract. When you know the result, write: answer 21")
    Settings = CalculatorSettings

    def problem(self, rng: random.Random) -> dict[str, Any]:
        while True:
            count = rng.randint(self.settings.smallest, self.settings.largest)
            numbers = [rng.randint(1, self.settings.highest) for _ in range(count)]
            operators = "".join(rng.choice("+-*") for _ in range(count - 1))
            if all(0 <= apply(call) <= 999 for call in solution(numbers, operators)):
                return {"numbers": numbers, "operators": operators}

    def open(self, task: Task) -> Episode:
        return _Sum(self, task)

    def player(self, task: Task, seed: int, error_rate: float) -> Player:
        return _Solver(task, stream(seed, "player", task.id), error_rate)

    def random_player(self, task: Task, seed: int) -> Player:
        return _Guesser(task, stream(seed, "random", task.id))


def apply(call: Call) -> int:
    """The result of one operation."""
    return int(_OPERATORS[call[1]](call[0], call[2]))


def solution(numbers: list[int], operators: str) -> list[Call]:
    """The calls that reduce the expression, products first, each time the leftmost; the last gives its value."""
    numbers, left = list(numbers), list(operators)
    calls: list[Call] = []
    while left:
        at = left.index("*") if "*" in left else 0
        calls.append((numbers[at], left.pop(at), numbers[at + 1]))
        numbers[at:at + 2] = [apply(calls[-1])]
    return calls


def _expression(task: Task) -> str:
    numbers, operators = task.payload["numbers"], task.payload["operators"]
    return "".join(f"{number}{sign}" for number, sign in zip(numbers, [*operators, ""], strict=True))


class _Sum(Episode):
    def __init__(self, domain: Domain, task: Task) -> None:
        self._domain, self._task = domain, task
        self._target = apply(solution(task.payload["numbers"], task.payload["operators"])[-1])
        self._actions = self._valid = 0

    def first(self) -> Observation:
        return Observation(self._domain.start(Message("user", _expression(self._task))))

    def step(self, action: Action) -> Observation:
        text = str(action.text).strip()
        call, answer = _CALL.fullmatch(text), _ANSWER.fullmatch(text)
        self._actions += 1
        self._valid += bool(call or answer)
        messages: tuple[Message, ...] = ()
        if call:
            messages = (Message("tool", str(apply((int(call[1]), call[2], int(call[3]))))),)
        elif not answer:
            messages = (Message("user", "?"),)
        success = answer is not None and int(answer[1]) == self._target
        out_of_turns = not answer and self._actions >= self._task.max_turns
        return Observation(messages, done=bool(answer) or out_of_turns, truncated=out_of_turns, reward=float(success),
                           facts={"success": success, "target": self._target, "valid": self._valid,
                                  "actions": self._actions})


class _Solver:
    """Makes the right call, again if it erred. Errs by a wrong operand, operator or order, or by an early answer."""

    def __init__(self, task: Task, rng: random.Random, error_rate: float) -> None:
        self._task, self._rng, self._error_rate = task, rng, error_rate
        self._calls = solution(task.payload["numbers"], task.payload["operators"])
        self._done = 0  # calls that were made right

    def act(self, observation: Observation) -> str:
        err = self._rng.random() < self._error_rate
        if self._done == len(self._calls):
            result = apply(self._calls[-1])
            return f"answer {result + self._rng.choice((-2, -1, 1, 2)) if err else result}"
        if not err:
            call = self._calls[self._done]
            self._done += 1
            return "calc {}{}{}".format(*call)
        return self._wrong(*self._calls[self._done])

    def _wrong(self, left: int, sign: str, right: int) -> str:
        kind = self._rng.randrange(4)
        numbers, operators = self._task.payload["numbers"], self._task.payload["operators"]
        if kind == 0:
            return f"answer {apply((left, sign, right)) if self._done else numbers[0]}"
        if kind == 1:
            return f"calc {left}{self._rng.choice([s for s in _OPERATORS if s != sign])}{right}"
        if kind == 2:
            return f"calc {left}{sign}{self._rng.choice([n for n in range(1, 10) if n != right])}"
        at = self._rng.randrange(len(operators))  # any pair of the expression, whatever binds first
        return f"calc {numbers[at]}{operators[at]}{numbers[at + 1]}"


class _Guesser:
    def __init__(self, task: Task, rng: random.Random) -> None:
        self._task, self._rng = task, rng

    def act(self, observation: Observation) -> str:
        numbers = self._task.payload["numbers"]
        if self._rng.random() < 0.5:
            return f"answer {self._rng.randint(0, 99)}"
        return f"calc {self._rng.choice(numbers)}{self._rng.choice('+-*')}{self._rng.choice(numbers)}"
