"""The five schedules where environments dominate: seconds for the same number of optimizer steps, in one run.

Real engine, learner and environment processes; latency is injected into every environment call: N(1 s, 1 s) cut at 0,
and 20 s more in 2 % of the calls. `rollart` is shown with its redundant environments (spares) and without; one more
row lets a share of calls hang for ever. About a quarter of an hour: mostly sleep, so it runs beside other work.

    python benchmarks/schedules.py [--steps 4] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from rollart.build import open_run
from rollart.config.recipe import from_tables
from rollart.observe.metrics import Metrics
from rollart.observe.run_folder import RunFolder
from rollart.observe.summary import summarise

GROUPS, SIZE = 4, 4
LATENCY = {"distribution": "normal", "mean_seconds": 1.0, "sigma_seconds": 1.0, "tail_probability": 0.02,
           "tail_seconds": 20.0}
HANGS = {**LATENCY, "hang_rate": 0.002}
ROWS: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
    # label, schedule, rollout settings, latency
    ("sync", "sync", {}, LATENCY),
    ("sync_plus", "sync_plus", {}, LATENCY),
    ("one_off", "one_off", {}, LATENCY),
    ("areal", "areal", {}, LATENCY),
    ("rollart, no spares", "rollart", {}, LATENCY),
    ("rollart", "rollart", {"spares": 1, "spare_groups": 2}, LATENCY),
    ("rollart, calls that hang", "rollart", {"spares": 1, "spare_groups": 2}, HANGS),
]


def recipe(schedule: str, rollout: dict[str, Any], latency: dict[str, Any], steps: int) -> dict[str, Any]:
    return {
        "name": "schedules", "seed": 1, "pipeline": {"steps": steps, "checkpoint_every": 0},
        "schedule": {"name": schedule}, "evaluation": {"tasks": 0},
        "rollout": {"batch_groups": GROUPS, "group_size": SIZE, "environment_seconds": 40.0, **rollout},
        "model": {"small": {"layers": 2, "width": 96, "heads": 4, "kv_heads": 2, "mlp": 192}},
        "domains": {"frozen_lake": {"max_turns": 8, "latency": latency}, "calculator": {"latency": latency}},
    }


async def measure(schedule: str, rollout: dict[str, Any], latency: dict[str, Any], steps: int) -> dict[str, Any]:
    tables = recipe(schedule, rollout, latency, steps)
    settings = from_tables(tables)
    path = Path(tempfile.mkdtemp(prefix="rollart-bench-"))
    try:
        with RunFolder(path).create(settings.to_json()) as folder:
            async with open_run(settings, folder, resume=False, subscribers=lambda ledger: [
                    Metrics(folder.metrics, ledger.accounts, staleness_bound=settings.schedule.bound)]) as run:
                started = time.perf_counter()
                await run.train()
                seconds = time.perf_counter() - started
        summary = summarise(path)
    finally:
        shutil.rmtree(path, ignore_errors=True)
    ledger = summary["ledger"]
    return {"seconds": seconds, "per_step": seconds / steps, "staleness_max": summary["staleness"]["max"],
            "trained": ledger["trained"], "failed": ledger["failed"], "stale": ledger["stale"],
            "wasted": summary["tokens"]["wasted"] / max(1, summary["tokens"]["generated"])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4, help="optimizer steps of each schedule")
    parser.add_argument("--json", type=Path, help="write the figures here")
    arguments = parser.parse_args()
    results: dict[str, dict[str, Any]] = {}
    print(f"{arguments.steps} steps of {GROUPS} groups x {SIZE} trajectories, latency per call "
          f"N(1 s, 1 s) and 2 % tail of 20 s", flush=True)
    print(f"{'schedule':26} {'seconds':>8} {'s/step':>7} {'sync /':>7} {'staleness':>9} {'stale':>6} {'failed':>6} "
          f"{'wasted':>7}", flush=True)
    for label, schedule, rollout, latency in ROWS:
        row = results[label] = asyncio.run(measure(schedule, rollout, latency, arguments.steps))
        ratio = results["sync"]["seconds"] / row["seconds"]
        print(f"{label:26} {row['seconds']:8.1f} {row['per_step']:7.1f} {ratio:6.2f}x {row['staleness_max']:9} "
              f"{row['stale']:6} {row['failed']:6} {row['wasted']:7.1%}", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
