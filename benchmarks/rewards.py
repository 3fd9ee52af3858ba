"""Rewards: the caller's speed, a burst onto the elastic platform, and reserved workers against elastic ones.

    python benchmarks/rewards.py [caller] [burst] [run] [shape] [--json FILE]       (all without a name: 6 minutes)

caller: scored trajectories per second against a function that does nothing, beside plain httpx on the same server.
burst: 500 trajectories at once onto the platform at zero instances; 0.1 s each, 16 instances at most.
run: a real training run whose schedule (sync) sends the 500 trajectories of each step to their rewards at once.
shape: the same training twice on two cores. Reserved: one core belongs to the reward worker, everything else has the
other. Elastic: both cores belong to all, engine and learner compute with two threads, the function's instances come and
go. The model is large enough (7 million parameters) for two threads to help.
Rollout time is what the trainer waited for a batch; the schedule is sync_plus, so that nothing else overlaps it. Cores
busy: CPU seconds of everything over two cores' time. Linux only (it pins processes).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from rollart.backends.scorers import open_scorers
from rollart.backends.serverless.caller import Caller
from rollart.backends.serverless.transport import HttpTransport
from rollart.core.types import Score
from rollart.rewards.contract import RewardRequest, content_key, to_json
from rollart.rewards.domains import REWARDS
from rollart.rewards.settings import CallSettings, ElasticSettings, RewardSettings

CALLS = {1: (1000, 300), 16: (3000, 400), 256: (6000, 512)}
"""Calls of ours and of httpx by concurrency: httpx is slow where many are out."""
WORK_SECONDS = 0.02
PARTS = ("caller", "burst", "run", "shape")


def noop(request: RewardRequest) -> Score:
    return Score(1.0)


def sleeping(request: RewardRequest) -> Score:
    time.sleep(0.1)
    return Score(1.0)


def resting(request: RewardRequest) -> Score:
    """0.1 s of waiting, then the domain's own reward."""
    time.sleep(0.1)
    return REWARDS[request.domain](request)


def working(request: RewardRequest) -> Score:
    """WORK_SECONDS of one core, then the domain's own reward; on the core that is reserved for it, if one is."""
    if "REWARD_CORE" in os.environ:
        os.sched_setaffinity(0, {int(os.environ["REWARD_CORE"])})
    end = time.process_time() + WORK_SECONDS
    while time.process_time() < end:
        sum(range(1000))
    return REWARDS[request.domain](request)


def requests(count: int) -> list[RewardRequest]:
    made = [RewardRequest(id=f"g{i}.0", domain="d", answer="x" * 200) for i in range(count)]
    return [replace(request, key=content_key(request)) for request in made]


async def ours(url: str, concurrency: int, calls: int) -> float:
    settings = RewardSettings(call=CallSettings(concurrency=concurrency))
    caller, work = Caller(HttpTransport(url, settings.call), settings), requests(calls)
    started = time.perf_counter()
    scores = await asyncio.gather(*(caller.score(request) for request in work))
    seconds = time.perf_counter() - started
    await caller.close()
    assert len(scores) == calls
    return calls / seconds


async def plain_httpx(url: str, concurrency: int, calls: int) -> float:
    import httpx

    work, room = requests(calls), asyncio.Semaphore(concurrency)
    limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
    async with httpx.AsyncClient(limits=limits, timeout=60) as client:
        async def one(request: RewardRequest) -> float:
            async with room:
                answer = await client.post(url, json=to_json(request))
                return float(answer.json()["score"]["value"])

        started = time.perf_counter()
        values = await asyncio.gather(*(one(request) for request in work))
        seconds = time.perf_counter() - started
    assert sum(values) == calls
    return calls / seconds


def caller(rounds: int = 3) -> dict[str, Any]:
    server = subprocess.Popen([sys.executable, "-m", "rollart.rewards.server", "rewards:noop", "--port", "0",
                               "--concurrency", "256", "--until-eof"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                              text=True, env=_environment())
    out: dict[str, Any] = {}
    try:
        assert server.stdout is not None
        url = server.stdout.readline().split("listening on ")[1].strip()
        print(f"{'concurrency':>11} {'ours /s':>9} {'httpx /s':>9}", flush=True)
        for concurrency, (calls, fewer) in CALLS.items():
            both: dict[str, list[float]] = {"ours": [], "httpx": []}
            for _ in range(rounds):
                both["ours"].append(asyncio.run(ours(url, concurrency, calls)))
                both["httpx"].append(asyncio.run(plain_httpx(url, concurrency, fewer)))
            out[str(concurrency)] = {name: statistics.median(rates) for name, rates in both.items()}
            print(f"{concurrency:11} {out[str(concurrency)]['ours']:9,.0f} {out[str(concurrency)]['httpx']:9,.0f}",
                  flush=True)
    finally:
        server.kill()
        server.wait()
    return out


async def burst(count: int = 500) -> dict[str, Any]:
    settings = RewardSettings(where="elastic", elastic=ElasticSettings(max_instances=16, idle_seconds=1.0))
    scorers = await open_scorers({"d": "rewards:sleeping"}, settings)
    history: list[tuple[float, float, float]] = []

    async def look(until: str) -> None:
        while True:
            figures = await scorers.figures()
            history.append((time.perf_counter() - started, figures["instances"], figures["in_flight"]))
            if until == "zero" and not figures["instances"]:
                return
            await asyncio.sleep(0.1)

    started = time.perf_counter()
    await look("zero")  # the call at the start had warmed one
    history.clear()
    started = time.perf_counter()
    watch = asyncio.create_task(look("cancelled"))
    await asyncio.gather(*(scorers.score_request(request) for request in requests(count)))
    seconds = time.perf_counter() - started
    watch.cancel()
    await look("zero")
    figures = await scorers.figures()
    await scorers.close()
    print(f"{count} trajectories from zero instances: all scored in {seconds:.2f} s (16 instances that were warm would "
          f"need {count * 0.1 / 16:.2f} s); instances 0 -> {max(i for _, i, _ in history):.0f} -> 0 after "
          f"{history[-1][0]:.1f} s; {figures['cold_starts'] - 1:.0f} cold starts, {figures['retries']:.0f} retries, "
          f"95 % within {figures['latency_p95_seconds']:.2f} s", flush=True)
    return {"seconds": seconds, "figures": figures, "history": history}


def recipe(where: str, steps: int) -> dict[str, Any]:
    threads = 1 if where == "processes" else 2
    return {
        "name": "rewards", "seed": 1, "pipeline": {"steps": steps, "checkpoint_every": 0},
        "schedule": {"name": "sync_plus"}, "evaluation": {"tasks": 0},
        "rollout": {"batch_groups": 8, "group_size": 8},
        "model": {"small": {"layers": 4, "width": 384, "heads": 6, "kv_heads": 2, "mlp": 1024}},
        "engine": {"threads": threads}, "learner": {"threads": threads},
        "reward": {"where": where, "processes": 1, "functions": {"calculator": "rewards:working"},
                   "elastic": {"max_instances": 2, "idle_seconds": 0.5}},
        "domains": {"calculator": {"max_tokens": 16}},
    }


async def trained(tables: dict[str, Any], path: str) -> tuple[list[dict[str, Any]], dict[str, Any], float]:
    """A training run in this process: its lines of metrics, its summary, and the share of two cores that was busy."""
    from rollart.build import open_run
    from rollart.config.recipe import from_tables
    from rollart.observe.metrics import Metrics, read_metrics
    from rollart.observe.report import write_report
    from rollart.observe.run_folder import RunFolder
    from rollart.observe.summary import write_summary

    settings = from_tables(tables)
    with RunFolder(path).create(settings.to_json()) as folder:
        async with open_run(settings, folder, resume=False, subscribers=lambda ledger: [
                Metrics(folder.metrics, ledger.accounts, staleness_bound=settings.schedule.bound)]) as run:
            before, started = _cpu_seconds(), time.perf_counter()
            await run.train()
            wall = time.perf_counter() - started
        used = _cpu_seconds() - before
        write_report(path)
        return read_metrics(folder.metrics), write_summary(path), used / (2 * wall)


async def train(where: str, steps: int) -> dict[str, Any]:
    """One half of `shape`."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    if where == "processes":
        os.environ["REWARD_CORE"] = str(cores[-1])
        cores = cores[:-1]
    os.sched_setaffinity(0, cores)
    with tempfile.TemporaryDirectory(prefix="rollart-bench-") as path:
        lines, summary, busy = await trained(recipe(where, steps), path)
    steps_only, rewards = [line for line in lines if line["kind"] == "step"][1:], summary["rewards"]
    return {"rollout_seconds": statistics.mean(line["waited"] for line in steps_only),
            "step_seconds": statistics.mean(line["waited"] + line["seconds"] for line in steps_only),
            "cores_busy": busy, "scored": rewards["scored"], "reward_use": rewards["utilisation"],
            "busy_seconds": rewards["busy_seconds"], "alive_seconds": rewards["alive_seconds"]}


def real(folder: Path) -> dict[str, Any]:
    tables = {
        "name": "burst", "pipeline": {"steps": 2, "checkpoint_every": 0}, "schedule": {"name": "sync"},
        "evaluation": {"tasks": 0}, "rollout": {"batch_groups": 50, "group_size": 10},
        "model": {"small": {"layers": 2, "width": 96, "heads": 4, "kv_heads": 2, "mlp": 192}},
        "engine": {"max_concurrent": 256},
        "reward": {"where": "elastic", "functions": {"calculator": "rewards:resting"},
                   "elastic": {"max_instances": 16, "idle_seconds": 1.0}},
        "domains": {"calculator": {"smallest": 2, "largest": 2, "max_turns": 2, "max_tokens": 8}},
    }
    lines, summary, _ = asyncio.run(trained(tables, str(folder)))
    rewards, ledger = summary["rewards"], summary["ledger"]
    seen = [int(line["figures"]["instances"]) for line in lines if line["kind"] == "rewards"]
    print(f"{ledger['trained']} trajectories trained, {rewards['scored']:.0f} scored by {rewards['attempts']:.0f} "
          f"calls; instances over time {seen}; {rewards['cold_starts']:.0f} cold starts, half within "
          f"{rewards['latency_p50_seconds']:.2f} s, 95 % within {rewards['latency_p95_seconds']:.2f} s; "
          f"{rewards['alive_seconds']:.0f} instance-seconds; {folder}/report.html", flush=True)
    return {"rewards": rewards, "instances": seen}


def _cpu_seconds() -> float:
    """Of this process and of all that it started and that has ended (the rewards' processes have, at the end)."""
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def shape(steps: int, rounds: int) -> dict[str, Any]:
    out: dict[str, list[dict[str, Any]]] = {"processes": [], "elastic": []}
    for _ in range(rounds):
        for where, rows in out.items():
            done = subprocess.run([sys.executable, __file__, "--one", where, "--steps", str(steps)], check=True,
                                  stdout=subprocess.PIPE, text=True, env=_environment())
            rows.append(json.loads(done.stdout.splitlines()[-1]))
    print(f"{'rewards':10} {'rollout s/step':>14} {'whole s/step':>12} {'cores busy':>10} {'reward use':>10} "
          f"{'reward alive s':>14}")
    for where, rows in out.items():
        mean = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
        print(f"{'reserved' if where == 'processes' else where:10} {mean['rollout_seconds']:14.2f} "
              f"{mean['step_seconds']:12.2f} {mean['cores_busy']:10.1%} {mean['reward_use']:10.1%} "
              f"{mean['alive_seconds']:14.1f}", flush=True)
    return out


def _environment() -> dict[str, str]:
    path = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="default: all")
    parser.add_argument("--steps", type=int, default=5, help="optimizer steps of `shape`; the first is left out")
    parser.add_argument("--rounds", type=int, default=1, help="of `shape`")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--run", type=Path, help="folder of `run` (new); default: one that is made")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(asyncio.run(train(options.one, options.steps))))
        return
    os.environ["PYTHONPATH"] = _environment()["PYTHONPATH"]
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    results: dict[str, Any] = {}
    folder = options.run or Path(tempfile.mkdtemp(prefix="rollart-rewards-")) / "run"
    doing = {"caller": caller, "burst": lambda: asyncio.run(burst()), "run": lambda: real(folder),
             "shape": lambda: shape(options.steps, options.rounds)}
    for part in options.parts or PARTS:
        print(f"--- {part}", flush=True)
        results[part] = doing[part]()
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
