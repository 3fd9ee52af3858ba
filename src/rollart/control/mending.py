"""A learner that comes back: around a Trainer that can start again, one that only takes longer.

Keeps true: a learner that dies costs time and nothing else. It starts again from the newest whole checkpoint and does
the steps since then once more, with the batches that were kept: a step is a function of weights, optimizer state and
batch, so version n is version n again, engines keep their weights, and whatever rollout has stays as fresh as it was.
Waits for the trainer, under the caller's deadlines: a recovery counts towards that of the step or publish it is in.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

from rollart.core.clock import now
from rollart.core.errors import NoCapacity, TrainerLost
from rollart.core.ports import Trainer
from rollart.core.types import Manifest, StepReport, TrainBatch, Version

T = TypeVar("T")


class Restartable(Trainer, Protocol):
    """A learner outside this process."""

    async def restart(self, folder: Path | None) -> None:
        """End what is left of it and start it again, from a checkpoint or (None) at version 0. Raises TrainerLost,
        NoCapacity."""
        ...


class MendingTrainer:
    """`newest()`: version and folder of the newest whole checkpoint, or None: then it begins at version 0.

    redo_batches: steps since that checkpoint that can be done again. max_restarts: between two new steps, with
    `backoff_seconds` doubling between them. Raises TrainerLost when these do not help.
    """

    def __init__(self, trainer: Restartable, newest: Callable[[], tuple[Version, Path] | None], *,
                 redo_batches: int = 64, max_restarts: int = 5, backoff_seconds: float = 1.0) -> None:
        self.inner, self._newest, self._redo_batches = trainer, newest, redo_batches
        self._max, self._backoff = max_restarts, backoff_seconds
        self.version: Version = 0
        self._kept: dict[Version, TrainBatch] = {}
        self._mending, self._given_up = asyncio.Lock(), ""
        self._asked: list[tuple[Version, Callable[[], Awaitable[Any]], asyncio.Future[Any]]] = []
        self._life = self._restarts = 0
        self.recoveries: list[float] = []
        """Seconds that each took, from the word of the loss."""

    async def step(self, batch: TrainBatch) -> StepReport:
        newest = self._newest()
        self._kept = {v: kept for v, kept in self._kept.items() if newest is None or v >= newest[0]}
        while len(self._kept) >= self._redo_batches:
            del self._kept[min(self._kept)]
        self._kept[batch.version] = batch
        report = await self._try(lambda: self.inner.step(batch))
        self.version, self._restarts = batch.version + 1, 0
        return report

    async def publish(self, version: Version) -> Manifest:
        return await self._at(version, lambda: self.inner.publish(version))

    async def retire(self, manifest: Manifest) -> None:
        await self._try(lambda: self.inner.retire(manifest))

    async def save(self, folder: Path) -> None:
        await self._at(self.version, lambda: self.inner.save(folder))

    async def load(self, folder: Path) -> None:
        """`folder` is the newest checkpoint's."""
        await self.inner.load(folder)
        newest = self._newest()
        self.version = newest[0] if newest else 0

    async def _at(self, version: Version, call: Callable[[], Awaitable[T]]) -> T:
        """What is asked of one version, beside the next step: a recovery asks it again when it comes by there."""
        again: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        request = (version, call, again)
        self._asked.append(request)
        try:
            return await self._try(call, again)
        finally:
            self._asked.remove(request)

    async def _try(self, call: Callable[[], Awaitable[T]], again: asyncio.Future[T] | None = None) -> T:
        """A call, repeated after each recovery unless that has its result already."""
        while True:
            if self._mending.locked():
                async with self._mending:
                    pass
            life = self._life
            try:
                return again.result() if again and again.done() else await call()
            except TrainerLost as lost:
                await self._mend(life, str(lost))

    async def _mend(self, life: int, reason: str) -> None:
        async with self._mending:
            if self._given_up:
                raise TrainerLost(self._given_up)
            if life != self._life:
                return  # somebody else has done it
            began = now()
            while True:
                self._restarts += 1
                if self._restarts > self._max:
                    self._given_up = f"the learner was given up after {self._max} restarts: {reason}"
                    raise TrainerLost(self._given_up)
                try:
                    await self._again()
                    break
                except (TrainerLost, NoCapacity) as failure:
                    reason = str(failure)
                    await asyncio.sleep(self._backoff * 2 ** (self._restarts - 1))
            self._life += 1
            self.recoveries.append(now() - began)

    async def _again(self) -> None:
        newest = self._newest()
        at, folder = newest if newest else (0, None)
        missing = [version for version in range(at, self.version) if version not in self._kept]
        if missing:
            self._restarts = self._max  # no further try helps
            raise TrainerLost(f"the learner was lost at version {self.version}, its newest checkpoint is {at}, and the "
                              f"batch of step {missing[0]} is not kept any more (cluster.redo_batches)")
        await self.inner.restart(folder)
        for version in range(at, self.version + 1):
            for asked, call, again in list(self._asked):
                if asked == version and not again.done():
                    again.set_result(await call())
            if version < self.version:
                await self.inner.step(self._kept[version])
