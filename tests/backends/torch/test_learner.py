"""The learner as a port: the same result however a batch is split, resume, publish under a step, failures, learning."""

import asyncio
import math
import random
from dataclasses import replace

import pytest
import torch

from rollart.algo.catalogue import ALGORITHMS
from rollart.algo.samples import make_batch
from rollart.algo.settings import AlgoSettings
from rollart.backends.torch.learner import TorchTrainer
from rollart.backends.torch.losses import ActionTokens, policy_loss
from rollart.backends.torch.optimizer import rate_at
from rollart.backends.torch.scoring import action_logprobs, pack_sequences
from rollart.backends.torch.settings import LearnerSettings, SmallModel
from rollart.backends.torch.threads import choose_device
from rollart.backends.torch.transformer import small_model
from rollart.backends.weights.memory import MemoryWeights
from rollart.core.clock import stream
from rollart.core.errors import ConfigError, InvariantViolated, TrainerLost
from rollart.core.tokens import floats, ids
from rollart.core.types import (
    Completion,
    Finish,
    Group,
    Observation,
    Outcome,
    Sample,
    Score,
    Task,
    TrainBatch,
    Trajectory,
    TrajectoryId,
    Turn,
)

SHAPE = SmallModel(layers=2, width=32, heads=2, kv_heads=1, mlp=48, vocabulary=20)
# With an eps far above the gradient, AdamW's first step is proportional to the gradient: parameters show it.
PLAIN = LearnerSettings(eps=1e3, learning_rate=1e3, max_grad_norm=0.0, precision="float32", device="cpu")


def model(seed=0, dtype=torch.float32):
    return small_model(SHAPE, seed).to(dtype)


def sample(chance, member=0, *, version=0, length=None, **change):
    length = length or chance.randrange(6, 60)
    mask = [0, 0, *(int(chance.random() < 0.4) for _ in range(length - 3)), 1]
    made = Sample(TrajectoryId(0, member), "d", ids(chance.randrange(20) for _ in mask), ids(mask),
                  floats(-3.0 * m for m in mask), ids(version if m else -1 for m in mask), chance.uniform(-2, 2), 1.0)
    return replace(made, **change)


def batch(count=12, *, version=0, seed=1):
    chance = random.Random(seed)
    return TrainBatch(version, tuple(sample(chance, i, version=version) for i in range(count)))


def parameters(trainer_or_model):
    module = getattr(trainer_or_model, "_model", trainer_or_model)
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def run(story):
    return asyncio.run(asyncio.wait_for(story, 60))


def trained(samples, settings=PLAIN, algo=None, dtype=torch.float64, **more):
    """Parameters and report after one step of a fresh model."""
    trainer = TorchTrainer(model(dtype=dtype), settings, algo or AlgoSettings(), MemoryWeights(), **more)
    report = run(trainer.step(TrainBatch(0, tuple(samples))))
    trainer.close()
    return parameters(trainer), report


@pytest.mark.parametrize("micro_batch_tokens", [1, 70, 100_000])
def test_l7_any_split_into_micro_batches_gives_the_same_loss_and_gradient(micro_batch_tokens):
    samples = batch().samples
    reference, whole = trained(samples, replace(PLAIN, micro_batch_tokens=200))
    moved, report = trained(samples, replace(PLAIN, micro_batch_tokens=micro_batch_tokens))
    assert (moved - reference).abs().max() < 1e-6
    assert report.metrics["loss"] == pytest.approx(whole.metrics["loss"], abs=1e-9)
    assert report.metrics["grad_norm"] == pytest.approx(whole.metrics["grad_norm"], abs=1e-9)
    assert (reference - parameters(model(dtype=torch.float64))).abs().max() > 1e-4


def test_l7_the_loss_is_the_token_mean_and_not_the_mean_of_means():
    chance = random.Random(0)
    mask = {2: [0, 0, 1, 1], 6: [0, 0, 1, 1, 1, 1, 1, 1]}
    samples = []
    for count, loss in ((2, 1.0), (6, 2.0)):  # behaviour equals the learner, so each token's loss is -advantage
        made = sample(chance, length=count + 2, mask=ids(mask[count]), advantage=-loss)
        with torch.no_grad():
            own, _ = action_logprobs(model(), pack_sequences([(made.ids, made.mask)], torch.device("cpu")), 1.0)
        samples.append(replace(made, logprobs=floats([0.0, 0.0, *own.tolist()])))
    for micro in (1, 1000):
        _, report = trained(samples, replace(PLAIN, micro_batch_tokens=micro), dtype=torch.float32)
        assert report.metrics["loss"] == pytest.approx(1.75, abs=1e-5)


def test_a6_a_trajectory_in_three_samples_has_the_weight_of_one():
    first, other = batch(2).samples
    thirds = [replace(first, weight=1 / 3)] * 3
    one, _ = trained([first, other])
    three, _ = trained([*thirds, other])
    assert (one - three).abs().max() < 1e-9


def test_t2_what_stands_at_masked_positions_changes_no_gradient():
    samples = batch(4).samples
    noisy = [replace(s, logprobs=floats(lp if m else 99.0 for lp, m in zip(s.logprobs, s.mask, strict=True)),
                     versions=ids(v if m else 55 for v, m in zip(s.versions, s.mask, strict=True)))
             for s in samples]
    assert torch.equal(trained(samples)[0], trained(noisy)[0])


@pytest.mark.parametrize("ratio", ["proximal", "behaviour"])
@pytest.mark.parametrize("minibatches", [1, 2])
def test_a_step_is_the_plain_loop_with_the_proximal_policy_of_the_steps_start(minibatches, ratio):
    """Against the formula written out: log-probs of the start of the step, one AdamW step per minibatch."""
    settings = replace(PLAIN, minibatches=minibatches)
    algo = AlgoSettings(ratio=ratio, correction="tis" if ratio == "proximal" else "none")
    samples = list(batch(4).samples)
    got, report = trained(samples, settings, algo, seed=3)

    plain = model(dtype=torch.float64)
    adam = torch.optim.AdamW(plain.parameters(), lr=1e3, betas=(0.9, 0.99), eps=1e3, weight_decay=0.0)

    def score(one):
        return action_logprobs(plain, pack_sequences([(one.ids, one.mask)], torch.device("cpu")), 1.0)[0]

    with torch.no_grad():
        proximal = {one.trajectory: score(one) for one in samples}
    stream(3, "minibatches", 0).shuffle(samples)
    for start in range(minibatches):
        part = samples[start::minibatches]
        losses = []
        for one in part:
            behaviour = torch.tensor([lp for lp, m in zip(one.logprobs, one.mask, strict=True) if m])
            advantages = torch.full_like(behaviour, one.advantage, dtype=torch.float64)
            losses.append(policy_loss(ActionTokens(score(one), proximal[one.trajectory], behaviour.double(), advantages,
                                                   behaviour * 0, torch.tensor([len(behaviour)])), algo).loss)
        adam.zero_grad()
        torch.cat(losses).mean().backward()
        adam.step()
    assert report.metrics["updates"] == minibatches
    assert (got - parameters(plain)).abs().max() < 1e-9


def test_log_probability_gap_is_zero_for_equal_weights_and_absent_without_fresh_tokens():
    samples = []
    for one in batch(4).samples:
        with torch.no_grad():
            own, _ = action_logprobs(model(), pack_sequences([(one.ids, one.mask)], torch.device("cpu")), 0.7)
        own = iter(own.tolist())
        samples.append(replace(one, logprobs=floats(next(own) if m else 0.0 for m in one.mask)))
    _, report = trained(samples, dtype=torch.float32, temperature=0.7)
    assert report.metrics["logprob_gap"] < 1e-5
    assert report.metrics["importance_ess"] == pytest.approx(1.0, abs=1e-5)
    _, hotter = trained(samples, dtype=torch.float32, temperature=1.0)
    assert hotter.metrics["logprob_gap"] > 1e-3
    _, stale = trained([replace(s, versions=ids(v - 1 if v >= 0 else v for v in s.versions)) for s in samples])
    assert "logprob_gap" not in stale.metrics
    assert stale.metrics["logprob_gap_all"] > 0


def test_kl_to_the_reference_is_zero_at_first_and_holds_the_policy_back():
    settings = LearnerSettings(learning_rate=3e-3, device="cpu", precision="float32")

    async def divergence(coefficient):
        algo = AlgoSettings(kl_coefficient=coefficient, reference="copy")
        trainer = TorchTrainer(model(), settings, algo, MemoryWeights(), reference=model())
        seen = [(await trainer.step(batch(version=version))).metrics["kl"] for version in range(12)]
        trainer.close()
        return seen

    held, free = run(divergence(5.0)), run(divergence(1e-9))
    assert held[0] == pytest.approx(0, abs=1e-6)
    assert held[-1] < 0.5 * free[-1]
    with pytest.raises(ConfigError, match="set both or neither"):
        TorchTrainer(model(), settings, AlgoSettings(kl_coefficient=5.0, reference="copy"), MemoryWeights())
    with pytest.raises(ConfigError, match="set both or neither"):
        TorchTrainer(model(), settings, AlgoSettings(), MemoryWeights(), reference=model())


def test_a_batch_without_samples_is_a_step_that_changes_nothing_but_counts():
    async def story():
        trainer = TorchTrainer(model(), PLAIN, AlgoSettings(), MemoryWeights())
        report = await trainer.step(TrainBatch(0, ()))
        assert (report.tokens, report.metrics["updates"], trainer.version) == (0, 0, 1)
        assert torch.equal(parameters(trainer), parameters(model()))
        assert (await trainer.publish(1)).version == 1
        trainer.close()

    run(story())


def test_an_update_that_is_not_finite_is_skipped_and_five_in_a_row_are_the_end():
    def bad(version):
        return TrainBatch(version, (replace(batch(version=version).samples[0], advantage=math.nan),))

    async def story():
        trainer = TorchTrainer(model(), PLAIN, AlgoSettings(), MemoryWeights())
        for version in range(4):
            report = await trainer.step(bad(version))
            assert report.metrics["skipped"] == 1
            assert all(math.isfinite(value) for value in report.metrics.values())
        assert torch.equal(parameters(trainer), parameters(model()))
        assert (await trainer.step(batch(version=4))).metrics["skipped"] == 0
        for version in range(5, 9):
            await trainer.step(bad(version))
        with pytest.raises(TrainerLost, match="5 updates in a row"):
            await trainer.step(bad(9))
        trainer.close()

    run(story())


@pytest.mark.parametrize("minibatches", [1, 2])
def test_resume_is_bit_exact(tmp_path, minibatches):
    settings = LearnerSettings(schedule="cosine", warmup_steps=2, total_steps=8, weight_decay=0.1, device="cpu",
                               minibatches=minibatches)

    async def story():
        first = TorchTrainer(model(), settings, AlgoSettings(), MemoryWeights(), seed=5)
        for version in range(3):
            await first.step(batch(version=version, seed=version))
        await first.save(tmp_path)
        second = TorchTrainer(model(seed=9), settings, AlgoSettings(), MemoryWeights(), seed=5)
        await second.load(tmp_path)
        assert second.version == 3
        assert (await second.publish(3)).checksum == (await first.publish(3)).checksum
        for version in range(3, 6):
            reports = [await t.step(batch(version=version, seed=version)) for t in (first, second)]
            a, b = ({k: v for k, v in r.metrics.items() if k != "tokens_per_second"} for r in reports)
            assert a == b
            assert torch.equal(parameters(first), parameters(second))
        first.close()
        second.close()

    run(story())


def test_a_resumed_learner_follows_its_own_settings_and_not_those_of_the_file(tmp_path):
    async def story():
        first = TorchTrainer(model(), PLAIN, AlgoSettings(), MemoryWeights())
        await first.step(batch())
        await first.save(tmp_path)
        first.close()
        moved = []
        for settings in (PLAIN, replace(PLAIN, weight_decay=1e-4), replace(PLAIN, beta1=0.5)):
            trainer = TorchTrainer(model(), settings, AlgoSettings(), MemoryWeights())
            await trainer.load(tmp_path)
            await trainer.step(batch(version=1))
            moved.append(parameters(trainer))
            trainer.close()
        assert not torch.equal(moved[0], moved[1])
        assert not torch.equal(moved[0], moved[2])

    run(story())


def test_publish_hands_over_its_own_version_while_the_next_step_runs():
    async def story():
        weights = MemoryWeights()
        trainer = TorchTrainer(small_model(replace(SHAPE, layers=4, width=96), 0),
                               replace(PLAIN, minibatches=8, micro_batch_tokens=512), AlgoSettings(), weights)
        await trainer.step(batch(version=0))
        expected = {name: tensor.clone() for name, tensor in trainer._model.state_dict().items()}
        running = asyncio.create_task(trainer.step(batch(400, version=1)))
        ticks = 0
        while parameters(trainer).equal(torch.cat([t.flatten() for t in expected.values()])):
            await asyncio.sleep(0.005)  # until the step has changed the live weights at least once
            ticks += 1
        manifest = await trainer.publish(1)
        assert not running.done()
        assert ticks > 1
        got = weights.get(manifest)
        assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())
        await running
        assert (await trainer.publish(2)).checksum != manifest.checksum
        await trainer.retire(manifest)
        assert len(weights._held) == 1
        with pytest.raises(InvariantViolated, match="version 1 was to be published"):
            await trainer.publish(1)
        trainer.close()

    run(story())


def test_a_cancelled_step_ends_its_work_and_a_checkpoint_is_the_way_on(tmp_path):
    async def story():
        trainer = TorchTrainer(model(), replace(PLAIN, micro_batch_tokens=1), AlgoSettings(), MemoryWeights())
        await trainer.save(tmp_path)
        running = asyncio.create_task(trainer.step(batch(2000)))
        await asyncio.sleep(0.3)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        with pytest.raises(TrainerLost, match="load a checkpoint"):
            await trainer.step(batch())
        assert torch.equal(parameters(trainer), parameters(model()))
        await trainer.load(tmp_path)
        assert (await trainer.step(batch())).metrics["updates"] == 1
        trainer.close()

    run(story())


def test_a_checkpoint_that_is_not_whole_is_named(tmp_path):
    async def story():
        trainer = TorchTrainer(model(), PLAIN, AlgoSettings(), MemoryWeights())
        with pytest.raises(TrainerLost, match=r"optimizer\.pt"):
            await trainer.load(tmp_path)
        await trainer.save(tmp_path)
        (tmp_path / "model.safetensors").write_bytes(b"cut")
        with pytest.raises(TrainerLost, match="no whole checkpoint"):
            await trainer.load(tmp_path)
        with pytest.raises(InvariantViolated, match="stands at version 0; the batch is for 7"):
            await trainer.step(batch(version=7))
        trainer.close()

    run(story())


def test_no_checkpoint_is_made_of_weights_that_are_not_finite(tmp_path):
    async def story():
        trainer = TorchTrainer(model(), PLAIN, AlgoSettings(), MemoryWeights())
        trainer._copy["model.norm.weight"][0] = math.inf
        with pytest.raises(TrainerLost, match=r"weights of version 0 are not finite \(1 tensors, as model.norm.weight"):
            await trainer.save(tmp_path)
        assert not list(tmp_path.iterdir())
        trainer.close()

    run(story())


def test_an_exported_folder_is_what_load_reads(tmp_path):
    from rollart.backends.torch.chat import ByteChat
    from rollart.backends.torch.checkpoint import load_model, save_model

    source = small_model(replace(SHAPE, vocabulary=300), 0)

    async def story():
        trainer = TorchTrainer(source, PLAIN, AlgoSettings(), MemoryWeights(),
                               export=lambda folder: save_model(source, folder, ByteChat()))
        await trainer.step(batch())
        await trainer.save(tmp_path)
        other = TorchTrainer(small_model(replace(SHAPE, vocabulary=300), 4), PLAIN, AlgoSettings(), MemoryWeights())
        await other.load(tmp_path)
        assert torch.equal(parameters(trainer), parameters(other))
        assert torch.equal(parameters(load_model(tmp_path)), parameters(trainer))
        trainer.close()
        other.close()

    run(story())


def test_bfloat16_stays_near_float32_and_keeps_float32_weights():
    samples = batch().samples
    plain, report = trained(samples, replace(PLAIN, precision="float32"), dtype=torch.float32)
    half, near = trained(samples, replace(PLAIN, precision="bfloat16"), dtype=torch.float32)
    assert half.dtype == torch.float32
    assert near.metrics["entropy"] == pytest.approx(report.metrics["entropy"], abs=0.02)
    assert torch.nn.functional.cosine_similarity(half - parameters(model()), plain - parameters(model()), dim=0) > 0.98


def test_schedules():
    assert [rate_at(s, "constant", 4, 0) for s in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert [rate_at(s, "linear", 0, 4) for s in range(6)] == [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    assert rate_at(5, "cosine", 0, 10) == pytest.approx(0.5)
    assert 0 < rate_at(9, "cosine", 0, 10) < 0.05


def test_a_falling_schedule_needs_its_length():
    with pytest.raises(ConfigError, match="cosine needs total_steps"):
        TorchTrainer(model(), LearnerSettings(schedule="cosine"), AlgoSettings(), MemoryWeights())


@pytest.mark.parametrize("bad", [{"learning_rate": 0.0}, {"precision": "fp8"}, {"threads": -1},
                                 {"schedule": "linear", "warmup_steps": 5, "total_steps": 5}, {"beta2": 1.0},
                                 {"total_steps": 5}, {"minibatches": 0}, {"ranks": 0}, {"device": "cuda:1", "ranks": 2},
                                 {"max_grad_norm": -1.0}])
def test_settings_name_the_field_that_is_wrong(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        LearnerSettings(**bad)


def test_a_device_that_is_not_there_and_a_greedy_temperature_are_the_users_mistakes():
    with pytest.raises(ConfigError, match="device must be auto, cpu"):
        choose_device("gpu")
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match=r"needs a GPU; this machine has 0: set 'auto'"):
            choose_device("cuda:3")
    with pytest.raises(ConfigError, match="temperature above 0"):
        TorchTrainer(model(), PLAIN, AlgoSettings(), MemoryWeights(), temperature=0.0)


@pytest.mark.parametrize(("name", "precision"), [*((name, "float32") for name in ALGORITHMS),
                                                 *((name, "bfloat16") for name in ("grpo", "dr_grpo", "ppo"))])
def test_a_bandit_is_learned_from_its_rewards_by_every_algorithm(name, precision):
    """Prompt x of 6, answer (3x + 1) mod 20 among 20 tokens: from about chance to nearly always, in real steps.
    64 draws a prompt, one in each 64th of the distribution: an answer that the policy gives 1 time in 64 is found, so
    that luck does not decide whether it is seen before the policy has grown sure of another."""
    chance = torch.Generator().manual_seed(0)

    def play(policy, version):
        groups = []
        prompts = [[19, x] for x in range(6)]
        packed = pack_sequences([([*p, 0], [0, 0, 1]) for p in prompts], torch.device("cpu"))
        with torch.no_grad():
            hidden = policy(packed.ids, packed.positions, packed.lengths)
            logprobs = policy.logits(hidden[packed.scored]).log_softmax(-1)
        strata = (torch.arange(64) + torch.rand(6, 64, generator=chance)) / 64
        drawn = torch.searchsorted(logprobs.exp().cumsum(-1), strata).clamp(max=19)
        for x, prompt in enumerate(prompts):
            members = []
            for number, token in enumerate(drawn[x].tolist()):
                said = Completion(ids([token]), floats([logprobs[x, token]]), ((version, 0),), Finish.STOP)
                members.append(Trajectory(TrajectoryId(x, number), Task(str(x), "bandit"), ids(prompt), Observation(),
                                          (Turn(said, "", Observation(done=True), ids()),), Outcome.FINISHED,
                                          Score(float(token == (3 * x + 1) % 20))))
            groups.append(Group(x, members[0].task, version, tuple(members)))
        return groups

    async def story():
        policy, algo = model(), AlgoSettings.named(name)
        settings = LearnerSettings(learning_rate=1e-2, device="cpu", precision=precision)
        trainer = TorchTrainer(policy, settings, algo, MemoryWeights())
        rewards = []
        for version in range(40):
            groups = play(policy, version)
            rewards.append(sum(m.score.value for g in groups for m in g.members) / (6 * 64))
            await trainer.step(make_batch(version, groups, algo).batch)
        trainer.close()
        return rewards

    rewards = run(story())
    assert sum(rewards[:3]) / 3 < 0.2
    assert sum(rewards[-5:]) / 5 > 0.9
