"""The virtual-time loop: order, deadlock text, progress limits, no threads, seeded jitter."""

import asyncio

import pytest

from rollart.core.clock import now
from rollart.sim.loop import CALLBACKS_PER_INSTANT, Deadlock, NoProgress, VirtualTimeLoop, run_virtual


def test_time_jumps_to_the_next_timer_and_never_waits():
    async def main():
        await asyncio.sleep(86_400)
        return now()

    assert run_virtual(main()) == 86_400


def test_timers_due_together_run_in_creation_order():
    async def main():
        seen, loop = [], asyncio.get_running_loop()
        for name in "cab":
            loop.call_at(5.0, seen.append, name)
        loop.call_at(4.0, seen.append, "first")
        await asyncio.sleep(6)
        return seen

    assert run_virtual(main()) == ["first", "c", "a", "b"]


def test_a_cancelled_timer_neither_runs_nor_moves_time():
    async def main():
        loop = asyncio.get_running_loop()
        handles = [loop.call_later(1000 + i, pytest.fail, "ran") for i in range(3000)]
        for handle in handles:
            handle.cancel()
        assert len(loop._timers) < 1100, "cancelled timers pile up"
        await asyncio.sleep(1)
        return now()

    assert run_virtual(main()) == 1


def test_sets_of_tasks_iterate_alike_in_every_loop_of_a_process():
    async def main():
        tasks = {asyncio.create_task(asyncio.sleep(1), name=f"t{i}") for i in range(50)}
        done, _ = await asyncio.wait(tasks)
        return [task.get_name() for task in done]

    run_virtual(asyncio.sleep(1))
    assert run_virtual(main()) == run_virtual(main())


def test_deadlock_names_each_task_and_where_it_waits():
    async def inner(event):
        await event.wait()

    async def main():
        async with asyncio.TaskGroup() as group:
            group.create_task(inner(asyncio.Event()), name="g7.2")

    with pytest.raises(Deadlock, match=r"at 0 s: .*main \(test_loop.py:\d+\); g7.2 in .*inner \(test_loop.py:\d+\)"):
        run_virtual(main())


def test_a_budget_of_virtual_time_ends_a_run_that_only_ticks():
    async def main():
        while True:
            await asyncio.sleep(10)

    with pytest.raises(NoProgress, match=r"not finished after 1000 virtual seconds: .*main"):
        run_virtual(main(), time_limit=1000)


def test_spinning_without_time_is_no_progress():
    async def main():
        while True:
            await asyncio.sleep(0)

    loop = VirtualTimeLoop(callbacks_per_instant=1000)
    with pytest.raises(NoProgress, match=r"time stands still at 0 s after 1000 callbacks"):
        run_virtual(main(), loop=loop)
    assert CALLBACKS_PER_INSTANT > 1000


def test_threads_are_refused():
    async def main():
        await asyncio.to_thread(print)

    with pytest.raises(RuntimeError, match="run_in_executor is refused"):
        run_virtual(main())

    async def other():
        asyncio.get_running_loop().call_soon_threadsafe(print)

    with pytest.raises(RuntimeError, match="call_soon_threadsafe is refused"):
        run_virtual(other())


def test_an_exception_in_a_callback_ends_the_run():
    async def main():
        asyncio.get_running_loop().call_later(1, lambda: 1 / 0)
        await asyncio.sleep(1000)

    with pytest.raises(ZeroDivisionError):
        run_virtual(main())


def test_jitter_is_seeded_and_reorders_ties():
    async def main():
        seen, loop = [], asyncio.get_running_loop()
        for name in range(20):
            loop.call_at(5.0, seen.append, name)
        await asyncio.sleep(6)
        return seen

    assert run_virtual(main(), jitter_seed=1) == run_virtual(main(), jitter_seed=1)
    assert run_virtual(main(), jitter_seed=1) != run_virtual(main(), jitter_seed=2)
    assert run_virtual(main()) == list(range(20))


def test_tasks_left_behind_are_cancelled_and_clean_up():
    closed = []

    async def background():
        try:
            await asyncio.sleep(1e6)
        finally:
            await asyncio.sleep(3)
            closed.append(now())

    async def main():
        asyncio.create_task(background())  # noqa: RUF006
        await asyncio.sleep(1)

    run_virtual(main(), time_limit=2)
    assert closed == [4]


def test_timeouts_and_queues_work_on_virtual_time():
    async def main():
        queue = asyncio.Queue(1)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(30):
                await queue.get()
        return now()

    assert run_virtual(main()) == 30
