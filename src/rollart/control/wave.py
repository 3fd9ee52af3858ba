"""Barriers of the synchronous baseline: environments that move turn by turn together, rewards after the last of them.

Keeps true: nobody passes a barrier before all members of the wave have arrived or left.
"""

from __future__ import annotations

from rollart.core.changed import Changed


class Wave:
    """All episodes under way. A member is rolling from `join` to `leave`; `arrive` is one barrier."""

    def __init__(self, changed: Changed, seconds: float) -> None:
        self._changed, self._seconds = changed, seconds
        self._rolling = 0
        self._arrived = 0
        self._round = 0

    def join(self) -> None:
        self._rolling += 1

    def leave(self) -> None:
        """The member's turns are over (or it failed): the others no longer wait for it."""
        self._rolling -= 1
        self._release()

    def _release(self) -> None:
        if self._arrived >= self._rolling:
            self._arrived = 0
            self._round += 1
            self._changed.notify()

    async def arrive(self, who: str) -> None:
        """Wait until every rolling member has arrived."""
        self._arrived += 1
        here = self._round
        self._release()
        try:
            await self._changed.until(lambda: self._round > here, who=who, what="the other members of the wave",
                                      seconds=self._seconds)
        finally:
            if self._round == here:  # cancelled while waiting
                self._arrived -= 1

    async def all_left(self, who: str) -> None:
        """Wait until nobody is rolling any more: the moment at which blocking rewards begin."""
        await self._changed.until(lambda: self._rolling == 0, who=who, what="the last trajectory of the wave",
                                  seconds=self._seconds)
