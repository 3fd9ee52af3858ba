"""Held-out evaluation at one pinned version, beside training.

Keeps true: all episodes of one evaluation see the same weights, whatever training does meanwhile (an engine of its
own, never updated while it runs); they take no slots, are not in the ledger's counts, and no training step waits for
them (S6).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from contextlib import suppress

from rollart.algo.advantages import pass_at_k
from rollart.algo.intervals import success_interval
from rollart.control.env_manager import EnvManager, Services
from rollart.control.weight_sync import WeightSync
from rollart.core.clock import now
from rollart.core.errors import EngineLost, InvariantViolated, NoCapacity
from rollart.core.events import EvalEnded, EvalStarted, EvalTrajectory
from rollart.core.ports import Cluster
from rollart.core.types import EvalResult, Manifest, Task, Trajectory, TrajectoryId

RESTART_SECONDS = 300.0
"""Deadline for a lost engine to start again; without it the evaluation is left out."""


class Evaluator:
    """`services.proxy` must lead to engines that only the evaluator updates; `cluster` starts a lost one again.

    `samples`: attempts at each task. `concurrent`: episodes at once.
    """

    def __init__(self, services: Services, tasks: Sequence[Task], *, samples: int = 1, concurrent: int = 64,
                 cluster: Cluster | None = None) -> None:
        if concurrent < 1:
            raise ValueError(f"evaluation needs at least 1 concurrent episode; got {concurrent}")
        self._s, self._tasks = services, [task for task in tasks for _ in range(samples)]
        self._concurrent, self._cluster = concurrent, cluster
        self.number = 0

    async def run(self, manifest: Manifest, sync: WeightSync | None = None) -> tuple[EvalResult, ...]:
        """Play every task; one result per domain, in the tasks' order. Failed episodes count as not solved.

        Without an engine that comes up and stays up there is no result, rather than a success of 0.
        """
        number, self.number = self.number, self.number + 1
        started = now()
        proxy = self._s.proxy
        if sync:
            sync.pin(manifest)
        try:
            for engine in proxy.engines:
                await self._bring_up(engine, manifest)
        finally:
            if sync:
                await sync.unpin(manifest)
        if not proxy.routing.live:
            return ()
        self._s.journal.emit(EvalStarted(number, manifest.version, len(self._tasks)))
        room = asyncio.Semaphore(self._concurrent)

        async def play(index: int, task: Task) -> Trajectory:
            async with room:
                trajectory = await EnvManager(TrajectoryId(number, index, "e"), task, self._s).run()
            if any(turn.completion.segments != ((manifest.version, 0),) for turn in trajectory.turns):
                raise InvariantViolated(f"I1: {trajectory.id} is pinned at version {manifest.version}, but saw others")
            self._s.journal.emit(EvalTrajectory(number, manifest.version, trajectory))
            return trajectory

        async with asyncio.TaskGroup() as nursery:
            playing = [nursery.create_task(play(i, task), name=f"e{number}.{i}") for i, task in enumerate(self._tasks)]
        if not proxy.routing.live:
            return ()  # the engine was lost: what failed says nothing of the policy
        results = summarise([p.result() for p in playing], manifest.version)
        self._s.journal.emit(EvalEnded(number, manifest.version, results, now() - started))
        return results

    async def _bring_up(self, engine: str, manifest: Manifest) -> None:
        proxy = self._s.proxy
        if not await proxy.bring_up(engine, manifest, lambda: manifest) and self._cluster:
            with suppress(NoCapacity, EngineLost, TimeoutError):
                async with asyncio.timeout(RESTART_SECONDS):
                    await self._cluster.restart(engine)
                await proxy.bring_up(engine, manifest, lambda: manifest)


def summarise(trajectories: Sequence[Trajectory], version: int) -> tuple[EvalResult, ...]:
    """Mean success and reward per domain; a failed episode is counted, and is not a success. Every task of a domain
    has as many attempts."""
    out = []
    for domain in dict.fromkeys(t.task.domain for t in trajectories):
        mine = [t for t in trajectories if t.task.domain == domain]
        scores = [t.score for t in mine if t.good and t.score is not None]
        solved = dict.fromkeys((t.task.id for t in mine), 0)
        for t in mine:
            solved[t.task.id] += t.good and t.score is not None and t.score.success
        samples = len(mine) // len(solved)
        pass_at = tuple(math.fsum(pass_at_k(samples, c, k) for c in solved.values()) / len(solved)
                        for k in range(1, samples + 1))
        out.append(EvalResult(domain, version, len(solved), sum(s.success for s in scores) / len(mine),
                              math.fsum(s.value for s in scores) / len(mine), len(mine) - len(scores), pass_at,
                              success_interval([n / samples for n in solved.values()], samples)))
    return tuple(out)
