"""Sample buffer: the slots of groups, and the staleness bound.

Keeps true: a group trained at version n has n - oldest <= alpha, where oldest is the version of the oldest sampled
token of its members (queue time included). How:

  admission   at most (alpha + 1) * batch groups are open, ready or in training, so that a group admitted now is at most
              alpha steps old when its turn comes (oldest first); slots are freed when the schedule says;
  eviction    when the batch of n is taken, what the batch of n+1 may not hold is dropped, ready or open;
  or waiting  with policy `wait` a batch is taken only if what it leaves behind can still be trained in time.

Waiting, exactly. A group's deadline is oldest + alpha. After a step at n takes its batch, each later step n+k takes
`batch` more, so at most k * batch of the groups left may have a deadline <= n+k. A batch is therefore ready when, for
each k in 0..alpha-1, it holds enough of the groups with deadline <= n+k.   Example, batch 1, alpha 2, deadlines open
{2, 2}, ready {3}, n = 1: taking the ready one would leave two groups for the one step at 2; so the trainer waits.

Pure state: no awaits, no clock. Whoever changes it notifies the waiters.
"""

from __future__ import annotations

from dataclasses import dataclass

from rollart.control.settings import FreeSlots, Overlap, Schedule
from rollart.core.errors import InvariantViolated
from rollart.core.types import Group, StalePolicy, Version


@dataclass(slots=True)
class OpenGroup:
    """`oldest`: version of its oldest sampled token so far; None before the first."""

    born: Version
    oldest: Version | None = None


class SampleBuffer:
    """Slots for groups. `version` is the trainer's: n, the number of optimizer steps done."""

    def __init__(self, *, batch_groups: int, alpha: int, schedule: Schedule, stale: StalePolicy = StalePolicy.ABORT,
                 spare_groups: int = 0, version: Version = 0) -> None:
        if batch_groups < 1 or alpha < 0 or spare_groups < 0:
            raise ValueError(f"need batch_groups >= 1, alpha >= 0, spare_groups >= 0; got {batch_groups=} {alpha=} "
                             f"{spare_groups=}")
        if stale is StalePolicy.WAIT and spare_groups:
            raise ValueError(f"stale = wait trains every group, so spare_groups must be 0; got {spare_groups}")
        self.batch_groups, self.alpha, self.schedule, self.stale = batch_groups, alpha, schedule, stale
        self.version = self.due = version
        """due: the version at which the next batch is trained, `version` or the one after."""
        self.slots = (alpha + 1) * batch_groups + spare_groups
        if schedule.free is FreeSlots.TAKEN:
            self.slots = batch_groups + spare_groups
        self.open: dict[int, OpenGroup] = {}
        self.ready: dict[int, Group] = {}
        self.training: dict[Version, int] = {}
        """Slots held by trained groups, by the version that their step makes."""
        self.dropped = 0
        """Slots of groups that were dropped when the batch was taken; free when the next weights are live."""
        self._dropping: set[int] = set()  # those that have not ended yet

    @property
    def free(self) -> int:
        """Slots that a new group may take. Without overlap there are none while the trainer works."""
        if self.training and self.schedule.overlap is Overlap.NONE:
            return 0
        if self.schedule.free is FreeSlots.LIVE and self.version in self.training:
            return 0
        return self.slots - self._held

    @property
    def _held(self) -> int:
        return len(self.open) + len(self.ready) + sum(self.training.values()) + self.dropped

    def admit(self, group: int, born: Version) -> None:
        """A new group takes a slot."""
        if self.free < 1:
            raise InvariantViolated(f"I4: group {group} admitted although all {self.slots} slots are taken")
        self.open[group] = OpenGroup(born)

    def note(self, group: int, oldest: Version | None) -> bool:
        """An open group's oldest sampled version is now `oldest`. False if it can no longer be trained in time."""
        self.open[group].oldest = oldest
        return not self._late(oldest)

    def _late(self, oldest: Version | None) -> bool:
        """Whether the next batch may not hold it."""
        return self.schedule.check_always and oldest is not None and self.due - oldest > self.alpha

    def put(self, group: Group) -> bool:
        """Store a complete group; False (and its slot is free) if it is already too old to train."""
        self.discard(group.id)
        if self._late(group.oldest):
            return False
        self.ready[group.id] = group
        return True

    def discard(self, group: int) -> None:
        """An open group has ended."""
        del self.open[group]
        if group in self._dropping:
            self._dropping.remove(group)
            self.dropped += 1

    def _batch(self) -> list[Group]:
        return sorted(self.ready.values(), key=lambda g: (g.oldest, g.id))[: self.batch_groups]

    def missing(self) -> int:
        """How many more ready groups `take` needs; 0 means that it will succeed."""
        short = max(0, self.batch_groups - len(self.ready))
        if self.stale is StalePolicy.ABORT or not self.schedule.check_always:
            return short
        oldest = [g.oldest for g in self.ready.values()]  # a turn under way may have begun when the group was admitted
        oldest += [o.born if o.oldest is None else min(o.born, o.oldest) for o in self.open.values()]
        batch = [g.oldest for g in self._batch()]
        for k in range(self.alpha):
            due = self.version + k - self.alpha
            needed = sum(1 for v in oldest if v <= due) - k * self.batch_groups
            short = max(short, needed - sum(1 for v in batch if v <= due))
        return short

    def take(self) -> tuple[Group, ...]:
        """The oldest full batch; call when `missing()` is 0."""
        if self.missing():
            raise InvariantViolated(f"take called with {len(self.ready)} ready groups, {self.missing()} too few")
        chosen = self._batch()
        for group in chosen:
            del self.ready[group.id]
            if self._late(group.oldest):
                raise InvariantViolated(f"I1: group {group.id} is {self.version - group.oldest} versions old at "
                                        f"version {self.version}, the bound is {self.alpha}")
        self.due = self.version + 1
        if self.schedule.free is not FreeSlots.TAKEN:
            self.training[self.due] = len(chosen)
        return tuple(chosen)

    def evict(self) -> tuple[list[Group], list[int]]:
        """After `take`: what no later batch may hold. (ready groups, which are gone; ids of open ones)."""
        evicted = [group for group in self.ready.values() if self._late(group.oldest)]
        for group in evicted:
            del self.ready[group.id]
        hopeless = [id for id, group in self.open.items() if self._late(group.oldest)]
        if self.stale is StalePolicy.WAIT and (evicted or hopeless):
            raise InvariantViolated(f"I1: policy wait let {len(evicted)} ready and {len(hopeless)} open groups grow "
                                    f"older than {self.alpha} versions")
        if self.schedule.free is FreeSlots.LIVE:
            self.dropped += len(evicted)
            self._dropping.update(hopeless)
        return evicted, hopeless

    def advance(self, version: Version) -> None:
        """The trainer reached `version`."""
        if version != self.version + 1 or version != self.due:
            raise InvariantViolated(f"I5: the trainer went from version {self.version} to {version}, "
                                    f"the next batch is for {self.due}")
        self.version = version
        if self.schedule.free is FreeSlots.STEPPED:
            self.training.pop(version, None)

    def live(self, version: Version) -> int:
        """The weights of `version` are served: the slots that paid for them are free. Returns how many."""
        self.dropped = 0
        self._dropping.clear()
        return self.training.pop(version, 0)

    def check(self) -> None:
        """Raise InvariantViolated if the state contradicts the bound or the slots."""
        if self._held > self.slots:
            raise InvariantViolated(f"I4: {len(self.open)} open + {len(self.ready)} ready + "
                                    f"{sum(self.training.values())} training + {self.dropped} dropped groups exceed "
                                    f"{self.slots} slots")
        for group in self.ready.values():
            if self._late(group.oldest):
                raise InvariantViolated(f"I1: ready group {group.id} is {self.due - group.oldest} versions old")
