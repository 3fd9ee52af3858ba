"""Weight sync: publish, load, retire; one version at a time."""

from __future__ import annotations

import asyncio

import pytest
from fakes import FakeEngine, FakeTrainer, Log, hang

from rollart.control.llm_proxy import LLMProxy
from rollart.control.weight_sync import WeightSync
from rollart.core.changed import Changed
from rollart.core.clock import now
from rollart.core.errors import EngineLost, InvariantViolated, TrainerLost
from rollart.core.events import EngineDown, PublishStarted, WeightsFetched, WeightsLive, WeightsPublished
from rollart.core.tokens import ids
from rollart.core.types import GenerateRequest, Manifest, TrajectoryId, Version
from rollart.sim.loop import run_virtual


async def at_once() -> None:
    return


class Setup:
    def __init__(self, **trainer: object) -> None:
        self.log, self.engine, self.trainer = Log(), FakeEngine(), FakeTrainer(**trainer)  # type: ignore[arg-type]
        self.proxy = LLMProxy([self.engine], {}, journal=self.log, changed=Changed())
        self.sync = WeightSync(self.trainer, self.proxy, self.log, publish_seconds=100.0)

    async def to(self, *versions: Version) -> None:
        for version in versions:
            await self.sync.sync(version, at_once)


def test_a_version_is_published_then_loaded_then_live_and_the_one_before_retired() -> None:
    async def main() -> None:
        s = Setup()
        await s.to(0)
        assert s.trainer.retired == []
        await s.to(1, 2)
        assert [type(e) for e in s.log.of(PublishStarted, WeightsPublished, WeightsLive)] == [
            PublishStarted, WeightsPublished, WeightsLive] * 3
        assert s.engine.loads == [0, 1, 2]
        assert s.trainer.retired == [0, 1]
        assert s.sync.current is not None
        assert s.sync.current.version == 2

    run_virtual(main())


def test_weights_are_retired_only_after_the_newer_ones_are_live() -> None:
    async def main() -> None:
        s = Setup()
        live: list[Version] = []

        async def retire(manifest: object) -> None:
            live.append(s.proxy.version)

        s.trainer.retire = retire  # type: ignore[method-assign]
        await s.to(0, 1, 2)
        assert live == [1, 2]

    run_virtual(main())


def test_weights_that_somebody_pins_are_retired_when_the_last_lets_go() -> None:
    async def main() -> None:
        s = Setup()
        await s.to(0)
        pinned = s.sync.current
        assert pinned is not None
        s.sync.pin(pinned)
        s.sync.pin(pinned)
        await s.to(1, 2)
        assert s.trainer.retired == [1]
        await s.sync.unpin(pinned)
        assert s.trainer.retired == [1]
        await s.sync.unpin(pinned)
        assert s.trainer.retired == [1, 0]

    run_virtual(main())


def test_unpinning_the_current_weights_does_not_retire_them() -> None:
    async def main() -> None:
        s = Setup()
        await s.to(0)
        assert s.sync.current is not None
        s.sync.pin(s.sync.current)
        await s.sync.unpin(s.sync.current)
        assert s.trainer.retired == []

    run_virtual(main())


def test_i6_overlapping_publishes_are_our_own_mistake() -> None:
    async def main() -> None:
        s = Setup()
        first = asyncio.create_task(s.sync.sync(0, at_once))
        await asyncio.sleep(1.0)
        with pytest.raises(InvariantViolated, match="I6: publish of version 1"):
            await s.to(1)
        await first
        await s.to(1)

    run_virtual(main())


def test_a_publish_without_an_answer_loses_the_trainer_at_its_deadline() -> None:
    async def main() -> None:
        s = Setup(version=3, hangs="publish")
        with pytest.raises(TrainerLost, match="publish of version 3: no answer in 100 s"):
            await s.to(3)
        assert now() == 100.0
        assert not s.engine.loads

    run_virtual(main())


def test_a_retire_without_an_answer_loses_the_trainer_at_a_deadline() -> None:
    async def main() -> None:
        s = Setup()
        await s.to(0)
        s.trainer.retire = lambda manifest: hang()  # type: ignore[method-assign, assignment]
        with pytest.raises(TrainerLost, match="retiring version 0: no answer in 100 s"):
            await s.to(1)

    run_virtual(main())


def test_nothing_is_loaded_before_it_may_be() -> None:
    async def main() -> None:
        s = Setup()
        gate = asyncio.Event()

        async def wait() -> None:
            await gate.wait()

        syncing = asyncio.create_task(s.sync.sync(0, wait))
        await asyncio.sleep(50.0)
        assert s.trainer.published == [0]
        assert s.sync.current is None
        gate.set()
        await syncing
        assert s.engine.loads == [0]

    run_virtual(main())


class FetchingEngine(FakeEngine):
    """Fetches for 20 s beside its work; `gone`: it cannot."""

    gone = False

    async def prefetch(self, manifest: Manifest) -> None:
        await asyncio.sleep(20.0)
        if self.gone:
            raise EngineLost("weights are gone")


def test_engines_serve_while_they_fetch_and_stand_still_for_the_load_alone() -> None:
    async def main() -> None:
        s = Setup()
        engine = FetchingEngine(tokens=40, load_s=2.0)
        s.proxy = LLMProxy([engine], {}, journal=s.log, changed=Changed())
        s.sync = WeightSync(s.trainer, s.proxy, s.log)
        await s.to(0)
        assert not s.log.of(WeightsFetched)  # nothing is served yet that could go on
        began = now()
        request = GenerateRequest(TrajectoryId(1, 0), 0, "game", ids([1]), 40)
        turn = asyncio.create_task(s.proxy.generate(request))
        await s.to(1)
        fetched, live = s.log.of(WeightsFetched, WeightsLive)[-2:]
        assert fetched == WeightsFetched(1, 20.0, 1)
        assert live == WeightsLive(1, 2.0, 1)
        await turn
        assert now() - began <= 40 + 2.0 + 0.2

    run_virtual(main())


def test_an_engine_that_cannot_fetch_is_lost_and_the_others_get_the_new_weights() -> None:
    async def main() -> None:
        s = Setup()
        engines = [FetchingEngine("a"), FetchingEngine("b"), FakeEngine("c")]
        s.proxy = LLMProxy(engines, {}, journal=s.log, changed=Changed())
        s.sync = WeightSync(s.trainer, s.proxy, s.log)
        await s.to(0)
        engines[0].gone = True  # type: ignore[attr-defined]
        await s.to(1)
        assert [(e.engine, e.reason) for e in s.log.of(EngineDown)] == [("a", "fetching version 1: weights are gone")]
        assert [engine.loads for engine in engines] == [[0], [0, 1], [0, 1]]
        assert s.log.of(WeightsFetched) == [WeightsFetched(1, 20.0, 1)]

    run_virtual(main())
