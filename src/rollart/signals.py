"""What the signals of a terminal mean to a run.

    Ctrl-C, SIGTERM     once: a clean end after the step under way; twice: an end at once; after that: no more
    SIGHUP              the terminal was closed: a clean end
    Ctrl-Z              everything stops, the loop's clock too, so that no deadline passes meanwhile; `fg` goes on

Keeps true: a signal that was ignored when the program was started (nohup) stays ignored.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def heeded(ask: Callable[[], bool], *, pause: Callable[[], None], resume: Callable[[], None]) -> Iterator[None]:
    """Inside the loop's main task. `ask` asks for a clean end, or says False: nothing has begun that needs one, and the
    task is cancelled. `pause` and `resume` are called around a stop by Ctrl-Z."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    asked = cancelled = False

    def end(number: int) -> None:
        nonlocal asked, cancelled
        if cancelled or (asked and number == signal.SIGHUP):
            return
        cancelled = asked or not ask()
        asked = True
        if cancelled:
            task.cancel()

    def stopped() -> None:
        pause()
        began = time.monotonic()
        loop.remove_signal_handler(signal.SIGTSTP)
        signal.raise_signal(signal.SIGTSTP)  # here it stops, and here it goes on
        loop.add_signal_handler(signal.SIGTSTP, stopped)
        lost = time.monotonic() - began
        clock = loop.time
        loop.time = lambda: clock() - lost  # type: ignore[method-assign]
        resume()

    taken = [number for number in (*ENDING, signal.SIGTSTP) if signal.getsignal(number) is not signal.SIG_IGN]
    for number in taken:
        loop.add_signal_handler(number, *((stopped,) if number == signal.SIGTSTP else (end, number)))
    try:
        yield
    finally:
        for number in taken:
            loop.remove_signal_handler(number)
