"""What episodes look like: distributions of turns, tokens and seconds by domain, written down or taken from records.

Keeps true: what a trajectory does depends on the seed, its id and its turn only, never on who else runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import NormalDist
from typing import Literal

from rollart.core.clock import draw, stream
from rollart.core.types import TrajectoryId

_NORMAL = NormalDist().inv_cdf


@dataclass(frozen=True, kw_only=True)
class Spread:
    """A distribution of a length or a time: mean and sigma (standard deviation) of `shape`, cut to low..high.

    tail_probability: chance that an exponential extra of mean `tail` is added. `values`: recorded ones to draw from
    instead.
    """

    mean: float = 0.0
    sigma: float = 0.0
    shape: Literal["lognormal", "normal"] = "lognormal"
    low: float = 0.0
    high: float = math.inf
    tail_probability: float = 0.0
    tail: float = 0.0
    values: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.mean < math.inf or not 0 <= self.sigma < math.inf or not 0 <= self.low <= self.high:
            raise ValueError(f"needs mean, sigma >= 0 and 0 <= low <= high; got mean {self.mean:g}, sigma "
                             f"{self.sigma:g}, low {self.low:g}, high {self.high:g}")
        if self.shape not in ("lognormal", "normal"):
            raise ValueError(f"shape must be lognormal or normal; got {self.shape!r}")
        if not 0 <= self.tail_probability <= 1 or not 0 <= self.tail < math.inf:
            raise ValueError(f"needs tail_probability of 0 to 1, tail >= 0; got {self.tail_probability}, {self.tail}")
        if bad := [value for value in self.values if not 0 <= value < math.inf]:
            raise ValueError(f"values must be finite numbers >= 0; got {bad[0]!r}")

    def draw(self, seed: int, *name: object, common: tuple[object, ...] = (), alike: float = 0.0) -> float:
        """The value that this seed and name stand for. `alike` of the variance (of the logarithm, for a lognormal) is
        drawn by `common` instead, which others share."""
        if self.values:
            return self.values[draw(seed, *name) % len(self.values)]
        value = self.mean
        if self.sigma and self.mean:
            normal = _normal(seed, *name)
            if alike:
                normal = math.sqrt(alike) * _normal(seed, *common) + math.sqrt(1.0 - alike) * normal
            if self.shape == "normal":
                value += self.sigma * normal
            else:
                variance = math.log1p((self.sigma / self.mean) ** 2)
                value *= math.exp(math.sqrt(variance) * normal - variance / 2)
        if self.tail_probability:
            chance = stream(seed, "tail", *name)
            if chance.random() < self.tail_probability:
                value += chance.expovariate(1.0 / self.tail) if self.tail else 0.0
        return min(max(value, self.low), self.high)


def _normal(seed: int, *name: object) -> float:
    return _NORMAL((draw(seed, *name) + 0.5) / 2.0**63)


def _spread(mean: float, sigma: float = 0.0, **rest: float) -> Spread:
    return Spread(mean=mean, sigma=sigma, **rest)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Plan:
    """Of one opened environment: its turns, and the tokens of the first message and of each later one."""

    turns: int
    prompt: int
    observations: Sequence[int] = ()


@dataclass(frozen=True)
class Record:
    """A recorded episode in tokens: prompt, each turn's sampled text, each observation (one fewer)."""

    prompt: int
    actions: tuple[int, ...]
    observations: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if min(self.prompt, *self.actions, *self.observations) < 0:
            raise ValueError(f"a record's lengths must be at least 0; got {self}")


@dataclass(frozen=True, kw_only=True)
class Load:
    """Episodes of one domain.

    turns: turns of an episode. prompt, observation, action: tokens of the first message, of each later one, of each
    turn's sampled text. open_s, step_s, reward_s: seconds to open an environment, of one step, of one reward call.
    alike: share of the spread of turns and actions that the members of a group have in common (0 to 1).
    success: probability that an episode is solved. max_turns, max_tokens: limits of a task. records: recorded episodes,
    which then stand for turns, prompt, observation and action.
    """

    turns: Spread = field(default_factory=lambda: _spread(4.8, 3.2))
    prompt: Spread = field(default_factory=lambda: _spread(500))
    observation: Spread = field(default_factory=lambda: _spread(150, 100))
    action: Spread = field(default_factory=lambda: _spread(165, 156))
    open_s: Spread = field(default_factory=lambda: _spread(4.1, 3.9))
    step_s: Spread = field(default_factory=lambda: _spread(1.4, 1.3))
    reward_s: Spread = field(default_factory=lambda: _spread(1.3, 1.0))
    alike: float = 0.0
    success: float = 0.5
    max_turns: int = 12
    max_tokens: int = 400
    records: tuple[Record, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.alike <= 1 or not 0 <= self.success <= 1:
            raise ValueError(f"alike and success must lie between 0 and 1; got {self.alike} and {self.success}")
        if self.max_turns < 1 or self.max_tokens < 1:
            raise ValueError(f"max_turns and max_tokens must be at least 1; got {self.max_turns}, {self.max_tokens}")

    def episode(self, seed: int, number: int, task: str) -> Plan:
        """What environment `number`, opened for `task`, will do."""
        if self.records:
            record = self.records[draw(seed, "record", number) % len(self.records)]
            return Plan(len(record.actions), record.prompt, record.observations)
        turns = self.turns.draw(seed, "turns", number, common=("turns", task), alike=self.alike)
        turns = max(1, round(min(turns, self.max_turns)))
        tokens = [round(self.observation.draw(seed, "observation", number, turn)) for turn in range(turns - 1)]
        return Plan(turns, max(1, round(self.prompt.draw(seed, "prompt", task))), tokens)

    def says(self, seed: int, id: TrajectoryId, turn: int) -> int:
        """Sampled tokens of a turn, at least 1 (of a record: those of any that has this turn)."""
        if self.records:
            able = self._by_turn[min(turn, len(self._by_turn) - 1)]
            return able[draw(seed, "action", str(id), turn) % len(able)].actions[min(turn, len(self._by_turn) - 1)]
        return max(1, round(self.action.draw(seed, "action", str(id), turn, common=("action", id.kind, id.group),
                                             alike=self.alike)))

    @cached_property
    def _by_turn(self) -> list[list[Record]]:
        longest = max(len(record.actions) for record in self.records)
        return [[r for r in self.records if len(r.actions) > turn] for turn in range(longest)]


DOMAINS: Mapping[str, Load] = {
    "swe": Load(turns=_spread(38, 8, low=5), prompt=_spread(1500, 600), observation=_spread(260, 230),
                action=_spread(300, 160), open_s=_spread(14, 11, tail_probability=0.001, tail=200.0),
                step_s=_spread(0.6, 0.5), reward_s=_spread(10, 5), alike=0.3, success=0.3, max_turns=50,
                max_tokens=4096),
    "webshop": Load(turns=_spread(14, 7, low=5), prompt=_spread(800, 100), observation=_spread(1400, 700),
                    action=_spread(60, 50), open_s=_spread(3, 2), step_s=_spread(0.4, 0.3), reward_s=_spread(0.2, 0.1),
                    alike=0.3, max_turns=30, max_tokens=1024),
    "frozen_lake": Load(turns=_spread(28, 14, low=20), prompt=_spread(500, 50), observation=_spread(200, 30),
                        action=_spread(10, 6), open_s=_spread(1, 0.5), step_s=_spread(0.1, 0.1),
                        reward_s=_spread(0.05, 0.02), alike=0.3, max_turns=100, max_tokens=512),
    "math": Load(turns=_spread(2.5, 1.2, low=1), prompt=_spread(250, 100), observation=_spread(80, 60),
                 action=_spread(2800, 2200), open_s=_spread(0.2, 0.1), step_s=_spread(0.5, 0.5),
                 reward_s=_spread(1.0, 1.0), alike=0.3, max_turns=5, max_tokens=16384),
    "game": Load(turns=_spread(1), prompt=_spread(400, 100), observation=_spread(80), action=_spread(2800, 2200),
                 open_s=_spread(0.2, 0.1), step_s=_spread(0.1, 0.1), reward_s=_spread(0.1, 0.05), alike=0.3,
                 max_turns=1, max_tokens=16384),
}
"""SWE-bench, WebShop, FrozenLake, GEM-math and GEM-game as the paper describes them: turns from its table, the rest
assumed or fitted as `docs/reproduction.md` says."""

TOY: Mapping[str, Load] = {
    "math": Load(turns=_spread(1), open_s=_spread(0.1), step_s=_spread(0.1, 0.1), prompt=_spread(200),
                 observation=_spread(20)),
    "game": Load(turns=_spread(6, 4), open_s=_spread(2, 2), step_s=_spread(0.4, 0.4), prompt=_spread(400),
                 observation=_spread(80)),
    "code": Load(turns=_spread(9, 6), open_s=_spread(28, 26), step_s=_spread(5.5, 5), prompt=_spread(1500),
                 observation=_spread(400), success=0.3),
}
"""Small and varied, to test the control plane with."""
