"""The whole run over simulated parts: schedules, staleness, failures, deadlines, stop and resume."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from fakes import Books, FakeCheckpoints, FakeEngine, FakePool, FakeScorer, FakeTrainer, Rig, hang, task

from rollart.algo.settings import AlgoSettings
from rollart.control.pipeline import PipelineSettings
from rollart.control.settings import SCHEDULES, RolloutSettings, ScheduleSettings
from rollart.core.clock import now
from rollart.core.errors import InvariantViolated, RunError, Stalled, TrainerLost
from rollart.core.events import (
    BatchTaken,
    CheckpointSaved,
    Event,
    GroupEnded,
    GroupOpened,
    Noted,
    RunEnded,
    Settled,
    SlotsFreed,
    StepEnded,
    TrajectoryEnded,
    TrajectoryStarted,
    TurnEnded,
    WeightsLive,
)
from rollart.core.types import Fate, Restored, Score, StalePolicy, Task, Trajectory, TrajectoryId, Unfinished
from rollart.sim.costs import StepCost, TrainCost
from rollart.sim.engine import SimEngine
from rollart.sim.faults import CALM, Faults
from rollart.sim.loop import run_virtual
from rollart.sim.parts import (
    RewardCost,
    SimCheckpoints,
    SimCluster,
    SimEnvironmentPool,
    SimRenderer,
    SimScorer,
    SimTasks,
    SimTrainer,
)
from rollart.sim.workload import TOY

STORMY = Faults(engine_mtbf=400.0, engine_repair=20.0, open_fails=0.05, step_fails=0.02, step_hangs=0.01,
                score_fails=0.05)
EVERY = [(name, stale) for name in SCHEDULES for stale in StalePolicy]
BOUNDED = [(name, stale) for name, stale in EVERY if name != "areal"]


def violated(name: str, what: str) -> None:
    """What the simulated parts see broken."""
    raise InvariantViolated(f"{name}: {what}")


def sim(name: str, stale: StalePolicy = StalePolicy.ABORT, *, seed: int = 0, faults: Faults = CALM, steps: int = 4,
        alpha: int | None = None, version: int = 0, publish_s: float = 8.0, step_s: float = 10.0,
        checkpoint_every: int = 0, **rollout: Any) -> Rig:
    """A run over simulated parts; slow turns, so that many are under way when weights change."""
    cost = StepCost(overhead_s=0.1)
    domains = {name: replace(load, max_turns=6, max_tokens=300) for name, load in TOY.items()}
    engines = [SimEngine(f"{pool}-{n}", pool, seed=seed, cost=cost, violated=violated,
                         says=lambda id, domain, turn: domains[domain].says(seed, id, turn))
               for pool in ("a", "b") for n in range(2)]
    trainer = SimTrainer(seed=seed, faults=faults, publish_s=publish_s, cost=TrainCost(fixed_s=step_s),
                         violated=violated)
    trainer.version = version
    cluster = SimCluster(engines, seed=seed, faults=faults)
    cluster.begin()
    return Rig(
        schedule=ScheduleSettings(name=name, stale=stale, alpha=alpha), version=version, engines=engines,
        rollout=RolloutSettings(**{"batch_groups": 3, "group_size": 3, "environment_seconds": 60.0,
                                   "max_failed_groups": 50, **rollout}),
        pipeline=PipelineSettings(steps=steps, checkpoint_every=checkpoint_every),
        affinity={"math": "a", "default": "b"},
        pool=SimEnvironmentPool(seed=seed, faults=faults, domains=domains, violated=violated),
        renderer=SimRenderer(), trainer=trainer,
        scorer=SimScorer(seed=seed, faults=faults, domains=domains, cost=RewardCost()), cluster=cluster, seed=seed,
        tasks=SimTasks({"math": 1.0, "game": 1.0, "code": 1.0}, domains, seed=seed),
        checkpoints=SimCheckpoints())


def play(make: Callable[[], Rig], *, errors: bool = False, counted: bool = True) -> Rig:
    """Run to the end; the scheduler's counts are compared with the events after each one."""

    async def main() -> Rig:
        rig = make()
        books = Books(rig) if counted else None
        rig.errors = await rig.run()  # type: ignore[attr-defined]
        if not errors:
            assert rig.errors == []  # type: ignore[attr-defined]
            check_end(rig)
            assert books is None or not books.waiting
        return rig

    return run_virtual(main())


def check_end(rig: Rig) -> None:
    """Nothing is left of a run: no environment, no turn, no KV, no group."""
    assert not getattr(rig.pool, "live", None)
    assert not rig.rollout.groups
    assert not rig.buffer.open
    for engine in rig.engines:
        assert (getattr(engine, "in_flight", 0), len(getattr(engine, "kv", ()))) == (0, 0)
    for seat in rig.proxy.routing.seats.values():
        assert seat.load == 0


def staleness(rig: Rig) -> list[int]:
    return [s for event in rig.log.of(BatchTaken) for s in event.staleness]


def fates(rig: Rig) -> dict[TrajectoryId, Fate]:
    """The final fate of every trajectory; each has exactly one."""
    out: dict[TrajectoryId, Fate] = {}
    for event in rig.log.of(TrajectoryEnded, Settled):
        if isinstance(event, Settled):
            told = dict.fromkeys(event.ids, event.fate)
        else:
            told = {} if event.fate is Fate.IN_FLIGHT else {event.trajectory.id: event.fate}
        assert not told.keys() & out.keys()
        out.update(told)
    return out


# -- schedules and staleness -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "stale"), EVERY)
@pytest.mark.parametrize("faults", [CALM, STORMY], ids=["calm", "stormy"])
def test_every_schedule_trains_exactly_what_it_should_and_tells_one_fate_each(
        name: str, stale: StalePolicy, faults: Faults) -> None:
    for seed in range(2):
        rig = play(lambda seed=seed: sim(name, stale, faults=faults, seed=seed, spares=seed))  # type: ignore[misc]
        told = fates(rig)
        assert sorted(told) == sorted(e.id for e in rig.log.of(TrajectoryStarted))
        assert sum(fate is Fate.TRAINED for fate in told.values()) == len(staleness(rig)) == 4 * 3 * 3
        assert [e.version for e in rig.log.of(StepEnded)] == [1, 2, 3, 4]
        assert rig.log.of(RunEnded) == [RunEnded(4, "finished")]


@pytest.mark.parametrize(("name", "stale", "alpha"), [
    (name, stale, alpha) for name, stale in BOUNDED for alpha in range(4)
    if SCHEDULES[name].fixed_alpha in (None, alpha)])
def test_i1_no_trained_trajectory_is_older_than_the_bound(name: str, stale: StalePolicy, alpha: int) -> None:
    for seed in range(3):
        rig = play(lambda seed=seed: sim(name, stale, alpha=alpha, seed=seed, faults=STORMY,  # type: ignore[misc]
                                         steps=6, group_size=2, batch_groups=2))
        assert len(staleness(rig)) == 6 * 2 * 2
        assert max(staleness(rig)) <= alpha
        for event in rig.log.of(BatchTaken):  # told by the trajectories themselves, not by the pipeline
            ended = {e.trajectory.id: e.trajectory for e in rig.log.of(TrajectoryEnded)}
            trained = [ended[id] for e in rig.log.of(Settled)
                       if e.fate is Fate.TRAINED and e.step == event.version for id in e.ids]
            assert all(event.version - (t.oldest or 0) <= alpha for t in trained)


@pytest.mark.parametrize("name", ["sync", "sync_plus"])
def test_synchronous_schedules_are_strictly_on_policy_and_stand_still_while_the_trainer_works(name: str) -> None:
    for spare_groups in (0, 2):
        rig = play(lambda spare_groups=spare_groups: sim(name, spare_groups=spare_groups))  # type: ignore[misc]
        assert set(staleness(rig)) == {0}
        training = False
        for event in rig.log.of(BatchTaken, WeightsLive, TrajectoryStarted, TurnEnded):
            if isinstance(event, BatchTaken | WeightsLive):
                training = isinstance(event, BatchTaken)
            else:
                assert not training, f"{event} while the trainer works"
        assert Fate.STALE not in fates(rig).values()


def test_sync_moves_turn_by_turn_and_scores_after_the_last_member() -> None:
    rig = play(lambda: sim("sync", steps=2))
    for step in (0, 1):
        born = {e.group for e in rig.log.of(GroupOpened) if e.born == step}
        turns = [e.turn for e in rig.log.of(TurnEnded) if e.id.group in born]
        assert turns == sorted(turns)
        last = max(at for at, e in rig.log.rows if isinstance(e, TurnEnded) and e.id.group in born)
        good = [at for at, e in rig.log.rows if isinstance(e, TrajectoryEnded) and e.trajectory.id.group in born
                and e.fate is Fate.IN_FLIGHT]
        assert min(good) > last


def test_sync_plus_scores_a_trajectory_when_it_ends() -> None:
    rig = play(lambda: sim("sync_plus", steps=1))
    assert min(rig.log.times(TrajectoryEnded)) < max(rig.log.times(TurnEnded))


def test_one_off_trains_exactly_one_version_behind_after_the_first_step_and_does_not_mix_rounds() -> None:
    rig = play(lambda: sim("one_off", steps=5))
    assert [set(e.staleness) for e in rig.log.of(BatchTaken)] == [{0}] + [{1}] * 4
    born = {e.group: e.born for e in rig.log.of(GroupOpened)}
    assert [{born[g] for g in e.groups} for e in rig.log.of(BatchTaken)] == [{0}, {0}, {1}, {2}, {3}]
    for turns in ({v for e in rig.log.of(TurnEnded) if e.id.group in batch.groups for v in (e.oldest, e.newest)}
                  for batch in rig.log.of(BatchTaken)):
        assert len(turns) == 1  # weights change between rounds only


def test_one_off_does_not_wait_for_a_round_that_nobody_will_train() -> None:
    rig = play(lambda: sim("one_off", steps=3))
    last, end = rig.log.times(StepEnded)[-1], rig.log.times(RunEnded)[0]
    assert end - last < 8.0 * 2 + 8.0 * 1.5 + 10.0  # publish, load, the closing of environments


@pytest.mark.parametrize("name", ["areal", "rollart"])
def test_continuous_schedules_roll_out_while_the_trainer_works(name: str) -> None:
    rig = play(lambda: sim(name, step_s=60.0))
    training, turns = False, 0
    for event in rig.log.of(BatchTaken, StepEnded, TurnEnded):
        training = isinstance(event, BatchTaken) or (training and isinstance(event, TurnEnded))
        turns += training and isinstance(event, TurnEnded)
    assert turns > 20


@pytest.mark.parametrize("stale", StalePolicy)
def test_rollart_aborts_stale_groups_or_waits_for_them(stale: StalePolicy) -> None:
    kinds = []
    for seed in range(6):
        rig = play(lambda seed=seed: sim("rollart", stale, alpha=1, steps=6, seed=seed,  # type: ignore[misc]
                                         faults=STORMY, batch_groups=2))
        kinds += list(fates(rig).values())
        tasks = {e.group: e.task for e in rig.log.of(GroupOpened)}
        for event in rig.log.of(GroupEnded):
            if "staleness" in event.reason:  # its task is the last of those that come again
                domain, number = event.source["returned"][-1]
                assert tasks[event.group].id == f"{domain}/{number}"
    assert (Fate.STALE in kinds) is (stale is StalePolicy.ABORT)


def test_i6_slots_are_freed_only_when_their_weights_are_live() -> None:
    rig = play(lambda: sim("rollart"))
    live = -1
    for event in rig.log.of(WeightsLive, SlotsFreed):
        if isinstance(event, WeightsLive):
            live = event.version
        else:
            assert event.version == live
    assert [e.groups for e in rig.log.of(SlotsFreed)] == [3] * 4


@pytest.mark.parametrize(("name", "stale"), EVERY)
def test_a_run_gives_the_same_events_again_from_its_seed(name: str, stale: StalePolicy) -> None:
    def rows() -> list[tuple[float, str]]:
        rig = play(lambda: sim(name, stale, faults=STORMY, steps=2))
        return [(at, repr(event)[:300]) for at, event in rig.log.rows]

    assert rows() == rows()


# -- stop and resume -------------------------------------------------------------------------------------------------


def interrupted(rig: Rig) -> Restored:
    """What the ledger would hand back: every group that is neither trained nor given up.

    A ready group that was evicted has its task in the task source's next recorded state.
    """
    over = {g for e in rig.log.of(BatchTaken) for g in e.groups}
    over |= {e.group for e in rig.log.of(GroupEnded) if not e.kept}
    evicted: set[int] = set()
    for event in rig.log.of(GroupOpened, GroupEnded, Settled):
        if isinstance(event, Settled):
            evicted |= {id.group for id in event.ids if event.fate is Fate.STALE}
        else:
            over |= evicted - {event.group}
            evicted &= {event.group}
    final = fates(rig)
    groups, source, next_group = [], None, 0
    for event in rig.log.of(GroupOpened, GroupEnded):
        source = event.source
        if isinstance(event, GroupOpened):
            next_group = max(next_group, event.group + 1)
    for event in rig.log.of(GroupOpened):
        if event.group not in over:
            finished = tuple(e.trajectory for e in rig.log.of(TrajectoryEnded)
                             if e.trajectory.id.group == event.group and e.trajectory.id not in final)
            started = sum(e.id.group == event.group for e in rig.log.of(TrajectoryStarted))
            groups.append(Unfinished(event.group, event.task, event.born, finished, started))
    return Restored(tuple(groups), source, next_group)


@pytest.mark.parametrize(("name", "stale"), EVERY)
def test_stopped_at_any_moment_it_ends_cleanly_and_a_resume_loses_and_repeats_no_task(
        name: str, stale: StalePolicy) -> None:
    chance = random.Random(name + stale)

    async def begin(seconds: float) -> Rig:
        rig = sim(name, stale, faults=STORMY, steps=4)
        Books(rig)
        asyncio.get_running_loop().call_later(seconds, rig.pipeline.stop)
        assert await rig.run() == []
        check_end(rig)
        return rig

    async def go_on(before: Rig) -> Rig:
        rig = sim(name, stale, faults=STORMY, steps=4, version=before.buffer.version)
        restored = interrupted(before)
        Books(rig, restored)
        assert await rig.run(restored) == []
        check_end(rig)
        return rig

    for _ in range(4):
        before = run_virtual(begin(chance.uniform(0.0, 250.0)))
        done = before.buffer.version
        if before.log.of(RunEnded) == [RunEnded(4, "finished")]:
            continue
        assert before.log.of(RunEnded) == [RunEnded(done, "interrupted")]
        running = {e.id for e in before.log.of(TrajectoryStarted)} - fates(before).keys()
        assert running == {e.trajectory.id for e in before.log.of(TrajectoryEnded) if e.fate is Fate.IN_FLIGHT
                           } - fates(before).keys()
        assert before.log.of(CheckpointSaved)[-1].version == done
        after = run_virtual(go_on(before))
        trained = [g for rig in (before, after) for e in rig.log.of(BatchTaken) for g in e.groups]
        assert len(trained) == len(set(trained)) == 4 * 3
        tasks = {e.group: e.task.id for rig in (before, after) for e in rig.log.of(GroupOpened)}
        assert len({tasks[g] for g in trained}) == len(trained)
        ids = [e.id for rig in (before, after) for e in rig.log.of(TrajectoryStarted)]
        assert len(ids) == len(set(ids))


def test_an_interrupted_run_leaves_finished_members_and_ready_groups_in_flight() -> None:
    async def main() -> None:
        pool = FakePool(trouble=lambda stage, number: "hang" if stage == "step" and number in (3, 5, 7) else "")
        rig = Rig(pool=pool)
        asyncio.get_running_loop().call_later(25.0, rig.pipeline.stop)
        assert await rig.run() == []
        assert rig.log.of(RunEnded) == [RunEnded(0, "interrupted")]
        good = {e.trajectory.id for e in rig.log.of(TrajectoryEnded) if e.fate is Fate.IN_FLIGHT}
        assert {str(id) for id in good} == {"g0.0", "g0.1", "g1.0", "g2.0", "g3.0"}
        assert not rig.log.of(Settled)
        assert [e.group for e in rig.log.of(GroupEnded)] == [0]
        assert list(rig.buffer.ready) == [0]
        assert rig.rollout.unsettled == len(good)

    run_virtual(main())


def test_stop_before_the_first_batch_ends_at_once_and_is_resumable() -> None:
    async def main() -> None:
        rig = sim("rollart")
        rig.pipeline.stop()
        assert await rig.run() == []
        assert rig.log.of(RunEnded) == [RunEnded(0, "interrupted")]
        assert not rig.log.of(BatchTaken)

    run_virtual(main())


def test_checkpoints_are_saved_when_due_and_at_the_end_once_each() -> None:
    async def main(every: int, steps: int) -> list[int]:
        rig = Rig(pipeline=PipelineSettings(steps=steps, checkpoint_every=every), checkpoints=FakeCheckpoints())
        assert await rig.run() == []
        assert [e.version for e in rig.log.of(CheckpointSaved)] == rig.trainer.saved
        return rig.trainer.saved

    assert run_virtual(main(2, 5)) == [2, 4, 5]
    assert run_virtual(main(2, 4)) == [2, 4]
    assert run_virtual(main(0, 3)) == [3]


# -- things that hang or break ---------------------------------------------------------------------------------------


def test_s2_one_hung_environment_of_16_changes_no_step_beyond_its_replacement_and_its_error_names_it() -> None:
    async def times(hung: int | None) -> tuple[list[float], Rig]:
        pool = FakePool(trouble=lambda stage, number: "hang" if stage == "step" and number == hung else "")
        rig = Rig(rollout=RolloutSettings(batch_groups=2, group_size=4, environment_seconds=30.0), pool=pool,
                  schedule=ScheduleSettings(alpha=3), pipeline=PipelineSettings(steps=24, checkpoint_every=0))
        assert await rig.run() == []
        return rig.log.times(StepEnded), rig

    calm, _ = run_virtual(times(None))
    hung, rig = run_virtual(times(5))
    assert len(hung) == 24
    episode = 12.0
    delays = [b - a for a, b in zip(calm, hung, strict=True)]
    assert max(delays) <= 30.0 + episode
    assert max(delays[12:]) <= max(delays[:12]) + 0.2  # and it does not add up
    failed = [e.trajectory for e in rig.log.of(TrajectoryEnded) if e.fate is Fate.FAILED]
    assert [str(t.id) for t in failed] == ["g1.1"]
    assert failed[0].error.startswith("EnvironmentFailed: g1.1 (game/1) after ")
    assert "environment gave no answer within 30 s" in failed[0].error


@pytest.mark.parametrize(("verb", "message"), [
    ("step", "step 0: no answer within 3600 s"), ("publish", "publish of version 1: no answer in 1800 s"),
    ("save", "checkpoint 1: no answer within 3600 s"), ("retire", "retiring version 0: no answer in 1800 s")])
@pytest.mark.parametrize("name", list(SCHEDULES))
def test_i7_a_stuck_trainer_ends_the_run_with_an_error_that_names_what_it_was_asked(
        name: str, verb: str, message: str) -> None:
    async def main() -> None:
        rig = Rig(trainer=FakeTrainer(hangs=verb), checkpoints=FakeCheckpoints(),
                  schedule=ScheduleSettings(name=name), pipeline=PipelineSettings(steps=5, checkpoint_every=1))
        errors = await rig.run()
        assert [type(e) for e in errors] == [TrainerLost]
        assert message in str(errors[0])
        rig.pool.check_closed()

    run_virtual(main())


@pytest.mark.parametrize("stuck", ["open", "environment", "generate", "score"])
@pytest.mark.parametrize("name", list(SCHEDULES))
def test_i7_a_stage_that_is_stuck_everywhere_ends_the_run_and_is_named(name: str, stuck: str) -> None:
    async def main() -> None:
        at = {"open": "open", "environment": "step"}.get(stuck)
        engine = FakeEngine()
        if stuck == "generate":
            engine.generate = lambda request: hang()  # type: ignore[method-assign, assignment]
        rig = Rig(pool=FakePool(trouble=lambda stage, _: "hang" if stage == at else ""), engines=[engine],
                  scorer=FakeScorer(trouble=lambda _: "hang" if stuck == "score" else ""),
                  schedule=ScheduleSettings(name=name), rollout=RolloutSettings(batch_groups=2, group_size=2))
        errors = await rig.run()
        assert errors
        assert all(isinstance(e, RunError) for e in errors)
        assert f"{stuck} gave no answer within" in str(errors[0]) or f" in {stuck} for " in str(errors[0])
        rig.pool.check_closed()

    run_virtual(main())


def test_i7_a_full_batch_that_does_not_come_names_who_waits_and_the_oldest_trajectories() -> None:
    async def main() -> None:
        pool = FakePool(trouble=lambda stage, number: "hang" if stage == "step" and number == 0 else "")
        rig = Rig(pool=pool, rollout=RolloutSettings(batch_groups=4, group_size=2, environment_seconds=900.0,
                                                     stall_seconds=100.0), schedule=ScheduleSettings(alpha=0))
        errors = await rig.run()
        assert [type(e) for e in errors] == [Stalled]
        assert "train waited 100 s for a full batch of 4 groups: g0.0 (game/0) in environment" in str(errors[0])
        pool.check_closed()

    run_virtual(main())


def test_i7_an_optimizer_step_longer_than_the_stall_limit_is_no_stall() -> None:
    async def main() -> None:
        rig = Rig(trainer=FakeTrainer(step_s=3000.0),
                  rollout=RolloutSettings(batch_groups=2, group_size=2, stall_seconds=500.0))
        assert await rig.run() == []

    run_virtual(main())


def test_the_loss_of_every_engine_for_a_while_only_delays_the_run() -> None:
    async def main() -> None:
        engines = [FakeEngine(f"e{n}", token_s=2.0) for n in range(2)]
        rig = Rig(engines=engines, pipeline=PipelineSettings(steps=5, checkpoint_every=0))
        for at in (12.0, 44.0, 60.0):
            for engine in engines:
                asyncio.get_running_loop().call_later(at, rig.cluster.crash, engine.id)
        assert await rig.run() == []
        assert rig.supervisor.restarts >= 6
        assert rig.proxy.moved > 0

    run_virtual(main())


@pytest.mark.parametrize("kind", [KeyError, InvariantViolated])
def test_s9_a_raising_worker_ends_the_run_at_once_with_its_own_error(kind: type[Exception]) -> None:
    class Broken(FakeScorer):
        async def score(self, trajectory: Trajectory) -> Any:
            if trajectory.id == TrajectoryId(3, 1):
                raise kind("a bug of ours")
            return await super().score(trajectory)

    async def main() -> None:
        rig = Rig(scorer=Broken())
        errors = await rig.run()
        assert [type(e) for e in errors] == [kind]
        assert "a bug of ours" in str(errors[0])
        assert now() < 30.0
        rig.pool.check_closed()
        assert not rig.log.of(RunEnded)

    run_virtual(main())


def test_s9_a_journal_that_raises_at_any_event_ends_the_run_with_that_error() -> None:
    async def main(at: int) -> bool:
        rig = Rig(pipeline=PipelineSettings(steps=2, checkpoint_every=1), checkpoints=FakeCheckpoints())
        seen = 0

        def on(event: Event) -> None:
            nonlocal seen
            seen += 1
            if seen == at:
                raise InvariantViolated(f"I9: at event {at}, {type(event).__name__}")

        rig.log.on = on
        try:
            await rig.pipeline.run()
        except InvariantViolated as alone:
            return f"at event {at}," in str(alone)
        except BaseExceptionGroup as group:
            return f"at event {at}," in repr(group.exceptions)
        return seen < at

    for at in range(1, 140, 3):
        assert run_virtual(main(at)), f"the error at event {at} was lost"


def test_s9_failures_without_an_end_stop_the_run_with_number_key_and_reason() -> None:
    async def main() -> None:
        pool = FakePool(trouble=lambda stage, number: "fail" if stage == "first" else "")
        rig = Rig(pool=pool, rollout=RolloutSettings(batch_groups=2, group_size=2, max_failed_groups=5))
        (error,) = await rig.run()
        assert isinstance(error, RunError)
        for part in (" tasks in a row", "rollout.max_failed_groups = 5", "broke in first"):
            assert part in str(error)

    run_virtual(main())


def test_a_finished_run_settles_the_surplus_and_gives_its_tasks_back() -> None:
    rig = play(lambda: sim("rollart", alpha=2))
    over = {e.task.id for e in rig.log.of(GroupOpened)} - {
        e.task.id for e in rig.log.of(GroupOpened) if e.group in {g for b in rig.log.of(BatchTaken) for g in b.groups}}
    back: list[Task] = []
    while len(back) < len(over):
        back.append(rig.tasks.next())
    assert {t.id for t in back} == over
    assert task(0).id not in over


def test_s9_batches_with_nothing_to_train_on_are_told_at_the_first_and_end_the_run_in_the_end() -> None:
    async def main() -> None:
        rig = Rig(scorer=FakeScorer(), algo=AlgoSettings(filter="zero_variance"),
                  rollout=RolloutSettings(batch_groups=2, group_size=1),
                  pipeline=PipelineSettings(steps=9, checkpoint_every=0, max_empty_batches=3))
        (error,) = await rig.run()
        assert isinstance(error, RunError)
        assert str(error).startswith("3 batches in a row had nothing to train on (2 trajectories: zero variance): ")
        assert "pipeline.max_empty_batches = 3" in str(error)
        assert rig.trainer.version == 3
        (note,) = rig.log.of(Noted)
        assert "step 1 had nothing to train on (2 trajectories: zero variance)" in note.text

    run_virtual(main())


def test_a_batch_with_something_in_it_forgives_the_empty_ones_before_it() -> None:
    class Sometimes(FakeScorer):
        async def score(self, t: Trajectory) -> Score:
            made = await super().score(t)
            return made if t.id.group % 3 == 2 else replace(made, value=1.0)

    async def main() -> None:
        rig = Rig(scorer=Sometimes(), algo=AlgoSettings(filter="zero_variance"),
                  rollout=RolloutSettings(batch_groups=1, group_size=2),
                  pipeline=PipelineSettings(steps=9, checkpoint_every=0, max_empty_batches=3))
        assert await rig.run() == []
        assert len(rig.log.of(Noted)) == 3

    run_virtual(main())


def test_updates_that_were_left_out_are_told_and_no_checkpoint_is_made_of_them() -> None:
    class Diverging(FakeTrainer):
        async def step(self, batch: Any) -> Any:
            report = await super().step(batch)
            return replace(report, metrics={"skipped": float(batch.version == 1), "updates": 0.0})

    async def main() -> None:
        checkpoints = FakeCheckpoints()
        rig = Rig(trainer=Diverging(), checkpoints=checkpoints,
                  pipeline=PipelineSettings(steps=4, checkpoint_every=1))
        assert await rig.run() == []
        assert [event.version for event in rig.log.of(CheckpointSaved)] == [1, 3, 4]
        (note,) = rig.log.of(Noted)
        assert note.text.startswith("step 2: 1 updates were left out, as their loss or gradient was not finite")

    run_virtual(main())
