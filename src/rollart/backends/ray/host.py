"""The actor's side: one worker in its own process, and the calls that arrive for it.

Keeps true: each call that was posted is answered once, by its value or by an error; a call that is cancelled here stops
what it does; answers leave in batches, as soon as there is one. Waits for calls; `poll` at most POLL_SECONDS.
"""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import Mapping
from typing import Any

from rollart import __version__
from rollart.core.errors import InvariantViolated, RollArtError
from rollart.distributed.api import Role, worker_class

POLL_SECONDS = 2.0
CANCEL = ""
"""The method name that cancels the call of that number."""


class Crashed(Exception):
    """The worker's own code raised something that is no RollArtError; the text names it."""


class Host:
    """The body of every actor. `worker` is `module:Class`, `spec` what its constructor takes."""

    def __init__(self, worker: str, role: str, spec: Mapping[str, Any]) -> None:
        self._name, self._role, self._spec = worker, Role(role), spec
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._answers: list[tuple[int, bool, Any]] = []
        self._answered = asyncio.Event()

    async def start(self) -> dict[str, Any]:
        """Build the worker and start it. Raises ConfigError as a value: Ray would wrap it."""
        try:
            self._worker = await asyncio.to_thread(worker_class(self._name, self._role), self._spec)
            await self._worker.start()
        except RollArtError as error:
            return {"error": error}
        return {"pid": os.getpid(), "version": __version__}

    async def post(self, calls: list[tuple[int, str, tuple[Any, ...]]]) -> None:
        """Begin these calls, in order: (number, method, arguments)."""
        for number, method, arguments in calls:
            if method == CANCEL:
                if task := self._calls.get(number):
                    task.cancel()
            else:
                self._calls[number] = asyncio.create_task(self._call(number, method, arguments))

    async def poll(self) -> tuple[list[tuple[int, bool, Any]], Mapping[str, Any]]:
        """Answers (number, whether it went well, value or error) and the worker's figures. Empty when none came."""
        if not self._answers:
            self._answered.clear()
            try:
                async with asyncio.timeout(POLL_SECONDS):
                    await self._answered.wait()
            except TimeoutError:
                pass
        answers, self._answers = self._answers, []
        return answers, self._worker.stats()

    async def close(self) -> None:
        for task in self._calls.values():
            task.cancel()
        await self._worker.close()

    async def _call(self, number: int, method: str, arguments: tuple[Any, ...]) -> None:
        try:
            resolved = [await a.ref if isinstance(a, Shared) else a for a in arguments]
            found = getattr(self._worker, method, None) or getattr(self._worker.part, method)
            if inspect.iscoroutinefunction(found):
                answer = number, True, await found(*resolved)
            else:
                answer = number, True, await asyncio.to_thread(found, *resolved)
        except asyncio.CancelledError:
            answer = number, False, Crashed("cancelled")
        except (RollArtError, InvariantViolated, ValueError) as error:
            answer = number, False, error
        except Exception as error:  # noqa: BLE001  the process's edge: whatever it was, the caller must hear of it
            answer = number, False, Crashed(f"{type(error).__name__}: {error}")
        del self._calls[number]
        self._answers.append(answer)
        self._answered.set()


class Shared:
    """An argument that lies in the object store; the actor gets its value."""

    def __init__(self, ref: Any) -> None:
        self.ref = ref
