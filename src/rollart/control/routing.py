"""Which engine serves a turn: domain to pool, stickiness, least load, fallback. Synchronous state, no awaits.

Keeps true: a trajectory stays on the engine that holds its KV as long as that engine is up; a new one goes to the
least-loaded live engine of its domain's pool that is not full, else of any other pool (fallback instead of blocking),
else to the least-loaded one of its own pool, which queues it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rollart.core.types import TrajectoryId

DEFAULT = "default"


@dataclass(slots=True)
class Seat:
    """What routing knows of one engine. `load`: trajectories that live there, between turns too."""

    engine: str
    pool: str
    load: int = 0
    up: bool = False


class Routing:
    """`affinity` maps a domain (or "default") to a pool name; `full` is trajectories per engine (0: no limit)."""

    def __init__(self, engines: Sequence[tuple[str, str]], affinity: Mapping[str, str], full: int = 0) -> None:
        if not engines:
            raise ValueError("routing needs at least one engine, got none")
        self.seats = {engine: Seat(engine, pool) for engine, pool in engines}
        pools = {seat.pool for seat in self.seats.values()}
        for domain, pool in affinity.items():
            if pool not in pools:
                raise ValueError(f"domain {domain} is bound to pool {pool!r}; the pools are {', '.join(sorted(pools))}")
        self.affinity, self.full = dict(affinity), full
        self.fallbacks = 0
        self.up = 0
        """Engines that are up."""
        self._heaps: dict[str, list[tuple[int, str]]] = {pool: [] for pool in sorted(pools)}
        self._home: dict[TrajectoryId, str] = {}

    @property
    def live(self) -> list[str]:
        """Engines that are up, in a fixed order."""
        return [seat.engine for seat in self.seats.values() if seat.up]

    def _changed(self, seat: Seat) -> None:
        """Its load or its state is new. Old heap entries are dropped when they come to the top, or when too many."""
        heap = self._heaps[seat.pool]
        heapq.heappush(heap, (seat.load, seat.engine))
        if len(heap) > 64 + 4 * len(self.seats):
            heap[:] = [(s.load, s.engine) for s in self.seats.values() if s.pool == seat.pool and s.up]
            heapq.heapify(heap)

    def _least(self, pool: str) -> Seat | None:
        """The least loaded live engine of a pool."""
        heap = self._heaps[pool]
        while heap:
            load, engine = heap[0]
            seat = self.seats[engine]
            if seat.up and seat.load == load:
                return seat
            heapq.heappop(heap)
        return None

    def _pick(self, domain: str) -> Seat | None:
        pool = self.affinity.get(domain, self.affinity.get(DEFAULT))

        def least(pools: Iterable[str]) -> Seat | None:
            seats = [seat for p in pools if (seat := self._least(p))]
            return min(seats, key=lambda s: (s.load, s.engine), default=None)

        own = least(self._heaps if pool is None else [pool])
        if own and (not self.full or own.load < self.full):
            return own
        other = least(self._heaps)
        best = other if own is None or (other and other.load < self.full) else own
        self.fallbacks += best is not None and best is not own
        return best

    def choose(self, trajectory: TrajectoryId, domain: str) -> str | None:
        """The engine for this trajectory's next turn, or None while no engine is up."""
        home = self._home.get(trajectory)
        if home is not None and self.seats[home].up:
            return home
        self.forget(trajectory)
        seat = self._pick(domain)
        if seat is None:
            return None
        seat.load += 1
        self._changed(seat)
        self._home[trajectory] = seat.engine
        return seat.engine

    def forget(self, trajectory: TrajectoryId) -> str | None:
        """The trajectory has ended or must move. Returns the engine that held it."""
        home = self._home.pop(trajectory, None)
        if home is not None:
            self.seats[home].load -= 1
            self._changed(self.seats[home])
        return home

    def mark(self, engine: str, *, up: bool) -> None:
        seat = self.seats[engine]
        self.up += up - seat.up
        seat.up = up
        self._changed(seat)
