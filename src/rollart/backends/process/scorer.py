"""Reward functions in worker processes.

Keeps true: a reward that hangs or crashes costs its own process and nothing else; a call is repeated a stated number
of times (rewards are plain functions of the trajectory, so that is safe) and then raises: no score is never 0. It
waits for a free process and for each call, both with a deadline.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollart.backends.process import wire
from rollart.backends.process.pool import NoFreeWorker, WorkerFailed, WorkerPool
from rollart.core.errors import ScorerFailed
from rollart.core.types import Score, Trajectory
from rollart.rewards.domains import reward_function


@dataclass(frozen=True, kw_only=True)
class ScorerSettings:
    """processes: reward calls at a time; more wait (processes).

    score_seconds: deadline of one call (seconds).
    wait_seconds: deadline for a process to become free (seconds).
    retries: further attempts after a failed call.
    memory_mb: how much a process may grow (10^6 bytes; enforced on Linux).
    """

    processes: int = 2
    score_seconds: float = 30.0
    wait_seconds: float = 600.0
    retries: int = 2
    memory_mb: int = 1024

    def __post_init__(self) -> None:
        for name in ("processes", "score_seconds", "wait_seconds", "memory_mb"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be above 0; got {getattr(self, name)}")
        if self.retries < 0:
            raise ValueError(f"retries must be at least 0; got {self.retries}")


class ProcessScorer:
    """A Scorer. `rewards`: the reward's name by domain. Raises ConfigError for a reward that does not exist."""

    def __init__(self, rewards: Mapping[str, str], settings: ScorerSettings) -> None:
        for name in rewards.values():
            reward_function(name)
        self._rewards, self._settings = dict(rewards), settings
        self._workers = WorkerPool(domains={}, rewards=self._rewards, processes=settings.processes,
                                   idle=settings.processes, memory_mb=settings.memory_mb, message_mb=1)

    async def score(self, trajectory: Trajectory) -> Score:
        """Raises ScorerFailed after the last attempt."""
        where = f"{trajectory.id}: score in domain {trajectory.task.domain}"
        if trajectory.task.domain not in self._rewards:
            raise ScorerFailed(f"{where}: no reward is named for it")
        error: Exception | None = None
        for _ in range(1 + self._settings.retries):
            try:
                return wire.unpack_score(await self._call(trajectory))
            except NoFreeWorker as full:
                raise ScorerFailed(f"{where}: {full} (processes)") from None
            except WorkerFailed as failure:
                error = failure
        raise ScorerFailed(f"{where}, attempt {1 + self._settings.retries}: {error}")

    async def close(self) -> None:
        """Kill every process and wait until they are gone."""
        await self._workers.close()

    async def _call(self, trajectory: Trajectory) -> Any:
        worker = await self._workers.take(self._settings.wait_seconds)
        try:
            value = await worker.call("score", trajectory, seconds=self._settings.score_seconds)
        except BaseException:
            self._workers.kill(worker)
            raise
        self._workers.give_back(worker)
        return value
