"""One timer for all waits of a task: the same outcomes at the same times as `asyncio.timeout`, and few timers."""

from __future__ import annotations

import asyncio
import random
from contextlib import AbstractContextManager
from typing import Any

import pytest

from rollart.core.deadline import Deadline
from rollart.sim.loop import VirtualTimeLoop, run_virtual


async def told(plan: list[tuple[float, float]], cancels: list[float], lazily: bool) -> list[tuple[float, str]]:
    """Waits one after the other, (seconds of work, limit) each, while someone cancels; what came when."""
    said: list[tuple[float, str]] = []
    now = asyncio.get_running_loop().time

    async def waits() -> None:
        deadline = Deadline()
        for work, limit in plan:
            try:
                if lazily:
                    with deadline.within(limit):
                        await asyncio.sleep(work)
                else:
                    async with asyncio.timeout(limit):
                        await asyncio.sleep(work)
                said.append((now(), "done"))
            except TimeoutError:
                said.append((now(), "late"))
            except asyncio.CancelledError:
                said.append((now(), "cancelled"))
                task = asyncio.current_task()
                assert task is not None
                task.uncancel()
        deadline.close()

    running = asyncio.create_task(waits())
    for after in cancels:
        asyncio.get_running_loop().call_later(after, running.cancel)
    await asyncio.wait([running])
    return [*said, (now(), repr(running.exception()))]


@pytest.mark.parametrize("seed", range(300))
def test_outcomes_and_times_are_those_of_asyncio_timeout(seed: int) -> None:
    chance = random.Random(seed)
    plan = [(chance.choice([0.5, 1.0, 2.5, 7.0]), chance.choice([-1.0, 0.0, 1.5, 3.0, 30.0])) for _ in range(12)]
    cancels = [chance.uniform(0, 20) for _ in range(chance.randint(0, 4))]
    assert run_virtual(told(plan, cancels, True)) == run_virtual(told(plan, cancels, False))


def test_waits_that_end_in_time_set_one_timer_in_a_limits_time() -> None:
    armed = []

    class Loop(VirtualTimeLoop):
        def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:
            if getattr(callback, "__self__", None).__class__ is Deadline:
                armed.append(when)
            return super().call_at(when, callback, *args, context=context)

    async def main() -> None:
        deadline: Deadline = Deadline()
        for _ in range(1000):
            wait: AbstractContextManager[None] = deadline.within(60.0)
            with wait:
                await asyncio.sleep(0.1)
        deadline.close()

    run_virtual(main(), loop=Loop())
    assert len(armed) == 2
