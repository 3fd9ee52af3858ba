"""What the adapters of other libraries' environments share.

Keeps true: what a library draws from the global random streams (`random`, numpy's) is the episode's own, seeded from
its task and put aside after each call, so that episodes in one process change neither each other nor their host; the
score is the library's own reward; an answer of a wrong type is an error that names the environment and the call. A
library is imported where it is used. It waits for the library, within the deadlines of whoever calls.
"""

from __future__ import annotations

import importlib
import math
import random
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NoReturn

from rollart.core.clock import draw
from rollart.core.errors import ConfigError
from rollart.core.types import Action, Message, Observation, Task
from rollart.envs.domain import Domain, DomainSettings, Episode, Player, nearest


@dataclass(frozen=True, kw_only=True)
class ForeignSettings(DomainSettings):
    """id: what the library calls the environment. arguments: a table, passed to the library's maker.

    solved_at: an episode is solved if it ended and its last reward is at least this, unless the library says.
    """

    id: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    solved_at: float = 1.0
    max_turns: int = 32
    max_tokens: int = 256


@dataclass(frozen=True)
class Reply:
    """An environment's answer. `text`: what it says, or whole messages. `success`: None where only the reward tells."""

    text: str | tuple[Message, ...]
    reward: float = 0.0
    done: bool = False
    truncated: bool = False
    valid: bool = True
    success: bool | None = None


class Session:
    """One episode of the library's environment `env`: `reset() -> Reply`, then `step(text) -> Reply`."""

    reset: Callable[..., Reply]
    step: Callable[..., Reply]

    def __init__(self, env: Any, task: Task) -> None:
        self.env, self.payload = env, task.payload

    def close(self) -> None:
        """Free what it holds."""


class Foreign(Domain):
    """A domain of a library's environment. Payload: `seed`, unless the adapter has problems of its own.

    Subclasses set `Session`, and say how to `make` the environment, which ids are `known`, how to `sample` an action.
    """

    reward = "own"
    Settings = ForeignSettings
    Session: ClassVar[type[Session]]

    def __init__(self, settings: Any = None) -> None:
        super().__init__(settings)
        id, known = self.settings.id, list(self.known())
        if not id or (known and id not in known):
            near = nearest(id, known)
            near = near if len(near) < 300 else f": there are {len(known)}, such as {', '.join(known[:4])}"
            raise ConfigError(f"domain {self.name}: no id {id!r}{near}")
        with Apart(id):
            try:
                self.check()
            except (ImportError, TypeError, ValueError, AssertionError, OSError, LookupError, RuntimeError) as error:
                reason = " ".join(str(error).split())[:300]
                raise ConfigError(f"domain {self.name}: {id} cannot be made: {reason}") from None

    def known(self) -> Iterable[str]:
        """All ids that there are; none: whatever `check` accepts."""
        return ()

    def make(self) -> Any:
        """The library's environment, new. Its global draws are put aside by the caller."""

    def check(self) -> None:
        """Raise what is wrong with id and arguments."""
        self.make()

    def sample(self, env: Any) -> str:
        """An action at random, where the library knows its actions."""
        raise NotImplementedError

    def problem(self, rng: random.Random) -> dict[str, Any]:
        return {"seed": rng.randrange(2**31)}

    def session(self, task: Task) -> Session:
        return self.Session(self.make(), task)

    def open(self, task: Task) -> Episode:
        return _Foreign(self, task)

    def player(self, task: Task, seed: int, error_rate: float) -> Player:
        raise ConfigError(f"domain {self.name}: {self.settings.id} comes without a player that knows the solution: no "
                          "warm start and no scripted player with it")

    def random_player(self, task: Task, seed: int) -> Player:
        if type(self).sample is Foreign.sample:
            raise ConfigError(f"domain {self.name}: the actions of {self.settings.id} are not known: no random player")
        return _Sampler(self, task, seed)


def library(module: str, extra: str) -> Any:
    """Import it. Raises ConfigError with the line that installs it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = str(error.name).partition(".")[0]
        raise ConfigError(f"this domain needs the module {missing}: pip install 'rollart[{extra}]'") from None


class Apart:
    """`with` it around each call of a library: the global random streams are the episode's own meanwhile."""

    def __init__(self, *name: object) -> None:
        seed = draw(0, "foreign", *name)
        self._mine: tuple[Any, Any] = (random.Random(seed).getstate(), None)
        self._seed = seed % 2**32

    def __enter__(self) -> None:
        self._outer = _streams()
        if self._outer[1] is not None and self._mine[1] is None:
            sys.modules["numpy"].random.seed(self._seed)
        _restore(self._mine)

    def __exit__(self, *_: object) -> None:
        self._mine = _streams()
        _restore(self._outer)


def _streams() -> tuple[Any, Any]:
    numpy = sys.modules.get("numpy")
    return random.getstate(), numpy.random.get_state() if numpy else None


def _restore(streams: tuple[Any, Any]) -> None:
    random.setstate(streams[0])
    if streams[1] is not None:
        sys.modules["numpy"].random.set_state(streams[1])


class _Foreign(Episode):
    def __init__(self, domain: Foreign, task: Task) -> None:
        self._domain, self._apart = domain, Apart(task.id)
        self._total = 0.0
        self._actions = self._valid = 0
        with self._apart:
            self._session = domain.session(task)

    def first(self) -> Observation:
        with self._apart:
            seen = self._observation(self._session.reset(), "reset")
        return Observation(self._domain.start(*seen.messages), facts=seen.facts)

    def step(self, action: Action) -> Observation:
        with self._apart:
            reply = self._session.step(str(action.text))
        self._actions += 1
        self._valid += reply.valid
        return self._observation(reply, "step")

    def close(self) -> None:
        with self._apart:
            self._session.close()

    def _observation(self, reply: Reply, call: str) -> Observation:
        """Check what foreign code said. `return`, the sum of its rewards, is what the reward function `own` pays."""
        messages = reply.text if isinstance(reply.text, tuple) else (Message("user", reply.text),)
        for message in messages:
            if not isinstance(message.content, str):
                self._wrong(call, "a text", message.content)
        number = isinstance(reply.reward, int | float) or hasattr(reply.reward, "item")
        reward = float(reply.reward) if number else math.nan
        if not math.isfinite(reward):
            self._wrong(call, "a finite number as reward", reply.reward)
        self._total += reward
        solved = reply.done and reward >= self._domain.settings.solved_at if reply.success is None else reply.success
        return Observation(messages, bool(reply.done), bool(reply.done and reply.truncated), reward,
                           {"success": bool(solved), "return": self._total, "valid": self._valid,
                            "actions": self._actions})

    def _wrong(self, call: str, wanted: str, got: object) -> NoReturn:
        raise TypeError(f"{self._domain.settings.id}: {call} must give {wanted}; got {type(got).__name__} {got!r:.80}")


class _Sampler:
    """The library's random action, in a copy of the episode that is played."""

    def __init__(self, domain: Foreign, task: Task, seed: int) -> None:
        self._domain, self._play, self._choose = domain, Apart(task.id), Apart("random", seed, task.id)
        with self._play:
            self._session = domain.session(task)
            self._session.reset()

    def act(self, observation: Observation) -> str:
        with self._choose:
            text = self._domain.sample(self._session.env)
        with self._play:
            self._session.step(text)
        return text
