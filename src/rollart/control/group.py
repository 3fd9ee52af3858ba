"""One group: its members, spares, replacements and cut-off.

Keeps true: at most group_size good members are kept, the first to be good; every member that was started has ended,
with its fate told, when the group ends (also when the group is cancelled before its first step); a failed member is
replaced while replacements are left, and is never a reward of 0.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from rollart.control.env_manager import EnvManager, Services
from rollart.core.clock import now
from rollart.core.events import Settled, TrajectoryEnded, TrajectoryStarted
from rollart.core.types import Fate, Outcome, Task, Trajectory, TrajectoryId, Version


class GroupRun:
    """Members of one task. `on_age(oldest)` is called whenever the group's oldest sampled version may have changed."""

    def __init__(self, id: int, task: Task, born: Version, services: Services, *,
                 on_age: Callable[[int, Version | None], None], finished: Sequence[Trajectory] = (),
                 started: int = 0) -> None:
        self.id, self.task, self.born, self._s, self._on_age = id, task, born, services, on_age
        self.opened = now()
        self.good: list[Trajectory] = list(finished)
        self._good_oldest = min((m.oldest for m in finished if m.oldest is not None), default=None)
        self.members: dict[asyncio.Task[Trajectory], EnvManager] = {}
        self.started, self.failures = started, 0
        self._started_before = started
        self._stopping: dict[asyncio.Task[Trajectory], EnvManager] = {}
        self.errors: list[str] = []
        self.began = False
        self.kept = False
        """The buffer has it: its good members are no longer this group's to give up."""
        self.end_fate, self.end_reason = Fate.CANCELLED, "spare"
        """What becomes of members that are cancelled, and of good ones if the group is given up."""

    @property
    def oldest(self) -> Version | None:
        """Version of the oldest sampled token of any member that may still be trained."""
        versions = [self._good_oldest, *[m.oldest for m in self.members.values()]]
        return min((v for v in versions if v is not None), default=None)

    @property
    def in_flight(self) -> int:
        """Members without a final fate that are this group's (those of a kept group are the buffer's)."""
        return len(self.members) + len(self._stopping) + (0 if self.kept else len(self.good))

    @property
    def dispatched(self) -> int:
        """Members started by this process."""
        return self.started - self._started_before

    def _start(self) -> None:
        id = TrajectoryId(self.id, self.started)
        self.started += 1
        manager = EnvManager(id, self.task, self._s, lambda _: self._on_age(self.id, self.oldest))
        self._s.journal.emit(TrajectoryStarted(id, self.task.domain))
        self.members[asyncio.create_task(manager.run(), name=str(id))] = manager

    async def run(self) -> bool:
        """True if the group is complete: `good` then holds its members."""
        settings = self._s.settings
        if len(self.good) < settings.group_size:
            for _ in range(settings.group_size + settings.spares - len(self.good)):
                self._start()
        while self.members and len(self.good) < settings.group_size:
            await asyncio.wait(self.members, return_when=asyncio.FIRST_COMPLETED)
            for member in [m for m in self.members if m.done()]:
                self._ended(self.members.pop(member), member.result())
                self._on_age(self.id, self.oldest)
        return len(self.good) >= (settings.group_size if self.members else settings.enough)

    def _ended(self, manager: EnvManager, result: Trajectory) -> None:
        full = len(self.good) >= self._s.settings.group_size
        if result.good and not full:
            self.good.append(result)
            if manager.oldest is not None:
                known = manager.oldest if self._good_oldest is None else self._good_oldest
                self._good_oldest = min(manager.oldest, known)
            self._s.journal.emit(TrajectoryEnded(result, Fate.IN_FLIGHT))
        elif result.good:
            self._s.journal.emit(TrajectoryEnded(result, Fate.CANCELLED))
        else:
            self._s.journal.emit(TrajectoryEnded(result, Fate.FAILED))
            self.errors.append(result.error)
            self.failures += 1
            if self.failures <= self._s.settings.max_replacements and not full:
                self._start()

    async def stop(self) -> None:
        """Cancel what still runs and wait until it has cleaned up, even if this task is cancelled meanwhile."""
        self._stopping, self.members = self.members, {}
        for member in self._stopping:
            member.cancel()
        cancelled = False
        while running := [member for member in self._stopping if not member.done()]:
            try:
                await asyncio.wait(running)
            except asyncio.CancelledError:
                cancelled = True
        stopped = dict(self._stopping)
        for member, manager in stopped.items():
            del self._stopping[member]
            ended = manager.trajectory(Outcome.ABORTED, error=self.end_reason)
            self._s.journal.emit(TrajectoryEnded(ended, self.end_fate))
        for member in stopped:
            if not member.cancelled() and (failure := member.exception()):
                raise failure  # our own mistake: never lost, whatever was being cancelled
        if cancelled:
            raise asyncio.CancelledError

    def give_up(self) -> None:
        """The group will not be trained: its good members get the group's fate."""
        if self.good:
            self._s.journal.emit(Settled(tuple(m.id for m in self.good), self.end_fate, self.end_reason))
            self.good = []
