"""The default algorithm (GRPO, truncated importance weights, zero_variance) keeps the numbers of 2026-11-29, when it
was the only one: recorded from that code by `python tests/backends/torch/test_same_numbers.py`."""

import asyncio
import random

import pytest
import torch

from rollart.algo.samples import make_batch
from rollart.algo.settings import AlgoSettings
from rollart.backends.torch.learner import TorchTrainer
from rollart.backends.torch.settings import LearnerSettings, SmallModel
from rollart.backends.torch.transformer import small_model
from rollart.backends.weights.memory import MemoryWeights
from rollart.core.tokens import floats, ids
from rollart.core.types import (
    Completion,
    Finish,
    Group,
    Observation,
    Outcome,
    Score,
    Task,
    Trajectory,
    TrajectoryId,
    Turn,
)

RECORDED = {
    "3.loss": -0.037372779846191403,
    "3.grad_norm": 0.9522216022014618,
    "3.entropy": 3.674941718869093,
    "3.clip_fraction": 0.004878048780487805,
    "3.importance_mean": 1.100469970703125,
    "3.importance_capped": 0.2048780487804878,
    "3.importance_ess": 0.6882254088668891,
    "3.logprob_gap_all": 0.591528859952601,
    "3.action_tokens": 205.0,
    "3.reward": 1.0,
    "4.loss": -0.10625320992818693,
    "4.grad_norm": 0.893589049577713,
    "4.entropy": 3.6732070550685973,
    "4.clip_fraction": 0.0,
    "4.importance_mean": 1.0997681036228086,
    "4.importance_capped": 0.18536585365853658,
    "4.importance_ess": 0.6677963816297277,
    "4.logprob_gap_all": 0.5970612316596798,
    "4.action_tokens": 205.0,
    "4.reward": 1.0,
    "weights": 475.763727858357,
}


def groups(count=6, size=4):
    """Trajectories of one to three turns, with log-probs that are off, of two versions, some rewards all equal."""
    chance = random.Random(7)
    made = []
    for group in range(count):
        members = []
        for member in range(size):
            turns = []
            for _ in range(chance.randrange(1, 4)):
                said = ids(chance.randrange(40) for _ in range(chance.randrange(2, 12)))
                segments = ((3, 0),) if chance.random() < 0.5 else ((2, 0), (3, 1))
                logprobs = floats(-3.7 + chance.uniform(-1.2, 1.2) for _ in said)
                turns.append(Turn(Completion(said, logprobs, segments, Finish.STOP), "", Observation(),
                                  ids(chance.randrange(40) for _ in range(3))))
            reward = 1.0 if group == 2 else float(chance.randrange(3))
            outcome = Outcome.TRUNCATED if chance.random() < 0.2 else Outcome.FINISHED
            members.append(Trajectory(TrajectoryId(group, member), Task("t", "d"), ids([1, 2, 3, 4, group]),
                                      Observation(), tuple(turns), outcome, Score(reward)))
        made.append(Group(group, members[0].task, 3, tuple(members)))
    return made


async def steps():
    algo = AlgoSettings(filter="zero_variance")
    model = small_model(SmallModel(layers=2, width=32, heads=2, kv_heads=1, mlp=48, vocabulary=40), 0)
    settings = LearnerSettings(learning_rate=3e-3, minibatches=2, micro_batch_tokens=120, precision="float32",
                               device="cpu", threads=1)
    trainer = TorchTrainer(model, settings, algo, MemoryWeights(), seed=5)
    trainer.version = 3
    seen = {}
    for version in (3, 4):
        made = make_batch(version, groups(), algo)
        report = await trainer.step(made.batch)
        seen[version] = {name: report.metrics[name] for name in (
            "loss", "grad_norm", "entropy", "clip_fraction", "importance_mean", "importance_capped", "importance_ess",
            "logprob_gap_all", "action_tokens", "reward")}
    seen["weights"] = float(sum(p.detach().double().abs().sum() for p in model.parameters()))
    trainer.close()
    return seen


def flat(seen):
    return {f"{key}.{name}": value for key, table in seen.items() if isinstance(table, dict)
            for name, value in table.items()} | {"weights": seen["weights"]}


def test_two_steps_give_the_recorded_loss_gradient_and_weights():
    got = flat(asyncio.run(steps()))
    assert got.keys() == RECORDED.keys()
    for name, value in RECORDED.items():
        assert got[name] == pytest.approx(value, rel=2e-5, abs=2e-6), name


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name, value in flat(asyncio.run(steps())).items():
        print(f'    "{name}": {value!r},')
