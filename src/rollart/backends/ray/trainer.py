"""The learner in actors as the control plane's `Trainer`, and a rank of RankedTrainer in one.

Keeps true: a batch goes to the object store once. Waits for the workers, under the callers' deadlines.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import ray

from rollart.backends.ray.host import Shared
from rollart.backends.ray.remote import Remote
from rollart.core.types import Manifest, StepReport, TrainBatch, Version
from rollart.distributed.api import Cluster, Worker


class RemoteTrainer:
    """Learner workers in actors: all are asked, the first that has a result answers. `restart` is for
    `control.mending`. Raises TrainerLost."""

    def __init__(self, kind: type[Worker], remotes: Sequence[Remote]) -> None:
        self.remotes, self._workers = remotes, Cluster(kind, remotes)

    async def start(self) -> None:
        """Raises NoCapacity, ConfigError."""
        await asyncio.gather(*[remote.start() for remote in self.remotes])

    async def restart(self, folder: Path | None) -> None:
        await self.start()
        if folder:
            await self.load(folder)

    async def step(self, batch: TrainBatch) -> StepReport:
        shared = Shared(await asyncio.to_thread(ray.put, batch))
        return next(report for report in await self._workers.step(shared) if report)

    async def publish(self, version: Version) -> Manifest:
        return next(manifest for manifest in await self._workers.publish(version) if manifest)

    async def retire(self, manifest: Manifest) -> None:
        await self._workers.retire(manifest)

    async def save(self, folder: Path) -> None:
        await self._workers.save(folder)

    async def load(self, folder: Path) -> None:
        await self._workers.load(folder)


class ActorRank:
    """One rank of a `RankedTrainer` in an actor; whoever made the remote closes it."""

    def __init__(self, remote: Remote) -> None:
        self.remote = remote

    async def call(self, method: str, *arguments: Any) -> Any:
        large = [_shared(a) if isinstance(a, bytes) else a for a in arguments]
        return await self.remote.call("begin" if method == "start" else method, *large)

    def close(self) -> None: ...

    def kill(self) -> None:
        self.remote.kill()


@lru_cache(maxsize=1)
def _shared(body: bytes) -> Shared:
    """All ranks are given the same batch."""
    return Shared(ray.put(body))
