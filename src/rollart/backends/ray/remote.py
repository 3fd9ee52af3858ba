"""The driver's side of one actor: calls to its worker, gathered, and word of its death.

Keeps true: each call ends: by its answer, as cancelled, or with the role's PortError once the actor is dead, silent for
too long, or closed; calls of one turn of the event loop travel together, answers too, so that a busy actor costs
fewer Ray calls than it gets calls. A value that comes after its call was cancelled is undone. Waits for answers, under
the caller's deadlines; for a start, under its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import RayError

from rollart import __version__
from rollart.backends.ray.host import CANCEL, Host
from rollart.core.errors import ConfigError, NoCapacity, PortError

CLOSE_SECONDS = 10.0


class Remote:
    """A worker in an actor. `options` are Ray's for the actor, asked for at each start: where it may be placed.

    Raises `lost` where the actor is gone. `calls` and `posts` count what was asked and the Ray calls it took.
    """

    def __init__(self, name: str, worker: str, role: str, spec: Mapping[str, Any],
                 options: Callable[[], Mapping[str, Any]], lost: type[PortError], *, start_seconds: float,
                 silent_seconds: float) -> None:
        self.name, self._worker, self._role, self._spec = name, worker, role, spec
        self._options, self._lost = options, lost
        self._start_seconds, self._silent_seconds = start_seconds, silent_seconds
        self.dead: str | None = "not started"
        self.pid = 0
        self.stats: Mapping[str, Any] = {}
        self.calls = self.posts = self.polls = 0
        self._actor: Any = None
        self._polling: asyncio.Task[None] | None = None
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._undo: dict[int, Callable[[Any], None]] = {}
        self._outbox: list[tuple[int, str, tuple[Any, ...]]] = []
        self._watchers: list[Callable[[], None]] = []
        self._number = 0

    def on_dead(self, callback: Callable[[], None]) -> None:
        """`callback` runs on the event loop whenever the actor dies by itself."""
        self._watchers.append(callback)

    async def start(self) -> None:
        """A new actor; what the old one had is gone. Raises NoCapacity when it is not up in time, ConfigError."""
        await self.close()
        options = {"max_concurrency": 64, "max_restarts": 0, "num_cpus": 0, **self._options()}
        self._actor = ray.remote(Host).options(**options).remote(self._worker, self._role, self._spec)
        limit = asyncio.timeout(self._start_seconds)
        try:
            async with limit:
                answer = await self._actor.start.remote()
        except (TimeoutError, RayError) as error:
            await self.close()
            # Ray may tell a wait that is cancelled at its deadline as a dead actor.
            raise NoCapacity(
                f"{self.name} did not start within {self._start_seconds:g} s: no node has room for it, or its start "
                "hangs (cluster.start_seconds)" if limit.expired() else
                f"{self.name} could not start: {_line(error)}") from None
        except BaseException:
            await self.close()
            raise
        if "error" in answer:
            await self.close()
            raise answer["error"]
        if answer["version"] != __version__:
            await self.close()
            raise ConfigError(f"{self.name} runs rollart {answer['version']}, the driver {__version__}: install the "
                              "same version on every node")
        self.pid, self.dead = answer["pid"], None
        self._polling = asyncio.create_task(self._poll(), name=f"poll {self.name}")

    async def call(self, method: str, *arguments: Any, undo: Callable[[Any], None] | None = None) -> Any:
        """The worker's method. `undo` gets a value that comes after this call was cancelled."""
        if self.dead is not None:
            raise self._lost(f"{self.name} is lost: {self.dead}")
        number = self._post(method, arguments)
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        if undo:
            self._undo[number] = undo
        try:
            return await future
        except asyncio.CancelledError:
            if self._waiting.pop(number, None) is not None and self.dead is None:
                self._post(CANCEL, (), number)
            elif undo and future.done() and not future.cancelled() and future.exception() is None:
                undo(future.result())
            raise

    def tell(self, method: str, *arguments: Any) -> None:
        """A call nobody waits for. Never raises."""
        if self.dead is None:
            self._post(method, arguments)

    async def close(self) -> None:
        """End the actor: kindly, then by force. What is under way fails."""
        if self._actor is not None and self.dead is None:
            with suppress(RayError, TimeoutError):
                async with asyncio.timeout(CLOSE_SECONDS):
                    await self._actor.close.remote()
        self.kill("closed")

    def kill(self, reason: str = "killed") -> None:
        """End the actor at once, without a word to its watchers."""
        actor, self._actor = self._actor, None
        if actor is not None:
            self._end(reason)
            with suppress(RayError):
                ray.kill(actor)

    def _post(self, method: str, arguments: tuple[Any, ...], number: int | None = None) -> int:
        self.calls += 1
        if number is None:
            self._number += 1
            number = self._number
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outbox.append((number, method, arguments))
        return number

    def _flush(self) -> None:
        calls, self._outbox = self._outbox, []
        if self.dead is None and calls:
            self.posts += 1
            self._actor.post.remote(calls)

    async def _poll(self) -> None:
        """Take answers until the actor is dead or silent."""
        try:
            while True:
                limit = asyncio.timeout(self._silent_seconds)
                async with limit:
                    answers, self.stats = await self._actor.poll.remote()
                self.polls += 1
                for number, well, value in answers:
                    self._answer(number, well, value)
        except (TimeoutError, RayError) as error:
            reason = (f"no sign of life for {self._silent_seconds:g} s (cluster.silent_seconds)" if limit.expired() else
                      _line(error))
        self._polling = None
        self._end(reason)
        for watcher in self._watchers:
            watcher()

    def _answer(self, number: int, well: bool, value: Any) -> None:
        future = self._waiting.pop(number, None)
        undo = self._undo.pop(number, None)
        if future is None or future.done():  # cancelled meanwhile
            if undo and well:
                undo(value)
        elif well:
            future.set_result(value)
        else:
            future.set_exception(value if isinstance(value, PortError | AssertionError | ValueError) else
                                 self._lost(f"{self.name}: {value}"))

    def _end(self, reason: str) -> None:
        self.dead = reason
        self.stats = {}
        polling, self._polling = self._polling, None
        if polling:
            polling.cancel()
        waiting, self._waiting = self._waiting, {}
        self._undo.clear()
        self._outbox.clear()
        for future in waiting.values():
            if not future.done():
                future.set_exception(self._lost(f"{self.name} is lost: {reason}"))


def _line(error: BaseException) -> str:
    """Ray's errors are pages: what happened is in the first line, of what the worker raised in the last."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    return f"{type(error).__name__}: {' '.join(dict.fromkeys((lines[0], lines[-1])))[:400]}"
