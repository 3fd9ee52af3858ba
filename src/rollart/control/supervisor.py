"""Supervisor: starts lost engines again in place, and gives one up after too many tries.

Keeps true: an engine serves again only with the newest weights loaded; the run ends when no engine is left.
Waits for: an engine that the cluster or the proxy calls lost.
"""

from __future__ import annotations

import asyncio

from rollart.control.llm_proxy import LLMProxy
from rollart.control.weight_sync import WeightSync
from rollart.core.changed import Changed
from rollart.core.errors import EngineLost, NoCapacity, RunError
from rollart.core.ports import Cluster


class Supervisor:
    """`max_restarts` in a row for one engine, `backoff_seconds` doubling between them."""

    def __init__(self, cluster: Cluster, proxy: LLMProxy, sync: WeightSync, changed: Changed, *,
                 max_restarts: int = 5, backoff_seconds: float = 1.0, restart_seconds: float = 600.0) -> None:
        self._cluster, self._proxy, self._sync, self._changed = cluster, proxy, sync, changed
        self._max, self._backoff, self._restart_seconds = max_restarts, backoff_seconds, restart_seconds
        self.restarts = 0
        self.given_up: dict[str, str] = {}
        self._mending: dict[str, asyncio.Task[None]] = {}

    async def run(self, nursery: asyncio.TaskGroup) -> None:
        """Watch for ever."""
        watching = nursery.create_task(self._watch(), name="watch cluster")
        try:
            while True:
                await self._changed.until(lambda: bool(self._lost()), who="supervisor", what="a lost engine",
                                          seconds=float("inf"))
                for engine in self._lost():
                    self._mending[engine] = nursery.create_task(self._mend(engine), name=f"mend {engine}")
        finally:
            for task in (watching, *self._mending.values()):
                task.cancel()

    def _lost(self) -> list[str]:
        if not self._proxy.started:
            return []
        return [engine for engine, seat in self._proxy.routing.seats.items()
                if not seat.up and engine not in self._mending and engine not in self.given_up]

    async def _watch(self) -> None:
        while True:
            engine = await self._cluster.wait_lost()
            if engine in self._proxy.engines:  # others, as those of an evaluation, have their own ways
                self._proxy.mark_down(engine, "the cluster reports it lost")

    async def _mend(self, engine: str) -> None:
        reason = "it never came up"
        try:
            for attempt in range(self._max):
                await asyncio.sleep(self._backoff * 2**attempt if attempt else 0.0)
                self.restarts += 1
                try:
                    async with asyncio.timeout(self._restart_seconds):
                        await self._cluster.restart(engine)
                except (NoCapacity, EngineLost, TimeoutError) as failure:
                    reason = str(failure) or f"no answer within {self._restart_seconds:g} s"
                    continue
                if await self._load(engine):
                    return
            self.given_up[engine] = reason
            if len(self.given_up) == len(self._proxy.engines):
                raise RunError(f"no engine is left; {engine} was given up after {self._max} restarts: {reason}")
        finally:
            del self._mending[engine]
            self._changed.notify()

    async def _load(self, engine: str) -> bool:
        """Bring it up on the newest weights; again if newer ones came while it loaded. False if it was lost."""
        while manifest := self._sync.current:
            self._sync.pin(manifest)
            try:
                if await self._proxy.bring_up(engine, manifest, lambda: self._sync.current):
                    return True
            finally:
                await self._sync.unpin(manifest)
            if self._sync.current is manifest:
                return False
        return False
