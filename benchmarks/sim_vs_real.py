"""Does the simulator predict this machine? Real runs of the quickstart's tasks against simulated ones.

Measured first, one at a time: engine steps at several batch sizes and prefill (least squares), and from one real run
with schedule sync the learner's seconds per token, the episodes (as records) and the seconds of environments and
rewards. Then real runs with each schedule, and the same schedules simulated: seconds per step and trainer idle side by
side. The filter of groups is off, since the simulator does not learn. Needs a machine that does nothing else.

    python benchmarks/sim_vs_real.py [--steps 10] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import shutil
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from rollart.backends.torch.engine import EmbeddedEngine
from rollart.backends.torch.threads import shares
from rollart.backends.weights.memory import MemoryWeights
from rollart.build import open_run
from rollart.config.recipe import Recipe, load_recipe
from rollart.control.pipeline import PipelineSettings
from rollart.control.settings import ScheduleSettings
from rollart.core.events import BatchTaken, Event, StepEnded, TrajectoryEnded, WeightsLoaded, WeightsPublished
from rollart.core.tokens import ids
from rollart.core.types import GenerateRequest, Trajectory, TrajectoryId
from rollart.observe.run_folder import RunFolder
from rollart.policy import first_policy
from rollart.sim.costs import StepCost, TrainCost
from rollart.sim.parts import RewardCost
from rollart.sim.workload import Load, Record, Spread
from rollart.sim.world import SimPool, World, simulate

RECIPE = Path(__file__).parents[1] / "recipes" / "quickstart.toml"
SCHEDULES = ("sync", "one_off", "rollart")
BATCHES, CONTEXT, SAMPLED = (1, 16, 64, 128, 192), 160, (2, 40)  # two lengths tell prefill from decode
GLUE = 7
"""Tokens that the simulated renderer adds to a message and the next header; recorded lengths have them already."""


class Watch:
    """What a real run shows of itself."""

    def __init__(self) -> None:
        self.trajectories: list[Trajectory] = []
        self.steps: list[tuple[float, float, int]] = []  # (when, seconds, tokens)
        self.waited: list[float] = []
        self.published: list[float] = []
        self.loaded: list[float] = []

    def on(self, at: float, event: Event) -> None:
        match event:
            case TrajectoryEnded(trajectory=trajectory):
                if trajectory.good:
                    self.trajectories.append(trajectory)
            case BatchTaken(waited=waited):
                self.waited.append(waited)
            case StepEnded(report=report):
                self.steps.append((at, report.seconds, report.tokens))
            case WeightsPublished(seconds=seconds):
                self.published.append(seconds)
            case WeightsLoaded(seconds=seconds):
                self.loaded.append(seconds)

    @property
    def step_seconds(self) -> float:
        """In steady state: the first step fills the pipeline."""
        return (self.steps[-1][0] - self.steps[0][0]) / (len(self.steps) - 1)

    @property
    def idle(self) -> float:
        """Share of the time that the trainer waited for a batch."""
        return sum(self.waited[1:]) / (self.steps[-1][0] - self.steps[0][0])


async def real(recipe: Recipe) -> Watch:
    watch, path = Watch(), Path(tempfile.mkdtemp(prefix="rollart-bench-"))
    try:
        with RunFolder(path).create(recipe.to_json()) as folder:
            async with open_run(recipe, folder, resume=False, subscribers=lambda _: [watch]) as run:
                await run.train()
    finally:
        shutil.rmtree(path, ignore_errors=True)
    return watch


async def engine_cost(recipe: Recipe) -> StepCost:
    """Fit seconds = overhead + sequences x a + prefilled tokens x b to engine runs."""
    policy, weights = first_policy(recipe), MemoryWeights()
    manifest = weights.put(0, policy.model.state_dict())
    engine = EmbeddedEngine("bench", "bench", policy.model, weights, recipe.engine, shares()[0])
    engine.start()
    await engine.load_weights(manifest)
    rows, seconds = [], []
    try:
        for repeat, (batch, most) in enumerate(itertools.product(BATCHES, SAMPLED)):
            for timed in (False, True, True):  # the first warms up
                prompts = [ids([2 + (i * 7 + j) % 90 for j in range(CONTEXT)]) for i in range(batch)]
                begun = time.perf_counter()
                done = await asyncio.gather(*[engine.generate(GenerateRequest(
                    TrajectoryId(repeat, i), 0, "", prompt, most, seed=i)) for i, prompt in enumerate(prompts)])
                took = time.perf_counter() - begun
                steps, sampled = max(len(c.tokens) for c in done), sum(len(c.tokens) for c in done)
                if timed:
                    rows.append([steps, sampled, batch * CONTEXT])
                    seconds.append(took)
                for i in range(batch):
                    engine.release(TrajectoryId(repeat, i))
    finally:
        await engine.close()
    weight = 1.0 / np.array(seconds)  # relative errors
    fitted, *_ = np.linalg.lstsq(np.array(rows) * weight[:, None], np.ones(len(seconds)), rcond=None)
    overhead, sequence, prefill = (max(0.0, float(value)) for value in fitted)
    return StepCost(overhead_s=overhead, sequence_s=max(0.0, sequence - prefill), token_s=prefill, chunk=1 << 20,
                    load_s=0.0)


def loads(recipe: Recipe, watch: Watch) -> dict[str, Load]:
    """Episodes as records, and the seconds of environments and rewards, by domain."""
    out = {}
    for name in recipe.domains:
        mine = [t for t in watch.trajectories if t.task.domain == name]
        records = tuple(Record(len(t.prompt) - GLUE, tuple(len(turn.completion.tokens) for turn in t.turns),
                               tuple(max(1, len(turn.reply) - GLUE) for turn in t.turns[:-1])) for t in mine)

        def spread(stage: str, calls: bool = False, mine: list[Trajectory] = mine) -> Spread:
            return Spread(values=tuple(t.seconds.get(stage, 0.0) / (len(t.turns) if calls else 1) for t in mine))

        out[name] = Load(records=records, open_s=spread("open"), step_s=spread("environment", True),
                         reward_s=spread("score"), max_turns=max(len(t.turns) for t in mine),
                         max_tokens=recipe.domains[name].settings["max_tokens"])
    return out


def train_cost(watch: Watch) -> TrainCost:
    seconds, tokens = [s for _, s, _ in watch.steps[1:]], [n for _, _, n in watch.steps[1:]]
    return TrainCost(fixed_s=0.0, token_s=sum(seconds) / sum(tokens))


def predicted(recipe: Recipe, cost: StepCost, watch: Watch, schedule: str, steps: int) -> tuple[float, float]:
    """(seconds per step, trainer idle) of the simulator."""
    idle: list[float] = []

    class Waits:
        def on(self, at: float, event: Event) -> None:
            if isinstance(event, BatchTaken):
                idle.append(event.waited)

    world = World(
        pools={"cpu": SimPool(engines=1, cost=replace(cost, load_s=statistics.fmean(watch.loaded)))},
        affinity={}, weights={name: entry.weight for name, entry in recipe.domains.items()},
        domains=loads(recipe, watch), schedule=ScheduleSettings(name=schedule), rollout=recipe.rollout,
        pipeline=PipelineSettings(steps=steps, checkpoint_every=0), algo=recipe.algorithm,
        reward=RewardCost(cold_start_s=0.0), train=train_cost(watch), publish_s=statistics.fmean(watch.published),
        wasted_share=1.0)
    result = simulate(world, 0, [Waits()])
    seconds = (result.step_ends[-1] - result.step_ends[0]) / (steps - 1)  # the same steps as in the real run
    return seconds, sum(idle[1:]) / (result.step_ends[-1] - result.step_ends[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10, help="optimizer steps of each run")
    parser.add_argument("--json", type=Path, help="write the figures here")
    arguments = parser.parse_args()
    recipe = load_recipe(RECIPE, [f"pipeline.steps={arguments.steps}", "pipeline.checkpoint_every=0",
                                  "evaluation.tasks=0", "algorithm.filter=none"])
    cost = asyncio.run(engine_cost(recipe))
    print(f"engine step: {cost.overhead_s * 1e3:.2f} ms + {(cost.sequence_s + cost.token_s) * 1e6:.0f} us a sequence; "
          f"prefill {1 / cost.token_s:,.0f} tokens/s", flush=True)
    watches = {name: asyncio.run(real(replace(recipe, schedule=ScheduleSettings(name=name)))) for name in SCHEDULES}
    learner = train_cost(watches["sync"])
    print(f"learner: {1 / learner.token_s:,.0f} tokens/s", flush=True)
    print(f"{'schedule':10} {'s/step real':>12} {'simulated':>10} {'ratio':>6}   {'idle real':>9} {'simulated':>10}")
    rows = {}
    for name, watch in watches.items():
        step, idle = predicted(recipe, cost, watches["sync"], name, arguments.steps)
        rows[name] = {"step": [watch.step_seconds, step], "idle": [watch.idle, idle]}
        print(f"{name:10} {watch.step_seconds:12.2f} {step:10.2f} {step / watch.step_seconds:6.2f}   {watch.idle:9.1%} "
              f"{idle:10.1%}", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
