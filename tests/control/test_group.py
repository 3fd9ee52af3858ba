"""One group: the first good members, spares, replacements, and an end that tells every fate."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

import pytest
from fakes import FakePool, FakeScorer, Rig, task, trajectory

from rollart.control.group import GroupRun
from rollart.control.settings import RolloutSettings
from rollart.core.clock import now
from rollart.core.errors import InvariantViolated
from rollart.core.events import Settled, TrajectoryEnded, TrajectoryStarted
from rollart.core.types import Fate, Outcome, TrajectoryId, Version
from rollart.sim.loop import run_virtual


class Setup:
    """A group over fakes, its engine up. Make it inside the loop."""

    def __init__(self, *, pool: FakePool | None = None, scorer: FakeScorer | None = None, finished: Any = (),
                 started: int = 0, **settings: Any) -> None:
        settings = {"batch_groups": 1, "group_size": 3, "open_attempts": 1, **settings}
        self.rig = Rig(rollout=RolloutSettings(**settings), pool=pool, scorer=scorer)
        self.log = self.rig.log
        self.ages: list[Version | None] = []
        self.group = GroupRun(5, task(5), 0, self.rig.services, on_age=lambda id, oldest: self.ages.append(oldest),
                              finished=finished, started=started)

    async def run(self) -> bool:
        await self.rig.serve()
        try:
            return await self.group.run()
        finally:
            await self.group.stop()

    def fates(self) -> dict[str, Fate]:
        """By member; each that was started has exactly one."""
        ended = self.log.of(TrajectoryEnded)
        assert sorted(e.trajectory.id for e in ended) == [e.id for e in self.log.of(TrajectoryStarted)]
        assert not self.group.members
        self.rig.pool.check_closed()
        return {str(e.trajectory.id): e.fate for e in ended}


def fails(*members: int, stage: str = "step") -> FakePool:
    """Environments are numbered like the members that open them."""
    return FakePool(trouble=lambda at, number: "fail" if at == stage and number in members else "")


def play(check: Callable[[Setup, bool], None], **parts: Any) -> None:
    async def main() -> None:
        s = Setup(**parts)
        check(s, await s.run())

    run_virtual(main())


def test_the_first_good_members_are_kept_and_spares_cancelled_and_counted() -> None:
    def slow(stage: str, number: int) -> str:
        return "hang" if stage == "step" and number in (0, 3) else ""

    def check(s: Setup, good: bool) -> None:
        assert good
        assert [m.id.member for m in s.group.good] == [1, 2, 4]
        assert s.fates() == {"g5.0": Fate.CANCELLED, "g5.1": Fate.IN_FLIGHT, "g5.2": Fate.IN_FLIGHT,
                             "g5.3": Fate.CANCELLED, "g5.4": Fate.IN_FLIGHT}
        assert (s.group.dispatched, s.group.in_flight, s.group.failures) == (5, 3, 0)
        aborted = [e.trajectory for e in s.log.of(TrajectoryEnded) if e.fate is Fate.CANCELLED]
        assert {(t.outcome, t.error) for t in aborted} == {(Outcome.ABORTED, "spare")}
        assert now() < 20.0  # not the deadline of the hung ones

    play(check, pool=FakePool(trouble=slow), spares=2)


def test_spares_that_end_at_the_same_instant_are_cancelled_not_kept() -> None:
    def check(s: Setup, good: bool) -> None:
        assert good
        assert [m.id.member for m in s.group.good] == [0, 1, 2]
        assert list(s.fates().values()) == [Fate.IN_FLIGHT] * 3 + [Fate.CANCELLED] * 2

    play(check, spares=2)


def test_a_failed_member_is_replaced_and_never_a_reward_of_0() -> None:
    def check(s: Setup, good: bool) -> None:
        assert good
        assert [m.id.member for m in s.group.good] == [0, 2, 3]
        assert s.fates()["g5.1"] is Fate.FAILED
        assert all(m.score is not None for m in s.group.good)
        assert s.group.errors == ["EnvironmentFailed: environment 1 broke in step"]

    play(check, pool=fails(1))


def test_failed_scores_are_replaced_too() -> None:
    def check(s: Setup, good: bool) -> None:
        assert good
        assert [m.id.member for m in s.group.good] == [1, 2, 3]
        assert s.fates()["g5.0"] is Fate.FAILED

    play(check, scorer=FakeScorer(trouble=lambda t: "fail" if t.id.member == 0 else ""))


@pytest.mark.parametrize(("spares", "chance"), [(0, 0.430), (2, 0.930)])
def test_a7_spares_raise_the_chance_that_all_8_members_are_good(spares: int, chance: float) -> None:
    started, whole = 8 + spares, 0.0
    for failing in range(started + 1):
        got: list[bool] = []
        play(lambda s, good, got=got: got.append(good), pool=fails(*range(failing)), group_size=8, spares=spares,
             max_replacements=0)
        whole += got[0] * math.comb(started, failing) * 0.1 ** failing * 0.9 ** (started - failing)
    assert whole == pytest.approx(chance, abs=5e-4)


@pytest.mark.parametrize(("replacements", "good"), [(0, False), (1, False), (2, True)])
def test_replacements_end_at_their_limit(replacements: int, good: bool) -> None:
    def check(s: Setup, got: bool) -> None:
        assert got is good
        assert s.group.dispatched == 3 + min(replacements, 2)
        assert s.group.failures == 2
        assert list(s.fates().values()).count(Fate.FAILED) == 2

    play(check, pool=fails(0, 1), max_replacements=replacements)


@pytest.mark.parametrize(("enough", "good"), [(0, False), (2, True), (1, True), (3, False)])
def test_a_group_whose_replacements_are_used_up_counts_with_min_members(enough: int, good: bool) -> None:
    def check(s: Setup, got: bool) -> None:
        assert got is good
        assert len(s.group.good) == 2
        assert list(s.fates().values()).count(Fate.FAILED) == 3

    play(check, pool=fails(0, 3, 4), max_replacements=2, min_members=enough)


def test_min_members_does_not_cut_off_members_that_still_run() -> None:
    def check(s: Setup, good: bool) -> None:
        assert good
        assert len(s.group.good) == 3

    play(check, pool=fails(0), max_replacements=1, min_members=1)


def test_a_given_up_group_tells_the_fate_of_its_good_members_once() -> None:
    def check(s: Setup, good: bool) -> None:
        assert not good
        s.group.end_fate, s.group.end_reason = Fate.FAILED, "1 member failed"
        s.group.give_up()
        s.group.give_up()
        assert s.log.of(Settled) == [Settled((TrajectoryId(5, 1), TrajectoryId(5, 2)), Fate.FAILED, "1 member failed")]
        assert s.group.in_flight == 0

    play(check, pool=fails(0), max_replacements=0)


def test_restored_members_count_and_ids_go_on_from_started() -> None:
    def check(s: Setup, good: bool) -> None:
        assert good
        assert [e.id.member for e in s.log.of(TrajectoryStarted)] == [7, 8]
        assert [m.id.member for m in s.group.good] == [1, 7, 8]
        assert s.group.dispatched == 2
        assert list(s.fates()) == ["g5.7", "g5.8"]

    play(check, finished=[trajectory(5, 1)], started=7)


def test_a_complete_restored_group_starts_nothing() -> None:
    def check(s: Setup, good: bool) -> None:
        assert good
        assert not s.log.of(TrajectoryStarted)

    play(check, finished=[trajectory(5, n) for n in range(3)], started=3, spares=2)


def test_the_groups_age_is_that_of_members_that_may_still_be_trained() -> None:
    async def main() -> None:
        s = Setup(pool=fails(0))
        running = asyncio.create_task(s.run())
        await asyncio.sleep(3.0)
        assert s.group.oldest is None  # nothing sampled yet
        await running
        assert s.group.oldest == 0
        assert set(s.ages) == {0}

    run_virtual(main())


def test_i3_a_group_stopped_at_any_moment_has_told_every_fate_and_closed_every_environment() -> None:
    async def main(at: float, again: float) -> set[Fate]:
        s = Setup(pool=fails(1), spares=1)
        running = asyncio.create_task(s.run())
        for moment in (at, at + again):
            asyncio.get_running_loop().call_later(moment, running.cancel)
        await asyncio.wait([running])
        return set(s.fates().values())

    seen = [run_virtual(main(at * 0.5 + 0.25, again)) for at in range(60) for again in (0.0, 0.6)]
    assert {fate for fates in seen for fate in fates} == {Fate.IN_FLIGHT, Fate.FAILED, Fate.CANCELLED}


def test_our_own_mistake_in_a_member_ends_the_group_with_it_even_while_it_is_cancelled() -> None:
    async def main() -> None:
        s = Setup()

        async def broken(*_: object) -> None:
            try:
                await asyncio.sleep(1000.0)
            finally:
                raise InvariantViolated("I9: found while it was cancelled")

        s.rig.scorer.score = broken
        running = asyncio.create_task(s.run())
        await asyncio.sleep(30.0)
        running.cancel()
        with pytest.raises(InvariantViolated, match="I9"):
            await running
        assert len(s.log.of(TrajectoryEnded)) == 3

    run_virtual(main())
