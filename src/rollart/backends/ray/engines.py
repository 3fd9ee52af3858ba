"""Engines in actors as the control plane's `Engine`s.

Keeps true: a dead actor fails its turns with EngineLost at once and is told to who watches once; a restarted one serves
only after it has loaded weights. What an actor sampled of a turn dies with it: the turn begins again elsewhere,
from the tokens of the turns before.
"""

from __future__ import annotations

from collections.abc import Callable
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

    def on_lost(self, callback: Callable[[str], None]) -> None:
        """`callback(engine id)` runs on the event loop whenever the actor dies."""
        self.remote.on_dead(lambda: callback(self.id))

    async def generate(self, request: GenerateRequest) -> Completion:
        return await self.remote.call("generate", request)

    async def prefetch(self, manifest: Manifest) -> None:
        await self.remote.call("prefetch", manifest)

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
