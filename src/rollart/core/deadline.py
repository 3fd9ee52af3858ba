"""`asyncio.timeout` for the many short waits of one task, at a fraction of its cost.

Keeps true: what `asyncio.timeout` promises. The wait is cancelled at its deadline, which becomes a TimeoutError; a
cancellation from elsewhere stays one. One timer serves all waits: it is moved only to an earlier deadline, and when it
fires early it goes on to the deadline of the wait that is under way then. Most waits end long before theirs, so most
set no timer at all.
"""

from __future__ import annotations

import asyncio
import math
from types import TracebackType


class Deadline:
    """Of one task, which waits for one thing at a time: `with deadline.within(seconds): await ...`."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[object] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._due = math.inf
        self._cancelling = 0
        self._expired = False

    def within(self, seconds: float) -> Deadline:
        """The wait that begins now may take so long."""
        due = self._due = self._loop.time() + seconds
        if self._timer is None or self._timer.when() > due:
            self._arm(due)
        return self

    def close(self) -> None:
        """No wait will follow."""
        if self._timer is not None:
            self._timer.cancel()

    def __enter__(self) -> None:
        if self._task is None:
            self._task = asyncio.current_task()
        self._cancelling = self._task.cancelling() if self._task else 0

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self._due = math.inf
        if self._expired and self._task is not None:
            self._expired = False
            if self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
                raise TimeoutError from error

    def _arm(self, due: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(due, self._fired)

    def _fired(self) -> None:
        self._timer = None
        if self._due == math.inf:
            return
        if self._loop.time() < self._due:
            self._arm(self._due)
        elif self._task is not None:
            self._expired = True
            self._task.cancel()
