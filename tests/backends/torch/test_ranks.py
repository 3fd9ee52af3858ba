"""The learner over ranks, in real processes over gloo: equal to one process, checkpoints for any number, lost ranks."""

import asyncio
import os
import random
import signal
import time
from dataclasses import replace

import pytest
import torch
from test_learner import SHAPE, batch, parameters, sample
from test_pieces import samples

from rollart.algo.packing import deal, pack
from rollart.algo.settings import AlgoSettings
from rollart.backends.torch.chat import ByteChat
from rollart.backends.torch.checkpoint import load_model, save_shape
from rollart.backends.torch.learner import TorchTrainer
from rollart.backends.torch.ranks import ProcessRank, RankedTrainer, RankSpec
from rollart.backends.torch.settings import LearnerSettings
from rollart.backends.torch.transformer import small_model
from rollart.backends.weights import WeightsSettings, open_reader
from rollart.backends.weights.memory import MemoryWeights
from rollart.core.errors import ConfigError, InvariantViolated, TrainerLost
from rollart.core.types import TrainBatch

# With an eps above the gradient, AdamW's step shows the gradient itself; clipping shows its norm over all ranks.
STEADY = LearnerSettings(eps=1.0, learning_rate=1.0, max_grad_norm=0.7, weight_decay=0.01, micro_batch_tokens=70,
                         precision="float32", device="cpu", ranks=2, rank_seconds=120)
MIXTURE = replace(SHAPE, experts=8, experts_per_token=2)


class Kept:
    """A rank's process that outlives its trainer, for the next test."""

    def __init__(self, rank):
        self.call, self.pid, self.end = rank.call, rank.pid, rank.close
        self.close = self.kill = lambda: None


@pytest.fixture(scope="module")
def runner():
    with asyncio.Runner() as runner:
        yield lambda story: runner.run(asyncio.wait_for(story, 280))


@pytest.fixture(scope="module")
def launch(runner):
    kept = {}

    async def start(number):
        if number not in kept:
            kept[number] = Kept(ProcessRank(number))
        return kept[number]

    yield start
    for rank in kept.values():
        rank.end()


def spec(shape=SHAPE, settings=STEADY, algo=None, seed=0, weights=WeightsSettings(), **more):  # noqa: B008
    model, algo = small_model(shape, seed), algo or AlgoSettings()
    source = (model.config, dict(model.state_dict()))
    return RankSpec(model=source, settings=settings, algo=algo, weights=weights, seed=5,
                    reference=source if algo.reference == "copy" else None, **more)


def alone(shape=SHAPE, settings=STEADY, algo=None, seed=0):
    algo = algo or AlgoSettings()
    return TorchTrainer(small_model(shape, seed), settings, algo, MemoryWeights(), seed=5,
                        reference=small_model(shape, seed) if algo.reference == "copy" else None)


def uneven(version):
    return batch(9, version=version, seed=version)


def of_turns(version):
    return TrainBatch(version, tuple(samples(9, version)))


CASES = {
    "dense": (SHAPE, STEADY, AlgoSettings(aggregation="sequence_mean"), uneven),
    "mixture": (MIXTURE, replace(STEADY, gradient_checkpointing=True), AlgoSettings(router_coefficient=0.5), uneven),
    "critic, reference, minibatches": (SHAPE, replace(STEADY, minibatches=2), replace(
        AlgoSettings.named("ppo"), kl_coefficient=0.2, reference="copy", entropy_coefficient=0.1), of_turns),
}


@pytest.mark.parametrize("case", CASES)
def test_l7_two_ranks_are_one(runner, launch, tmp_path, case):
    shape, settings, algo, made = CASES[case]
    files = WeightsSettings(carrier="file", folder=str(tmp_path))

    async def story():
        two, one = RankedTrainer(spec(shape, settings, algo, weights=files), launch), alone(shape, settings, algo)
        await two.start()
        for version in range(5):
            report, expected = await two.step(made(version)), await one.step(made(version))
            assert report.tokens == expected.tokens
            assert report.metrics.keys() == expected.metrics.keys()
            for name, value in expected.metrics.items():
                if name != "tokens_per_second":
                    assert report.metrics[name] == pytest.approx(value, abs=1e-5, rel=1e-5), (version, name)
        assert report.metrics["grad_norm"] > 0.7
        moved = open_reader(files).get(await two.publish(5))
        before = small_model(shape, 0).state_dict()
        for name, tensor in one._model.state_dict().items():
            assert (moved[name] - tensor).abs().max() < 1e-5, name
        assert max((moved[name] - tensor).abs().max() for name, tensor in before.items()) > 1e-2
        one.close()
        two.close()

    runner(story())


def test_bfloat16_stays_near_float32_and_keeps_float32_weights(runner, launch, tmp_path):
    half, files = replace(STEADY, precision="bfloat16"), WeightsSettings(carrier="file", folder=str(tmp_path))

    async def story():
        two, one = RankedTrainer(spec(MIXTURE, half, weights=files), launch), alone(MIXTURE)
        await two.start()
        report, expected = await two.step(uneven(0)), await one.step(uneven(0))
        assert 1e-6 < abs(report.metrics["loss"] - expected.metrics["loss"]) < 0.02  # it is another arithmetic
        assert report.metrics["grad_norm"] == pytest.approx(expected.metrics["grad_norm"], rel=0.05)
        moved, before = open_reader(files).get(await two.publish(1)), small_model(MIXTURE, 0).state_dict()
        steps = [torch.cat([(new[name] - before[name]).flatten() for name in before])
                 for new in (moved, one._model.state_dict())]
        assert steps[0].dtype == torch.float32
        assert torch.nn.functional.cosine_similarity(*steps, dim=0) > 0.97
        two.close()
        one.close()

    runner(story())


def test_a_checkpoint_is_of_its_moment_and_goes_on_bit_by_bit_with_any_number_of_ranks(runner, launch, tmp_path):
    shape = replace(SHAPE, vocabulary=300)
    folder, plain = tmp_path / "two", tmp_path / "one"
    folder.mkdir()
    plain.mkdir()
    export = lambda path: save_shape(small_model(shape, 0).config, path, ByteChat())  # noqa: E731

    async def story():
        two = RankedTrainer(spec(shape), launch, export=export)
        await two.start()
        for version in range(2):
            await two.step(uneven(version))
        saving = asyncio.create_task(two.save(folder))
        await asyncio.sleep(0)
        published = await two.publish(2)
        report = await two.step(uneven(2))  # while it is written
        after = await two.publish(3)
        await saving
        await two.load(folder)
        assert two.version == 2
        assert (await two.publish(2)).checksum == published.checksum
        again = await two.step(uneven(2))
        assert {**again.metrics, "tokens_per_second": 0} == {**report.metrics, "tokens_per_second": 0}
        assert (await two.publish(3)).checksum == after.checksum
        two.close()

        one = alone(shape, seed=9)
        await one.load(folder)
        assert (one.version, (await one.publish(2)).checksum) == (2, published.checksum)
        assert torch.equal(parameters(load_model(folder)), parameters(one))
        await one.save(plain)
        few = TrainBatch(2, uneven(2).samples[:2])
        expected = await one.step(few)
        three = RankedTrainer(spec(shape, replace(STEADY, ranks=3), seed=7), launch)
        for source in (folder, plain):  # more ranks than samples, from two ranks and from one
            await three.load(source)
            assert (await three.publish(2)).checksum == published.checksum
            got = (await three.step(few)).metrics
            assert got["loss"] == pytest.approx(expected.metrics["loss"], abs=1e-5)
            assert got["grad_norm"] == pytest.approx(expected.metrics["grad_norm"], abs=1e-5)
            assert got["importance_ess"] == pytest.approx(expected.metrics["importance_ess"], abs=1e-5)
        assert (await three.step(TrainBatch(3, ()))).metrics["updates"] == 0
        for number in folder.glob("shards/*.distcp"):
            number.write_bytes(b"cut")
        with pytest.raises(TrainerLost, match="learner at version"):
            await three.load(folder)
        three.close()
        one.close()

    runner(story())


def gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_a_rank_that_dies_or_hangs_ends_all_and_a_checkpoint_is_the_way_on(runner, tmp_path):
    settings = replace(STEADY, micro_batch_tokens=1, rank_seconds=15)

    async def story():
        warm = [ProcessRank(number) for number in (0, 1, 0, 1)]  # imports take longer than a rank may wait here
        await asyncio.gather(*[rank.call("listen") for rank in warm])

        async def launch(number):
            return warm.pop(0)

        trainer = RankedTrainer(spec(settings=settings), launch)
        with pytest.raises(TrainerLost, match="not started"):
            await trainer.step(uneven(0))
        await trainer.start()
        await trainer.step(uneven(0))
        await trainer.save(tmp_path)
        whole = (await trainer.step(uneven(1))).metrics
        pids = [rank.pid for rank in trainer.ranks]
        running = asyncio.create_task(trainer.step(batch(4000, version=2)))
        await asyncio.sleep(0.5)
        assert not running.done()
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(TrainerLost, match=r"version 2, step: rank 1 \(process \d+\) ended by signal 9"):
            await running
        with pytest.raises(TrainerLost, match="load a checkpoint"):
            await trainer.step(uneven(2))
        await trainer.restart(tmp_path)
        assert all(gone(pid) for pid in pids)
        again = (await trainer.step(uneven(1))).metrics
        assert {**again, "tokens_per_second": 0} == {**whole, "tokens_per_second": 0}


        os.kill(trainer.ranks[1].pid, signal.SIGSTOP)
        started = time.monotonic()
        with pytest.raises(TrainerLost, match="version 2, step"):
            await trainer.step(uneven(2))
        assert time.monotonic() - started < 60
        trainer.close()

    runner(story())


def test_a_start_that_fails_is_tried_once_more_and_bad_calls_are_told(runner):
    class Fake:
        def __init__(self, bad):
            self.bad, self.killed, self.calls = bad, False, []

        async def call(self, method, *arguments):
            self.calls.append(method)
            if self.bad and method == "start":
                raise TrainerLost("rank 1 ended by signal 6")
            return "host:1" if method == "listen" else None

        def kill(self):
            self.killed = True

        close = kill

    async def story(failures):
        made = []

        async def launch(number):
            made.append(Fake(bad=len(made) < 2 * failures))
            return made[-1]

        trainer = RankedTrainer(spec(), launch)
        if failures > 1:
            with pytest.raises(TrainerLost, match="signal 6"):
                await trainer.start()
        else:
            await trainer.start()
            with pytest.raises(InvariantViolated, match="stands at version 0; the batch is for 3"):
                await trainer.step(TrainBatch(3, ()))
            with pytest.raises(InvariantViolated, match="version 2 was to be published"):
                await trainer.publish(2)
        assert [rank.killed for rank in made] == [True, True, failures > 1, failures > 1]
        trainer.close()
        assert all(rank.killed for rank in made)

    runner(story(1))
    runner(story(2))


@pytest.mark.parametrize("bad", [{"settings": replace(STEADY, schedule="linear")}, {"temperature": 0.0},
                                 {"algo": AlgoSettings(kl_coefficient=0.1, reference="adapter_off")}])
def test_what_one_rank_refuses_all_refuse(bad):
    with pytest.raises(ConfigError):
        RankedTrainer(spec(**bad))


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_samples_are_dealt_evenly_by_tokens(ranks):
    chance = random.Random(ranks)
    for _ in range(200):
        lengths = [chance.randrange(1, 400) for _ in range(chance.randrange(0, 40))]
        dealt = deal(lengths, ranks, 500)
        assert sorted(i for own in dealt for members in own for i in members) == list(range(len(lengths)))
        loads = [sum(lengths[i] for members in own for i in members) for own in dealt]
        least = max([0, *lengths, sum(lengths) / ranks])
        assert max(loads) <= (4 / 3) * least + max([0, *lengths]) / 3
        assert max(loads) - min(loads) <= max([0, *lengths])
        assert all(sum(lengths[i] for i in members) <= 500 for own in dealt for members in own)
    assert deal(lengths, 1, 500) == [pack(lengths, 500)]


def test_one_sample_is_dealt_to_one_rank():
    chance = random.Random(0)
    assert [len(own) for own in deal([len(sample(chance).ids)], 3, 100)] == [1, 0, 0]
