"""The critic: values of action tokens only, L3 over a whole trajectory, its loss, and that it learns."""

import asyncio
from dataclasses import replace

import pytest
import torch
from test_pieces import CPU, LEARNER, model, samples

from rollart.algo.settings import AlgoSettings
from rollart.backends.torch.critic import Critic, Estimate, _advantages
from rollart.backends.torch.learner import TorchTrainer
from rollart.backends.weights.memory import MemoryWeights
from rollart.core.errors import TrainerLost
from rollart.core.tokens import floats, ids
from rollart.core.types import Sample, TrainBatch, TrajectoryId

PPO = AlgoSettings.named("ppo", whiten="none")


def sample(turns=(1, 1), rewards=(0.0, 1.0), member=0, **changes):
    mask = [0]
    for count in turns:
        mask += [1] * count + [0, 0]
    return Sample(TrajectoryId(0, member), "d", ids(range(1, len(mask) + 1)), ids(mask), floats(0.0 for _ in mask),
                  ids(0 for _ in mask), 0.0, 1.0, turn_tokens=turns, turn_rewards=rewards, **changes)


def values(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)


def test_l3_observations_between_turns_are_skipped_and_rewards_sit_on_last_tokens():
    assert _advantages([sample()], [values(0.5, 0.7)], [9.0], PPO)[0].tolist() == pytest.approx([0.485, 0.3])
    long = _advantages([sample((3,), (1.0,))], [values(0.5, 0.6, 0.7)], [9.0], PPO)[0]
    assert long.tolist() == pytest.approx([0.46575, 0.385, 0.3])


def test_t4_a_truncated_trajectory_bootstraps_only_where_that_is_asked_for():
    cut = sample((3,), (0.0,), truncated=True)
    made = [_advantages([one], [values(0.5, 0.6, 0.7)], [0.8], replace(PPO, truncated=rule))[0].tolist()
            for one, rule in ((cut, "bootstrap"), (cut, "train"), (replace(cut, truncated=False), "bootstrap"))]
    assert made[0] == pytest.approx([0.28525, 0.195, 0.1])
    assert made[1] == made[2] == pytest.approx([-0.43675, -0.565, -0.7])


def test_a_forked_trajectory_is_one_row_of_action_tokens():
    parts = [sample((2,), (0.0,), truncated=True), sample((1,), (0.3,), 7), sample((1,), (1.0,))]
    made = _advantages(parts, [values(0.5, 0.6), values(0.1), values(0.7)], [9.0] * 3, PPO)
    whole = _advantages([sample((2, 1), (0.0, 1.0))], [values(0.5, 0.6, 0.7)], [9.0], PPO)[0]
    assert torch.cat([made[0], made[2]]).tolist() == pytest.approx(whole.tolist())
    assert made[1].tolist() == pytest.approx([0.2])


def test_values_are_those_of_the_context_before_each_action_token():
    critic = Critic(model())
    with torch.no_grad():
        critic.value.weight.normal_()
    one = sample((2, 1), (0.0, 1.0))
    said, after, counts = critic([one, one], CPU)
    row = torch.tensor(list(one.ids))
    alone = critic.value(critic.body(row, torch.arange(len(row)), [len(row)])).squeeze(-1)
    at = [i for i, m in enumerate(one.mask) if m]
    assert said.tolist() == pytest.approx([alone[i - 1].item() for i in at] * 2, abs=1e-9)
    assert after.tolist() == pytest.approx([alone[at[-1]].item()] * 2, abs=1e-9)
    assert counts == [3, 3]


def test_the_critic_loss_is_half_the_error_and_clipping_takes_the_larger_one():
    critic = Critic(model())  # says 0
    estimate = Estimate(values(0.0, -1.0), values(0, 0), values(1.0, 1.0))
    plain, missed = critic.loss([sample()], [estimate], replace(PPO, value_clip=0.0), values(1, 1), CPU)
    assert (plain.item(), missed.item()) == (1.0, 2.0)
    clipped, _ = critic.loss([sample()], [estimate], replace(PPO, value_clip=0.2), values(1, 1), CPU)
    assert clipped.item() == pytest.approx((1 + (-0.8 - 1) ** 2) / 2)
    clipped.backward()
    assert critic.value.bias.grad.item() == pytest.approx(-1.0)  # of the first token; the second one's limit is active


def test_the_critic_learns_the_returns_it_is_shown_and_survives_a_checkpoint(tmp_path):
    settings = replace(LEARNER, eps=1e-8, learning_rate=3e-3, max_grad_norm=1.0)

    async def story():
        trainer = TorchTrainer(model(torch.float32), settings, PPO, MemoryWeights())
        seen = []
        for version in range(30):
            report = await trainer.step(TrainBatch(version, tuple(samples(8, version))))
            seen.append(report.metrics["critic_rmse"])
        await trainer.save(tmp_path)
        other = TorchTrainer(model(torch.float32), settings, PPO, MemoryWeights())
        await other.load(tmp_path)
        again = [(await t.step(TrainBatch(30, tuple(samples(8, 30))))).metrics for t in (trainer, other)]
        assert {k: v for k, v in again[0].items() if k != "tokens_per_second"} == {
            k: v for k, v in again[1].items() if k != "tokens_per_second"}
        grouped = TorchTrainer(model(torch.float32), settings, AlgoSettings(), MemoryWeights())
        await grouped.save(tmp_path)
        with pytest.raises(TrainerLost, match="has no critic"):
            await other.load(tmp_path)
        for one in (trainer, other, grouped):
            one.close()
        return seen

    seen = asyncio.run(story())
    assert seen[-1] < 0.5 * seen[0]
