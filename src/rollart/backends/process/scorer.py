"""Reward functions in worker processes.

Keeps true: a reward that hangs or crashes costs its own process and nothing else; a call is repeated a stated number
of times (rewards are plain functions of the trajectory, so that is safe) and then raises: no score is never 0. It
waits for a free process and for each call, both with a deadline.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollart.backends.process.pool import CodeRaised, NoFreeWorker, WorkerFailed, WorkerPool
from rollart.core.clock import now
from rollart.core.errors import ConfigError, ScorerFailed
from rollart.core.types import Score
from rollart.rewards.contract import RewardRequest
from rollart.rewards.domains import reward_function
from rollart.rewards.settings import RewardSettings


class ProcessScorer:
    """Scores requests. `rewards`: the reward's name by domain. Raises ConfigError for a reward that does not exist."""

    def __init__(self, rewards: Mapping[str, str], settings: RewardSettings) -> None:
        for name in rewards.values():
            reward_function(name)
        self._rewards, self._settings = dict(rewards), settings
        self._workers = WorkerPool(domains={}, rewards=self._rewards, processes=settings.processes,
                                   idle=settings.processes, memory_mb=settings.memory_mb, message_mb=1)
        self._opened, self._busy = now(), 0.0

    async def score(self, request: RewardRequest) -> Score:
        """Raises ScorerFailed after the last attempt."""
        where = f"{request.id}: score in domain {request.domain}"
        if request.domain not in self._rewards:
            raise ScorerFailed(f"{where}: no reward is named for it")
        error: Exception | None = None
        for _ in range(1 + self._settings.retries):
            try:
                return Score(**await self._call(request))
            except NoFreeWorker as full:
                raise ScorerFailed(f"{where}: {full} (processes)") from None
            except WorkerFailed as failure:
                error = failure
        raise ScorerFailed(f"{where}, attempt {1 + self._settings.retries}: {error}")

    async def probe(self, request: RewardRequest) -> None:
        """One call before the first trajectory. Raises ConfigError where it crashes, hangs or gives no score."""
        try:
            await self._call(request)
        except (WorkerFailed, NoFreeWorker) as failure:
            if isinstance(failure, CodeRaised) and not str(failure).startswith(("BadScore", "Unavailable")):
                return  # it may dislike an episode in which nothing happened
            raise ConfigError(f"the reward of domain {request.domain} does not work: {failure}") from None

    def figures(self) -> dict[str, float]:
        """Reserved processes, how long all of them were there, and how long they were inside a call (seconds)."""
        return {"instances": self._settings.processes, "busy_seconds": self._busy,
                "alive_seconds": self._settings.processes * (now() - self._opened)}

    async def close(self) -> None:
        """Kill every process and wait until they are gone."""
        await self._workers.close()

    async def _call(self, request: RewardRequest) -> Any:
        worker = await self._workers.take(self._settings.wait_seconds)
        began = now()
        try:
            value = await worker.call("score", request, seconds=self._settings.score_seconds)
        except BaseException:
            self._workers.kill(worker)
            raise
        finally:
            self._busy += now() - began
        self._workers.give_back(worker)
        return value
