"""LLM proxy: one `generate` for the whole system, over many engines.

Keeps true: while suspended no new turn starts; a turn survives the loss of its engine (it goes on elsewhere from the
tokens that were sampled); an engine serves only after it has loaded weights, and never goes back a version.
Waits for: a live engine, the end of a suspension, the engine itself. Each within the caller's deadline.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rollart.control.routing import Routing
from rollart.core.changed import Changed
from rollart.core.clock import draw, now
from rollart.core.errors import EngineLost, InvariantViolated, Stalled
from rollart.core.events import EngineDown, EngineUp, TurnMoved, WeightsFetched, WeightsLive, WeightsLoaded
from rollart.core.ports import Engine, Journal, Prefetching
from rollart.core.tokens import join
from rollart.core.types import Completion, Finish, GenerateRequest, Manifest, TrajectoryId, Version


def merge(parts: Sequence[Completion]) -> Completion:
    """One completion from its consecutive pieces: 3 tokens at version 7 and 2 at 8 give segments (7,0) (8,3)."""
    if len(parts) == 1:
        return parts[0]
    segments: list[tuple[Version, int]] = []
    logprobs: array[float] = array("f")
    offset = 0
    for part in parts:
        for version, start in part.segments:
            if len(part.tokens) and (not segments or segments[-1][0] != version):
                segments.append((version, start + offset))
        logprobs.extend(part.logprobs)
        offset += len(part.tokens)
    last = parts[-1]
    tokens = join(*[part.tokens for part in parts])
    return Completion(tokens, logprobs, tuple(segments) or last.segments, last.finish, last.engine, last.routes)


class LLMProxy:
    """Routes turns to engines. `attempts`: engines a turn may lose before it fails with EngineLost."""

    def __init__(self, engines: Sequence[Engine], affinity: Mapping[str, str], *, journal: Journal, changed: Changed,
                 attempts: int = 4, full: int = 0, wait_seconds: float = 600.0, load_seconds: float = 600.0) -> None:
        self.engines = {engine.id: engine for engine in engines}
        self.routing = Routing([(e.id, e.pool) for e in engines], affinity, full)
        self._journal, self._changed = journal, changed
        self._attempts, self._wait_seconds, self._load_seconds = attempts, wait_seconds, load_seconds
        self._suspended = False
        self.started = False
        """The first weights have been loaded: an engine that is not up from now on is lost."""
        self.served: dict[str, Version] = {}
        """Newest version that each engine has loaded."""
        self.version: Version = 0
        """Newest version that every live engine serves."""
        self.moved = 0

    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample one turn. Raises EngineLost after `attempts` lost engines, or when none came up in time."""
        parts: list[Completion] = []
        reason = ""
        for _ in range(self._attempts):
            engine = await self._engine(request)
            try:
                parts.append(await engine.generate(request))
                return merge(parts)
            except EngineLost as lost:
                reason = str(lost)
                self.mark_down(engine.id, reason)
                self.routing.forget(request.trajectory)
                kept, tokens = lost.partial, len(lost.partial.tokens) if lost.partial else 0
                self.moved += 1
                self._journal.emit(TurnMoved(request.trajectory, request.turn, engine.id, tokens))
                if kept and tokens:
                    parts.append(kept)
                    if kept.finish is Finish.STOP or request.max_tokens == tokens:
                        return merge(parts)
                    request = replace(request, context=join(request.context, kept.tokens),
                                      max_tokens=request.max_tokens - tokens,
                                      seed=draw(request.seed, "moved", len(parts)))
        raise EngineLost(f"{request.trajectory} turn {request.turn}: lost {self._attempts} engines one after another, "
                         f"the last: {reason}")

    async def _engine(self, request: GenerateRequest) -> Engine:
        if self._suspended or not self.routing.up:
            try:
                await self._changed.until(lambda: not self._suspended and self.routing.up > 0,
                                          who=f"turn {request.turn} of {request.trajectory}",
                                          what="an engine that serves", seconds=self._wait_seconds)
            except Stalled as stalled:
                raise EngineLost(str(stalled)) from None
        chosen = self.routing.choose(request.trajectory, request.domain)
        if chosen is None:
            raise InvariantViolated("I7: no engine chosen although one is up")
        return self.engines[chosen]

    def forget(self, trajectory: TrajectoryId) -> None:
        """The trajectory has ended: its seat and its KV are free."""
        home = self.routing.forget(trajectory)
        if home is not None:
            self.engines[home].release(trajectory)

    def mark_down(self, engine: str, reason: str) -> None:
        """The engine is lost: no turn goes there until `bring_up`."""
        if self.routing.seats[engine].up:
            self.routing.mark(engine, up=False)
            self._journal.emit(EngineDown(engine, reason))
            self._changed.notify()

    async def bring_up(self, engine: str, manifest: Manifest, newest: Callable[[], Manifest | None]) -> bool:
        """Load the manifest into an engine that just started; then it serves.

        False if it was lost meanwhile, or if `newest()` is another manifest by now: it must load that one first.
        """
        if not await self._load(self.engines[engine], manifest) or newest() is not manifest:
            return False
        self._up(engine, manifest)
        return True

    def _up(self, engine: str, manifest: Manifest) -> None:
        if not self.routing.seats[engine].up:
            self.routing.mark(engine, up=True)
            self._journal.emit(EngineUp(engine, manifest.version))
            self._changed.notify()

    async def _load(self, engine: Engine, manifest: Manifest) -> bool:
        started = now()
        try:
            async with asyncio.timeout(self._load_seconds):
                await engine.load_weights(manifest)
        except (EngineLost, TimeoutError) as lost:
            self.mark_down(engine.id, f"loading version {manifest.version}: {lost or 'no answer'}")
            return False
        if manifest.version < self.served.get(engine.id, 0):
            raise InvariantViolated(f"I5: {engine.id} went back from {self.served[engine.id]} to {manifest.version}")
        self.served[engine.id] = manifest.version
        self._journal.emit(WeightsLoaded(engine.id, manifest.version, now() - started))
        return True

    async def prefetch(self, manifest: Manifest) -> None:
        """Have every live engine fetch the weights while it serves, so that `update` is short. One that cannot is
        lost."""
        started = now()
        engines = [engine for name in self.routing.live if isinstance(engine := self.engines[name], Prefetching)]
        if engines:
            fetched = await asyncio.gather(*[self._prefetch(engine, manifest) for engine in engines])
            self._journal.emit(WeightsFetched(manifest.version, now() - started, sum(fetched)))

    async def _prefetch(self, engine: Any, manifest: Manifest) -> bool:
        try:
            async with asyncio.timeout(self._load_seconds):
                await engine.prefetch(manifest)
        except (EngineLost, TimeoutError) as lost:
            self.mark_down(engine.id, f"fetching version {manifest.version}: {lost or 'no answer'}")
            return False
        return True

    async def update(self, manifest: Manifest) -> None:
        """suspend -> load -> resume on every live engine; in-flight turns are kept. A lost engine is left out.

        The first update brings up every engine.
        """
        started, first = now(), not self.started
        engines = list(self.engines) if first else self.routing.live
        self._suspended = True
        try:
            loaded = await asyncio.gather(*[self._update(self.engines[e], manifest, first) for e in engines])
        finally:
            self.started = True
            self._suspended = False
            self._changed.notify()
        self.version = manifest.version
        self._journal.emit(WeightsLive(manifest.version, now() - started, sum(loaded)))

    async def _update(self, engine: Engine, manifest: Manifest, first: bool) -> bool:
        try:
            async with asyncio.timeout(self._load_seconds):
                await engine.suspend()
                if not await self._load(engine, manifest):
                    return False
                await engine.resume()
                if first:
                    self._up(engine.id, manifest)
        except (EngineLost, TimeoutError) as lost:
            self.mark_down(engine.id, f"updating to version {manifest.version}: {lost or 'no answer'}")
            return False
        return True
