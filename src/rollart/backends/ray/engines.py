"""Engines in actors as the control plane's `Engine`s, and the `Cluster` that starts them again.

Keeps true: a dead actor fails its turns with EngineLost at once and is told to the supervisor once; a restarted one
serves only after it has loaded weights. What an actor sampled of a turn dies with it: the turn begins again elsewhere,
from the tokens of the turns before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace

from rollart.backends.ray.remote import Remote
from rollart.core.types import Completion, GenerateRequest, Manifest, TrajectoryId, Version


class RemoteEngine:
    """One engine worker in an actor. Raises EngineLost."""

    def __init__(self, id: str, pool: str, remote: Remote) -> None:
        self.id, self.pool, self.remote = id, pool, remote
        self.version: Version | None = None

    @property
    def lost(self) -> str | None:
        return self.remote.dead

    async def generate(self, request: GenerateRequest) -> Completion:
        return await self.remote.call("generate", request)

    async def suspend(self) -> None:
        await self.remote.call("suspend")

    async def load_weights(self, manifest: Manifest) -> None:
        await self.remote.call("load_weights", manifest)
        self.version = manifest.version

    async def resume(self) -> None:
        await self.remote.call("resume")

    def release(self, trajectory: TrajectoryId) -> None:
        self.remote.tell("release", trajectory)

    async def restart(self) -> None:
        """Raises NoCapacity."""
        self.version = None
        await self.remote.start()

    def stats(self) -> SimpleNamespace:
        """The figures that came with the last answers."""
        return SimpleNamespace(**{**dict.fromkeys(("running", "waiting", "kv_tokens", "generated", "reused"), 0),
                                  **self.remote.stats})


class RemoteCluster:
    """The core's `Cluster` over engines in actors."""

    def __init__(self, engines: Sequence[RemoteEngine]) -> None:
        self._engines = {engine.id: engine for engine in engines}
        self._lost: asyncio.Queue[str] = asyncio.Queue()  # at most one word for each start of an engine
        for engine in engines:
            engine.remote.on_dead(lambda id=engine.id: self._lost.put_nowait(id))

    async def wait_lost(self) -> str:
        return await self._lost.get()

    async def restart(self, engine: str) -> None:
        await self._engines[engine].restart()
