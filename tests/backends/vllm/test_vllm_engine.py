"""VLLMEngine against transformers and against the port's contract, on vLLM itself."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

pytest.importorskip("vllm")

import torch
from tiny_models import KINDS, tensors_of
from transformers import AutoModelForCausalLM

from rollart.backends.vllm.engine import VLLMEngine
from rollart.backends.vllm.settings import VLLMSettings
from rollart.core.errors import EngineLost, InvariantViolated
from rollart.core.tokens import ids
from rollart.core.types import Finish, GenerateRequest, Manifest, Sampling, TrajectoryId

SETTINGS = VLLMSettings(dtype="float32", context_tokens=384, max_concurrent=16, kv_gb=0.05, threads=1,
                        handover_folder=f"/dev/shm/rollart-test-{os.getpid()}")
PROMPT = list(range(5, 45))


class Published:
    """A reader over folders: version v has the weights of `folders[v % len]`."""

    def __init__(self, folders):
        self.folders = folders

    def get(self, manifest):
        """`Reader.get` without a carrier: its tests are elsewhere."""
        return tensors_of(self.folders[manifest.version % len(self.folders)])


def manifest(version):
    return Manifest(version, f"test:{version}")


def request(prompt=PROMPT, tokens=16, temperature=0.0, member=0, group=0, **rest):
    return GenerateRequest(TrajectoryId(group, member), 0, "test", ids(prompt), tokens, Sampling(temperature, **rest),
                           seed=member)


async def update(engine, version):
    await engine.suspend()
    await engine.load_weights(manifest(version))
    await engine.resume()


def reference(folder, prompt, tokens, temperature=1.0):
    """Greedy tokens of transformers, and its log-probs [len(tokens)] of given ones after the prompt."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    sequence, greedy = list(prompt), []
    with torch.no_grad():
        for _ in range(len(tokens)):
            greedy.append(int(model(torch.tensor([sequence])).logits[0, -1].argmax()))
            sequence.append(greedy[-1])
        logits = model(torch.tensor([list(prompt) + list(tokens)])).logits[0, len(prompt) - 1:-1]
    logprobs = (logits / temperature).log_softmax(-1)
    return greedy, logprobs[torch.arange(len(tokens)), torch.tensor(list(tokens))]


@pytest.fixture(scope="module", params=KINDS)
def served(request, folders, loop):
    """(kind, engine at version 0, folders): one engine process for each kind of model."""
    kind = request.param
    engine = VLLMEngine("v-0", "v", folders[kind][0], SETTINGS, Published(folders[kind]))

    async def start():
        engine.start()
        await update(engine, 0)

    loop.run_until_complete(start())
    yield kind, engine, folders[kind]
    loop.run_until_complete(engine.close())


def test_tokens_and_logprobs_are_those_of_transformers_before_and_after_updates(served, loop):
    """Also of a tied lm_head and of packed experts, which vLLM's CPU build would keep old without a word."""
    _, engine, folders = served

    async def at(version):
        await update(engine, version)
        return await engine.generate(request()), await engine.generate(request(tokens=40, temperature=0.7))

    for version in range(engine.version, engine.version + 3):
        greedy, sampled = loop.run_until_complete(at(version))
        folder = folders[version % 2]
        expected, _ = reference(folder, PROMPT, greedy.tokens)
        assert list(greedy.tokens) == expected
        _, logprobs = reference(folder, PROMPT, sampled.tokens, 0.7)
        assert (torch.tensor(sampled.logprobs) - logprobs).abs().max() < 1e-4
        assert greedy.segments == sampled.segments == ((version, 0),)


def test_versions_in_flight_are_recorded_and_kv_never_crosses_them(served, loop):
    """Each token's log-prob is that of its own version's weights over the whole context: stale KV would show."""
    _, engine, folders = served

    async def across():
        first = engine.version
        turn = asyncio.create_task(engine.generate(request(tokens=340, temperature=1.0, member=7)))
        for step in (1, 2):
            await asyncio.sleep(0.25)
            await update(engine, first + step)
        return first, await turn

    first, done = loop.run_until_complete(across())
    starts = [start for _, start in done.segments]
    assert [version for version, _ in done.segments] == [first, first + 1, first + 2], done.segments
    assert len(done.tokens) == len(done.logprobs) == 340
    assert starts == sorted(set(starts))
    for (version, start), end in zip(done.segments, [*starts[1:], 340], strict=True):
        _, logprobs = reference(folders[version % 2], PROMPT, done.tokens)
        gap = (torch.tensor(done.logprobs) - logprobs).abs()[start:end]
        assert gap.max() < 1e-4, (version, start, end, gap.max())


def test_older_groups_are_served_first(served, loop):
    _, engine, _ = served
    groups = [*range(80, 0, -1)]  # five times as many as run at once
    ended = []

    async def turn(group):
        await engine.generate(request(tokens=24, group=group))
        ended.append(group)

    async def all_at_once():
        await engine.suspend()
        turns = [asyncio.create_task(turn(group)) for group in groups]
        await asyncio.sleep(0.5)
        await engine.resume()
        await asyncio.gather(*turns)

    loop.run_until_complete(all_at_once())
    assert set(ended[-16:]) == set(range(65, 81)), ended


def test_prefix_cache_is_used_within_a_version_and_dropped_with_it(served, loop):
    _, engine, folders = served
    long = [(7 * i) % 250 for i in range(200)]

    async def turns():
        await engine.generate(request(long, 4, member=3))
        before = engine.stats().reused
        await engine.generate(request([*long, 1, 2, 3], 4, member=3))
        within = engine.stats().reused - before
        await update(engine, engine.version + 1)
        before = engine.stats().reused
        after = await engine.generate(request(long, 4, member=3))
        return within, engine.stats().reused - before, after

    within, across, after = loop.run_until_complete(turns())
    assert within >= 128
    assert across == 0
    assert list(after.tokens) == reference(folders[engine.version % 2], long, after.tokens)[0]


@pytest.mark.parametrize("served", ["llama"], indirect=True)  # the same for every model
def test_stop_length_context_and_bad_input(served, loop):
    _, engine, _ = served

    async def several():
        greedy = await engine.generate(request())
        stop = greedy.tokens[5]
        stopped = await engine.generate(GenerateRequest(TrajectoryId(0, 0), 0, "test", ids(PROMPT), 16, Sampling(0.0),
                                                        (stop,)))
        long = await engine.generate(request([1] * 380, 50))
        full = await engine.generate(request([1] * 384, 50))
        cut = await engine.generate(request(tokens=30, temperature=1.0, top_k=1))
        again = [await engine.generate(request(temperature=1.0, member=9)) for _ in range(2)]
        for context in ([], [0, 999]):
            with pytest.raises(ValueError, match="token"):
                await engine.generate(request(context))
        return greedy, stop, stopped, long, full, cut, again

    greedy, stop, stopped, long, full, cut, again = loop.run_until_complete(several())
    assert stopped.finish is Finish.STOP
    assert list(stopped.tokens) == list(greedy.tokens[:list(greedy.tokens).index(stop) + 1])
    assert greedy.finish is long.finish is full.finish is Finish.LENGTH
    assert len(long.tokens) == 4
    assert len(full.tokens) == 0
    assert full.segments
    assert max(map(abs, cut.logprobs)) < 1e-6, "of the distribution that was sampled: top_k = 1 leaves one token"
    assert again[0].tokens == again[1].tokens


@pytest.mark.parametrize("served", ["tied"], indirect=True)  # the same for every model
def test_cancel_aborts_and_weights_that_do_not_fit_change_nothing(served, loop, folders):
    _, engine, own = served

    async def story():
        turn = asyncio.create_task(engine.generate(request(tokens=340, member=4)))
        await asyncio.sleep(0.2)
        turn.cancel()
        await asyncio.wait([turn])
        assert turn.cancelled()
        await asyncio.sleep(0.5)
        assert engine._llm.output_processor.request_states == {}
        before = await engine.generate(request())
        for tensors, line in ((tensors_of(folders["experts"][0]), "missing: .*; unknown: "),
                              (dict(list(tensors_of(own[0]).items())[1:]), "missing: ")):
            engine._handover._reader = type("Wrong", (), {"get": lambda _, m, tensors=tensors: tensors})()
            with pytest.raises(EngineLost, match=line):
                await engine.load_weights(manifest(engine.version + 1))
        with pytest.raises(InvariantViolated, match="I5"):
            await engine.load_weights(manifest(engine.version - 1))
        return before, await engine.generate(request())

    before, after = loop.run_until_complete(story())
    assert before.tokens == after.tokens
    assert before.segments == after.segments


@pytest.mark.parametrize("served", ["llama"], indirect=True)  # the same for every model
def test_a_killed_engine_gives_what_it_had_and_starts_again(served, loop):
    _, engine, folders = served
    lost = []
    engine.on_lost(lost.append)

    async def story():
        turn = asyncio.create_task(engine.generate(request(tokens=340, temperature=1.0, member=5)))
        await asyncio.sleep(0.3)
        version = engine.version
        os.kill(engine._llm.engine_core.resources.engine_manager.processes[0].pid, signal.SIGKILL)
        with pytest.raises(EngineLost) as error:
            async with asyncio.timeout(10):
                await turn
        partial = error.value.partial
        async with asyncio.timeout(10):
            while engine.lost is None or not lost:
                await asyncio.sleep(0.05)
        with pytest.raises(EngineLost):
            await engine.generate(request())
        await engine.restart()
        with pytest.raises(EngineLost, match="no weights"):
            await engine.generate(request())
        await engine.load_weights(manifest(version))
        return version, partial, await engine.generate(request())

    version, partial, after = loop.run_until_complete(story())
    assert lost == [engine.id]
    assert 0 < len(partial.tokens) == len(partial.logprobs)
    assert partial.segments == ((version, 0),)
    _, logprobs = reference(folders[version % 2], PROMPT, partial.tokens)
    assert (torch.tensor(partial.logprobs) - logprobs).abs().max() < 1e-4
    assert list(after.tokens) == reference(folders[version % 2], PROMPT, after.tokens)[0]


def test_handed_over_weights_leave_no_file_behind(served):
    assert not list(Path(SETTINGS.handover_folder).glob("w*/v*"))
