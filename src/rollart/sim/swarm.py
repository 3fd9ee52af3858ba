"""Many seeds, each a random world with a random subset of faults: `python -m rollart.sim.swarm --seeds 1000`.

Keeps true: a seed names a run for ever, so a failure is replayed by `--first SEED --seeds 1`. Switching whole kinds of
faults off per seed finds more than a bit of everything in each (swarm testing, Groce et al. 2012).
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
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


@dataclass(kw_only=True)
class Report:
    """What a swarm found. `failures`: (seed, reason); `ended`: how runs ended, by kind."""

    failures: list[tuple[int, str]] = field(default_factory=list)
    ended: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    callbacks: int = 0


def attempt(seed: int) -> SimResult | str:
    """The result of one seed, or why it failed: `InvariantViolated: I3: ...`."""
    try:
        return simulate(draw_world(seed), seed)
    except FAILURES as failure:
        return f"{type(failure).__name__}: {failure}"


def swarm(seeds: Iterable[int]) -> Report:
    """Run every seed and collect."""
    report = Report()
    for seed in seeds:
        result = attempt(seed)
        if isinstance(result, str):
            report.failures.append((seed, result))
        else:
            report.ended[result.ended.partition(":")[0]] += 1
            report.counts.update(result.counts)
            report.callbacks += result.callbacks
    return report


def main(argv: list[str] | None = None) -> int:
    """Exit code 1 if any seed failed. Failures are grouped by their text without numbers."""
    parser = argparse.ArgumentParser(prog="python -m rollart.sim.swarm", description=__doc__)
    parser.add_argument("--seeds", type=int, default=200, help="how many seeds")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    wanted = parser.parse_args(argv)
    if wanted.seeds < 1:
        parser.error(f"--seeds must be at least 1; got {wanted.seeds}")
    began = time.process_time()
    report = swarm(range(wanted.first, wanted.first + wanted.seeds))
    print(f"{wanted.seeds} seeds, {time.process_time() - began:.1f} CPU seconds, {report.callbacks} callbacks")
    print(f"ended: {dict(report.ended)}; trajectories: {dict(report.counts)}")
    kinds: dict[str, list[tuple[int, str]]] = {}
    for seed, reason in report.failures:
        kinds.setdefault(re.sub(r"\d+", "N", reason)[:80], []).append((seed, reason))
    for found in sorted(kinds.values(), key=len, reverse=True):
        seeds = ", ".join(str(seed) for seed, _ in found[:10])
        print(f"FAILED {len(found)} seeds: {seeds}{', ...' if len(found) > 10 else ''}; the first: {found[0][1]}")
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
