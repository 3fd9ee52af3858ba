"""Rollout scheduler: keeps the buffer's slots full of groups, and ends those that nobody will train.

Keeps true: every admitted group ends exactly once: in the buffer, given up (its task comes again, unless so many of its
groups have failed that it is quarantined), or cancelled; its slot is then free. A raising group ends the run at once.
Waits for: a free slot, for as long as the others' deadlines (step, publish, load) let it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from rollart.control.env_manager import Services
from rollart.control.group import GroupRun
from rollart.control.sample_buffer import SampleBuffer
from rollart.core.changed import Changed
from rollart.core.clock import now
from rollart.core.errors import RunError
from rollart.core.events import GroupEnded, GroupOpened, GroupReady, Settled
from rollart.core.ports import TaskSource
from rollart.core.types import (
    Fate,
    Group,
    Restored,
    StalePolicy,
    Task,
    Trajectory,
    TrajectoryId,
    Unfinished,
    Version,
)


@dataclass(frozen=True, slots=True)
class InFlight:
    """One running trajectory, for status and for the text of a stall."""

    id: TrajectoryId
    task: str
    stage: str
    stage_seconds: float
    age_seconds: float
    turns: int
    oldest: Version | None


class RolloutScheduler:
    """Opens groups while there are slots. `unusable`: why no step could train a complete group, or ''; such a group has
    failed."""

    def __init__(self, services: Services, buffer: SampleBuffer, tasks: TaskSource, changed: Changed,
                 unusable: Callable[[Group], str] = lambda group: "") -> None:
        self._s, self._buffer, self._tasks, self._changed = services, buffer, tasks, changed
        self._unusable = unusable
        self._settings = services.settings
        self.groups: dict[int, GroupRun] = {}
        self._running: dict[int, asyncio.Task[None]] = {}
        self._restored: deque[Unfinished] = deque()
        self._next = 0
        self._failures: dict[str, int] = {}  # failed groups of tasks that are not quarantined yet
        self._failing: dict[str, float] = {}  # tasks that failed since a group was completed; seconds that each lasted
        self._failing_since = 0.0
        self._last_failure = ""
        self._dispatched = 0
        self._left = 0  # finished members of groups that an interrupted run leaves for its resume
        self._stopping = False

    def restore(self, restored: Restored) -> None:
        """Take over what a crash left. Call once, before `run`, with the buffer at the checkpoint's version.

        Finished members are kept if no token is newer than the checkpoint (those weights are gone) and the bound
        allows; complete groups go to the buffer, others go on with what they have; what finds no slot is put back.
        """
        if restored.source is not None:
            self._tasks.restore(restored.source)
        self._next = restored.next_group
        timely = 0
        for left, kept in self._oldest_first(restored):
            oldest = self._oldest(kept)
            steps = oldest + self._buffer.alpha - self._buffer.version + 1  # that can still train it
            if self._buffer.stale is StalePolicy.WAIT and kept and timely >= steps * self._buffer.batch_groups:
                self._settle(kept, Fate.STALE, "resume: no step in time")
                kept, oldest = (), self._buffer.version
            timely += bool(kept)
            if len(self._restored) < self._buffer.slots:
                self._restored.append(Unfinished(left.id, left.task, oldest, kept, left.started))
            else:
                self._settle(kept, Fate.CANCELLED, "resume: no slot")
                self._tasks.put_back(left.task)
                self._s.journal.emit(GroupEnded(left.id, False, "resume: no slot", self._tasks.state()))

    def _oldest_first(self, restored: Restored) -> list[tuple[Unfinished, tuple[Trajectory, ...]]]:
        """Groups with the members that may still be used, those with the oldest tokens first; settles the others."""
        out = []
        for left in restored.groups:
            usable = [m for m in left.finished if self._usable(m)]
            self._settle([m for m in left.finished if m not in usable], Fate.STALE,
                         "resume: its weights are gone, or it is too old")
            kept = tuple(usable[: self._settings.group_size])
            self._settle(usable[self._settings.group_size :], Fate.CANCELLED, "resume: groups are smaller now")
            out.append((left, kept))
        return sorted(out, key=lambda entry: (self._oldest(entry[1]), entry[0].id))

    def _oldest(self, members: Sequence[Trajectory]) -> Version:
        return min((m.oldest for m in members if m.oldest is not None), default=self._buffer.version)

    def _settle(self, members: Sequence[Trajectory], fate: Fate, reason: str) -> None:
        if members:
            self._s.journal.emit(Settled(tuple(m.id for m in members), fate, reason))

    def _usable(self, member: Trajectory) -> bool:
        version = self._buffer.version
        if member.oldest is None or member.newest is None:
            return member.good
        return member.good and member.newest <= version and version - member.oldest <= self._buffer.alpha

    async def run(self, nursery: asyncio.TaskGroup) -> None:
        """Open groups for ever."""
        while True:
            await self._changed.until(lambda: self._buffer.free > 0, who="rollout", what="a free slot",
                                      seconds=float("inf"))
            self._check_failures()
            if self._restored:
                left = self._restored.popleft()
                self._open(nursery, left.id, left.task, left.born, left.finished, left.started)
            else:
                task = self._tasks.next()
                self._open(nursery, self._next, task, self._s.proxy.version, (), 0)

    def _open(self, nursery: asyncio.TaskGroup, id: int, task: Task, born: Version, finished: Sequence[Trajectory],
              started: int) -> None:
        self._next = max(self._next, id + 1)
        self._buffer.admit(id, born)
        group = GroupRun(id, task, born, self._s, on_age=self._age, finished=finished, started=started)
        self.groups[id] = group
        self._age(id, group.oldest)
        self._s.journal.emit(GroupOpened(id, task, born, self._tasks.state(), len(finished)))
        running = nursery.create_task(self._drive(group), name=f"group {id}")
        self._running[id] = running
        running.add_done_callback(partial(self._never_began, group))

    def _age(self, id: int, oldest: Version | None) -> None:
        if id in self._buffer.open and not self._buffer.note(id, oldest):
            self.drop([id], Fate.STALE, "beyond the staleness bound")

    async def _drive(self, group: GroupRun) -> None:
        """Run the group and close it. After an error of ours it is stopped, not closed: its books are not whole then,
        the run ends, and the first error is the one that is told."""
        group.began = True
        error: Exception | None = None
        cancelled = False
        try:
            if await group.run():
                self._complete(group)
            else:
                group.end_fate = Fate.FAILED
                group.end_reason = f"{group.failures} members failed, the last: {(group.errors or ['?'])[-1]}"
        except asyncio.CancelledError:
            cancelled = True
        except Exception as failure:  # noqa: BLE001  raised again below
            error = failure
        try:
            await group.stop()
        except asyncio.CancelledError:
            cancelled = True
        except Exception as failure:  # noqa: BLE001  raised again below
            error = error or failure
        if error is not None:
            raise error
        self._closed(group)
        if cancelled:
            raise asyncio.CancelledError

    def _complete(self, group: GroupRun) -> None:
        members = tuple(sorted(group.good, key=lambda member: member.id))  # who was first is chance
        finished = Group(group.id, group.task, group.born, members)
        if reason := self._unusable(finished):
            group.end_fate, group.end_reason = Fate.FAILED, reason
        elif self._buffer.put(finished):
            group.kept = True
            self._failing.clear()
            self._failures.pop(group.task.id, None)
            self._s.journal.emit(GroupReady(finished))
            self._changed.notify()
        else:
            group.end_fate, group.end_reason = Fate.STALE, "beyond the staleness bound when it was complete"

    def _never_began(self, group: GroupRun, task: asyncio.Task[None]) -> None:
        """A group that was cancelled before its first step never runs its `finally`."""
        if not group.began:
            self._closed(group)

    def _closed(self, group: GroupRun) -> None:
        del self.groups[group.id], self._running[group.id]
        self._dispatched += group.dispatched
        if group.id in self._buffer.open:
            self._buffer.discard(group.id)
        if self._stopping:  # the group and its good members survive the run: resume goes on with them
            self._left += 0 if group.kept else len(group.good)
            return
        if not group.kept:
            if group.end_fate is not Fate.FAILED or self._fails_again(group):
                self._tasks.put_back(group.task)
            group.give_up()
        self._s.journal.emit(GroupEnded(group.id, group.kept, "" if group.kept else group.end_reason,
                                        self._tasks.state()))
        self._changed.notify()

    def _fails_again(self, group: GroupRun) -> bool:
        """Count the failure; True if the task may come again, else its group's reason says that it is quarantined."""
        if not self._failing:
            self._failing_since = now()
        self._failing[group.task.id] = now() - group.opened
        self._last_failure = group.end_reason
        failed = self._failures[group.task.id] = self._failures.get(group.task.id, 0) + 1
        if failed < self._settings.task_attempts:
            return True
        del self._failures[group.task.id]
        group.end_reason = f"quarantined after {failed} failed groups: {group.end_reason}"
        return False

    def _check_failures(self) -> None:
        """Whether nothing but failures is to be expected. A group that has outlived all failed ones may well be good
        and slow: few broken tasks beside many such groups are no reason to end a run. Groups that were under way when
        the first one failed are waited for until they have failed too, or outlived it."""
        if len(self._failing) < self._settings.max_failed_groups:
            return
        longest = max(self._failing.values())
        outliving = undecided = 0
        for group in self.groups.values():
            if now() - group.opened > longest:
                outliving += 1
            elif group.opened <= self._failing_since:
                undecided += 1
        if not undecided and len(self._failing) >= self._settings.max_failed_groups * (1 + outliving):
            raise RunError(f"{len(self._failing)} tasks in a row failed (rollout.max_failed_groups = "
                           f"{self._settings.max_failed_groups}); the last one: {self._last_failure}")

    def drop(self, ids: Sequence[int], fate: Fate, reason: str) -> None:
        """End open groups that nobody will train."""
        for id in ids:
            if id in self._running and not self._running[id].done():
                self.groups[id].end_fate, self.groups[id].end_reason = fate, reason
                self._running[id].cancel()

    async def stop(self, *, keep: bool) -> None:
        """End all open groups. `keep`: for a later resume (their finished members stay in flight)."""
        self._stopping = keep
        running = list(self._running.values())
        self.drop(list(self._running), Fate.CANCELLED, "interrupted" if keep else "the run has ended")
        if running:
            await asyncio.wait(running)
            await asyncio.sleep(0)  # the done-callbacks
        while self._restored and not keep:
            left = self._restored.popleft()
            self._settle(left.finished, Fate.CANCELLED, "the run has ended")
            self._tasks.put_back(left.task)
            self._s.journal.emit(GroupEnded(left.id, False, "the run has ended", self._tasks.state()))

    @property
    def stall_seconds(self) -> float:
        """The longest that a loop waits for rollout."""
        return self._settings.stall_seconds

    @property
    def dispatched(self) -> int:
        """Trajectories started by this process."""
        return self._dispatched + sum(group.dispatched for group in self.groups.values())

    @property
    def unsettled(self) -> int:
        """Trajectories that are running or wait in an open group or in the buffer (not those in training)."""
        return (self._left + sum(group.in_flight for group in self.groups.values())
                + sum(len(left.finished) for left in self._restored)
                + sum(len(group.members) for group in self._buffer.ready.values()))

    def in_flight(self) -> list[InFlight]:
        """Running trajectories, the oldest first."""
        managers = [m for group in self.groups.values() for m in group.members.values()]
        time = now()
        return [InFlight(m.id, m.task.id, m.stage, time - m.since, time - m.started, len(m.turns), m.oldest)
                for m in sorted(managers, key=lambda m: (m.started, m.id))]

    def explain(self) -> str:
        """The oldest running trajectories in words, for the text of a stall."""
        oldest = self.in_flight()[:3]
        return "; ".join(f"{i.id} ({i.task}) in {i.stage} for {i.stage_seconds:.0f} s, {i.age_seconds:.0f} s old, "
                         f"{i.turns} turns" for i in oldest) or "no trajectory is running"
