"""Weight sync: publish -> fetch -> load -> release, one version at a time.

Keeps true: publishes do not overlap (I6); a version is live only when every live engine has loaded it; weights that an
engine or an evaluation may still read are not retired.
Waits for: Trainer.publish, then every live engine's fetch (they go on serving), then (schedule one_off) the end of the
round, then every live engine's load.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from rollart.control.llm_proxy import LLMProxy
from rollart.core.clock import now
from rollart.core.errors import InvariantViolated, TrainerLost
from rollart.core.events import PublishStarted, WeightsPublished
from rollart.core.ports import Journal, Trainer
from rollart.core.types import Manifest, Version


class WeightSync:
    """`current` is the newest published manifest: what an engine that starts must load."""

    def __init__(self, trainer: Trainer, proxy: LLMProxy, journal: Journal, *, publish_seconds: float = 1800.0) -> None:
        self._trainer, self._proxy, self._journal = trainer, proxy, journal
        self._publish_seconds = publish_seconds
        self.current: Manifest | None = None
        self._busy = False
        self._pins: dict[Version, int] = {}
        self._retiring: dict[Version, Manifest] = {}

    async def sync(self, version: Version, may_load: Callable[[], Awaitable[None]]) -> None:
        """Publish `version`, wait for `may_load()`, load it everywhere, retire the one before."""
        if self._busy:
            raise InvariantViolated(f"I6: publish of version {version} started while another was under way")
        self._busy = True
        try:
            started = now()
            self._journal.emit(PublishStarted(version))
            try:
                async with asyncio.timeout(self._publish_seconds):
                    manifest = await self._trainer.publish(version)
            except TimeoutError:
                raise TrainerLost(f"publish of version {version}: no answer in {self._publish_seconds:g} s") from None
            self._journal.emit(WeightsPublished(manifest, now() - started))
            await self._proxy.prefetch(manifest)
            await may_load()
            before, self.current = self.current, manifest
            await self._proxy.update(manifest)
        finally:
            self._busy = False
        if before is not None:
            self._retiring[before.version] = before
            await self._retire()

    def pin(self, manifest: Manifest) -> None:
        """Someone (an evaluation) will read these weights: keep them until `unpin`."""
        self._pins[manifest.version] = self._pins.get(manifest.version, 0) + 1

    async def unpin(self, manifest: Manifest) -> None:
        self._pins[manifest.version] -= 1
        await self._retire()

    async def _retire(self) -> None:
        for version in [v for v in self._retiring if not self._pins.get(v)]:
            try:
                async with asyncio.timeout(self._publish_seconds):
                    if manifest := self._retiring.pop(version, None):
                        await self._trainer.retire(manifest)
            except TimeoutError:
                raise TrainerLost(f"retiring version {version}: no answer in {self._publish_seconds:g} s") from None
