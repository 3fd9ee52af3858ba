"""Exactly-once accounting in memory: what became of every dispatched trajectory (I2).

Keeps true: each trajectory has one fate at any instant, so dispatched = trained + filtered + stale + failed + cancelled
+ in flight. A start seen twice, or an end of something that is not in flight, is our own mistake: InvariantViolated.
Memory grows with what is in flight and with the number of domains, not with the length of the run.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import dataclass

from rollart.core.errors import InvariantViolated
from rollart.core.events import Event, Settled, TrajectoryEnded, TrajectoryStarted
from rollart.core.types import Fate, Trajectory, TrajectoryId

MAX_REASONS = 200
"""Distinct reasons kept per fate; later ones are counted as "other"."""


@dataclass(slots=True)
class Flight:
    """A trajectory in flight. `ended`: its episode is over and `sampled` is its number of sampled tokens."""

    domain: str
    ended: bool = False
    sampled: int = 0


def short_reason(text: str) -> str:
    """A reason without its numbers, so that alike ones are counted together; at most 100 characters."""
    return re.sub(r"\d+", "N", " ".join(text.split()))[:100] or "no reason given"


class Accounts:
    """A journal subscriber. All counters are of the whole run: the ledger fills them again on resume."""

    def __init__(self) -> None:
        self.in_flight: dict[TrajectoryId, Flight] = {}
        self.fates: defaultdict[str, Counter[Fate]] = defaultdict(Counter)
        """Trajectories by domain and final fate."""
        self.tokens: defaultdict[str, Counter[Fate]] = defaultdict(Counter)
        """Sampled tokens of ended trajectories by domain and fate."""
        self.reasons: defaultdict[Fate, Counter[str]] = defaultdict(Counter)
        """Why trajectories were not trained: counts by fate and shortened reason."""

    def on(self, at: float, event: Event) -> None:
        match event:
            case TrajectoryStarted(id=id, domain=domain):
                self.start(id, domain)
            case TrajectoryEnded(trajectory=trajectory, fate=fate):
                self.end(trajectory, fate)
            case Settled(ids=ids, fate=fate, reason=reason):
                for id in ids:
                    self.settle(id, fate, reason)

    def start(self, id: TrajectoryId, domain: str) -> None:
        if id in self.in_flight:
            raise InvariantViolated(f"I2: trajectory {id} was started twice")
        self.in_flight[id] = Flight(domain)

    def end(self, trajectory: Trajectory, fate: Fate) -> None:
        """Its episode is over; `fate` is final, or in flight if it waits to be trained."""
        flight = self.in_flight.get(trajectory.id)
        if flight is None or flight.ended:
            raise InvariantViolated(f"I2: trajectory {trajectory.id} ended, but it is not running")
        flight.ended, flight.sampled = True, trajectory.sampled
        self.tokens[flight.domain][Fate.IN_FLIGHT] += flight.sampled
        if fate is not Fate.IN_FLIGHT:
            self.settle(trajectory.id, fate, trajectory.error)

    def settle(self, id: TrajectoryId, fate: Fate, reason: str = "") -> None:
        flight = self.in_flight.pop(id, None)
        if flight is None or not flight.ended or fate is Fate.IN_FLIGHT:
            state = "not in flight" if flight is None else "in flight, ended" if flight.ended else "still running"
            raise InvariantViolated(f"I2: trajectory {id} was settled as {fate}, but it is {state}")
        self.fates[flight.domain][fate] += 1
        self.tokens[flight.domain][Fate.IN_FLIGHT] -= flight.sampled
        self.tokens[flight.domain][fate] += flight.sampled
        if fate is not Fate.TRAINED:
            self.count_reason(fate, reason)

    def count_reason(self, fate: Fate, reason: str, n: int = 1) -> None:
        known, short = self.reasons[fate], short_reason(reason)
        known[short if short in known or len(known) < MAX_REASONS else "other"] += n

    def by_domain(self) -> dict[str, dict[str, int]]:
        """For each domain the numbers of `counts`."""
        flying = Counter(flight.domain for flight in self.in_flight.values())
        return {domain: counted(self.fates.get(domain, Counter()), flying[domain])
                for domain in sorted({*self.fates, *flying})}

    def counts(self) -> dict[str, int]:
        """{dispatched, trained, filtered, stale, failed, cancelled, in_flight}: trajectories of the whole run."""
        fates: Counter[Fate] = sum(self.fates.values(), Counter())
        return counted(fates, len(self.in_flight))

    def token_totals(self) -> dict[str, int]:
        """Sampled tokens of ended trajectories by fate, and in all as `generated`."""
        tokens: Counter[Fate] = sum(self.tokens.values(), Counter())
        return {"generated": tokens.total(), **{fate.value: tokens[fate] for fate in Fate}}

    def check(self, in_flight: int, dispatched: int) -> None:
        """I2 against the control plane's own numbers (of the whole run). Raises InvariantViolated."""
        counts = self.counts()
        if (counts["in_flight"], counts["dispatched"]) != (in_flight, dispatched):
            raise InvariantViolated(
                f"I2: the control plane dispatched {dispatched} trajectories and has {in_flight} in flight, "
                f"the accounts say {', '.join(f'{name} {n}' for name, n in counts.items())}")


def counted(fates: Counter[Fate], in_flight: int) -> dict[str, int]:
    """Counts by fate under their report names; `dispatched` is their sum."""
    ends = {fate.value: fates[fate] for fate in Fate if fate is not Fate.IN_FLIGHT}
    return {"dispatched": sum(ends.values()) + in_flight, **ends, "in_flight": in_flight}
