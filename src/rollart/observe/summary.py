"""summary.json: the figures of the whole run, from what is on disk, so that a resume or a crash changes nothing.

Keeps true: every figure is of the run, not of the last process. A run that has just begun gives zeros and nulls.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from rollart.algo.intervals import change_interval
from rollart.observe.ledger_view import LedgerView
from rollart.observe.metrics import WASTED, read_metrics
from rollart.observe.run_folder import RunFolder, atomic_write


def summarise(run_path: str | Path) -> dict[str, Any]:
    """The figures of a run folder."""
    folder = RunFolder(run_path)
    with LedgerView(folder.database) as ledger:
        run = figures(read_metrics(folder.metrics), ledger.by_domain(), ledger.counts(), ledger.tokens(),
                      ledger.evaluations())
        return {**run, "environments": ledger.environments()}


def figures(lines: Sequence[Mapping[str, Any]], by_domain: Mapping[str, Mapping[str, int]], counts: Mapping[str, int],
            tokens: Mapping[str, int], evaluations: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The figures: see the keys below. Times in seconds, staleness in versions, success 0 to 1, null: not known;
    intervals are 95 %, [low, high].

    lines: those of metrics.jsonl; by_domain, counts, tokens: trajectories and their sampled tokens by fate.
    """
    steps = [line for line in lines if line["kind"] == "step"]
    starts = [line for line in lines if line["kind"] == "start"]
    wall = max((line["wall_seconds"] for line in lines), default=0.0)
    idle = max((line.get("idle_seconds", 0.0) for line in lines), default=0.0)
    stale = Counter[int]()
    for step in steps:
        stale.update({int(age): n for age, n in step["staleness"]["histogram"].items()})
    domains = {}
    for name in sorted({*by_domain, *(result["domain"] for result in evaluations)}):
        mine = [result for result in evaluations if result["domain"] == name]
        later = bool(mine) and mine[-1]["version"] > mine[0]["version"]
        numbers = by_domain.get(name, {"dispatched": 0, "trained": 0})
        domains[name] = {"eval_before": mine[0]["success"] if mine else None,
                         "eval_before_interval": mine[0].get("interval") if mine else None,
                         "eval_after": mine[-1]["success"] if later else None,
                         "eval_after_interval": mine[-1].get("interval") if later else None,
                         **(change(mine[0], mine[-1]) if later else NO_CHANGE),
                         "eval_tasks": mine[-1]["tasks"] if mine else 0,
                         "dispatched": numbers["dispatched"], "trained": numbers["trained"]}
    return {
        "steps": steps[-1]["version"] if steps else 0,
        "wall_seconds": wall,
        "domains": domains,
        "staleness": {"bound": starts[-1]["staleness_bound"] if starts else None, "max": max(stale, default=0),
                      "mean": sum(age * n for age, n in stale.items()) / stale.total() if stale else 0.0,
                      "histogram": {str(age): stale[age] for age in sorted(stale)}},
        "ledger": counts,
        "trainer_idle_fraction": idle / wall if wall else 0.0,
        "tokens": {"generated": sum(tokens.values()), "trained": tokens.get("trained", 0),
                   "wasted": sum(tokens.get(fate, 0) for fate in WASTED),
                   "wasted_by_fate": {fate: tokens.get(fate, 0) for fate in WASTED}},
        "weights": weight_figures(steps[1:], wall),
        "rewards": reward_figures(lines),
        "logprob_gap_step0": steps[0]["metrics"].get("logprob_gap") if steps else None,
    }


NO_CHANGE = {"eval_change": None, "eval_change_interval": None}


def change(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """How success changed from one evaluation to another, over the tasks that both have played; null without any."""
    both = [(rate, after["rates"][task]) for task, rate in before["rates"].items() if task in after["rates"]]
    if not both:
        return NO_CHANGE
    was, now = zip(*both, strict=True)
    return {"eval_change": fmean(now) - fmean(was),
            "eval_change_interval": list(change_interval(was, now, min(before["attempts"], after["attempts"])))}


def weight_figures(steps: Sequence[Mapping[str, Any]], wall: float) -> dict[str, float | None]:
    """Means over the syncs before these steps; `exposed`: engines stood still, in seconds and as a share of the run."""
    def mean(name: str) -> float | None:
        values = [step["weights"][name] for step in steps if name in step.get("weights", {})]
        return round(sum(values) / len(values), 6) if values else None
    exposed = sum(step.get("weights", {}).get("live_seconds", 0.0) for step in steps)
    return {"publish_seconds": mean("publish_seconds"), "fetch_seconds": mean("fetch_seconds"),
            "exposed_seconds": mean("live_seconds"), "exposed_fraction": round(exposed / wall, 6) if wall else 0.0}


_NOW = ("in_flight", "waiting", "queued", "instances")
_HIGHEST = ("latency_p50_seconds", "latency_p95_seconds", "latency_max_seconds", "peak_instances")


def reward_figures(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """What the rewards did in the whole run: sums over its processes, of latencies and peaks the highest.

    `instances` and others of now are those at the end; `utilisation` is busy through alive seconds.
    """
    total: dict[str, Any] = {}
    last: dict[str, Any] = {}
    for line in [*lines, {"kind": "start"}]:
        if line["kind"] == "rewards":
            last = line["figures"]
        elif line["kind"] == "start":
            for name, value in last.items():
                if name in _NOW:
                    total[name] = value
                else:
                    total[name] = max(total.get(name, 0), value) if name in _HIGHEST else total.get(name, 0) + value
            last = {}
    if total.get("alive_seconds"):
        total["utilisation"] = total["busy_seconds"] / total["alive_seconds"]
    return {name: round(value, 6) for name, value in total.items()}


def write_summary(run_path: str | Path) -> dict[str, Any]:
    """Write summary.json and return it."""
    summary = summarise(run_path)
    atomic_write(RunFolder(run_path).summary, json.dumps(summary, indent=2) + "\n")
    return summary
