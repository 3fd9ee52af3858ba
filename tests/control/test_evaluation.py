"""Evaluation: one pinned version, beside training, never in its way (S6)."""

from __future__ import annotations

import asyncio

import pytest
from fakes import FakeCluster, FakeEngine, FakePool, FakeScorer, Log, Rig, hang, task, trajectory

from rollart.algo.intervals import wilson
from rollart.control.evaluation import Evaluator, summarise
from rollart.control.pipeline import PipelineSettings
from rollart.control.settings import RolloutSettings
from rollart.core.clock import now
from rollart.core.errors import InvariantViolated
from rollart.core.events import (
    BatchTaken,
    EvalEnded,
    EvalStarted,
    EvalTrajectory,
    RunEnded,
    StepEnded,
    TrajectoryEnded,
    TrajectoryStarted,
    WeightsLive,
)
from rollart.core.types import EvalResult, Outcome, Score
from rollart.sim.loop import run_virtual

TASKS = [task(n, domain) for domain in ("game", "math") for n in range(3)]


def rig(*, engine: FakeEngine | None = None, eval_pool: FakePool | None = None, steps: int = 4, eval_every: int = 1,
        scorer: FakeScorer | None = None, log: Log | None = None) -> Rig:
    return Rig(pipeline=PipelineSettings(steps=steps, checkpoint_every=0, eval_every=eval_every),
               rollout=RolloutSettings(batch_groups=2, group_size=2), eval_tasks=TASKS, scorer=scorer,
               eval_engines=[engine or FakeEngine("eval")], eval_pool=eval_pool, log=log)


def test_the_summary_is_per_domain_in_the_tasks_order_and_failed_episodes_are_not_solved() -> None:
    played = [trajectory(0, member, number=member) for member in range(4)]
    failed = trajectory(0, 4)
    failed = type(failed)(failed.id, task(9, "math"), failed.prompt, failed.start, (), Outcome.FAILED)
    solved = [type(t)(t.id, t.task, t.prompt, t.start, t.turns, t.outcome, Score(float(n), n == 3))
              for n, t in enumerate(played)]
    assert summarise([failed, *solved], 7) == (EvalResult("math", 7, 1, 0.0, 0.0, 1, (0.0,), wilson(0.0, 1)),
                                               EvalResult("game", 7, 4, 0.25, 1.5, 0, (0.25,), wilson(0.25, 4)))


def test_more_than_one_attempt_at_a_task_gives_pass_at_k() -> None:
    won = {0: (1, 0, 0), 1: (1, 1, 0), 2: (0, 0, 0)}  # successes of three attempts at each task
    played = [type(t)(t.id, task(number), t.prompt, t.start, t.turns, t.outcome, Score(float(success), bool(success)))
              for number, successes in won.items() for success in successes for t in [trajectory(0, 0)]]
    (result,) = summarise(played, 0)
    assert (result.tasks, result.success) == (3, 3 / 9)
    assert result.pass_at == pytest.approx(((1 / 3 + 2 / 3) / 3, (2 / 3 + 1) / 3, 2 / 3))


def test_each_task_gets_its_attempts() -> None:
    async def main() -> None:
        r = rig()
        await r.serve()
        assert r.evaluator is not None
        assert r.sync.current is not None
        evaluator = Evaluator(r.evaluator._s, TASKS, samples=2)
        results = await evaluator.run(r.sync.current, r.sync)
        assert [e.trajectory.task for e in r.log.of(EvalTrajectory)] == [t for t in TASKS for _ in range(2)]
        assert [(result.tasks, len(result.pass_at)) for result in results] == [(3, 2), (3, 2)]

    run_virtual(main())


def test_every_task_is_played_once_at_the_pinned_version_and_scored() -> None:
    async def main() -> None:
        r = rig()
        await r.serve()
        assert r.evaluator is not None
        assert r.sync.current is not None
        results = await r.evaluator.run(r.sync.current, r.sync)
        assert [e.trajectory.task for e in r.log.of(EvalTrajectory)] == TASKS
        assert results == (EvalResult("game", 0, 3, 1 / 3, 1 / 3, 0, (1 / 3,), wilson(1 / 3, 3)),
                           EvalResult("math", 0, 3, 2 / 3, 2 / 3, 0, (2 / 3,), wilson(2 / 3, 3)))
        assert not r.log.of(TrajectoryStarted, TrajectoryEnded)  # outside the ledger's counts
        assert (r.rollout.dispatched, len(r.buffer.open)) == (0, 0)
        assert {str(e.trajectory.id) for e in r.log.of(EvalTrajectory)} == {f"e0.{n}" for n in range(6)}

    run_virtual(main())


def test_no_more_episodes_run_at_once_than_wanted() -> None:
    async def main() -> None:
        r = rig()
        await r.serve()
        running: list[int] = []
        pool = FakePool()
        pool.trouble = lambda stage, number: running.append(len(pool.made) - sum(pool.closed.values())) or ""
        assert r.evaluator is not None
        assert r.sync.current is not None
        services = r.evaluator._s
        evaluator = Evaluator(type(services)(**{**vars(services), "environments": pool}), TASKS, concurrent=2)
        await evaluator.run(r.sync.current, r.sync)
        assert max(running) == 2
        pool.check_closed()

    run_virtual(main())
    with pytest.raises(ValueError, match="at least 1 concurrent episode; got 0"):
        Evaluator(None, TASKS, concurrent=0)  # type: ignore[arg-type]


def test_s6_all_episodes_of_an_evaluation_see_one_version_whatever_training_does() -> None:
    async def main() -> None:
        r = rig(eval_pool=FakePool(step_s=40.0))  # several training steps long
        assert await r.run() == []
        by_number: dict[int, set[int]] = {}
        for event in r.log.of(EvalTrajectory):
            by_number.setdefault(event.number, set()).update(
                turn.completion.oldest for turn in event.trajectory.turns)
            assert event.trajectory.newest == event.trajectory.oldest == event.version
        assert all(len(versions) == 1 for versions in by_number.values())
        assert by_number[max(by_number)] == {4}  # the finished policy is evaluated
        assert by_number[0] == {0}  # and the one before the first step

    run_virtual(main())


def test_s6_a_slow_evaluation_delays_no_training_step() -> None:
    async def steps(step_s: float) -> tuple[list[float], list[float], float]:
        r = rig(eval_pool=FakePool(step_s=step_s), eval_every=2, steps=6)
        assert await r.run() == []
        return r.log.times(BatchTaken, StepEnded, WeightsLive), r.log.times(EvalEnded), r.log.times(RunEnded)[0]

    quick, _, _ = run_virtual(steps(0.0))
    slow, ends, end = run_virtual(steps(50.0))
    assert slow == quick
    assert ends[0] > quick[-1]
    assert end == ends[-1]


def test_s6_an_evaluation_that_fails_altogether_delays_no_step_and_counts_its_failures() -> None:
    async def main() -> None:
        broken = FakePool(trouble=lambda stage, number: "fail" if stage == "step" else "")
        r = rig(eval_pool=broken)
        assert await r.run() == []
        for event in r.log.of(EvalEnded):
            assert [(x.tasks, x.failed, x.success) for x in event.results] == [(3, 3, 0.0)] * 2

    run_virtual(main())


def test_weights_are_kept_until_the_evaluation_engine_has_loaded_them() -> None:
    async def main() -> None:
        engine = FakeEngine("eval", load_s=60.0)
        r = rig(engine=engine, eval_every=0)
        running = asyncio.create_task(r.run())
        await asyncio.sleep(55.0)
        assert r.proxy.version > 1
        assert 0 not in r.trainer.retired
        assert await running == []
        assert engine.loads == [0, 4]
        assert 0 in r.trainer.retired

    run_virtual(main())


def test_evaluations_do_not_overlap_and_are_numbered() -> None:
    async def main() -> None:
        r = rig(eval_pool=FakePool(step_s=10.0), steps=8)
        assert await r.run() == []
        order = [(type(e), e.number) for e in r.log.of(EvalStarted, EvalEnded)]
        assert order == [(kind, n) for n in range(len(order) // 2) for kind in (EvalStarted, EvalEnded)]
        assert len(order) < 2 * 9  # some were skipped: one was still running

    run_virtual(main())


def test_an_interrupted_run_does_not_wait_for_its_evaluation_and_closes_its_environments() -> None:
    async def main() -> None:
        pool = FakePool(step_s=500.0)
        r = rig(eval_pool=pool)
        running = asyncio.create_task(r.run())
        await asyncio.sleep(40.0)
        r.pipeline.stop()
        assert await running == []
        assert now() < 60.0  # the deadline of the step that is slow is at 70
        pool.check_closed()
        assert r.log.of(RunEnded)[0].reason == "interrupted"

    run_virtual(main())


def test_tokens_of_another_version_in_an_evaluation_are_our_own_mistake() -> None:
    async def main() -> None:
        engine = FakeEngine("eval")
        r = rig(engine=engine)
        asyncio.get_running_loop().call_later(12.0, setattr, engine, "version", 3)
        errors = await r.run()
        assert errors
        assert all(isinstance(e, InvariantViolated) and "pinned at version 0" in str(e) for e in errors)

    run_virtual(main())


def lost_engine(cluster: FakeCluster | None, engine: FakeEngine) -> Rig:
    """A run whose evaluation engine dies in the first of two evaluations."""
    asyncio.get_running_loop().call_later(9.0, engine.crash)
    return Rig(pipeline=PipelineSettings(steps=4, checkpoint_every=0), rollout=RolloutSettings(batch_groups=2),
               eval_tasks=TASKS, eval_engines=[engine], eval_cluster=cluster)


def test_an_evaluation_engine_that_died_is_started_again_for_the_next_evaluation() -> None:
    async def main() -> None:
        engine = FakeEngine("eval")
        r = lost_engine(FakeCluster([engine]), engine)
        assert await r.run() == []
        assert len(r.log.of(EvalStarted)) == 2
        (last,) = r.log.of(EvalEnded)  # what failed with the engine says nothing of the policy: no result
        assert last.number == 1
        assert [x.failed for x in last.results] == [0, 0]

    run_virtual(main())


@pytest.mark.parametrize("cluster", [False, True])
def test_an_evaluation_without_an_engine_is_left_out_and_not_a_success_of_0(cluster: bool) -> None:
    async def main() -> None:
        engine = FakeEngine("eval")
        r = lost_engine(FakeCluster([engine], no_room=9) if cluster else None, engine)
        assert await r.run() == []
        assert len(r.log.of(EvalStarted)) == 1
        assert r.log.of(EvalEnded) == []
        assert r.log.of(RunEnded) == [RunEnded(4, "finished")]

    run_virtual(main())


def test_i7_a_stuck_restart_of_the_evaluation_engine_leaves_the_evaluation_out() -> None:
    async def main() -> None:
        engine = FakeEngine("eval")
        cluster = FakeCluster([engine])
        cluster.restart = lambda engine: hang()  # type: ignore[method-assign]
        r = lost_engine(cluster, engine)
        assert await r.run() == []
        assert r.log.of(RunEnded) == [RunEnded(4, "finished")]

    run_virtual(main())
