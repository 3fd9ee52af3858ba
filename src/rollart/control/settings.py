"""What a user may choose about rollout and staleness, and the five schedules as values of one small type."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from rollart.core.ranges import above, at_least
from rollart.core.types import StalePolicy


class Overlap(StrEnum):
    """How rollout and training overlap."""

    NONE = "none"  # rollout stands still while the trainer works
    ONE_OFF = "one_off"  # round k+1 rolls out on the old weights while round k is trained; rounds do not mix
    BOUNDED = "bounded"  # continuous, under the staleness bound


class FreeSlots(StrEnum):
    """When the slots of a trained batch are free for successors."""

    TAKEN = "taken"  # when the batch is taken
    STEPPED = "stepped"  # when the optimizer step has ended
    LIVE = "live"  # when the weights that they paid for are served


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """One way to order rollout, reward, training and weight updates.

    turn_barrier: environments of a batch move turn by turn together, and rewards begin after the last of them;
    check_always: staleness is checked at every turn and version, not only at the start;
    waits_for_weights: a step begins only when the weights of the one before are served.
    """

    name: str
    turn_barrier: bool = False
    overlap: Overlap = Overlap.BOUNDED
    free: FreeSlots = FreeSlots.LIVE
    check_always: bool = True
    waits_for_weights: bool = False
    fixed_alpha: int | None = None

    def alpha(self, wanted: int | None) -> int:
        """The staleness bound in versions. Raises ValueError where the schedule has its own."""
        if self.fixed_alpha is None:
            return 1 if wanted is None else wanted
        if wanted is not None and wanted != self.fixed_alpha:
            raise ValueError(f"schedule {self.name} has alpha = {self.fixed_alpha} by its nature, got {wanted}: "
                             f"leave alpha out, or choose schedule rollart or areal")
        return self.fixed_alpha


SCHEDULES: dict[str, Schedule] = {
    s.name: s
    for s in (
        Schedule(name="sync", turn_barrier=True, overlap=Overlap.NONE, fixed_alpha=0),
        Schedule(name="sync_plus", overlap=Overlap.NONE, fixed_alpha=0),
        Schedule(name="one_off", overlap=Overlap.ONE_OFF, free=FreeSlots.TAKEN, fixed_alpha=1,
                 waits_for_weights=True),
        Schedule(name="areal", free=FreeSlots.STEPPED, check_always=False, waits_for_weights=True),
        Schedule(name="rollart"),
    )
}


@dataclass(frozen=True, kw_only=True)
class ScheduleSettings:
    """`name`: sync, sync_plus, one_off, areal or rollart. `alpha`: staleness bound in versions (default 1 where free).

    `stale`: what happens to a group that would miss the bound: abort (its task comes again) or wait (for it).
    """

    name: str = "rollart"
    alpha: int | None = None
    stale: StalePolicy = StalePolicy.ABORT

    def __post_init__(self) -> None:
        if self.name not in SCHEDULES:
            raise ValueError(f"name must be one of {', '.join(SCHEDULES)}; got {self.name!r}")
        if self.alpha is not None:
            at_least(self, 0, "alpha")
        self.schedule.alpha(self.alpha)

    @property
    def schedule(self) -> Schedule:
        return SCHEDULES[self.name]

    @property
    def bound(self) -> int:
        """The staleness bound in force, in versions."""
        return self.schedule.alpha(self.alpha)


@dataclass(frozen=True, kw_only=True)
class RolloutSettings:
    """Sizes (in groups, trajectories, tokens) and deadlines (in seconds) of rollout.

    batch_groups: groups per optimizer step. group_size: trajectories per group. spares: members started beyond
    group_size, cancelled when the group is full. spare_groups: groups in flight beyond the bound's slots.
    max_replacements: failed members replaced per group. min_members: a group whose replacements are used up still
    counts with this many members (0: group_size). task_attempts: a task whose group failed comes again until so many of
    its groups have; then it is quarantined. max_failed_groups: the run ends when so many different
    tasks have failed since a group was last completed, and as many again for each group that has been under way for
    longer than any of those lasted.
    context_tokens: a trajectory that would grow beyond it ends as truncated (0: no limit here).
    stall_seconds: the longest that a loop of the control plane waits for another before the run ends with an error.
    """

    batch_groups: int = 16
    group_size: int = 8
    spares: int = 0
    spare_groups: int = 0
    max_replacements: int = 8
    min_members: int = 0
    task_attempts: int = 2
    max_failed_groups: int = 8
    context_tokens: int = 0
    open_seconds: float = 300.0
    open_attempts: int = 3
    open_backoff_seconds: float = 0.5
    generate_seconds: float = 600.0
    environment_seconds: float = 60.0
    score_seconds: float = 120.0
    close_seconds: float = 10.0
    episode_seconds: float = 1800.0
    stall_seconds: float = 3600.0

    def __post_init__(self) -> None:
        at_least(self, 1, "batch_groups", "group_size", "open_attempts", "task_attempts", "max_failed_groups")
        at_least(self, 0, "spares", "spare_groups", "max_replacements", "context_tokens", "open_backoff_seconds")
        if not 0 <= self.min_members <= self.group_size:
            raise ValueError(f"min_members must be between 0 and group_size = {self.group_size} trajectories; got "
                             f"{self.min_members}")
        above(self, 0, "open_seconds", "generate_seconds", "environment_seconds", "score_seconds", "close_seconds",
              "episode_seconds", "stall_seconds")

    @property
    def enough(self) -> int:
        """Members that a group needs once its replacements are used up."""
        return self.min_members or self.group_size
