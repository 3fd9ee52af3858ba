"""Wake-ups for shared state. One event loop and no await between check and change, so no lock is needed.

Keeps true: whoever changes state that a predicate reads calls `notify`. Every wait has a deadline and a name, so that
`status` can say what each loop waits for and a stall names itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from rollart.core.clock import now
from rollart.core.errors import Stalled


@dataclass(frozen=True, slots=True)
class Wait:
    """Who waits for what, since when (loop seconds)."""

    who: str
    what: str
    since: float


class Changed:
    """A condition without a lock: `await changed.until(predicate, ...)`, and `changed.notify()` after each change."""

    def __init__(self) -> None:
        self._waiters: dict[asyncio.Future[None], None] = {}
        self._waits: dict[int, Wait] = {}
        self._next = 0

    @property
    def waits(self) -> list[Wait]:
        """All waits under way, oldest first."""
        return list(self._waits.values())

    def notify(self) -> None:
        """Wake every waiter to look again."""
        waiters, self._waiters = self._waiters, {}
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def until(self, predicate: Callable[[], bool], *, who: str, what: str, seconds: float,
                    explain: Callable[[], str] = lambda: "") -> None:
        """Return once `predicate()` is true. Raises Stalled after `seconds`, with `explain()` appended."""
        if predicate():
            return
        self._next += 1
        key, since = self._next, now()
        self._waits[key] = Wait(who, what, since)
        try:
            async with asyncio.timeout(seconds):
                while not predicate():
                    waiter = asyncio.get_running_loop().create_future()
                    self._waiters[waiter] = None
                    try:
                        await waiter
                    finally:
                        self._waiters.pop(waiter, None)
        except TimeoutError:
            detail = f": {explain()}".rstrip(": ")
            raise Stalled(f"{who} waited {now() - since:.0f} s for {what}{detail}") from None
        finally:
            del self._waits[key]
