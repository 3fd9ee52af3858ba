"""What every engine around vLLM shares: its state, the order of an update, and how it is lost.

Keeps true: a version never goes back; weights that do not fit are refused before the old ones are touched; an engine
that failed in an update, or did not answer in time, is in an unknown state and so is lost (I5).
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollart.backends.vllm.handover import Handover
from rollart.core.errors import EngineLost, InvariantViolated
from rollart.core.tokens import floats, ids
from rollart.core.types import Completion, Finish, GenerateRequest, Manifest, TrajectoryId, Version


@dataclass(slots=True)
class EngineStats:
    """Counts since the engine was made: tokens sampled, prefilled, taken from kept KV; requests and KV tokens now."""

    generated: int = 0
    prefilled: int = 0
    reused: int = 0
    running: int = 0
    waiting: int = 0
    kv_tokens: int = 0


class BaseEngine:
    """Subclasses say how to sample, pause, update and resume. Without a hand-over the weights stay what they are,
    whatever version they are called."""

    def __init__(self, id: str, pool: str, context: int, answer_seconds: float, handover: Handover | None) -> None:
        self.id, self.pool, self._context, self._answer_seconds = id, pool, context, answer_seconds
        self._handover = handover
        self.lost: str | None = "not started"
        """Why the engine does not serve, or None while it does."""
        self.version: Version | None = None
        self._suspended, self._stats = False, EngineStats()
        self._watchers: list[Callable[[str], None]] = []

    def on_lost(self, callback: Callable[[str], None]) -> None:
        """`callback(engine id)` runs on the event loop whenever the engine dies, or does not start."""
        self._watchers.append(callback)

    def stats(self) -> EngineStats:
        return self._stats

    def release(self, trajectory: TrajectoryId) -> None:
        """Nothing is kept for a trajectory: vLLM's prefix cache gives up what was used least recently."""

    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample one turn. Raises EngineLost; ValueError for a context that is empty or holds unknown token ids."""
        if not isinstance(request.context, array) or not request.context or min(request.context) < 0:
            raise ValueError(f"a context needs at least one token id of 0 or more; got {request.context!r:.80}")
        if self.lost is not None or self.version is None:
            raise self._gone("no weights are loaded")
        limit = min(request.max_tokens, self._context - len(request.context)) if self._context else request.max_tokens
        if limit <= 0:
            return Completion(ids(), floats(), ((self.version, 0),), Finish.LENGTH, self.id)
        return await self._generate(request, limit)

    async def suspend(self) -> None:
        """No step begins any more; returns when none runs. Drops all KV. Raises EngineLost."""
        await self._ready()
        self._suspended = True
        if self._handover is not None:
            await self._answer(self._pause(), "suspend")

    async def prefetch(self, manifest: Manifest) -> None:
        """Put these weights where the workers can map them. Raises EngineLost when they are gone or do not fit."""
        if self._handover is not None:
            await asyncio.to_thread(self._handover.fetch, manifest)

    async def load_weights(self, manifest: Manifest) -> None:
        """Swap the weights. Raises EngineLost when they are gone or do not fit (the old ones then stay),
        InvariantViolated when the version would go back."""
        await self._ready()
        if self.version is not None and manifest.version < self.version:
            raise InvariantViolated(f"I5: engine {self.id} at version {self.version} was given {manifest.version}")
        if self._handover is not None:
            path, serves = await asyncio.to_thread(self._handover.fetch, manifest), not self._suspended
            if serves:
                await self.suspend()
            await self._answer(self._update(path, manifest.version), f"load version {manifest.version}")
            await asyncio.to_thread(self._handover.done)
            if serves:
                await self.resume()
        self.version = manifest.version

    async def resume(self) -> None:
        """Go on; the KV of what is in flight is computed again. Raises EngineLost."""
        await self._ready()
        if self._handover is not None:
            await self._answer(self._go_on(), "resume")
        self._suspended = False

    def _gone(self, otherwise: str = "", partial: Completion | None = None) -> EngineLost:
        return EngineLost(f"engine {self.id} is lost: {self.lost or otherwise}"[:500], partial)

    def _die(self, reason: str) -> None:
        self._end(reason)
        for watcher in self._watchers:
            watcher(self.id)

    def _end(self, reason: str) -> None:
        self.lost, self.version = reason, None

    async def _ready(self) -> None:
        """Raises EngineLost."""
        if self.lost is not None:
            raise self._gone()

    async def _answer(self, call: Awaitable[Any], what: str) -> None:
        """Raises EngineLost where the call fails or takes too long; the engine is then dead."""
        try:
            async with asyncio.timeout(self._answer_seconds):
                await call
        except TimeoutError:
            self._die(f"{what}: no answer in {self._answer_seconds:g} s")
        except Exception as error:  # noqa: BLE001 - vLLM hands on whatever its process raised
            self._die(f"{what}: {type(error).__name__}: {error}")
        if self.lost is not None:
            raise self._gone()

    async def _generate(self, request: GenerateRequest, limit: int) -> Completion: raise NotImplementedError
    async def _pause(self) -> None: raise NotImplementedError
    async def _update(self, path: Path, version: Version) -> None: raise NotImplementedError
    async def _go_on(self) -> None: raise NotImplementedError
