"""Make any environment slow or unreliable on purpose.

Keeps true: what a call suffers depends on the seed, the task and how often that task was opened before, never on who
else runs; delays are cut at 0 and pass on the event loop, so they cost nothing under virtual time. A hang waits until
the environment is closed or the call cancelled.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from rollart.core.clock import stream
from rollart.core.errors import EnvironmentFailed
from rollart.core.ports import Environment, EnvironmentPool
from rollart.core.ranges import at_least, between, finite, literals
from rollart.core.types import Action, Observation, Task

_COUNTED_TASKS = 100_000  # tasks whose openings are remembered; the oldest are forgotten first


@dataclass(frozen=True, kw_only=True)
class Latency:
    """What is added to each step of a domain, and to its opening.

    distribution: normal, lognormal, exponential or constant.
    mean_seconds: mean delay of a step before cutting at 0 (seconds).
    sigma_seconds: standard deviation of normal and lognormal (seconds); the opening keeps the ratio to its mean.
    tail_probability: chance that a step or opening takes tail_seconds longer (fraction).
    tail_seconds: that much longer (seconds).
    open_seconds: mean delay of the opening (seconds).
    failure_rate: chance that a step or opening fails after its delay (fraction).
    hang_rate: chance that a step or opening never returns (fraction).
    """

    distribution: Literal["normal", "lognormal", "exponential", "constant"] = "constant"
    mean_seconds: float = 0.0
    sigma_seconds: float = 0.0
    tail_probability: float = 0.0
    tail_seconds: float = 0.0
    open_seconds: float = 0.0
    failure_rate: float = 0.0
    hang_rate: float = 0.0

    def __post_init__(self) -> None:
        literals(self)
        finite(self, "mean_seconds", "sigma_seconds", "tail_seconds", "open_seconds")
        at_least(self, 0, "mean_seconds", "sigma_seconds", "tail_seconds", "open_seconds")
        between(self, 0, 1, "tail_probability", "failure_rate", "hang_rate")
        if self.sigma_seconds and (self.distribution not in ("normal", "lognormal") or not self.mean_seconds):
            raise ValueError(f"sigma_seconds needs a normal or lognormal distribution and mean_seconds above 0; got "
                             f"{self.distribution} with mean_seconds {self.mean_seconds}")
        if bool(self.tail_probability) != bool(self.tail_seconds):
            raise ValueError(f"tail_probability and tail_seconds go together; got {self.tail_probability} and "
                             f"{self.tail_seconds}")

    def step_delay(self, rng: random.Random) -> float:
        """Draw the delay of one step (seconds)."""
        return self._draw(rng, self.mean_seconds, self.sigma_seconds)

    def open_delay(self, rng: random.Random) -> float:
        """Draw the delay of one opening (seconds)."""
        ratio = self.sigma_seconds / self.mean_seconds if self.sigma_seconds else 0.0
        return self._draw(rng, self.open_seconds, self.open_seconds * ratio)

    def _draw(self, rng: random.Random, mean: float, sigma: float) -> float:
        tail = self.tail_seconds if rng.random() < self.tail_probability else 0.0
        if mean == 0 or self.distribution == "constant":
            return mean + tail
        if self.distribution == "exponential":
            return rng.expovariate(1 / mean) + tail
        if self.distribution == "normal":
            return max(0.0, rng.gauss(mean, sigma)) + tail
        variance = math.log1p((sigma / mean) ** 2)  # of the logarithm, so that mean and sigma are those of the delay
        return rng.lognormvariate(math.log(mean) - variance / 2, math.sqrt(variance)) + tail


class InjectedLatency:
    """An EnvironmentPool around another. Domains without a Latency pass through untouched."""

    def __init__(self, pool: EnvironmentPool, latencies: Mapping[str, Latency], seed: int) -> None:
        self._pool, self._latencies, self._seed = pool, dict(latencies), seed
        self._opened: dict[str, int] = {}

    async def open(self, task: Task) -> Environment:
        latency = self._latencies.get(task.domain)
        if latency is None:
            return await self._pool.open(task)
        count = self._opened.pop(task.id, 0)
        self._opened[task.id] = count + 1
        if len(self._opened) > _COUNTED_TASKS:
            del self._opened[next(iter(self._opened))]
        rng = stream(self._seed, "latency", task.id, count)
        closed = asyncio.Event()
        await _suffer(latency, rng, latency.open_delay(rng), task, "open", closed)
        return _Slow(await self._pool.open(task), latency, rng, task, closed)


class _Slow:
    def __init__(self, inner: Environment, latency: Latency, rng: random.Random, task: Task,
                 closed: asyncio.Event) -> None:
        self._inner, self._latency, self._rng, self._task, self._closed = inner, latency, rng, task, closed

    async def first(self) -> Observation:
        return await self._inner.first()

    async def step(self, action: Action) -> Observation:
        await _suffer(self._latency, self._rng, self._latency.step_delay(self._rng), self._task, "step", self._closed)
        return await self._inner.step(action)

    async def close(self) -> None:
        self._closed.set()
        await self._inner.close()


async def _suffer(latency: Latency, rng: random.Random, seconds: float, task: Task, stage: str,
                  closed: asyncio.Event) -> None:
    hangs, fails = rng.random() < latency.hang_rate, rng.random() < latency.failure_rate
    if hangs:
        await closed.wait()
        raise EnvironmentFailed(f"{task.id}: {stage} in domain {task.domain} hung on purpose until it was closed")
    if seconds:
        await asyncio.sleep(seconds)
    if fails:
        raise EnvironmentFailed(f"{task.id}: {stage} in domain {task.domain} failed on purpose")
