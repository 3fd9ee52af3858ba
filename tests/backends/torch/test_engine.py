"""The embedded engine: exact log-probs (L9), versions (T5, T8, I5), aborts and losses, exact KV accounting."""

import asyncio
import math
import random
import time

import pytest
import torch

from rollart.backends.torch.engine import EmbeddedEngine
from rollart.backends.torch.settings import EngineSettings, SmallModel
from rollart.backends.torch.transformer import small_model
from rollart.backends.weights.memory import MemoryWeights, checksum
from rollart.core.errors import ConfigError, EngineLost, InvariantViolated
from rollart.core.tokens import ids, join
from rollart.core.types import Finish, GenerateRequest, Manifest, Sampling, TrajectoryId

TINY = SmallModel(layers=2, width=32, heads=4, kv_heads=2, mlp=32, vocabulary=40, context_tokens=200)


def policy(seed):
    """Weights loud enough that every mistake shows in the log-probs."""
    model = small_model(TINY, seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6)
    return model


MODELS = {version: policy(version) for version in (0, 1, 2)}


def request(member=0, context=range(1, 12), max_tokens=12, seed=7, turn=0, group=0, **more):
    return GenerateRequest(TrajectoryId(group, member), turn, "d", ids(context), max_tokens, seed=seed, **more)


def expected_logprobs(context, completion, sampling=Sampling()):  # noqa: B008 - frozen
    """Each token's log-prob by one forward pass over the whole sequence with the weights of its version."""
    whole = torch.tensor([*context, *completion.tokens])
    with torch.no_grad():
        logits = {version: model.logits(model(whole, torch.arange(len(whole)), [len(whole)]))
                  for version, model in MODELS.items()}
    out = []
    for at, version in enumerate(completion.versions(), start=len(context)):
        row = logits[version][at - 1] / (sampling.temperature or 1.0)
        if sampling.top_k:
            row[row < row.topk(sampling.top_k).values[-1]] = -torch.inf
        if sampling.top_p < 1:
            order = row.argsort(descending=True)
            p = row[order].softmax(-1)
            row[order[p.cumsum(-1) - p >= sampling.top_p]] = -torch.inf
        out.append(float(row.log_softmax(-1)[whole[at]]))
    return out


def running(test, **settings):
    """Run `test(engine, weights)` with an engine at version 0."""
    async def main():
        weights = MemoryWeights()
        engine = EmbeddedEngine("e0", "pool", MODELS[0], weights, EngineSettings(**settings))
        engine.start()
        await engine.load_weights(weights.put(0, MODELS[0].state_dict()))
        try:
            async with asyncio.timeout(60):
                return await test(engine, weights)
        finally:
            await engine.close()
    return asyncio.run(main())


async def sampled(engine, tokens):
    """Wait until the engine has sampled `tokens` more."""
    start = engine.stats().generated
    while engine.stats().generated < start + tokens:
        await asyncio.sleep(.001)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(.6), Sampling(top_p=.7), Sampling(.8, top_k=3),
                                      Sampling(0.0), Sampling(1.2, top_p=.9, top_k=8)])
def test_logprobs_equal_one_forward_pass_over_the_whole_sequence(sampling):
    async def test(engine, weights):
        asked = [request(i, range(1, 4 + 9 * i), 20, seed=i, sampling=sampling) for i in range(4)]
        for one, done in zip(asked, await asyncio.gather(*map(engine.generate, asked)), strict=True):
            assert len(done.tokens) == len(done.logprobs) == 20
            assert list(done.logprobs) == pytest.approx(expected_logprobs(one.context, done, sampling), abs=1e-4)
    running(test, prefill_chunk=16)


def test_tokens_depend_on_the_request_and_not_on_its_neighbours_or_the_chunk():
    async def test(engine, weights):
        asked = [request(i, range(1, 6 + 6 * i), 15, seed=i) for i in range(6)]
        together = await asyncio.gather(*map(engine.generate, asked))
        for one in asked:
            engine.release(one.trajectory)
        return [done.tokens for done in together], [(await engine.generate(one)).tokens for one in asked]
    first, second = running(test), running(test, prefill_chunk=5, max_concurrent=3)
    assert first[0] == first[1] == second[0] == second[1]


def test_a_sampled_stop_token_is_part_of_the_action_and_a_cut_action_has_none():
    async def test(engine, weights):
        free = await engine.generate(request(0, max_tokens=30))
        assert (free.finish, len(free.tokens)) == (Finish.LENGTH, 30)
        stop = free.tokens[9]
        first = list(free.tokens).index(stop)
        engine.release(TrajectoryId(0, 0))
        stopped = await engine.generate(request(0, max_tokens=30, stop=(39 if stop != 39 else 38, stop)))
        assert stopped.finish is Finish.STOP
        assert list(stopped.tokens) == list(free.tokens[:first + 1])
        assert len(stopped.logprobs) == first + 1
    running(test)


def test_the_context_limit_cuts_and_a_full_context_samples_nothing():
    async def test(engine, weights):
        cut = await engine.generate(request(0, [1] * 45, 30))
        assert (len(cut.tokens), cut.finish) == (5, Finish.LENGTH)
        full = await engine.generate(request(1, [1] * 50, 30))
        assert (len(full.tokens), full.finish, full.versions().tolist()) == (0, Finish.LENGTH, [])
        over = await engine.generate(request(2, [1] * 60, 30))
        assert (len(over.tokens), over.segments) == (0, ((0, 0),))
        engine.check()
    running(test, context_tokens=50)


@pytest.mark.parametrize("context", [[], [40], [-1]])
def test_a_context_that_is_empty_or_has_unknown_ids_is_refused(context):
    async def test(engine, weights):
        with pytest.raises(ValueError, match="a context needs at least one token id"):
            await engine.generate(request(context=context))
        assert len((await engine.generate(request())).tokens) == 12
    running(test)


def test_a_new_turn_prefills_only_what_the_cache_lacks():
    async def test(engine, weights):
        first = request(0, range(1, 31), 10)
        done = await engine.generate(first)
        assert (engine.stats().prefilled, engine.stats().reused, engine.stats().kv_tokens) == (29, 0, 39)
        context = join(first.context, done.tokens, ids([3, 4, 5]))
        second = request(0, context, 10, turn=1)
        again = await engine.generate(second)
        assert (engine.stats().prefilled, engine.stats().reused) == (29 + 3, 39)
        assert list(again.logprobs) == pytest.approx(expected_logprobs(context, again), abs=1e-4)
        # Another past than the cached one: nothing of it is used.
        other = request(0, [7, *join(context, again.tokens)[1:]], 10, turn=2)
        third = await engine.generate(other)
        assert engine.stats().reused == 39
        assert list(third.logprobs) == pytest.approx(expected_logprobs(other.context, third), abs=1e-4)
        # The same turn once more (its completion was lost on the way): all but its last token is there.
        repeat = await engine.generate(other)
        assert engine.stats().reused == 39
        assert repeat.tokens == third.tokens
        engine.release(other.trajectory)
        await engine.suspend()
        assert engine.stats().kv_tokens == 0
    running(test)


def test_weights_swapped_in_the_middle_of_a_turn():
    """T5, T8: each token has the version it was sampled with, and log-probs are a fresh engine's with those weights."""
    async def test(engine, weights):
        asked = [request(i, range(1, 8 + 5 * i), 120, seed=i) for i in range(5)]
        idle = await engine.generate(request(9, range(1, 20), 10))
        turns = [asyncio.ensure_future(engine.generate(one)) for one in asked]
        await sampled(engine, 60)
        await engine.suspend()
        await engine.load_weights(weights.put(1, MODELS[1].state_dict()))
        assert engine.version == 1
        await engine.resume()
        await sampled(engine, 60)
        await engine.load_weights(weights.put(2, MODELS[2].state_dict()))
        for one, done in zip(asked, await asyncio.gather(*turns), strict=True):
            assert [version for version, _ in done.segments] == [0, 1, 2]
            assert done.segments[0][1] == 0 < done.segments[1][1] < done.segments[2][1] < 120
            assert (done.oldest, done.newest) == (0, 2)
            assert list(done.logprobs) == pytest.approx(expected_logprobs(one.context, done), abs=1e-4)
        reused = engine.stats().reused
        context = join(ids(range(1, 20)), idle.tokens, ids([1]))
        later = await engine.generate(request(9, context, 5, turn=1))
        assert engine.stats().reused == reused  # what was idle had KV of version 0
        assert list(later.logprobs) == pytest.approx(expected_logprobs(context, later), abs=1e-4)
        assert later.segments == ((2, 0),)
    running(test)


def test_suspend_and_resume_without_new_weights_change_nothing():
    async def test(engine, weights):
        whole = await engine.generate(request(0, max_tokens=80))
        engine.release(TrajectoryId(0, 0))
        turn = asyncio.ensure_future(engine.generate(request(0, max_tokens=80)))
        await sampled(engine, 10)
        await engine.suspend()
        stood = engine.stats()
        late = asyncio.ensure_future(engine.generate(request(1, max_tokens=80)))
        await asyncio.sleep(.05)
        assert engine.stats().generated == stood.generated
        assert not turn.done()
        await engine.resume()
        again = await turn
        assert (again.tokens, again.segments) == (whole.tokens, whole.segments)
        assert list(again.logprobs) == pytest.approx(list(whole.logprobs), abs=1e-4)
        assert (await late).tokens == whole.tokens
    running(test)


def test_a_version_never_goes_back():
    async def test(engine, weights):
        old = weights.put(0, MODELS[0].state_dict())
        await engine.load_weights(weights.put(2, MODELS[2].state_dict()))
        with pytest.raises(InvariantViolated, match="I5: engine e0 at version 2 was given 0"):
            await engine.load_weights(old)
        done = await engine.generate(request())
        assert done.segments == ((2, 0),)
    running(test)


def test_weights_that_are_gone_or_do_not_fit_leave_the_old_ones_serving():
    async def test(engine, weights):
        before = (await engine.generate(request(0))).tokens
        with pytest.raises(EngineLost, match="version 5 are not held"):
            await engine.load_weights(Manifest(5, "memory:5"))
        short = {name: tensor for name, tensor in MODELS[1].state_dict().items() if "norm" not in name}
        with pytest.raises(EngineLost, match="do not fit engine e0: missing tensors"):
            await engine.load_weights(weights.put(6, short))
        done = await engine.generate(request(1))
        assert (done.tokens, done.segments) == (before, ((0, 0),))
        manifest = weights.put(7, MODELS[1].state_dict())
        await engine.load_weights(manifest)
        assert checksum(engine._runner.model.state_dict()) == manifest.checksum
    running(test)


def test_weights_are_fetched_while_tokens_are_sampled_and_the_load_fetches_no_more():
    async def test(engine, weights):
        get, asked = weights.get, []

        def slow(manifest):
            asked.append(manifest)
            time.sleep(0.3)
            return get(manifest)
        weights.get = slow
        manifest, sampled_before = weights.put(1, MODELS[1].state_dict()), engine.stats().generated
        turns = [asyncio.create_task(engine.generate(request(member, max_tokens=200))) for member in range(4)]
        await engine.prefetch(manifest)
        assert engine.stats().generated > sampled_before
        await engine.suspend()
        await engine.load_weights(manifest)
        await engine.resume()
        await asyncio.gather(*turns)
        assert asked == [manifest]
        assert checksum(engine._runner.model.state_dict()) == manifest.checksum
        await engine.load_weights(weights.put(2, MODELS[2].state_dict()))  # not fetched before: it is now
        assert checksum(engine._runner.model.state_dict()) == asked[1].checksum
    running(test)


def test_an_abort_in_the_middle_frees_its_row_and_its_kv():
    async def test(engine, weights):
        turns = [asyncio.ensure_future(engine.generate(request(i, max_tokens=180, seed=i))) for i in range(3)]
        await sampled(engine, 20)
        turns[0].cancel()
        turns[2].cancel()
        await asyncio.sleep(0)
        await engine.suspend()
        assert (engine.stats().running, engine.stats().kv_tokens) == (1, 11 + 180)
        engine.check()
        await engine.resume()
        done = await turns[1]
        assert turns[0].cancelled()
        assert list(done.logprobs) == pytest.approx(expected_logprobs(range(1, 12), done), abs=1e-4)
    running(test)


def test_what_cannot_fit_waits_and_idle_kv_goes_oldest_first():
    async def test(engine, weights):
        for member in (0, 1, 2):
            await engine.generate(request(member, range(1, 31), 11, seed=member))  # leaves 40 tokens each
        assert engine.stats().kv_tokens == 120
        long = asyncio.ensure_future(engine.generate(request(3, range(1, 31), 100)))  # 130 of 200: the oldest goes
        await sampled(engine, 5)
        assert engine.stats().kv_tokens == 130 + 40
        blocked = asyncio.ensure_future(engine.generate(request(4, range(1, 31), 60)))
        await sampled(engine, 5)
        assert (engine.stats().waiting, engine.stats().running) == (1, 1)
        assert len((await blocked).tokens) == 60
        assert long.done()
        reused = engine.stats().reused
        await engine.generate(request(0, range(1, 31), 2, turn=1))
        assert engine.stats().reused == reused
        await engine.suspend()
        engine.check()
    running(test, kv_tokens=200)


def test_older_groups_are_served_first_and_their_members_in_order_whoever_asked_first():
    async def test(engine, weights):
        ended = []

        async def turn(group, member, turn):
            await engine.generate(request(member, turn=turn, group=group))
            ended.append((group, member))
        running = asyncio.ensure_future(engine.generate(request(9, max_tokens=40)))
        await sampled(engine, 2)
        await asyncio.gather(running, *[turn(*of) for of in ((7, 0, 0), (5, 1, 0), (7, 1, 3), (5, 0, 2), (6, 0, 0))])
        assert ended == [(5, 0), (5, 1), (6, 0), (7, 0), (7, 1)]
    running(test, max_concurrent=1)


def test_a_release_from_another_thread_holds_up_nobody():
    """So calls an actor its synchronous methods."""
    async def test(engine, weights):
        await engine.generate(request(0))
        await asyncio.to_thread(engine.release, request(0).trajectory)
        async with asyncio.timeout(30):
            assert len((await engine.generate(request(1, max_tokens=3))).tokens) == 3
    running(test)


def test_many_trajectories_of_many_turns_with_random_aborts_keep_the_accounting_exact():
    async def test(engine, weights):
        chance = random.Random(3)
        finished = aborted = 0

        async def play(member):
            nonlocal finished, aborted
            context = ids(chance.choices(range(40), k=chance.randint(1, 30)))
            for turn in range(4):
                one = request(member, context, chance.randint(1, 12), seed=member * 10 + turn, turn=turn)
                asked = asyncio.ensure_future(engine.generate(one))
                if chance.random() < .15:
                    await asyncio.sleep(chance.random() * .01)
                    asked.cancel()
                try:
                    done = await asked
                except asyncio.CancelledError:
                    aborted += 1
                    break
                assert list(done.logprobs) == pytest.approx(expected_logprobs(context, done), abs=1e-4)
                finished += 1
                context = join(context, done.tokens, ids(chance.choices(range(40), k=chance.randint(0, 6))))
            engine.release(TrajectoryId(0, member))

        async def watch():
            for version in (1, 2):
                for _ in range(6):
                    await asyncio.sleep(.02)
                    await engine.suspend()
                    engine.check()
                    await engine.resume()
                await engine.load_weights(weights.put(version, MODELS[version].state_dict()))

        await asyncio.gather(watch(), *map(play, range(40)))
        await engine.suspend()
        stats = engine.stats()
        assert (stats.running, stats.waiting, stats.kv_tokens) == (0, 0, 0)
        assert finished > 60
        assert aborted > 5
    running(test, max_concurrent=7, kv_tokens=400, prefill_chunk=20)


def test_a_lost_engine_gives_partials_tells_its_watcher_and_starts_again():
    async def test(engine, weights):
        told = []
        engine.on_lost(told.append)
        turns = [asyncio.ensure_future(engine.generate(request(i, max_tokens=150, seed=i))) for i in range(2)]
        await sampled(engine, 20)
        decode = engine._runner.decode

        def broken(*arguments):
            raise RuntimeError("device gone")
        engine._runner.decode = broken
        for turn in turns:
            with pytest.raises(EngineLost, match="engine e0 is lost: RuntimeError: device gone") as lost:
                await turn
            partial = lost.value.partial
            assert 0 < len(partial.tokens) == len(partial.logprobs) < 150
            assert list(partial.logprobs) == pytest.approx(expected_logprobs(range(1, 12), partial), abs=1e-4)
        assert engine.lost == "RuntimeError: device gone"
        for refused in (engine.generate(request()), engine.suspend()):
            with pytest.raises(EngineLost, match="is lost"):
                await refused
        engine.release(TrajectoryId(0, 0))
        assert told == ["e0"]
        engine._runner.decode = decode
        await engine.restart()
        with pytest.raises(EngineLost, match="no weights loaded"):
            await engine.generate(request())
        await engine.load_weights(weights.put(0, MODELS[0].state_dict()))
        done = await engine.generate(request())
        assert list(done.logprobs) == pytest.approx(expected_logprobs(range(1, 12), done), abs=1e-4)
        assert engine.lost is None
    running(test)


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e38])
def test_weights_that_give_no_finite_logits_are_named_by_their_version(bad):
    """1e38 is finite, and its products are not: a learner that diverged has such weights."""
    async def test(engine, weights):
        diverged = {name: torch.full_like(tensor, bad) for name, tensor in MODELS[0].state_dict().items()}
        await engine.load_weights(weights.put(3, diverged))
        with pytest.raises(EngineLost, match="e0 is lost: weights of version 3 give logits that are not finite"):
            await engine.generate(request())
    running(test)


def test_a_turn_goes_on_from_its_partial_on_another_engine():
    async def test(engine, weights):
        turn = asyncio.ensure_future(engine.generate(request(0, max_tokens=150)))
        await sampled(engine, 20)
        await engine.close()
        with pytest.raises(EngineLost, match="closed") as lost:
            await turn
        kept = lost.value.partial.tokens
        await engine.restart()
        await engine.load_weights(weights.put(0, MODELS[0].state_dict()))
        context = join(ids(range(1, 12)), kept)
        rest = await engine.generate(request(0, context, 150 - len(kept)))
        assert list(rest.logprobs) == pytest.approx(expected_logprobs(context, rest), abs=1e-4)
    running(test)


@pytest.mark.parametrize("change", [{"threads": -1}, {"max_concurrent": 0}, {"kv_tokens": 10, "context_tokens": 20},
                                    {"prefill_chunk": 0}, {"context_tokens": -1}, {"answer_seconds": 0}])
def test_settings_that_cannot_be_are_refused(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        EngineSettings(**change)


def test_an_engine_refuses_a_context_that_its_model_or_its_budget_has_not():
    with pytest.raises(ConfigError, match="at most the model's 200; got 300"):
        EmbeddedEngine("e", "p", MODELS[0], MemoryWeights(), EngineSettings(context_tokens=300))
    with pytest.raises(ConfigError, match="whole context of 200 tokens; got 100"):
        EmbeddedEngine("e", "p", MODELS[0], MemoryWeights(), EngineSettings(kv_tokens=100))
