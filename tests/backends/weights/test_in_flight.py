"""Real engines, the real control plane and each carrier: weights change under a turn that is being sampled."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rollart.backends.torch.engine import EmbeddedEngine
from rollart.backends.torch.settings import EngineSettings, SmallModel
from rollart.backends.torch.transformer import small_model
from rollart.backends.weights import Writer, open_reader, open_writer
from rollart.backends.weights.memory import checksum
from rollart.backends.weights.settings import WeightsSettings
from rollart.control.llm_proxy import LLMProxy
from rollart.control.weight_sync import WeightSync
from rollart.core.changed import Changed
from rollart.core.events import WeightsFetched, WeightsLive
from rollart.core.tokens import ids
from rollart.core.types import GenerateRequest, Manifest, TrajectoryId, Version

MODELS = [small_model(SmallModel(layers=1, width=16, heads=2, kv_heads=1, mlp=16, vocabulary=32), i) for i in range(3)]


class Publisher:
    """A learner that has finished its steps already."""

    def __init__(self, writer: Writer) -> None:
        self.writer = writer

    async def publish(self, version: Version) -> Manifest:
        return await asyncio.to_thread(self.writer.put, version, MODELS[version].state_dict())

    async def retire(self, manifest: Manifest) -> None:
        self.writer.drop(manifest)


class Log(list[Any]):
    emit = list.append


@pytest.mark.parametrize("carrier", ["memory", "file", "collective"])
def test_two_engines_take_new_weights_in_the_middle_of_turns(carrier: str, tmp_path: Path) -> None:
    async def main() -> None:
        settings = WeightsSettings(carrier=carrier, folder=str(tmp_path), bucket_mb=1, deadline_seconds=30.0)
        writer, log = open_writer(settings), Log()
        readers = [open_reader(settings, writer) for _ in range(2)]
        engines = [EmbeddedEngine(f"e{i}", "pool", MODELS[0], reader, EngineSettings(threads=1))
                   for i, reader in enumerate(readers)]
        for engine in engines:
            engine.start()
        proxy = LLMProxy(engines, {}, journal=log, changed=Changed())
        sync = WeightSync(Publisher(writer), proxy, log)  # type: ignore[arg-type]

        async def at_once() -> None:
            return

        async def sampled(tokens: int) -> None:
            start = [engine.stats().generated for engine in engines]
            while any(e.stats().generated < s + tokens for e, s in zip(engines, start, strict=True)):
                await asyncio.sleep(0.001)

        async with asyncio.timeout(60):
            await sync.sync(0, at_once)
            turns = [asyncio.create_task(proxy.generate(GenerateRequest(
                TrajectoryId(0, i), 0, "d", ids([1, 2]), 900, seed=i))) for i in range(4)]
            for version in (1, 2):
                await sampled(20)
                await sync.sync(version, at_once)
                await sampled(20)
            for turn in await asyncio.gather(*turns):
                assert [version for version, _ in turn.segments] == [0, 1, 2]
        for engine in engines:
            await engine.close()
        assert [checksum(e._runner.model.state_dict()) for e in engines] == [checksum(MODELS[2].state_dict())] * 2
        assert [(e.version, e.engines) for e in log if isinstance(e, WeightsFetched)] == [(1, 2), (2, 2)]
        assert all(event.engines == 2 for event in log if isinstance(event, WeightsLive))
        for half in (*readers, writer):
            half.close()
        assert not list(tmp_path.iterdir())

    asyncio.run(main())
