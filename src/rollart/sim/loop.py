"""An asyncio event loop on virtual time: it never waits, it jumps to the next timer.

Keeps true: the same program gives the same order of callbacks in every process. Timers that fall due together run in
creation order; tasks hash by their number in this loop, so sets of tasks (`asyncio.wait`, `TaskGroup`) iterate alike;
threads are refused. An exception in a callback ends the run (a real loop would log it and go on). Waits for nothing:
where a real loop would sleep for ever it raises `Deadlock`, and where it would spin or never end, `NoProgress`.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from asyncio import events
from collections.abc import Coroutine
from typing import Any, NoReturn, TypeVar

from rollart.core.clock import stream

T = TypeVar("T")

TIME_LIMIT = 30 * 86_400.0
"""Virtual seconds that a run may take unless told otherwise."""
CALLBACKS_PER_INSTANT = 1_000_000
"""Callbacks without time advancing after which the run counts as spinning."""
CLEANUP_SECONDS = 3_600.0
"""Virtual seconds that cancelled tasks get to end after the run."""
JITTER_SECONDS = 0.001
"""Largest delay that `jitter_seed` adds to a timer: enough to reorder ties, too little to change what is slow."""


class Deadlock(RuntimeError):
    """Nothing is runnable and no timer is pending, so virtual time can never advance again. Names the waiting tasks."""


class NoProgress(RuntimeError):
    """The virtual-time budget is used up, or callbacks run and time does not advance."""


class NumberedTask(asyncio.Task):
    """Hashes by its creation number in the loop (an address would differ from process to process)."""

    def __init__(self, coro: Coroutine[Any, Any, Any], *, loop: VirtualTimeLoop, **kwargs: Any) -> None:
        self.number = next(loop.task_numbers)  # before super().__init__, which puts the task into a set
        super().__init__(coro, loop=loop, **kwargs)

    def __hash__(self) -> int:
        return self.number

    def __eq__(self, other: object) -> bool:
        return self is other


class VirtualTimeLoop(asyncio.BaseEventLoop):
    """Starts at time 0. `callbacks` counts what it ran; `jitter_seed` delays every timer by a small seeded amount."""

    def __init__(self, *, time_limit: float = TIME_LIMIT, callbacks_per_instant: int = CALLBACKS_PER_INSTANT,
                 jitter_seed: int | None = None) -> None:
        super().__init__()
        self.time_limit, self.callbacks_per_instant = time_limit, callbacks_per_instant
        self.callbacks = 0
        self.task_numbers = itertools.count(1)
        self._jitter = None if jitter_seed is None else stream(jitter_seed, "loop jitter")
        self._now = 0.0
        self._instant_began = 0  # `callbacks` when time last advanced
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._timer_numbers = itertools.count()
        self._cancelled_timers = 0  # cancelled handles still in the heap
        self.failed = False
        self._failure: BaseException | None = None
        self.set_task_factory(lambda loop, coro, **kwargs: NumberedTask(coro, loop=loop, **kwargs))

    def time(self) -> float:
        return self._now

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:
        if self._jitter is not None:
            when += self._jitter.uniform(0.0, JITTER_SECONDS)
        handle = events.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, next(self._timer_numbers), handle))
        handle._scheduled = True
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        if not handle._scheduled:
            return
        self._cancelled_timers += 1
        if self._cancelled_timers > 1000 and self._cancelled_timers * 2 > len(self._timers):
            self._timers = [timer for timer in self._timers if not timer[2]._cancelled]
            heapq.heapify(self._timers)
            self._cancelled_timers = 0

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if self.failed:
            return  # what follows from the first failure is not told
        if "handle" in context:
            self._failure = context["exception"]
        else:
            super().call_exception_handler(context)

    def _run_once(self) -> None:
        """One round, as asyncio defines it: what is ready now runs; what it schedules runs in the next round."""
        if not self._ready and not self._stopping:
            self._advance()
        if self.callbacks - self._instant_began > self.callbacks_per_instant:
            raise NoProgress(f"time stands still at {self._now:g} s after {self.callbacks_per_instant} callbacks: "
                             f"{self.waiting()}")
        for _ in range(len(self._ready)):
            handle = self._ready.popleft()
            if not handle._cancelled:
                self.callbacks += 1
                handle._run()
                if self._failure is not None:
                    failure, self._failure, self.failed = self._failure, None, True
                    raise failure

    def _advance(self) -> None:
        """Move time to the next timer and make everything that is due then ready."""
        timers = self._timers
        while timers and timers[0][2]._cancelled:
            heapq.heappop(timers)[2]._scheduled = False
            self._cancelled_timers -= 1
        if not timers:
            raise Deadlock(f"all tasks wait and no timer is pending at {self._now:g} s: {self.waiting()}")
        if timers[0][0] > self.time_limit:
            raise NoProgress(f"not finished after {self.time_limit:g} virtual seconds: {self.waiting()}")
        if timers[0][0] > self._now:
            self._now, self._instant_began = timers[0][0], self.callbacks
        while timers and timers[0][0] <= self._now:
            handle = heapq.heappop(timers)[2]
            handle._scheduled = False
            if handle._cancelled:
                self._cancelled_timers -= 1
            else:
                self._ready.append(handle)

    def cancel_all(self) -> None:
        """Cancel what is left, and what that brings, and run it to its end."""
        self.time_limit, self._instant_began = self.time() + CLEANUP_SECONDS, self.callbacks
        while tasks := sorted(asyncio.all_tasks(self), key=lambda task: task.number):
            for task in tasks:
                task.cancel()
            self.run_until_complete(asyncio.wait(tasks))
        self.run_until_complete(self.shutdown_asyncgens())

    def waiting(self, limit: int = 20) -> str:
        """Each unfinished task and where it waits: `g3.1 in EnvManager._turn (env_manager.py:88); ...`."""
        tasks = sorted(asyncio.all_tasks(self), key=lambda task: task.number)
        more = f"; and {len(tasks) - limit} more" if len(tasks) > limit else ""
        return "; ".join(f"{task.get_name()} in {_place(task)}" for task in tasks[:limit]) + more

    def _process_events(self, event_list: Any) -> None:
        pass

    def call_soon_threadsafe(self, callback: Any, *args: Any, context: Any = None) -> NoReturn:
        raise RuntimeError("virtual time has no threads: call_soon_threadsafe is refused; run this on a real loop")

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> NoReturn:
        raise RuntimeError("virtual time has no threads: run_in_executor is refused; run this on a real loop")


def _place(task: asyncio.Task) -> str:
    """The innermost coroutine of a suspended task (standard-library frames are stepped over)."""
    place, coroutine = "?", task.get_coro()
    while coroutine is not None and (code := getattr(coroutine, "cr_code", None)) is not None:
        frame = coroutine.cr_frame
        if frame is not None and "asyncio" not in code.co_filename:
            place = f"{code.co_qualname} ({code.co_filename.rpartition('/')[2]}:{frame.f_lineno})"
        coroutine = coroutine.cr_await
    return place


def run_virtual(main: Coroutine[Any, Any, T], *, time_limit: float = TIME_LIMIT, jitter_seed: int | None = None,
                loop: VirtualTimeLoop | None = None) -> T:
    """Run a coroutine to its end on a new virtual-time loop (or on `loop`, which is closed afterwards).

    Tasks that it left behind are cancelled, as `asyncio.run` does. Raises what it raises; Deadlock or NoProgress.
    """
    loop = loop or VirtualTimeLoop(time_limit=time_limit, jitter_seed=jitter_seed)
    try:
        result = loop.run_until_complete(main)
        loop.cancel_all()
        return result
    except BaseException:
        loop.failed = True
        try:
            loop.cancel_all()
        except (Deadlock, NoProgress):
            pass  # the first failure is the one to report
        raise
    finally:
        loop.close()
