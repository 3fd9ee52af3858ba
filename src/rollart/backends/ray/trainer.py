"""The learner in actors as the control plane's `Trainer`, and how it comes back.

Keeps true: a learner that dies costs time and nothing else. All its ranks start again from the newest whole checkpoint
and do the steps since then once more, with the batches that were kept: a step is a function of weights, optimizer state
and batch, so version n is again version n, engines keep their weights, and whatever rollout has stays as fresh as it
was. Waits for the workers; a step's deadline is the pipeline's and covers a recovery in it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray

from rollart.backends.ray.host import Shared
from rollart.backends.ray.remote import Remote
from rollart.core.clock import now
from rollart.core.errors import NoCapacity, TrainerLost
from rollart.core.types import Manifest, StepReport, TrainBatch, Version
from rollart.distributed.api import Cluster, Worker


class RemoteTrainer:
    """`newest()`: version and folder of the newest whole checkpoint, or None: then it begins at version 0.

    `redo_batches`: steps since that checkpoint that can be done again; `max_restarts`: starts between two new steps.
    Raises TrainerLost.
    """

    def __init__(self, kind: type[Worker], remotes: list[Remote], newest: Callable[[], tuple[Version, Path] | None], *,
                 redo_batches: int, max_restarts: int) -> None:
        self._remotes, self._newest, self._max = remotes, newest, max_restarts
        self._ranks = Cluster(kind, remotes)
        self._redo_batches = redo_batches
        self.version: Version = 0
        self._kept: dict[Version, Shared] = {}
        self._mending = asyncio.Lock()
        self._publishing = 0
        self._restarts = 0  # since the last new step
        self.recovery_seconds: list[float] = []

    async def start(self) -> None:
        """Raises NoCapacity, ConfigError."""
        await asyncio.gather(*[remote.start() for remote in self._remotes])

    async def step(self, batch: TrainBatch) -> StepReport:
        """The batch goes to the object store once, for all ranks and for a later recovery."""
        newest = self._newest()
        self._kept = {v: kept for v, kept in self._kept.items() if newest is None or v >= newest[0]}
        while len(self._kept) >= self._redo_batches:
            del self._kept[min(self._kept)]
        shared = self._kept[batch.version] = Shared(await asyncio.to_thread(ray.put, batch))
        report: StepReport = (await self._try("step", shared))[0]
        self.version, self._restarts = batch.version + 1, 0
        return report

    async def publish(self, version: Version) -> Manifest:
        self._publishing += 1
        try:
            manifests = await self._try("publish", version)
            return next(m for m in manifests if m is not None)
        finally:
            self._publishing -= 1

    async def retire(self, manifest: Manifest) -> None:
        await self._try("retire", manifest)

    async def save(self, folder: Path) -> None:
        await self._try("save", folder)

    async def load(self, folder: Path) -> None:
        """`folder` is the newest checkpoint."""
        await self._ranks.load(folder)
        newest = self._newest()
        self.version = newest[0] if newest else 0

    async def close(self) -> None:
        await asyncio.gather(*[remote.close() for remote in self._remotes])

    async def _try(self, method: str, argument: Any) -> Any:
        """A call, repeated after each recovery. The workers' own errors are no loss of the process: they are raised."""
        while True:
            if self._mending.locked():
                async with self._mending:
                    pass
            try:
                return await getattr(self._ranks, method)(argument)
            except TrainerLost as lost:
                if all(remote.dead is None for remote in self._remotes):
                    raise
                await self._mend(lost)
            while method != "publish" and self._publishing:  # the copy to hand over is that of before the step
                await asyncio.sleep(0.01)

    async def _mend(self, lost: TrainerLost) -> None:
        """All ranks again, at `version`. Whoever comes while it runs waits for it."""
        async with self._mending:
            if all(remote.dead is None for remote in self._remotes):
                return  # somebody else did it
            began, reason = now(), str(lost)
            while True:
                self._restarts += 1
                if self._restarts > self._max:
                    raise TrainerLost(f"the learner was given up after {self._max} restarts: {reason}")
                try:
                    await asyncio.gather(*[remote.close() for remote in self._remotes])
                    await self.start()
                    await self._redo()
                except NoCapacity as none:
                    reason = str(none)
                    await asyncio.sleep(1.0)
                except TrainerLost as again:
                    if all(remote.dead is None for remote in self._remotes):
                        raise
                    reason = str(again)
                else:
                    self.recovery_seconds.append(now() - began)
                    return

    async def _redo(self) -> None:
        """From the newest checkpoint to where the learner stood."""
        at, newest = 0, self._newest()
        if newest:
            at = newest[0]
            await self._ranks.load(newest[1])
        for version in range(at, self.version):
            if version not in self._kept:
                raise TrainerLost(f"the learner is lost at version {self.version}; its newest checkpoint is {at}, and "
                                  f"the batch of step {version} is not kept any more (cluster.redo_batches)")
            await self._ranks.step(self._kept[version])
