"""Maths: word problems with a Python tool, generated or from a GSM8K file.

Keeps true: the agent's code runs in a sandbox and nowhere else; files that it writes stay until the episode ends. An
answer counts only where the agent itself ends an action with `answer N`; what the tool prints earns nothing.

    user Ana has 12 shells. Ana buys 3 bags with 5 shells in each. How many shells does Ana have now?
    assistant <python>print((12+3*5))</python>      tool 27      assistant answer 27
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from rollart.core.clock import stream
from rollart.core.errors import ConfigError
from rollart.core.ranges import between
from rollart.core.types import Action, Message, Observation, Task
from rollart.envs.domain import CountedEpisode, Domain, DomainSettings, Episode, Player, Plays
from rollart.envs.tool_calls import parse
from rollart.sandbox import Sandbox, SandboxSettings, choose, open_sandbox

_ANSWER = re.compile(r"(?:^|\s)answer (-?\d{1,12})$")
_SHOWN = 1000  # characters of the tool's output, the last
_NAMES = ("Ana", "Ben", "Chen", "Dora", "Emil", "Fatma", "Goran", "Hanna")
_THINGS = ("shells", "stamps", "apples", "marbles", "cards", "nails", "books", "tickets")
_Work = Callable[[int, int, int], float]
_STARTS: tuple[tuple[str, str, _Work], ...] = (
    ("{name} has {b} {things}.", "{b}", lambda v, a, b: b),
    ("{name} counts {a} shelves with {b} {things} on each.", "({a}*{b})", lambda v, a, b: a * b))
_STEPS: tuple[tuple[str, str, _Work], ...] = (
    ("{name} finds {b} more.", "({v}+{b})", lambda v, a, b: v + b),
    ("{name} buys {a} bags with {b} {things} in each.", "({v}+{a}*{b})", lambda v, a, b: v + a * b),
    ("{name} gives {b} of them away.", "({v}-{b})", lambda v, a, b: v - b),
    ("A friend brings {a} times as many as {name} has, as a present.", "{v}*({a}+1)", lambda v, a, b: v * (a + 1)),
    ("{name} puts them into {a} equal piles and keeps one pile.", "({v}//{a})", lambda v, a, b: v / a))


@dataclass(frozen=True, kw_only=True)
class MathsSettings(DomainSettings):
    """smallest, largest: steps of a generated problem after its first sentence. highest: largest number in its text.

    path: problems from this file instead, in GSM8K's form: a line is {"question": ..., "answer": "... #### 42"}.
    sandbox: auto, bubblewrap, podman, docker, or trust (the code runs on this machine). tool_seconds: deadline of a
    call of the tool (seconds).
    """

    smallest: int = 1
    largest: int = 3
    highest: int = 20
    path: str = ""
    sandbox: str = "auto"
    tool_seconds: float = 10.0
    max_turns: int = 4
    max_tokens: int = 160

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.smallest <= self.largest <= 8:
            raise ValueError(f"1 <= smallest <= largest <= 8 is required; got {self.smallest} and {self.largest}")
        between(self, 3, 10_000, "highest")
        self.limits()

    def limits(self) -> SandboxSettings:
        """What the tool's code may use. Raises ValueError."""
        return SandboxSettings(kind=self.sandbox, seconds=self.tool_seconds)


class Maths(Domain):
    """Payload: `question`, `answer` (a whole number) and `work`, an expression with that value. Raises ConfigError."""

    name = "maths"
    reward = "maths"
    rules = ("Solve the problem. You may run Python, whose printed output you are shown: <python>print(2*3)</python>. "
             "Files stay, variables do not. End with the number alone: answer 6")
    Settings = MathsSettings

    def __init__(self, settings: Any = None) -> None:
        super().__init__(settings)
        self._rows = read_gsm8k(self.settings.path) if self.settings.path else []
        choose(self.settings.sandbox)

    def problem(self, rng: random.Random) -> dict[str, Any]:
        return dict(rng.choice(self._rows)) if self._rows else story(rng, self.settings)

    def open(self, task: Task) -> Episode:
        return _Problem(self, task)

    def player(self, task: Task, seed: int, error_rate: float) -> Player:
        return Plays(partial(_solve, task.payload["work"], stream(seed, "player", task.id), error_rate))

    def random_player(self, task: Task, seed: int) -> Player:
        return Plays(partial(_guess, stream(seed, "random", task.id)))


def story(rng: random.Random, settings: MathsSettings) -> dict[str, Any]:
    """A generated problem: every number along the way is whole and above 0."""
    name, things = rng.choice(_NAMES), rng.choice(_THINGS)
    sentences, work, value = [], "", 1
    for step in range(1 + rng.randint(settings.smallest, settings.largest)):
        after = 0.0
        while after < 1 or after != int(after):
            a, b = rng.randint(2, min(6, settings.highest)), rng.randint(2, settings.highest)
            text, form, function = rng.choice(_STEPS if step else _STARTS)
            after = function(value, a, b)
        value, work = int(after), form.format(v=work, a=a, b=b)
        sentences.append(text.format(name=name, things=things, a=a, b=b))
    return {"question": f"{' '.join(sentences)} How many {things} does {name} have now?", "answer": value, "work": work}


def read_gsm8k(path: str) -> list[dict[str, Any]]:
    """The problems of a file. Raises ConfigError that names the first line that is none."""
    rows, number = [], 0
    try:
        with open(path, "rb") as file:
            for line in file:
                number += 1
                if not line.strip():
                    continue
                row = json.loads(line.decode("utf-8-sig"))
                answer = int(row["answer"].rpartition("####")[2].strip().replace(",", ""))
                rows.append({"question": str(row["question"]), "answer": answer, "work": str(answer)})
    except OSError as error:
        raise ConfigError(f"domain maths: path {path} cannot be read: {error.strerror}") from None
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(f"domain maths: {path} line {number} must be "
                          f'{{"question": ..., "answer": "... #### 42"}}: {type(error).__name__}: {error}') from None
    if not rows:
        raise ConfigError(f"domain maths: {path} holds no problem")
    return rows


class _Problem(CountedEpisode):
    def __init__(self, domain: Domain, task: Task) -> None:
        super().__init__(domain, task)
        self._sandbox: Sandbox | None = None

    def first(self) -> Observation:
        return Observation(self._domain.start(Message("user", self._task.payload["question"])))

    def step(self, action: Action) -> Observation:
        text, target = str(action.text).strip(), self._task.payload["answer"]
        answer = _ANSWER.search(text)
        calls = [] if answer else [call for call in parse(text, "tags") if call.name == "python"]
        says = self._run(str(calls[0].arguments.get("code", calls[0].arguments.get("input", "")))) if calls else (
            "? write <python>code</python>, or end with: answer 6")
        success = answer is not None and int(answer[1]) == target
        return self._answer(*([] if answer else [Message("tool", says)]), valid=bool(answer or calls), success=success,
                            ended=bool(answer), target=target)

    def close(self) -> None:
        if self._sandbox:
            self._sandbox.close()

    def _run(self, code: str) -> str:
        self._sandbox = self._sandbox or open_sandbox(self._domain.settings.limits())
        ran = self._sandbox.run(["python3", "-"], stdin=code)
        late = f"\nstopped after {self._domain.settings.tool_seconds:g} s" if ran.timed_out else ""
        return f"{ran.stdout}{ran.stderr}{late}".strip()[-_SHOWN:] or "no output: use print"


def _solve(work: str, rng: random.Random, error_rate: float, observation: Observation) -> str:
    """Lets the tool work it out and gives its number. Errs by a wrong number in either."""
    off = f"+{rng.randint(1, 9)}" if rng.random() < error_rate else ""
    last = observation.messages[-1]
    if last.role == "tool" and str(last.content).removeprefix("-").isdigit():
        return f"answer {int(str(last.content)) + int(off or 0)}"
    return f"<python>print({work}{off})</python>"


def _guess(rng: random.Random, observation: Observation) -> str:
    number = rng.randint(0, 99)
    return f"answer {number}" if rng.random() < 0.5 else f"<python>print({number})</python>"
