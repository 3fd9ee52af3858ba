"""The learner in an actor as the control plane's `Trainer`, and a rank of one in an actor.

Keeps true: a batch goes to the object store once. Waits for the workers, under the callers' deadlines.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import ray

from rollart.backends.ray.host import Shared
from rollart.backends.ray.remote import Remote
from rollart.core.types import Manifest, StepReport, TrainBatch, Version


class RemoteTrainer:
    """A learner worker in an actor. `restart` and `load` as `control.mending` wants them. Raises TrainerLost."""

    def __init__(self, remote: Remote) -> None:
        self.remote = remote

    async def start(self) -> None:
        """Raises NoCapacity, ConfigError."""
        await self.remote.start()

    async def restart(self, folder: Path | None) -> None:
        await self.remote.start()
        if folder:
            await self.load(folder)

    async def step(self, batch: TrainBatch) -> StepReport:
        return await self.remote.call("step", Shared(await asyncio.to_thread(ray.put, batch)))

    async def publish(self, version: Version) -> Manifest:
        return await self.remote.call("publish", version)

    async def retire(self, manifest: Manifest) -> None:
        await self.remote.call("retire", manifest)

    async def save(self, folder: Path) -> None:
        await self.remote.call("save", folder)

    async def load(self, folder: Path) -> None:
        await self.remote.call("load", folder)

    async def close(self) -> None:
        await self.remote.close()


class ActorRank:
    """One rank of a `RankedTrainer` in an actor."""

    def __init__(self, remote: Remote) -> None:
        self.remote = remote
        self._closing: asyncio.Task[None] | None = None

    async def call(self, method: str, *arguments: Any) -> Any:
        large = [Shared(ray.put(a)) if isinstance(a, bytes) else a for a in arguments]
        return await self.remote.call(method, *large)

    def close(self) -> None:
        self._closing = asyncio.ensure_future(self.remote.close())

    def kill(self) -> None:
        self.remote.kill()
