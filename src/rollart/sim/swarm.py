"""Random worlds: each seed is one, with a random subset of faults. `rollart swarm` runs many.

Keeps true: a seed names a run for ever, so a failure is replayed by `rollart simulate swarm --seed SEED`. Switching
whole kinds of faults off per seed finds more than a bit of everything in each (swarm testing, Groce et al. 2012).
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

from rollart.algo.settings import AlgoSettings
from rollart.control.pipeline import PipelineSettings
from rollart.control.settings import SCHEDULES, RolloutSettings, ScheduleSettings
from rollart.core.clock import stream
from rollart.core.errors import InvariantViolated, RunError
from rollart.core.types import StalePolicy
from rollart.sim.costs import StepCost, TrainCost
from rollart.sim.faults import Faults
from rollart.sim.loop import Deadlock, NoProgress
from rollart.sim.parts import RewardCost
from rollart.sim.workload import TOY
from rollart.sim.world import SimPool, SimResult, World, simulate

FAILURES = (InvariantViolated, RunError, Deadlock, NoProgress)
"""What a wrong control plane raises under simulation (other exceptions are plain bugs and end the swarm)."""


def draw_world(seed: int) -> World:
    """The world of a seed. Over any ten seeds in a row, each schedule comes with each stale policy once."""
    chance = stream(seed, "world")
    name = list(SCHEDULES)[seed % 5]
    policy = list(StalePolicy)[seed // 5 % 2]
    alpha = chance.randrange(0, 4) if SCHEDULES[name].fixed_alpha is None else None
    group_size = chance.randrange(1, 6)
    cost = StepCost(kv_s=1e-8, capacity=chance.choice([float("inf"), 12_000.0]), load_s=chance.choice([0.5, 10.0]))
    limits = {"max_turns": chance.choice([3, 12]), "max_tokens": chance.choice([50, 400])}
    domains = {name: replace(load, **limits) for name, load in TOY.items()}
    reward = chance.choice([RewardCost(), RewardCost(instances=4), RewardCost(instances=4, serverless=False)])
    return World(
        pools={"compute": SimPool(engines=chance.randrange(1, 4), cost=cost),
               "bandwidth": _bandwidth_pool(chance, cost)},
        domains=domains, reward=reward, opening=chance.choice([0, 0, 8]),
        schedule=ScheduleSettings(name=name, alpha=alpha, stale=policy),
        rollout=RolloutSettings(
            batch_groups=chance.randrange(1, 5), group_size=group_size, spares=chance.choice([0, 0, 1, 2]),
            spare_groups=chance.choice([0, 1, 2]) if policy is StalePolicy.ABORT else 0,
            max_replacements=chance.choice([4, 8]), min_members=chance.choice([0, 1]), max_failed_groups=20,
            episode_seconds=chance.choice([300.0, 1800.0]), environment_seconds=chance.choice([20.0, 60.0]),
            context_tokens=chance.choice([0, 0, 3000]), close_seconds=chance.choice([0.2, 10.0])),
        pipeline=PipelineSettings(steps=chance.randrange(2, 5), checkpoint_every=chance.choice([0, 1, 2]),
                                  eval_every=chance.choice([0, 1])),
        algo=AlgoSettings(filter=chance.choice(["none", "zero_variance"]),
                          truncated=chance.choice(["train", "mask"])),
        faults=_draw_faults(seed), eval_tasks=chance.choice([0, 0, 1]), publish_s=chance.choice([0.0, 3.0, 60.0]),
        train=TrainCost(fixed_s=chance.choice([1.0, 20.0, 120.0])), jitter=chance.random() < 0.5)


def _bandwidth_pool(chance: Random, cost: StepCost) -> SimPool:
    """Of one to three engines, now and then with prefill and decode on engines of their own."""
    split = chance.random() < 0.2
    return SimPool(engines=chance.randrange(1, 4), cost=cost, prefill=int(split), decode=2 * split, kv_bytes=100_000)


def _draw_faults(seed: int) -> Faults:
    chance = stream(seed, "faults")
    rates = {
        "engine_mtbf": [200.0, 1_000.0, 5_000.0], "no_capacity": [0.2, 0.5], "open_fails": [0.05, 0.3],
        "open_hangs": [0.01, 0.05], "step_fails": [0.005, 0.03], "step_hangs": [0.002, 0.01],
        "score_fails": [0.02, 0.15], "score_hangs": [0.005, 0.03], "trainer_fails": [0.02],
    }
    on = {name: chance.choice(values) for name, values in rates.items() if chance.random() < 0.4}
    return Faults(**on, engine_repair=chance.choice([5.0, 120.0]))


def attempt(seed: int) -> SimResult | str:
    """The result of one seed, or why it failed: `InvariantViolated: I3: ...`."""
    try:
        return simulate(draw_world(seed), seed)
    except FAILURES as failure:
        return f"{type(failure).__name__}: {failure}"
