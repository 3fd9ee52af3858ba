"""The rollout scheduler: slots stay full, every group ends once, tasks are neither lost nor doubled."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
from fakes import Books, FakePool, FakeScorer, Rig, mix, task, trajectory

from rollart.algo.settings import AlgoSettings
from rollart.control.settings import RolloutSettings, ScheduleSettings
from rollart.core.errors import EnvironmentFailed, InvariantViolated, RunError
from rollart.core.events import (
    BatchTaken,
    Event,
    GroupEnded,
    GroupOpened,
    GroupReady,
    Settled,
    TrajectoryEnded,
    TrajectoryStarted,
)
from rollart.core.types import Fate, Outcome, Restored, Score, StalePolicy, Task, Trajectory, Unfinished
from rollart.sim.loop import run_virtual


def small(**settings: Any) -> RolloutSettings:
    return RolloutSettings(**{"batch_groups": 1, "group_size": 2, "open_attempts": 1, "max_replacements": 0,
                              **settings})


def play(story: Callable[[Rig], Awaitable[None]], *, restored: Restored | None = None, crashes: bool = False,
         **parts: Any) -> Rig:
    """Roll out while `story` runs, then stop; the counts are compared with the events after each one.

    `crashes`: a run that ends with our own mistake leaves it to a resume to settle its books.
    """

    async def main() -> Rig:
        rig = Rig(**{"rollout": small(), **parts})
        await rig.serve()
        books = None if crashes else Books(rig, restored)
        if restored:
            rig.rollout.restore(restored)
        async with asyncio.TaskGroup() as nursery:
            rolling = nursery.create_task(rig.rollout.run(nursery))
            await story(rig)
            rolling.cancel()
            await rig.rollout.stop(keep=False)
        assert books is None or books.checks > 0
        assert not rig.buffer.open
        assert not rig.rollout.groups
        rig.pool.check_closed()
        return rig

    return run_virtual(main())


async def train(rig: Rig) -> None:
    """One step as the pipeline does it: take, step, publish, load."""
    groups = rig.buffer.take()
    assert rig.buffer.evict() == ([], [])
    rig.log.emit(BatchTaken(rig.buffer.version, tuple(g.id for g in groups), (), 0.0))
    rig.trainer.version += 1
    rig.buffer.advance(rig.trainer.version)
    await rig.serve()
    rig.buffer.live(rig.trainer.version)
    rig.changed.notify()


def wait(seconds: float) -> Callable[[Rig], Awaitable[None]]:
    return lambda rig: asyncio.sleep(seconds)


def ended(rig: Rig) -> dict[int, GroupEnded]:
    found = rig.log.of(GroupEnded)
    assert sorted(e.group for e in found) == sorted(e.group for e in rig.log.of(GroupOpened))
    return {e.group: e for e in found}


def test_slots_are_kept_full_and_never_more() -> None:
    async def story(rig: Rig) -> None:
        await asyncio.sleep(0.1)
        assert len(rig.buffer.open) == 6
        await asyncio.sleep(30.0)
        assert (len(rig.buffer.open), len(rig.buffer.ready)) == (0, 6)
        await train(rig)
        await asyncio.sleep(0.1)
        assert (len(rig.buffer.open), len(rig.buffer.ready)) == (2, 4)
        assert [e.group for e in rig.log.of(GroupOpened)] == list(range(8))

    play(story, rollout=small(batch_groups=2), schedule=ScheduleSettings(alpha=2))


@pytest.mark.parametrize(("attempts", "tasks"), [(1, ["game/0", "game/1", "game/2"]), (2, ["game/0", "game/1"] * 2)])
def test_a_failed_group_s_task_comes_again_until_its_attempts_are_used_up(attempts: int, tasks: list[str]) -> None:
    pool = FakePool(trouble=lambda stage, number: "fail" if stage == "step" and number == 1 else "")
    rig = play(wait(30.0), pool=pool, rollout=small(task_attempts=attempts))
    end = ended(rig)[0]
    assert not end.kept
    told = "1 members failed, the last: EnvironmentFailed: environment 1 broke in step"
    assert end.reason == (f"quarantined after 1 failed groups: {told}" if attempts == 1 else told)
    assert Settled((trajectory(0, 0).id,), Fate.FAILED, end.reason) in rig.log.of(Settled)
    assert [e.task.id for e in rig.log.of(GroupOpened)] == tasks[:3]
    assert ended(rig)[1].kept
    assert ended(rig)[2].kept


def test_a_task_that_keeps_failing_is_quarantined_by_name_and_the_others_go_on() -> None:
    async def story(rig: Rig) -> None:
        for _ in range(6):
            await asyncio.sleep(20.0)
            await train(rig)

    class Refusing(FakePool):
        async def open(self, task: Task) -> Any:
            if task.id == "game/1":
                raise EnvironmentFailed("game/1 cannot be opened")
            return await super().open(task)

    rig = play(story, pool=Refusing(), rollout=small(task_attempts=3), schedule=ScheduleSettings(alpha=20))
    tried = [e for e in rig.log.of(GroupOpened) if e.task.id == "game/1"]
    assert len(tried) == 3
    reasons = [ended(rig)[e.group].reason for e in tried]
    assert [reason.startswith("quarantined after 3 failed groups: ") for reason in reasons] == [False, False, True]
    assert all(end.kept or end.group in [e.group for e in tried] for end in ended(rig).values() if end.reason !=
               "the run has ended")


def test_a_group_dropped_for_staleness_gives_its_task_back_before_new_ones() -> None:
    async def story(rig: Rig) -> None:
        await asyncio.sleep(4.0)
        rig.rollout.drop([1], Fate.STALE, "beyond the staleness bound")
        rig.rollout.drop([1, 99], Fate.STALE, "beyond the staleness bound")
        await asyncio.sleep(20.0)

    rig = play(story)
    assert [e.task.id for e in rig.log.of(GroupOpened)] == ["game/0", "game/1", "game/1"]
    assert (ended(rig)[1].kept, ended(rig)[1].reason) == (False, "beyond the staleness bound")
    fates = {str(e.trajectory.id): e.fate for e in rig.log.of(TrajectoryEnded)}
    assert fates["g1.0"] is fates["g1.1"] is Fate.STALE


def test_an_open_group_beyond_the_bound_is_dropped_at_its_next_turn() -> None:
    async def story(rig: Rig) -> None:
        await asyncio.sleep(3.0)
        rig.buffer.version = rig.buffer.due = 2  # two versions passed during the first turns
        await asyncio.sleep(5.0)

    rig = play(story)
    assert {e.reason for e in rig.log.of(GroupEnded) if e.group < 2} == {"beyond the staleness bound"}
    assert rig.log.of(GroupOpened)[2].task.id == "game/0"


def test_a_group_cancelled_before_its_first_step_leaks_nothing() -> None:
    async def main() -> None:
        rig = Rig(rollout=small())
        dropped = []

        def on(event: Event) -> None:
            if isinstance(event, GroupOpened) and event.group == 1:  # its task has not begun when this runs
                asyncio.get_running_loop().call_soon(rig.rollout.drop, [1], Fate.STALE, "too late")
                dropped.append(event.task)

        rig.log.on = on
        await rig.serve()
        async with asyncio.TaskGroup() as nursery:
            rolling = nursery.create_task(rig.rollout.run(nursery))
            await asyncio.sleep(2.0)
            assert rig.log.of(GroupEnded)[0] == GroupEnded(1, False, "too late", rig.log.of(GroupEnded)[0].source)
            assert not [e for e in rig.log.of(TrajectoryStarted) if e.id.group == 1]
            assert rig.log.of(GroupOpened)[2].task == dropped[0]
            assert sorted(rig.buffer.open) == sorted(rig.rollout.groups) == [0, 2]
            rolling.cancel()
            await rig.rollout.stop(keep=False)
        assert (rig.rollout.unsettled, rig.rollout.dispatched) == (0, 4)

    run_virtual(main())


def test_s9_too_many_failed_tasks_in_a_row_end_the_run_with_the_number_and_the_key() -> None:
    pool = FakePool(trouble=lambda stage, number: "fail" if stage == "step" else "")
    with pytest.raises(ExceptionGroup) as caught:
        play(wait(1000.0), pool=pool, rollout=small(max_failed_groups=4))
    (error,) = caught.value.exceptions
    assert isinstance(error, RunError)
    assert str(error).startswith("4 tasks in a row failed (rollout.max_failed_groups = 4); the last one: ")


class Partly(FakePool):
    """Tasks that `broken` names by their number cannot be opened; the others are well, and slow."""

    def __init__(self, broken: Callable[[int], bool], **settings: Any) -> None:
        super().__init__(**settings)
        self.broken = broken

    async def open(self, task: Task) -> Any:
        await asyncio.sleep(1.0)
        if self.broken(int(task.id.rsplit("/", 1)[1])):
            raise EnvironmentFailed(f"{task.id}: image not found")
        return await super().open(task)


def test_s9_broken_tasks_beside_good_ones_that_are_slow_do_not_end_a_run() -> None:
    """A third of the tasks fails within seconds, and the others take two hours: 16 good groups are under way at last,
    and more than max_failed_groups tasks have failed before the first of them was complete."""
    async def story(rig: Rig) -> None:
        await asyncio.sleep(3600.0)
        assert (len(rig.buffer.open), len(rig.buffer.ready)) == (16, 0)
        assert sum("quarantined" in e.reason for e in rig.log.of(GroupEnded)) >= 7
        await asyncio.sleep(2 * 3600.0)
        assert len(rig.buffer.ready) == 16

    pool = Partly(lambda number: number % 3 == 0, step_s=3600.0)
    play(story, pool=pool, rollout=small(batch_groups=8, max_failed_groups=4, environment_seconds=7200.0,
                                         episode_seconds=9000.0))


def test_s9_one_broken_task_counts_once_however_often_it_is_tried() -> None:
    rig = play(wait(60.0), pool=Partly(lambda number: number == 0), rollout=small(task_attempts=6, max_failed_groups=4),
               schedule=ScheduleSettings(alpha=9))
    assert sum("image not found" in e.reason for e in rig.log.of(GroupEnded)) == 6


def test_s9_when_all_are_broken_a_few_that_hang_put_the_end_off_by_a_few_tasks_only() -> None:
    pool = Partly(lambda number: number > 1, step_s=1e6)  # game/0 and game/1 hang
    with pytest.raises(ExceptionGroup) as caught:
        play(wait(1e5), pool=pool, rollout=small(batch_groups=4, max_failed_groups=4, environment_seconds=1e6,
                                                 episode_seconds=1e6))
    assert str(caught.value.exceptions[0]).startswith("12 tasks in a row failed (rollout.max_failed_groups = 4)")


def test_a_group_that_the_algorithm_cannot_use_has_failed_and_its_task_comes_again() -> None:
    class Negative(FakeScorer):
        async def score(self, t: Trajectory) -> Score:
            bad = t.task.id == "game/0" and t.id.member == 0
            return replace(await super().score(t), value=-0.5 if bad else float(t.id.member))

    rig = play(wait(40.0), scorer=Negative(), algo=AlgoSettings(advantage="maxrl"))
    assert [e.task.id for e in rig.log.of(GroupOpened)] == ["game/0", "game/1", "game/0", "game/2"]
    first, again = [ended(rig)[e.group] for e in rig.log.of(GroupOpened) if e.task.id == "game/0"]
    assert first.reason == ("advantage 'maxrl' cannot use the group's rewards: ConfigError: advantage 'maxrl' needs "
                            "rewards >= 0; got -0.5; set 'grpo'")
    assert again.reason.startswith("quarantined after 2 failed groups: advantage 'maxrl'")
    lost = [e for e in rig.log.of(Settled) if e.fate is Fate.FAILED]
    assert [[str(id) for id in e.ids] for e in lost] == [["g0.0", "g0.1"], ["g2.0", "g2.1"]]
    assert ended(rig)[1].kept
    assert ended(rig)[3].kept


def test_a_complete_group_in_between_forgives_the_failures_before_it() -> None:
    pool = FakePool(trouble=lambda stage, number: "fail" if stage == "step" and number % 4 == 0 else "")

    async def story(rig: Rig) -> None:
        for _ in range(7):
            await asyncio.sleep(30.0)
            await train(rig)

    rig = play(story, pool=pool, schedule=ScheduleSettings(alpha=20), rollout=small(max_failed_groups=20))
    failed = sum(not e.kept and "failed" in e.reason for e in rig.log.of(GroupEnded))
    assert failed > 7


def test_s9_our_own_mistake_in_a_group_ends_the_run_at_once_with_it() -> None:
    class Broken(FakeScorer):
        async def score(self, t: Trajectory) -> Any:
            raise InvariantViolated("I9: a bug")

    with pytest.raises(ExceptionGroup) as caught:
        play(wait(1e6), scorer=Broken(), crashes=True)
    assert {str(e) for e in caught.value.exceptions} == {"I9: a bug"}


def test_the_first_error_of_a_group_is_told_and_the_group_is_not_closed_over_it() -> None:
    """I3 would call members that still run at a GroupEnded a fault of ours, and hide the one that there was."""
    rigs = []

    class Broken(FakeScorer):
        async def score(self, t: Trajectory) -> Any:
            await asyncio.sleep(t.id.member)
            raise ValueError(f"member {t.id.member}")

    async def story(rig: Rig) -> None:
        rigs.append(rig)
        await asyncio.sleep(1e6)

    with pytest.raises(ExceptionGroup) as caught:
        play(story, scorer=Broken(), rollout=small(group_size=3), crashes=True)
    assert next(str(e) for e in caught.value.exceptions) == "member 0"
    assert not rigs[0].log.of(GroupEnded)
    assert {e.trajectory.id.member for e in rigs[0].log.of(TrajectoryEnded)} == {1, 2}
    rigs[0].pool.check_closed()


def test_what_a_subscriber_raises_when_a_group_ends_is_fatal_on_a_real_loop_too() -> None:
    async def main() -> None:
        quick = FakePool(open_s=0.0, first_s=0.0, step_s=0.0, close_s=0.0)
        rig = Rig(rollout=small(), pool=quick, scorer=FakeScorer(seconds=0.0))
        rig.engines[0].token_s = rig.engines[0].load_s = rig.trainer.publish_s = 0.0

        def on(event: Event) -> None:
            if isinstance(event, GroupEnded):
                raise InvariantViolated("I3: found at the end of a group")

        rig.log.on = on
        await rig.serve()
        with pytest.raises(ExceptionGroup) as caught:
            async with asyncio.timeout(5.0), asyncio.TaskGroup() as nursery:
                await rig.rollout.run(nursery)
        assert {str(e) for e in caught.value.exceptions} == {"I3: found at the end of a group"}

    asyncio.run(main())


@pytest.mark.parametrize("keep", [True, False])
def test_stop_ends_what_runs_and_keeps_or_settles_what_has_finished(keep: bool) -> None:
    """Member 0 of each group has finished, member 1 hangs."""
    pool = FakePool(trouble=lambda stage, number: "hang" if stage == "step" and number % 2 else "")

    async def main() -> None:
        rig = Rig(rollout=small(), pool=pool)
        await rig.serve()
        async with asyncio.TaskGroup() as nursery:
            rolling = nursery.create_task(rig.rollout.run(nursery))
            await asyncio.sleep(20.0)
            rolling.cancel()
            await rig.rollout.stop(keep=keep)
        fates = {str(e.trajectory.id): e.fate for e in rig.log.of(TrajectoryEnded)}
        assert fates == {"g0.0": Fate.IN_FLIGHT, "g0.1": Fate.CANCELLED, "g1.0": Fate.IN_FLIGHT,
                         "g1.1": Fate.CANCELLED}
        settled = [str(id) for e in rig.log.of(Settled) for id in e.ids]
        assert settled == ([] if keep else ["g0.0", "g1.0"])
        assert [e.reason for e in rig.log.of(GroupEnded)] == ([] if keep else ["the run has ended"] * 2)
        pool.check_closed()

    run_virtual(main())


def test_finished_members_that_wait_for_a_resume_stay_counted() -> None:
    pool = FakePool(trouble=lambda stage, number: "hang" if stage == "step" and number % 2 else "")

    async def main() -> None:
        rig = Rig(rollout=small(), pool=pool)
        await rig.serve()
        async with asyncio.TaskGroup() as nursery:
            rolling = nursery.create_task(rig.rollout.run(nursery))
            await asyncio.sleep(20.0)
            rolling.cancel()
            await rig.rollout.stop(keep=True)
        assert (rig.rollout.unsettled, rig.rollout.dispatched) == (2, 4)

    run_virtual(main())


# -- restore ---------------------------------------------------------------------------------------------------------


def left(id: int, *finished: Trajectory, started: int | None = None) -> Unfinished:
    return Unfinished(id, task(id), 1, finished, len(finished) if started is None else started)


def restore(*groups: Unfinished, version: int = 5, alpha: int = 2, batch: int = 2, seconds: float = 30.0,
            stale: StalePolicy = StalePolicy.ABORT) -> Rig:
    tasks = mix()
    for _ in range(20):
        tasks.next()
    return play(wait(seconds), version=version, rollout=small(batch_groups=batch),
                schedule=ScheduleSettings(alpha=alpha, stale=stale),
                restored=Restored(groups, tasks.state(), 20))


def opened(rig: Rig) -> dict[int, GroupOpened]:
    return {e.group: e for e in rig.log.of(GroupOpened)}


def test_restore_takes_over_complete_groups_without_starting_anything() -> None:
    rig = restore(left(10, trajectory(10, 0, 4), trajectory(10, 3, 5), started=4))
    assert opened(rig)[10].restored == 2
    assert [m.id.member for m in next(e.group for e in rig.log.of(GroupReady) if e.group.id == 10).members] == [0, 3]
    assert not [e for e in rig.log.of(TrajectoryStarted) if e.id.group == 10]


def test_restore_goes_on_with_partial_groups_and_with_their_ids() -> None:
    rig = restore(left(11, trajectory(11, 1, 4, number=11), started=5))
    assert [e.id.member for e in rig.log.of(TrajectoryStarted) if e.id.group == 11] == [5]
    members = next(e.group for e in rig.log.of(GroupReady) if e.group.id == 11).members
    assert [m.id.member for m in members] == [1, 5]
    assert opened(rig)[11].task == task(11)


@pytest.mark.parametrize(("oldest", "newest", "used"), [(3, 3, True), (2, 2, False), (2, 5, False), (5, 5, True),
                                                        (5, 6, False), (3, 6, False), (None, None, True)])
def test_restore_uses_members_within_the_bound_that_are_not_newer_than_the_checkpoint(
        oldest: int | None, newest: int | None, used: bool) -> None:
    """At version 5 with alpha 2."""
    rig = restore(left(12, trajectory(12, 0, oldest, newest), started=2))
    stale = [e for e in rig.log.of(Settled) if e.fate is Fate.STALE]
    assert opened(rig)[12].restored == int(used)
    assert [str(id) for e in stale for id in e.ids] == ([] if used else ["g12.0"])
    assert [e.id.member for e in rig.log.of(TrajectoryStarted) if e.id.group == 12] == ([2] if used else [2, 3])


def test_restore_does_not_use_a_member_that_is_not_good() -> None:
    unscored = Trajectory(trajectory(12, 0).id, task(12), trajectory(12, 0).prompt, trajectory(12, 0).start, (),
                          Outcome.FINISHED)
    assert opened(restore(left(12, unscored)))[12].restored == 0


def test_restore_opens_as_many_groups_as_there_are_slots_and_gives_the_other_tasks_back() -> None:
    many = [left(n, trajectory(n, 0, 5 - n % 3)) for n in range(10, 19)]
    rig = restore(*many, seconds=0.1)  # 6 slots
    assert list(opened(rig)) == [11, 14, 17, 10, 13, 16]  # oldest first
    back = {e.group: e for e in rig.log.of(GroupEnded) if e.reason == "resume: no slot"}
    assert sorted(back) == [12, 15, 18]
    cancelled = [str(id) for e in rig.log.of(Settled) if e.reason == "resume: no slot" for id in e.ids]
    assert sorted(cancelled) == ["g12.0", "g15.0", "g18.0"]
    assert [r[1] for r in back[18].source["returned"]] == [12, 15, 18]


def test_restored_groups_come_first_then_tasks_that_came_back_then_new_ones_under_new_ids() -> None:
    async def story(rig: Rig) -> None:
        await asyncio.sleep(0.1)

    rig = play(story, rollout=small(batch_groups=2), restored=Restored((left(10, trajectory(10, 0, 0)),), None, 20))
    assert list(opened(rig)) == [10, 20, 21, 22]
    assert [opened(rig)[n].task.id for n in (20, 21, 22)] == ["game/0", "game/1", "game/2"]


def test_restore_goes_on_in_the_task_stream_where_the_run_was() -> None:
    rig = restore(left(10, trajectory(10, 0, 5)), seconds=0.1)
    assert [e.task.id for e in rig.log.of(GroupOpened)] == ["game/10", *[f"game/{n}" for n in range(20, 25)]]


@pytest.mark.parametrize("batch", [1, 2])
def test_restore_under_wait_takes_no_more_old_groups_than_later_steps_can_train(batch: int) -> None:
    async def main() -> None:
        rig = Rig(version=5, rollout=small(batch_groups=batch),
                  schedule=ScheduleSettings(alpha=2, stale=StalePolicy.WAIT))
        await rig.serve()
        groups = [left(n, trajectory(n, 0, 3), trajectory(n, 1, 5)) for n in range(10, 10 + 3 * batch)]
        rig.rollout.restore(Restored(tuple(groups), None, 20))
        async with asyncio.TaskGroup() as nursery:
            rolling = nursery.create_task(rig.rollout.run(nursery))
            for _ in range(6):
                await rig.changed.until(lambda: not rig.buffer.missing(), who="test", what="a batch", seconds=100.0)
                await train(rig)
            rolling.cancel()
            await rig.rollout.stop(keep=False)
        stale = [id for e in rig.log.of(Settled) if e.fate is Fate.STALE for id in e.ids]
        assert len(stale) == 2 * 2 * batch  # one batch of them is in time, two are not

    run_virtual(main())


# -- what status and stalls read -------------------------------------------------------------------------------------


def test_what_runs_is_told_oldest_first_with_stage_and_age() -> None:
    pool = FakePool(trouble=lambda stage, number: "hang" if stage == "step" and number == 2 else "")

    async def story(rig: Rig) -> None:
        assert rig.rollout.explain() == "no trajectory is running"
        await asyncio.sleep(30.0)
        (one,) = rig.rollout.in_flight()
        assert (str(one.id), one.task, one.stage, one.turns, one.oldest) == ("g1.0", "game/1", "environment", 1, 0)
        assert (one.age_seconds, one.stage_seconds) == (30.0, 25.0)
        assert rig.rollout.explain() == "g1.0 (game/1) in environment for 25 s, 30 s old, 1 turns"

    play(story, pool=pool)
