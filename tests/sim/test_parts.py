"""Simulated parts keep the promises of the ports: versions per token, KV, crashes with partials, cancellation."""

import asyncio
from dataclasses import replace

import pytest

from rollart.core.clock import now
from rollart.core.errors import EngineLost, EnvironmentFailed, InvariantViolated, NoCapacity, ScorerFailed
from rollart.core.tokens import Counted
from rollart.core.types import Action, Finish, GenerateRequest, Manifest, Outcome, Trajectory, TrajectoryId
from rollart.sim.costs import StepCost
from rollart.sim.engine import DisaggregatedEngine, SimEngine
from rollart.sim.faults import CALM, Faults
from rollart.sim.loop import run_virtual
from rollart.sim.parts import (
    RewardCost,
    SimCluster,
    SimEnvironmentPool,
    SimRenderer,
    SimScorer,
    SimTasks,
    sim_task,
)
from rollart.sim.workload import TOY, Load, Spread

COST = StepCost(overhead_s=0.0, weights_s=0.01, token_s=0.001, chunk=100, load_s=5.0)
"""A decode step takes 10 ms, one with a chunk of 100 prefill tokens 0.1 s, so a context of 1,000 tokens takes 1 s."""
TASK = sim_task("game", TOY["game"], 0)


def violated(name, what):
    raise InvariantViolated(f"{name}: {what}")


def request(member=0, turn=0, context=1_000, tokens=1_000, group=0):
    return GenerateRequest(TrajectoryId(group, member), turn, "game", Counted(context), tokens)


def engine_of(id="e", cost=COST, says=lambda *_: 10**9):
    return SimEngine(id, "pool", seed=1, cost=cost, says=says, violated=violated)


async def serving(version=0, cost=COST):
    engine = engine_of(cost=cost)
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
        engine = await serving(cost=StepCost(overhead_s=0.01, token_s=1e-9, sequence_s=0.01))
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
        await engine.load_weights(Manifest(8, ""))
        assert not engine.kv
        await engine.resume()
        began = now()
        done = await turn
        assert now() - began == pytest.approx(1.31 + 1.31 + 6.7, abs=0.2), "what is in flight is computed again"
        late = await waiting
        assert [version for version, _ in done.segments] == [7, 8]
        assert list(done.versions()).count(7) == pytest.approx(10 + 300, abs=5), "10 beside the prefill of the other"
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
        assert [len(result.partial.tokens) for result in results[:2]] == [pytest.approx(20, abs=2), 9]
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
        pool = SimEnvironmentPool(seed=1, faults=CALM, domains=TOY, violated=violated)
        environment = await pool.open(TASK)
        assert list(pool.live.values()) == [TASK]
        assert len((await environment.first()).messages[0].content) == TOY["game"].prompt.mean
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
            pool = SimEnvironmentPool(seed=1, faults=faults, domains=TOY, violated=violated)
            with pytest.raises(error):
                async with asyncio.timeout(300):
                    await pool.open(TASK)
            assert not pool.live

    run_virtual(main())


def test_a_scorer_that_fails_has_not_answered():
    async def main():
        trajectory = Trajectory(TrajectoryId(0, 0), TASK, Counted(1), None, (), Outcome.FINISHED)
        failing = SimScorer(seed=1, faults=Faults(score_fails=1.0), domains=TOY, cost=RewardCost())
        with pytest.raises(ScorerFailed):
            await failing.score(trajectory)
        assert not failing.answered
        scorer = SimScorer(seed=1, faults=CALM, domains=TOY, cost=RewardCost())
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
    tasks = SimTasks({"math": 1.0, "game": 2.0}, TOY, seed=3)
    first = tasks.next()
    tasks.put_back(first)
    assert tasks.next() == first
    assert (tasks.drawn, tasks.returned) == (2, 1)
    assert len(SimRenderer().prompt(())) == 3


def test_a_rate_out_of_range_is_refused():
    with pytest.raises(ValueError, match=r"open_fails needs 0 <= value <= 1; got 2"):
        Faults(open_fails=2.0)


def test_a_steps_seconds_are_a_roofline():
    cost = StepCost(overhead_s=1.0, token_s=0.1, weights_s=2.0, kv_s=0.01, sequence_s=0.5)
    assert cost.seconds(1, 100, 0) == pytest.approx(1.0 + max(0.1, 2.0 + 1.0) + 0.5), "reading weights and KV"
    assert cost.seconds(1, 100, 99) == pytest.approx(1.0 + max(10.0, 3.0) + 0.5), "computing"
    experts = StepCost(overhead_s=0.0, token_s=0.0, experts_s=1.0, experts=4, active=1)
    assert experts.seconds(1, 0, 0) == pytest.approx(0.25)
    assert experts.seconds(2, 0, 0) == pytest.approx(1 - 0.75**2), "two tokens may choose the same expert"
    assert StepCost(attention=0.001).work(10, 100) == pytest.approx(10 * (1 + 0.105))


def test_kv_that_is_full_evicts_what_is_idle_then_lets_wait_then_preempts():
    async def main():
        engine = engine_of(cost=replace(COST, capacity=2_500))
        await engine.load_weights(Manifest(0, ""))
        await engine.generate(request(tokens=100))
        assert engine.kv == {TrajectoryId(0, 0): (1_100, 0)}
        others = [asyncio.create_task(engine.generate(request(member=i, tokens=1_000))) for i in (1, 2, 3)]
        await asyncio.sleep(3.0)
        assert not engine.kv, "what nobody computes with makes room"
        assert engine.in_flight == 3
        done = await asyncio.gather(*others)
        assert [len(completion.tokens) for completion in done] == [1_000] * 3
        assert engine.preempted >= 1
        kept = sum(tokens for tokens, _ in engine.kv.values())
        assert engine._used == pytest.approx(kept), "nothing of an ended turn is held besides its KV"
        assert kept <= 2_500

    run_virtual(main())


def test_older_groups_are_served_first_and_the_youngest_gives_its_kv_back():
    async def main():
        engine = engine_of(cost=replace(COST, concurrent=1))
        await engine.load_weights(Manifest(0, ""))
        ended = []

        async def turn(of, **more):
            await of.generate(request(**more))
            ended.append((more["group"], more["member"]))
        turns = [(1, 0), (7, 0), (5, 1), (7, 1), (5, 0), (6, 0)]
        await asyncio.gather(*[turn(engine, group=group, member=member) for group, member in turns])
        assert ended == [(1, 0), (5, 1), (5, 0), (6, 0), (7, 0), (7, 1)]

        tight = engine_of(cost=replace(COST, capacity=3_500))
        await tight.load_weights(Manifest(0, ""))
        ended.clear()
        await asyncio.gather(*[turn(tight, group=group, member=0) for group in (3, 1, 2)])
        assert tight.preempted >= 1
        assert ended == [(1, 0), (2, 0), (3, 0)], "the first to come is of the youngest group"

    run_virtual(main())


def test_members_of_a_group_share_the_prompts_kv():
    async def main():
        engine = await serving()
        await engine.generate(request(tokens=1))
        before = engine.prefill_tokens
        await engine.generate(request(member=1, tokens=1))
        assert engine.prefill_tokens - before == 1

    run_virtual(main())


def test_prefill_and_decode_on_engines_of_their_own():
    async def main():
        engine = DisaggregatedEngine("pd", "pool", [engine_of("p")], [engine_of("d0"), engine_of("d1")],
                                     kv_bytes=1_000, link=1e6, says=lambda *_: 500)
        await engine.load_weights(Manifest(4, ""))
        began = now()
        done = await engine.generate(request())
        assert now() - began == pytest.approx(1.0 + 0.01 + 1.0 + 5.0 + 0.01, abs=0.01), "prefill, move, decode"
        assert (len(done.tokens), done.segments, done.engine) == (500, ((4, 0),), "pd")
        await engine.generate(request(turn=1, context=1_700))
        assert engine.moved_tokens == 1_000 + 200, "only what the decode unit does not hold moves"
        others = await asyncio.gather(*[engine.generate(request(member=i)) for i in (1, 2)])
        assert len(others) == 2
        assert {len(unit.kv) for unit in engine.units[1:]} == {1, 2}, "trajectories are spread over the decode units"
        engine.release(TrajectoryId(0, 0))
        engine.crash("power")
        assert not engine.kv
        with pytest.raises(EngineLost):
            await engine.generate(request())

    run_virtual(main())


def test_serverless_rewards_start_cold_and_fall_to_zero_and_reserved_ones_stay():
    async def burst(cost):
        loads = {"game": Load(reward_s=Spread(mean=1.0))}
        scorer = SimScorer(seed=1, faults=CALM, domains=loads, cost=cost)
        began = now()
        trajectories = [Trajectory(TrajectoryId(0, i), TASK, Counted(1), None, (), Outcome.FINISHED) for i in range(8)]
        await asyncio.gather(*[scorer.score(trajectory) for trajectory in trajectories])
        took = now() - began
        await asyncio.sleep(100.0)
        return took, scorer.cold_starts, scorer.busy, scorer.warm

    serverless = run_virtual(burst(RewardCost(cold_start_s=2.0, idle_s=10.0)))
    assert serverless == (pytest.approx(3.0), 8, pytest.approx(8.0), pytest.approx(8 * 13.0))
    reserved = run_virtual(burst(RewardCost(instances=2, serverless=False)))
    assert reserved == (pytest.approx(4.0), 0, pytest.approx(8.0), pytest.approx(2 * 104.0))
    limited = run_virtual(burst(RewardCost(instances=2, cold_start_s=2.0, idle_s=10.0)))
    assert limited == (pytest.approx(6.0), 2, pytest.approx(8.0), pytest.approx(2 * 16.0))
