"""Simulated parts keep the promises of the ports: versions per token, KV, crashes with partials, cancellation."""

import asyncio

import pytest

from rollart.core.clock import now
from rollart.core.errors import EngineLost, EnvironmentFailed, InvariantViolated, NoCapacity, ScorerFailed
from rollart.core.tokens import Counted
from rollart.core.types import Action, Finish, GenerateRequest, Manifest, Outcome, Trajectory, TrajectoryId
from rollart.sim.engine import EngineCost, SimEngine
from rollart.sim.faults import CALM, Faults
from rollart.sim.loop import run_virtual
from rollart.sim.parts import DOMAINS, SimCluster, SimEnvironmentPool, SimRenderer, SimScorer, SimTasks, sim_task

COST = EngineCost(prefill_tokens_per_s=1_000.0, decode_base_s=0.01, decode_slope_s=0.0, load_s=5.0, turn_tokens=1e9)
TASK = sim_task("game", 0, max_turns=4, max_tokens=100)


def violated(name, what):
    raise InvariantViolated(f"{name}: {what}")


def request(member=0, turn=0, context=1_000, tokens=1_000):
    return GenerateRequest(TrajectoryId(0, member), turn, "game", Counted(context), tokens)


async def serving(version=0, cost=COST):
    engine = SimEngine("e", "pool", seed=1, cost=cost, violated=violated)
    await engine.load_weights(Manifest(version, ""))
    return engine


def test_a_turn_takes_prefill_and_decode_time_and_keeps_its_kv_for_the_next():
    async def main():
        engine = await serving()
        began = now()
        first = await engine.generate(request())
        assert (len(first.tokens), first.finish, first.segments) == (1_000, Finish.LENGTH, ((0, 0),))
        assert now() - began == pytest.approx(1.0 + 10.0)
        began = now()
        await engine.generate(request(turn=1, context=2_100, tokens=100))
        assert now() - began == pytest.approx(0.1 + 1.0), "only what the KV does not hold is prefilled"
        engine.release(TrajectoryId(0, 0))
        assert not engine.kv

    run_virtual(main())


def test_decode_steps_are_shared_and_slow_down_with_the_batch():
    async def main():
        engine = await serving(cost=EngineCost(prefill_tokens_per_s=1e9, decode_base_s=0.01, decode_slope_s=0.01,
                                               turn_tokens=1e9))
        began = now()
        await asyncio.gather(*[engine.generate(request(member=i)) for i in range(3)])
        return now() - began

    assert run_virtual(main()) == pytest.approx(1_000 * 0.04, rel=1e-3)


def test_weights_that_change_in_mid_turn_give_version_segments_and_drop_older_kv():
    async def main():
        engine = await serving(7)
        turn = asyncio.create_task(engine.generate(request()))
        waiting = asyncio.create_task(engine.generate(request(member=1)))
        await asyncio.sleep(1.0 + 4.0)
        await engine.suspend()
        began, load = now(), asyncio.create_task(engine.load_weights(Manifest(8, "")))
        await load
        assert not engine.kv
        await engine.resume()
        assert now() - began > 5.0 + 1.3, "the KV of what is in flight is computed again"
        done, late = await turn, await waiting
        assert done.segments == ((7, 0), (8, 400))
        assert list(done.versions()).count(7) == 400
        assert late.newest == 8
        assert {version for _, version in engine.kv.values()} == {8}

    run_virtual(main())


def test_a_crash_fails_what_is_in_flight_with_what_it_had_sampled():
    async def main():
        engine = await serving(3)
        turns = [asyncio.create_task(engine.generate(request(member=i))) for i in range(3)]
        await asyncio.sleep(2.0 + 1.0 - 0.005)
        engine.crash("power")
        results = await asyncio.gather(*turns, return_exceptions=True)
        assert [isinstance(result, EngineLost) for result in results] == [True] * 3
        assert len(results[0].partial.tokens) == pytest.approx(199, abs=2)
        assert results[0].partial.segments == ((3, 0),)
        assert results[2].partial is None, "it was still in prefill"
        with pytest.raises(EngineLost):
            await engine.generate(request())
        engine.restart()
        with pytest.raises(InvariantViolated, match=r"^I5: e was asked for a turn of g0.0 before any weights"):
            await engine.generate(request())

    run_virtual(main())


def test_a_crash_cuts_a_load_short():
    async def main():
        engine = await serving()
        load = asyncio.create_task(engine.load_weights(Manifest(1, "")))
        await asyncio.sleep(1.0)
        engine.crash("power")
        with pytest.raises(EngineLost):
            await load
        assert engine.version is None

    run_virtual(main())


def test_a_cancelled_turn_frees_the_engine():
    async def main():
        engine = await serving()
        turns = [asyncio.create_task(engine.generate(request(member=i))) for i in range(2)]
        await asyncio.sleep(1.5)
        for turn in turns:
            turn.cancel()
        await asyncio.wait(turns)
        assert engine.in_flight == 0
        assert not engine.kv

    run_virtual(main())


def test_weights_are_not_swapped_under_a_running_decode():
    async def main():
        engine = await serving()
        turn = asyncio.create_task(engine.generate(request()))
        await asyncio.sleep(2.0)
        with pytest.raises(InvariantViolated, match=r"^I5: e got version 1 in the middle of a decode step"):
            await engine.load_weights(Manifest(1, ""))
        turn.cancel()

    run_virtual(main())


def test_an_environment_is_used_open_and_closed_once():
    async def main():
        pool = SimEnvironmentPool(seed=1, faults=CALM, domains=DOMAINS, violated=violated)
        environment = await pool.open(TASK)
        assert list(pool.live.values()) == [TASK]
        assert len((await environment.first()).messages[0].content) == DOMAINS["game"].prompt_tokens
        while not (await environment.step(Action(Counted(3)))).done:
            pass
        await environment.close()
        assert not pool.live
        with pytest.raises(InvariantViolated, match=r"^I3: an environment of game/0 was closed twice"):
            await environment.close()
        with pytest.raises(InvariantViolated, match=r"^I3: a closed environment"):
            await environment.step(Action(Counted(3)))

    run_virtual(main())


def test_a_cancelled_or_failed_open_leaves_nothing_behind():
    async def main():
        for faults, error in ((Faults(open_hangs=1.0), TimeoutError), (Faults(open_fails=1.0), EnvironmentFailed)):
            pool = SimEnvironmentPool(seed=1, faults=faults, domains=DOMAINS, violated=violated)
            with pytest.raises(error):
                async with asyncio.timeout(300):
                    await pool.open(TASK)
            assert not pool.live

    run_virtual(main())


def test_a_scorer_that_fails_has_not_answered():
    async def main():
        trajectory = Trajectory(TrajectoryId(0, 0), TASK, Counted(1), None, (), Outcome.FINISHED)
        failing = SimScorer(seed=1, faults=Faults(score_fails=1.0), domains=DOMAINS)
        with pytest.raises(ScorerFailed):
            await failing.score(trajectory)
        assert not failing.answered
        scorer = SimScorer(seed=1, faults=CALM, domains=DOMAINS)
        assert await scorer.score(trajectory) == await scorer.score(trajectory), "a call may be repeated"
        assert list(scorer.answered) == [trajectory.id]

    run_virtual(main())


def test_the_cluster_reports_crashes_and_restarts_without_weights():
    async def main():
        engine = await serving()
        cluster = SimCluster([engine], seed=1, faults=Faults(engine_mtbf=100.0, engine_repair=10.0))
        cluster.begin()
        assert await cluster.wait_lost() == "e"
        assert not engine.up
        await cluster.restart("e")
        assert (engine.up, engine.version) == (True, None)
        full = SimCluster([engine], seed=1, faults=Faults(no_capacity=1.0))
        with pytest.raises(NoCapacity):
            await full.restart("e")

    run_virtual(main(), time_limit=1e5)


def test_tasks_and_texts_are_lengths():
    tasks = SimTasks({"math": 1.0, "game": 2.0}, seed=3, max_turns=2, max_tokens=9)
    first = tasks.next()
    tasks.put_back(first)
    assert tasks.next() == first
    assert (tasks.drawn, tasks.returned) == (2, 1)
    assert len(SimRenderer().prompt(())) == 3


def test_a_rate_out_of_range_is_refused():
    with pytest.raises(ValueError, match=r"faults.open_fails needs 0 <= value <= 1; got 2"):
        Faults(open_fails=2.0)
