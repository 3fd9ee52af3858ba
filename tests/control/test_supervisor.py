"""The supervisor: engines come back with the newest weights, or are given up."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from fakes import FakeCluster, FakeEngine, Rig, hang

from rollart.control.supervisor import Supervisor
from rollart.core.clock import now
from rollart.core.errors import RunError
from rollart.core.events import EngineDown, EngineUp, WeightsLoaded
from rollart.sim.loop import run_virtual


def play(story: Callable[[Rig], Awaitable[None]], *, engines: int = 2, serve: bool = True, no_room: int = 0,
         restart_s: float = 10.0, **settings: float) -> Rig:
    """The supervisor watches while `story` runs. The engines serve version 0 from second 5 on."""

    async def main() -> Rig:
        parts = [FakeEngine(f"e{i}") for i in range(engines)]
        rig = Rig(engines=parts, cluster=FakeCluster(parts, no_room=no_room, restart_s=restart_s))
        rig.supervisor = Supervisor(rig.cluster, rig.proxy, rig.sync, rig.changed, **settings)  # type: ignore[arg-type]
        async with asyncio.TaskGroup() as nursery:
            watching = nursery.create_task(rig.supervisor.run(nursery))
            if serve:
                await rig.serve()
                assert now() == 5.0
            await story(rig)
            watching.cancel()
        return rig

    return run_virtual(main())


def test_a_lost_engine_is_started_again_and_serves_with_the_newest_weights() -> None:
    async def story(rig: Rig) -> None:
        rig.cluster.crash("e0")
        await asyncio.sleep(1.0)
        assert rig.proxy.routing.live == ["e1"]
        await asyncio.sleep(12.0)
        assert rig.proxy.routing.live == ["e0", "e1"]
        assert rig.cluster.restarts == [(5.0, "e0")]
        assert (rig.supervisor.restarts, rig.supervisor.given_up) == (1, {})

    rig = play(story)
    assert [e.engine for e in rig.log.of(EngineDown)] == ["e0"]
    assert [e.engine for e in rig.log.of(EngineUp)] == ["e0", "e1", "e0"]


def test_an_engine_that_the_proxy_finds_lost_is_mended_without_the_clusters_word() -> None:
    async def story(rig: Rig) -> None:
        rig.engines[0].crash()
        rig.proxy.mark_down("e0", "no answer")
        await asyncio.sleep(13.0)
        assert rig.proxy.routing.live == ["e0", "e1"]

    play(story)


def test_several_engines_are_mended_at_the_same_time() -> None:
    async def story(rig: Rig) -> None:
        for engine in rig.engines:
            rig.cluster.crash(engine.id)
        await asyncio.sleep(12.1)
        assert len(rig.proxy.routing.live) == 4

    play(story, engines=4)


def test_an_engine_lost_before_the_first_weights_is_mended_once_there_are_some() -> None:
    async def story(rig: Rig) -> None:
        rig.cluster.crash("e0")
        await asyncio.sleep(1.0)
        assert rig.cluster.restarts == []
        await rig.serve()
        assert rig.proxy.routing.live == ["e1"]
        await asyncio.sleep(13.0)
        assert rig.proxy.routing.live == ["e0", "e1"]

    play(story, serve=False)


def test_newer_weights_that_come_while_it_loads_are_loaded_before_it_serves() -> None:
    async def story(rig: Rig) -> None:
        rig.engines[0].load_s = 30.0
        rig.cluster.crash("e0")
        await asyncio.sleep(15.0)  # it loads version 0
        rig.trainer.version = 1
        await rig.serve()
        assert rig.proxy.routing.live == ["e1"]
        assert 0 not in rig.trainer.retired  # somebody still reads it
        await asyncio.sleep(60.0)
        assert rig.proxy.routing.live == ["e0", "e1"]
        assert rig.trainer.retired == [0]

    rig = play(story)
    assert [e.version for e in rig.log.of(WeightsLoaded) if e.engine == "e0"] == [0, 0, 1]
    assert [e.version for e in rig.log.of(EngineUp) if e.engine == "e0"] == [0, 1]


def test_an_engine_lost_while_it_loads_is_started_again() -> None:
    async def story(rig: Rig) -> None:
        rig.cluster.crash("e0")
        await asyncio.sleep(11.0)
        rig.engines[0].crash()  # in the middle of its load
        await asyncio.sleep(20.0)
        assert rig.proxy.routing.live == ["e0", "e1"]
        assert len(rig.cluster.restarts) == 2

    play(story)


def test_restarts_wait_longer_each_time_and_end_at_their_limit() -> None:
    async def story(rig: Rig) -> None:
        rig.cluster.crash("e0")
        await asyncio.sleep(1000.0)
        begun = [at for at, _ in rig.cluster.restarts]
        assert begun == [5.0, 5.0 + 10 + 4, 5.0 + 2 * 10 + 4 + 8, 5.0 + 3 * 10 + 4 + 8 + 16]
        assert rig.supervisor.given_up == {"e0": "no room for e0"}
        assert rig.proxy.routing.live == ["e1"]  # the others go on

    play(story, no_room=100, max_restarts=4, backoff_seconds=2.0)


def test_a_restart_without_an_answer_counts_as_failed_at_its_deadline() -> None:
    async def story(rig: Rig) -> None:
        rig.cluster.restart = lambda engine: hang()  # type: ignore[method-assign]
        rig.cluster.crash("e0")
        await asyncio.sleep(1000.0)
        assert rig.supervisor.given_up == {"e0": "no answer within 40 s"}

    play(story, max_restarts=2, restart_seconds=40.0)


def test_the_run_ends_when_no_engine_is_left_and_says_why() -> None:
    async def story(rig: Rig) -> None:
        for engine in rig.engines:
            rig.cluster.crash(engine.id)
        await asyncio.sleep(1e6)

    with pytest.raises(ExceptionGroup) as caught:
        play(story, no_room=100, max_restarts=3)
    (error,) = caught.value.exceptions
    assert isinstance(error, RunError)
    assert str(error) == "no engine is left; e1 was given up after 3 restarts: no room for e1"


def test_a_late_word_of_a_loss_that_is_mended_already_costs_no_turn() -> None:
    """Proxy and cluster both tell the same crash; the cluster late, when the engine serves again."""
    async def story(rig: Rig) -> None:
        rig.engines[0].crash()
        rig.proxy.mark_down("e0", "no answer")
        await asyncio.sleep(13.0)
        rig.cluster.lost.put_nowait("e0")
        await asyncio.sleep(13.0)
        assert rig.proxy.routing.live == ["e0", "e1"]  # whatever was done, it serves

    play(story)


def test_a_lost_engine_that_is_not_the_trainings_is_left_to_its_owner() -> None:
    async def story(rig: Rig) -> None:
        rig.cluster.lost.put_nowait("eval-0")
        await asyncio.sleep(10.0)
        assert rig.proxy.routing.live == ["e0", "e1"]

    play(story)
