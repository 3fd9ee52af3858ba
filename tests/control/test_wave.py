"""Barriers of the synchronous schedule."""

from __future__ import annotations

import asyncio
import random

import pytest
from fakes import FOREVER

from rollart.control.wave import Wave
from rollart.core.changed import Changed
from rollart.core.clock import now
from rollart.core.errors import Stalled
from rollart.sim.loop import run_virtual


def test_nobody_passes_a_barrier_before_all_have_arrived_or_left() -> None:
    async def main() -> None:
        wave, chance = Wave(Changed(), 1000.0), random.Random(0)
        at: dict[int, set[str]] = {}
        rolling: set[str] = set()

        async def member(name: str, turns: int) -> None:
            rolling.add(name)
            wave.join()
            for turn in range(turns):
                await asyncio.sleep(chance.uniform(0.0, 5.0))
                at.setdefault(turn, set()).add(name)
                expected = set(rolling)
                await wave.arrive(name)
                assert at[turn] >= expected & rolling
            rolling.discard(name)
            wave.leave()

        await asyncio.gather(*[member(f"m{i}", 1 + i % 4) for i in range(12)])
        assert len(at[0]) == 12

    run_virtual(main())


def test_a_member_that_is_cancelled_at_the_barrier_does_not_hold_the_others() -> None:
    async def main() -> None:
        wave = Wave(Changed(), 1000.0)
        passed = []

        async def member(seconds: float) -> None:
            wave.join()
            try:
                await asyncio.sleep(seconds)
                await wave.arrive("m")
                passed.append(now())
            finally:
                wave.leave()

        early, *others = [asyncio.create_task(member(s)) for s in (1.0, 5.0, 9.0)]
        await asyncio.sleep(2.0)
        early.cancel()
        await asyncio.wait([early, *others])
        assert early.cancelled()
        assert passed == [9.0, 9.0]

    run_virtual(main())


def test_rewards_wait_for_the_last_member() -> None:
    async def main() -> None:
        wave = Wave(Changed(), 1000.0)
        for _ in range(2):
            wave.join()
        asyncio.get_running_loop().call_later(3.0, wave.leave)
        asyncio.get_running_loop().call_later(7.0, wave.leave)
        await wave.all_left("m score")
        assert now() == 7.0
        await wave.all_left("m score")  # nobody is left: at once
        assert now() == 7.0

    run_virtual(main())


@pytest.mark.parametrize(("wait", "what"), [("arrive", "the other members of the wave"),
                                            ("all_left", "the last trajectory of the wave")])
def test_a_wave_that_never_comes_together_names_itself(wait: str, what: str) -> None:
    async def main() -> None:
        wave = Wave(Changed(), 50.0)
        wave.join()
        wave.join()
        await asyncio.wait_for(getattr(wave, wait)("g3.1 turn 2"), FOREVER)

    with pytest.raises(Stalled, match=f"g3.1 turn 2 waited 50 s for {what}"):
        run_virtual(main(), time_limit=2 * FOREVER)
