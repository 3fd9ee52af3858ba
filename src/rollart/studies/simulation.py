"""One simulated run, summed up like a real one, with what it would cost."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from rollart.core.types import Fate
from rollart.observe.accounts import Accounts
from rollart.observe.journal import Subscriber
from rollart.observe.metrics import Metrics, read_metrics
from rollart.observe.summary import figures
from rollart.sim.world import SimResult, World, simulate


def run_world(world: World, seed: int, *watchers: Subscriber) -> dict[str, Any]:
    """The summary of a real run, and besides: ended, gpu_hours and utilisation by pool, cost (in hours of one H20),
    seconds_per_step, rewards, engines, digest. `watchers` hear of every event. Raises what `simulate` raises."""
    accounts = Accounts()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "metrics.jsonl"
        metrics = Metrics(path, accounts, staleness_bound=world.schedule.bound)
        result = simulate(world, seed, [accounts, metrics, *watchers])
        lines = read_metrics(path)
    totals = accounts.token_totals()
    tokens = {fate.value: totals[fate.value] for fate in Fate}
    summary = figures(lines, accounts.by_domain(), accounts.counts(), tokens, [])
    return {**summary, "ended": result.ended, **_cost(world, result),
            "seconds_per_step": result.seconds / result.steps if result.steps else None,
            "rewards": {"instance_seconds": result.reward_seconds, "cold_starts": result.cold_starts,
                        "utilisation": result.busy.get("reward", 0.0)},
            "engines": {"prefill_tokens": result.prefill_tokens, "preempted": result.preempted},
            "events": result.events, "digest": result.digest}


def _cost(world: World, result: SimResult) -> dict[str, Any]:
    hours = result.seconds / 3600.0
    gpus = {name: pool.engines * pool.gpus for name, pool in world.pools.items()}
    prices = {name: pool.engines * pool.price for name, pool in world.pools.items()}
    gpus["train"], prices["train"] = world.train_gpus, world.train_price
    return {"gpu_hours": {name: n * hours for name, n in gpus.items()}, "cost": sum(prices.values()) * hours,
            "utilisation": {name: result.busy.get(name, 0.0) for name in gpus}}
