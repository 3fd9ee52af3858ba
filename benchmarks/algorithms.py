"""Learning curves of the algorithms on the quickstart's tasks, and what staleness costs with and without correction.

    python benchmarks/algorithms.py                              every run of the plan that has no line yet
    python benchmarks/algorithms.py --only grpo --alphas 1 --seeds 0 --steps 20     some of them
    python benchmarks/algorithms.py --report                     table and plot into docs/, from the lines there are

Resumable: each finished run is one JSON line in --out (benchmarks/results/algorithms.jsonl), and a run that has its
line is left out. A run is the quickstart's recipe (warm start, engine, learner, environment processes) with another
[algorithm], alpha and seed; its folder is thrown away. The plan: each algorithm at alpha 1, and grpo at every alpha
with its truncated importance weights and without any correction, where the loss takes every token as if the newest
weights had sampled it. About a minute and a half a run on 2 cores; the warm start of a seed is made once and kept.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rollart.build import open_run
from rollart.config.recipe import from_tables
from rollart.config.toml import read_toml
from rollart.observe.charts import Frame, tag
from rollart.observe.metrics import Metrics, read_metrics
from rollart.observe.run_folder import RunFolder
from rollart.observe.summary import summarise

ROOT = Path(__file__).parents[1]
ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {}, "rloo": {}, "reinforce++": {}, "ppo": {"critic_rate": 2e-3},
    "gspo": {"clip_low": 0.03, "clip_high": 0.04}, "cispo": {}, "decoupled_ppo": {},
}
"""What a run changes beyond its algorithm's own values. GSPO's published clip (3e-4) is for models of billions of
parameters, whose ratios move less in a step; the critic begins at 0 and learns faster than the policy."""
ALPHAS = (0, 1, 2, 4)
KEY = ("algorithm", "correction", "alpha", "seed", "steps", "domains")
START, END = "<!-- learning curves: benchmarks/algorithms.py --report -->", "<!-- end of learning curves -->"


def plan(algorithms: Sequence[str], alphas: Sequence[int], seeds: Sequence[int], steps: int,
         domains: Sequence[str]) -> list[dict[str, Any]]:
    """The runs by their keys, seed by seed, so that an early end leaves whole comparisons."""
    runs = []
    for seed in seeds:
        kinds = [(name, "", alpha) for name in algorithms for alpha in alphas if alpha == 1 or name == "grpo"]
        kinds += [("grpo", "none", alpha) for alpha in alphas if "grpo" in algorithms]
        runs += [dict(zip(KEY, (name, correction, alpha, seed, steps, list(domains)), strict=True))
                 for name, correction, alpha in kinds]
    return runs


def tables(key: dict[str, Any]) -> dict[str, Any]:
    """The quickstart's recipe, changed by the key."""
    base = read_toml(ROOT / "recipes" / "quickstart.toml")
    algorithm = {"name": key["algorithm"], **ALGORITHMS[key["algorithm"]]}
    if key["correction"]:
        algorithm["correction"] = key["correction"]
    if algorithm["name"] not in ("ppo", "reinforce++"):
        algorithm["filter"] = "zero_variance"
    warm = base["warm_start"]
    for name in ("episodes", "error_rates"):
        warm[name] = {domain: value for domain, value in warm[name].items() if domain in key["domains"]}
    return {**base, "seed": key["seed"], "algorithm": algorithm, "warm_start": warm,
            "pipeline": {"steps": key["steps"], "checkpoint_every": 0, "eval_every": 0},
            "schedule": {"name": "rollart", "alpha": key["alpha"]},
            "domains": {domain: base["domains"][domain] for domain in key["domains"]}}


async def run(key: dict[str, Any]) -> dict[str, Any]:
    """One run from warm start to its last evaluation; its figures."""
    recipe = from_tables(tables(key))
    path = Path(tempfile.mkdtemp(prefix="rollart-algorithms-"))
    started = time.perf_counter()
    try:
        with RunFolder(path).create(recipe.to_json()) as folder:
            async with open_run(recipe, folder, resume=False, subscribers=lambda ledger: [
                    Metrics(folder.metrics, ledger.accounts, staleness_bound=recipe.schedule.bound)]) as live:
                await live.train()
        summary, lines = summarise(path), read_metrics(RunFolder(path).metrics)
    finally:
        shutil.rmtree(path, ignore_errors=True)
    steps = [line for line in lines if line["kind"] == "step"]

    def mean(name: str) -> float | None:
        seen = [line["metrics"][name] for line in steps if name in line["metrics"]]
        return statistics.fmean(seen) if seen else None

    return {**key, "seconds": round(time.perf_counter() - started, 1),
            "before": {d: v["eval_before"] for d, v in summary["domains"].items()},
            "after": {d: v["eval_after"] for d, v in summary["domains"].items()},
            "curve": [round(statistics.fmean(line["successes"].values()), 4) for line in steps if line["successes"]],
            "staleness_mean": summary["staleness"]["mean"], "staleness_max": summary["staleness"]["max"],
            **{name: mean(name) for name in ("importance_ess", "mismatch_kl", "clip_fraction", "masked", "entropy",
                                             "grad_norm")}}


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def done(lines: Iterable[dict[str, Any]], key: dict[str, Any]) -> bool:
    return any(all(line[name] == key[name] for name in KEY) for line in lines)


def label(line: dict[str, Any]) -> str:
    return line["algorithm"] + (", no correction" if line["correction"] == "none" else "")


def grouped(lines: Sequence[dict[str, Any]]) -> dict[tuple[str, int], list[dict[str, Any]]]:
    """Runs of one algorithm and alpha together; only those of the most common length and domains."""
    sizes = [(line["steps"], tuple(line["domains"])) for line in lines]
    usual = max(set(sizes), key=sizes.count)
    out: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for line, size in zip(lines, sizes, strict=True):
        if size == usual:
            out.setdefault((label(line), line["alpha"]), []).append(line)
    return dict(sorted(out.items(), key=lambda item: (item[0][1] != 1, item[0])))


def table(lines: Sequence[dict[str, Any]]) -> str:
    """Markdown: held-out success before and after (mean of the seeds, each seed's gain), and what the tokens were."""
    groups = grouped(lines)
    domains = next(iter(groups.values()))[0]["domains"]
    head = ["algorithm", "alpha", "seeds", *(f"{d}" for d in domains), "mean gain (each seed)", "staleness", "ESS",
            "mismatch KL", "clipped"]
    rows = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for (name, alpha), runs in groups.items():
        cells = [name, str(alpha), str(len(runs))]
        for domain in domains:
            before, after = (statistics.fmean(r[when][domain] for r in runs) for when in ("before", "after"))
            cells.append(f"{before:.2f} -> {after:.2f}")
        gains = [statistics.fmean(r["after"][d] - r["before"][d] for d in domains) for r in runs]
        cells.append(f"{statistics.fmean(gains):+.2f} ({', '.join(f'{gain:+.2f}' for gain in gains)})")
        for column, digits in (("staleness_mean", 2), ("importance_ess", 3), ("mismatch_kl", 4), ("clip_fraction", 3)):
            seen = [run[column] for run in runs if run[column] is not None]
            cells.append(f"{statistics.fmean(seen):.{digits}f}" if seen else "")
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


COLOURS = ("#4a5fd9", "#0d9384", "#d17a00", "#b93a92", "#2f8ac4", "#7a8b1f", "#d1343b", "#5d6575")


def chart(title: str, curves: dict[str, list[float]]) -> str:
    """Mean success of the training rollouts over steps, running mean of 5, one line each, with a legend."""
    last = max(len(curve) for curve in curves.values())
    frame = Frame(640, 300, 1, last, 1.0, percent=True)
    body = tag("rect", x=-8, width=648, height=308 + 18 * len(curves), fill="#ffffff") + frame.axes("step")
    for number, (name, curve) in enumerate(curves.items()):
        colour = COLOURS[number % len(COLOURS)]
        smooth = [(i + 1.0, statistics.fmean(curve[max(0, i - 4):i + 1])) for i in range(len(curve))]
        points = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in smooth)
        dash = {"stroke_dasharray": "5 4"} if "no correction" in name else {}
        body += tag("polyline", points=points, fill="none", stroke=colour, stroke_width=2, **dash)
        at = 312 + 18 * number
        body += tag("line", x1=40, x2=64, y1=at, y2=at, stroke=colour, stroke_width=2, **dash)
        body += tag("text", name, x=72, y=at + 4)
    style = tag("style", "text{font:12px sans-serif;fill:#333}.grid{stroke:#ddd}.axis{stroke:#888}")
    return tag("svg", style + tag("title", title) + body, xmlns="http://www.w3.org/2000/svg",
               viewBox=f"-8 0 648 {308 + 18 * len(curves)}")


def report(lines: Sequence[dict[str, Any]], docs: Path) -> None:
    """Write the table into docs/algorithms.md between its marks, and the two plots beside it."""
    groups = grouped(lines)

    def mean(runs: list[dict[str, Any]]) -> list[float]:
        return [statistics.fmean(values) for values in zip(*(run["curve"] for run in runs), strict=False)]

    kinds = {"algorithms": {name: mean(runs) for (name, alpha), runs in groups.items()
                            if alpha == 1 and "no correction" not in name},
             "staleness": {f"{name}, alpha {alpha}": mean(runs) for (name, alpha), runs in groups.items()
                           if name.startswith("grpo")}}
    pictures = []
    for kind, curves in kinds.items():
        if curves:
            (docs / f"curves_{kind}.svg").write_text(chart(kind, curves), encoding="utf-8")
            pictures.append(f"![Success of training rollouts: {kind}](curves_{kind}.svg)")
    first = lines[0]
    text = (f"{first['steps']} steps of the quickstart's recipe, held-out success at temperature 1, mean over seeds;\n"
            "`staleness`: mean of the trained trajectories, in versions; the other columns: means over the steps.")
    page = (docs / "algorithms.md").read_text(encoding="utf-8")
    before, rest = page.split(START)
    after = rest.split(END)[1]
    body = "\n\n".join([START, text, table(lines), *pictures, END])
    (docs / "algorithms.md").write_text(before + body + after, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(ALGORITHMS), default=list(ALGORITHMS))
    parser.add_argument("--alphas", nargs="+", type=int, default=list(ALPHAS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--domains", nargs="+", default=["frozen_lake", "guess", "calculator"])
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "algorithms.jsonl")
    parser.add_argument("--report", action="store_true", help="only write table and plot from the lines of --out")
    parser.add_argument("--list", action="store_true", help="only say what would run")
    given = parser.parse_args()
    if given.report:
        lines = read(given.out)
        if not lines:
            raise SystemExit(f"{given.out} has no runs yet")
        report(lines, ROOT / "docs")
        return
    given.out.parent.mkdir(parents=True, exist_ok=True)
    for key in plan(given.only, given.alphas, given.seeds, given.steps, given.domains):
        if done(read(given.out), key):
            continue
        print(json.dumps(key), flush=True)
        if not given.list:
            line = asyncio.run(run(key))
            with given.out.open("a", encoding="utf-8") as out:
                out.write(json.dumps(line) + "\n")
            print(f"    {line['before']} -> {line['after']} in {line['seconds']} s", flush=True)


if __name__ == "__main__":
    main()
