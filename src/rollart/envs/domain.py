"""What a task domain is: plain synchronous code, usable without the rest of the system.

Keeps true: a task depends on the settings, the split and its index only, so every process makes the same one; a
problem belongs to `train` or to `eval` by the hash of its content, so the splits never share one whatever the seeds;
an episode is used once, and judges the agent by its actions only. It waits for nothing.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import json
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

from rollart.core.clock import draw, stream
from rollart.core.errors import ConfigError
from rollart.core.ranges import at_least, literals
from rollart.core.types import Action, Message, Observation, Task

Split = Literal["train", "eval"]

DOMAINS: dict[str, str] = {
    "calculator": "rollart.envs.calculator:Calculator",
    "frozen_lake": "rollart.envs.frozen_lake:FrozenLake",
    "guess": "rollart.envs.guess:Guess",
    "maths": "rollart.envs.maths:Maths",
    "search_qa": "rollart.envs.search_qa:SearchQA",
    "service_desk": "rollart.envs.service_desk:ServiceDesk",
    "swe": "rollart.envs.swe.bugs:BugFix",
    "webshop": "rollart.envs.webshop:WebShop",
}
"""The domains that ship here, by name: `module:Class`. A recipe may name a domain of its own in the same form."""

ADAPTERS: dict[str, str] = {
    "gem": "rollart.envs.adapters.games:Gem",
    "gymnasium": "rollart.envs.adapters.games:Gymnasium",
    "http": "rollart.envs.adapters.remote:Http",
    "mcp": "rollart.envs.adapters.agents:Mcp",
    "openenv": "rollart.envs.adapters.remote:OpenEnv",
    "reasoning_gym": "rollart.envs.adapters.games:ReasoningGym",
    "textarena": "rollart.envs.adapters.games:TextArena",
    "verifiers": "rollart.envs.adapters.agents:Verifiers",
}
"""Other libraries' environments: `class = "gem"` in a domain's table, which is then named freely, and its `id`."""

_ATTEMPTS = 1000  # problems drawn for one task before its split is said to be empty


@dataclass(frozen=True, kw_only=True)
class DomainSettings:
    """What all domains have. A domain adds its difficulty and sets its own limits.

    seed: which stream of tasks (any integer).
    max_turns: actions an episode may take (turns).
    max_tokens: sampled tokens an action may have (tokens, its stop token among them).
    eval_share: part of all problems that only the eval split uses (fraction).
    instructions: begin with a system message that states the rules; for a model that has not been taught the format.
    """

    seed: int = 0
    max_turns: int = 16
    max_tokens: int = 64
    eval_share: float = 0.2
    instructions: bool = False

    def __post_init__(self) -> None:
        literals(self)
        at_least(self, 1, "max_turns", "max_tokens")
        if not 0 < self.eval_share < 1:
            raise ValueError(f"eval_share must lie between 0 and 1; got {self.eval_share}")


class Player(Protocol):
    """Plays one episode: called with the first observation, then with the answer to each of its actions."""

    def act(self, observation: Observation) -> str: ...


@dataclass(frozen=True)
class Plays:
    """A player that is one function."""

    act: Callable[[Observation], str]


class Episode(ABC):
    """One episode as plain calls. The answers' facts hold `success` (bool), `valid` and `actions` (counts so far)."""

    @abstractmethod
    def first(self) -> Observation: ...

    @abstractmethod
    def step(self, action: Action) -> Observation: ...

    def close(self) -> None:  # noqa: B027  most episodes hold nothing
        """Free what the episode holds."""


class CountedEpisode(Episode):
    """An episode that counts its actions and is cut off after the task's turns; its `step` ends with `_answer`."""

    def __init__(self, domain: Domain, task: Task) -> None:
        self._domain, self._task = domain, task
        self._actions = self._valid = 0

    def _answer(self, *messages: Message, valid: bool, success: bool, ended: bool, **facts: Any) -> Observation:
        """To one action: whether it had the form that it should, solved the task, ended the episode. The reward is 1
        for a success, unless the facts have another."""
        self._actions += 1
        self._valid += valid
        late = not ended and self._actions >= self._task.max_turns
        return Observation(messages, done=ended or late, truncated=late, reward=facts.get("reward", float(success)),
                           facts={"success": success, **facts, "valid": self._valid, "actions": self._actions})


class Domain(ABC):
    """A kind of task: makes problems, opens them, and knows how to play them.

    Subclasses set `name`, `Settings`, `rules` (the system message) and `reward`, a name in `rollart.rewards`.
    """

    name: ClassVar[str]
    reward: ClassVar[str]
    rules: ClassVar[str] = ""
    Settings: ClassVar[type[DomainSettings]] = DomainSettings

    def __init__(self, settings: Any = None) -> None:
        self.settings: Any = self.Settings() if settings is None else settings

    @abstractmethod
    def problem(self, rng: random.Random) -> dict[str, Any]:
        """Draw the JSON payload of one task."""

    @abstractmethod
    def open(self, task: Task) -> Episode: ...

    @abstractmethod
    def player(self, task: Task, seed: int, error_rate: float) -> Player:
        """A player that knows the solution and errs on purpose in that share of its actions."""

    def random_player(self, task: Task, seed: int) -> Player:
        """A player that keeps to the format and knows nothing else: unless it is replaced, one that always errs."""
        return self.player(task, seed, 1.0)

    def task(self, index: int, split: Split) -> Task:
        """Task number `index` of a split. Raises ConfigError when the settings leave the split without a problem."""
        if split not in ("train", "eval"):
            raise ConfigError(f"a split is train or eval; got {split!r}")
        for attempt in range(_ATTEMPTS):
            payload = self.problem(stream(self.settings.seed, self.name, split, index, attempt))
            if self._held_out(payload) == (split == "eval"):
                return Task(f"{self.name}/{split}/{index}", self.name, payload,
                            self.settings.max_turns, self.settings.max_tokens)
        raise ConfigError(f"domain {self.name} has no problem for split {split}: make it larger or change eval_share")

    def start(self, *messages: Message) -> tuple[Message, ...]:
        """The first observation's messages, with the rules before them where the settings ask for it."""
        return (Message("system", self.rules), *messages) if self.settings.instructions else messages

    def _held_out(self, payload: Mapping[str, Any]) -> bool:
        return draw(0, self.name, json.dumps(payload, sort_keys=True)) % 10_000 < self.settings.eval_share * 10_000


def make_domain(name: str, settings: Mapping[str, Any] | None = None) -> Domain:
    """The domain of that name or `module:Class` (or of `class` in its settings), with settings over its defaults.

    Raises ConfigError for an unknown name or key (naming the nearest), a value of a wrong type or out of range, and
    a library that is not installed.
    """
    values = dict(settings or {})
    kind = domain_class(str(values.pop("class", name)))
    fields = {field.name: field for field in dataclasses.fields(kind.Settings)}
    for key, value in values.items():
        if key not in fields:
            raise ConfigError(f"domain {name} has no setting {key!r}{nearest(key, fields)}")
        made = fields[key].default_factory
        expected = type(fields[key].default if made is dataclasses.MISSING else made())
        if type(value) is not expected and not (expected is float and type(value) is int):
            raise ConfigError(f"domain {name}: {key} must be {expected.__name__}; got {value!r}")
    domain = kind.__new__(kind)
    domain.name = name  # type: ignore[misc]  # tasks and errors carry the name that the recipe uses
    try:
        domain.__init__(kind.Settings(**values))  # type: ignore[misc]
    except ValueError as error:
        raise ConfigError(f"domain {name}: {error}") from None
    return domain


def domain_class(name: str) -> type[Domain]:
    """The class behind a domain's name, imported now. Raises ConfigError."""
    target = DOMAINS.get(name) or ADAPTERS.get(name, name)
    module, _, attribute = target.partition(":")
    if not attribute:
        raise ConfigError(f"no domain {name!r}{nearest(name, [*DOMAINS, *ADAPTERS])}; your own is named module:Class")
    try:
        kind = getattr(importlib.import_module(module), attribute, None)
    except ModuleNotFoundError as error:
        remedy = "pip install 'rollart[envs]'" if name in DOMAINS else f"install {error.name} or set PYTHONPATH"
        raise ConfigError(f"domain {name} needs the module {error.name}: {remedy}") from None
    except Exception as error:  # noqa: BLE001  somebody's module: whatever it raises
        raise ConfigError(f"domain {name} cannot be imported: {type(error).__name__}: {error}") from None
    if not (isinstance(kind, type) and issubclass(kind, Domain)):
        raise ConfigError(f"{target} is not a Domain class")
    if missing := sorted(getattr(kind, "__abstractmethods__", ())):
        raise ConfigError(f"{target} lacks {', '.join(missing)}, which every domain has")
    return kind


def nearest(word: str, known: Iterable[str]) -> str:
    """`: did you mean 'x'?`, or the list of what there is."""
    names = sorted(known)
    match = difflib.get_close_matches(word, names, n=1)
    return f": did you mean {match[0]!r}?" if match else f": there are {', '.join(names)}"
