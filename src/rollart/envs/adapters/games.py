"""Adapters of libraries whose environments live in this process: gymnasium, GEM, TextArena, reasoning-gym.

Keeps true: the agent reads all that a library means it to read, and each message once (GEM's boards stand in its
`info`, TextArena repeats the whole game every turn); a gymnasium action that is none of its space moves nothing and
costs a turn; a reasoning-gym question belongs to one split.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from rollart.core.clock import draw
from rollart.core.errors import ConfigError
from rollart.core.types import Task
from rollart.envs.adapters.foreign import Apart, Foreign, ForeignSettings, Reply, Session, library
from rollart.envs.domain import Player, Plays


@dataclass(frozen=True, kw_only=True)
class GymnasiumSettings(ForeignSettings):
    """actions: words for the actions 0, 1, ... of a Discrete space, parted by spaces (empty: their numbers)."""

    actions: str = ""


class _Gym(Session):
    def reset(self) -> Reply:
        return Reply(self._text(self.env.reset(seed=self.payload["seed"])[0]))

    def step(self, text: str) -> Reply:
        words, space = self.env.words, self.env.action_space
        said = [word for word in re.findall(r"[\w-]+", text) if word in words]
        if not said and (words or not space.contains(text)):
            return Reply(f"? {', '.join(words) or space}", valid=False)
        action = int(space.start) + words.index(said[-1]) if words else text
        seen, reward, done, truncated, _ = self.env.step(action)
        return Reply(self._text(seen), reward, done or truncated, truncated and not done)

    def close(self) -> None:
        self.env.close()

    def _text(self, seen: Any) -> str:
        if self.env.render_mode == "ansi":  # [x] where a terminal would highlight x
            return re.sub(r"\x1b\[[0-9;]*m", lambda code: "]" if code[0] == "\x1b[0m" else "[", self.env.render())
        return seen if isinstance(seen, str) else json.dumps(seen, default=lambda value: value.tolist())


class Gymnasium(Foreign):
    """Those with a Discrete or a Text action space. `arguments = {render_mode = "ansi"}` shows the drawn text."""

    name = "gymnasium"
    rules = "Act by one of the action's names."
    Settings, Session = GymnasiumSettings, _Gym

    def known(self) -> Iterable[str]:
        return () if ":" in self.settings.id else library("gymnasium", "envs").registry

    def make(self) -> Any:
        gym, s = library("gymnasium", "envs"), self.settings
        try:
            env = gym.make(s.id, **s.arguments)
        except gym.error.Error as error:
            raise ValueError(error) from None
        space = env.action_space
        count = int(getattr(space, "n", 0))
        env.words = s.actions.split() or [str(i) for i in range(count)]
        if len(env.words) != count or not (count or isinstance(space, gym.spaces.Text)):
            raise ValueError(f"its actions are {space}: Text, or Discrete with a word for each, can be played; got "
                             f"{len(env.words)} words")
        return env

    def sample(self, env: Any) -> str:
        env.action_space.seed(random.randrange(2**31))
        action = env.action_space.sample()
        return env.words[int(action - env.action_space.start)] if env.words else str(action)


class _Gem(Session):
    def reset(self) -> Reply:
        return Reply(self._text(*self.env.reset(seed=self.payload["seed"])))

    def step(self, text: str) -> Reply:
        seen, reward, done, truncated, info = self.env.step(text)
        return Reply(self._text(seen, info), reward, done or truncated, truncated)

    def _text(self, seen: Any, info: Mapping[str, Any]) -> Any:
        parts = (info.get("prefix"), seen, info.get("suffix"))
        return "\n".join(part.strip("\n") for part in parts if part) if isinstance(seen, str) else seen


class _Registered(Foreign):
    """Of a library that has a table of its environments and makes them by id."""

    package: ClassVar[str]

    def known(self) -> Iterable[str]:
        return library(f"{self.package}.envs.registration", self.package).ENV_REGISTRY

    def make(self) -> Any:
        return library(self.package, self.package).make(self.settings.id, **self.settings.arguments)


class Gem(_Registered):
    """GEM's games and tasks, e.g. `game:GuessTheNumber-v0-hard`."""

    name = package = "gem"
    rules = "Play the game. End with your action in \\boxed{}."
    Session = _Gem

    def sample(self, env: Any) -> str:
        return env.sample_random_action()


class _Arena(Session):
    seen = ""

    def reset(self) -> Reply:
        self.env.reset(num_players=1, seed=self.payload["seed"])
        return Reply(self._new())

    def step(self, text: str) -> Reply:
        done, _ = self.env.step(text)
        rewards, info = self.env.close() if done else ({}, [{}])
        return Reply(self._new(), (rewards or {}).get(0, 0), done, valid=not info[0].get("invalid_move"))

    def _new(self) -> Any:
        text = self.env.get_observation()[1]
        if not isinstance(text, str):
            return text
        new, self.seen = text.removeprefix(self.seen), text
        return new.strip("\n")


class TextArena(_Registered):
    """TextArena's games for one player, e.g. `GuessTheNumber-v0`; the reward is what its `close` says."""

    name = package = "textarena"
    rules = "Play the game. Write your action in square brackets."
    Session = _Arena


class _Question(Session):
    def reset(self) -> Reply:
        return Reply(self.env[0]["question"])

    def step(self, text: str) -> Reply:
        answer = library("reasoning_gym.utils", "reasoning-gym").extract_answer(text)
        try:
            reward = self.env.score_answer(answer, self.env[0])
        except ValueError:  # some generators raise where an answer cannot be read
            reward = 0.0
        return Reply((), reward, True, valid=answer is not None)


_BROKEN = {"game_of_life_halting": "scores any text as right", "codeio": "does not repeat itself for a seed",
           "composite": "is made of others: name each as a domain"}


class ReasoningGym(Foreign):
    """Generators by name, e.g. `chain_sum`, with their `arguments`. Payload: `seed`, and the `question` as shown."""

    name = "reasoning_gym"
    rules = "Think, then give the answer between <answer> and </answer>."
    Session = _Question

    def known(self) -> Iterable[str]:
        return library("reasoning_gym.factory", "reasoning-gym").DATASETS

    def check(self) -> None:
        if self.settings.id in _BROKEN:
            raise ValueError(f"it {_BROKEN[self.settings.id]}")
        self.entry(0)

    def session(self, task: Task) -> Session:
        return _Question(self.dataset(task.payload["seed"]), task)

    def dataset(self, seed: int) -> Any:
        create = library("reasoning_gym", "reasoning-gym").create_dataset
        return create(self.settings.id, seed=seed, size=1, **self.settings.arguments)

    def entry(self, seed: int) -> dict[str, Any]:
        """Its `question`, `answer` and what it needs to score."""
        with Apart(self.settings.id, seed):
            return self.dataset(seed)[0]

    def problem(self, rng: random.Random) -> dict[str, Any]:
        seed = rng.randrange(2**31)
        return {"seed": seed, "question": self.entry(seed)["question"]}

    def _held_out(self, payload: Mapping[str, Any]) -> bool:
        return super()._held_out({"question": payload["question"]})

    def player(self, task: Task, seed: int, error_rate: float) -> Player:
        answer = self.entry(task.payload["seed"])["answer"]
        if answer is None:
            raise ConfigError(f"domain {self.name}: {self.settings.id} has no reference answers: no warm start with it")
        err = random.Random(draw(seed, "player", task.id)).random() < error_rate
        return self.random_player(task, seed) if err else _says(answer)

    def random_player(self, task: Task, seed: int) -> Player:
        """Says the answer to another question."""
        return _says(self.entry(draw(seed, "random", task.id) % 2**31)["answer"])


def _says(answer: object) -> Player:
    return Plays(lambda _: f"<answer>{answer}</answer>")
