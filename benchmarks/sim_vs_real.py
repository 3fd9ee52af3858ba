"""Does the simulator predict this machine? Real runs of the quickstart's tasks against simulated ones.

Measured: what an engine step, a turn and a prefilled token cost (least squares over batches, contexts and lengths), and
from one real run with schedule sync the learner's seconds per token, the episodes (as records) and the seconds of
environments and rewards. Engine, learner, control plane and environments share cores, memory bandwidth and an
interpreter: so the engine is measured again beside a learner that trains, and the learner's seconds per token also in
a run with schedule areal, which is not predicted. Then real runs with each schedule, and the same schedules simulated
with SEEDS seeds: seconds per step and trainer idle side by side. The filter of groups is off, since the simulator does
not learn. A run begins with batches of the groups that end first, which are short, and then of what these left; its
first SKIPPED steps are not counted, real or simulated. Needs a machine that does nothing else.

    python benchmarks/sim_vs_real.py [--steps 20] [--json FILE]
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
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from rollart.backends.torch.engine import EmbeddedEngine
from rollart.backends.torch.threads import shares
from rollart.backends.weights.memory import MemoryWeights
from rollart.build import open_run
from rollart.config.recipe import Recipe, load_recipe
from rollart.control.pipeline import PipelineSettings
from rollart.control.settings import Overlap, ScheduleSettings
from rollart.core.events import BatchTaken, Event, StepEnded, TrajectoryEnded, WeightsLoaded, WeightsPublished
from rollart.core.tokens import ids
from rollart.core.types import GenerateRequest, StepReport, TrainBatch, Trajectory, TrajectoryId
from rollart.observe.run_folder import RunFolder
from rollart.parts import make_trainer
from rollart.policy import Policy, first_policy
from rollart.sim.costs import StepCost, TrainCost
from rollart.sim.parts import RewardCost
from rollart.sim.workload import Load, Record, Spread
from rollart.sim.world import SimPool, World, simulate

RECIPE = Path(__file__).parents[1] / "recipes" / "quickstart.toml"
SCHEDULES, OVERLAPPED = ("sync", "one_off", "rollart"), "areal"
BATCHES, CONTEXTS, SAMPLED = (1, 16, 64, 128, 192), (24, 160), (2, 24)  # two of each tell turn, prefill and decode
ROUNDS, SEEDS, SKIPPED = 4, 3, 8
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
        self.batch = TrainBatch(0, ())
        self.decoding = 0.0  # the engine's busy share

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
        """In steady state."""
        return self.seconds / (len(self.steps) - SKIPPED)

    @property
    def seconds(self) -> float:
        return self.steps[-1][0] - self.steps[SKIPPED - 1][0]

    @property
    def idle(self) -> float:
        """Share of the time that the trainer waited for a batch."""
        return sum(self.waited[SKIPPED:]) / self.seconds


async def real(recipe: Recipe) -> Watch:
    watch, path = Watch(), Path(tempfile.mkdtemp(prefix="rollart-bench-"))
    try:
        with RunFolder(path).create(recipe.to_json()) as folder:
            async with open_run(recipe, folder, resume=False, subscribers=lambda _: [watch]) as run:
                step = run.parts.trainer.step

                async def keep(batch: TrainBatch) -> StepReport:
                    watch.batch = batch
                    return await step(batch)

                run.parts.trainer.step = keep
                started = time.perf_counter()
                await run.train()
                watch.decoding = run.parts.engines[0].stats().busy_seconds / (time.perf_counter() - started)
    finally:
        shutil.rmtree(path, ignore_errors=True)
    return watch


async def engine_cost(recipe: Recipe, policy: Policy) -> StepCost:
    """Fit seconds = steps x overhead + sampled x a + requests x b + prefilled tokens x c to engine runs."""
    weights = MemoryWeights()
    manifest = weights.put(0, policy.model.state_dict())
    engine = EmbeddedEngine("bench", "bench", policy.model, weights, recipe.engine, shares()[0])
    engine.start()
    await engine.load_weights(manifest)
    rows, seconds = [], []
    try:
        for repeat, (batch, context, most) in enumerate(itertools.product(BATCHES, CONTEXTS, SAMPLED)):
            for timed in (False, True, True, True):  # the first warms up
                prompts = [ids([2 + (i * 7 + j) % 90 for j in range(context)]) for i in range(batch)]
                begun = time.perf_counter()
                done = await asyncio.gather(*[engine.generate(GenerateRequest(
                    TrajectoryId(repeat, i), 0, "", prompt, most, seed=i)) for i, prompt in enumerate(prompts)])
                took = time.perf_counter() - begun
                if timed:
                    rows.append([max(len(c.tokens) for c in done), sum(len(c.tokens) for c in done), batch,
                                 batch * context])
                    seconds.append(took)
                for i in range(batch):
                    engine.release(TrajectoryId(repeat, i))
    finally:
        await engine.close()
    overhead, sequence, turn, prefill = _nonnegative(np.array(rows), np.array(seconds))
    return StepCost(overhead_s=overhead, sequence_s=max(0.0, sequence - prefill), token_s=prefill, chunk=1 << 20,
                    turn_tokens=turn / prefill, concurrent=recipe.engine.max_concurrent, share_prompts=False,
                    load_s=0.0)


def _nonnegative(rows: np.ndarray, seconds: np.ndarray) -> list[float]:
    """Least squares of relative errors; what would be negative is left out, and 0 (prefill never is)."""
    weight, used = 1.0 / seconds, list(range(rows.shape[1]))
    while True:
        fitted, *_ = np.linalg.lstsq(rows[:, used] * weight[:, None], np.ones(len(seconds)), rcond=None)
        if fitted.min() >= 0:
            return [float(fitted[used.index(i)]) if i in used else 0.0 for i in range(rows.shape[1])]
        del used[int(fitted.argmin())]


@dataclass(frozen=True)
class Costs:
    """Of the engine and the learner on this machine, each alone and with the other (and what it brings: turns,
    environments) busy beside it."""

    engine: StepCost
    engine_beside: StepCost
    learner: float  # seconds per token
    learner_beside: float

    def at(self, training: float, decoding: float) -> tuple[StepCost, TrainCost]:
        """With the learner busy for the share `training` of the time, the engine for `decoding`."""
        mixed = {name: (1 - training) * getattr(self.engine, name) + training * getattr(self.engine_beside, name)
                 for name in ("overhead_s", "sequence_s", "token_s", "turn_tokens")}
        return replace(self.engine, **mixed), TrainCost(
            fixed_s=0.0, token_s=(1 - decoding) * self.learner + decoding * self.learner_beside)


async def engine_beside(recipe: Recipe, batch: TrainBatch) -> StepCost:
    """The engine's cost while the learner trains without a pause."""
    trainer = make_trainer(recipe, first_policy(recipe), None, MemoryWeights())

    async def train() -> None:
        while True:
            await trainer.step(replace(batch, version=trainer.version))

    training = asyncio.create_task(train())
    try:
        return await engine_cost(recipe, first_policy(recipe))
    finally:
        training.cancel()
        await asyncio.wait([training])
        trainer.close()


def loads(recipe: Recipe, watch: Watch) -> dict[str, Load]:
    """Episodes as records, and the seconds of environments and rewards, by domain."""
    out = {}
    for name in recipe.domains:
        mine = [t for t in watch.trajectories if t.task.domain == name]
        records = tuple(Record(max(1, len(t.prompt) - GLUE), tuple(len(turn.completion.tokens) for turn in t.turns),
                               tuple(max(1, len(turn.reply) - GLUE) for turn in t.turns[:-1])) for t in mine)

        def spread(stage: str, calls: bool = False, mine: list[Trajectory] = mine) -> Spread:
            return Spread(values=tuple(t.seconds.get(stage, 0.0) / (len(t.turns) if calls else 1) for t in mine))

        out[name] = Load(records=records, open_s=spread("open"), step_s=spread("environment", True),
                         reward_s=spread("score"), max_turns=max(len(t.turns) for t in mine),
                         max_tokens=recipe.domains[name].settings["max_tokens"])
    return out


def learner_cost(watch: Watch) -> float:
    return sum(s for _, s, _ in watch.steps[1:]) / sum(n for _, _, n in watch.steps[1:])


def predicted(recipe: Recipe, costs: Costs, watch: Watch, schedule: str, steps: int) -> tuple[float, float]:
    """(seconds per step, trainer idle) of the simulator. How much engine and learner slow each other down depends on
    how busy both are: simulated again with the shares that come out, until these stand still."""
    shares = (0.5, 0.5) if ScheduleSettings(name=schedule).schedule.overlap is not Overlap.NONE else (0.0, 0.0)
    for _ in range(ROUNDS):
        if shares == (0.0, 0.0):
            break
        _, _, *busy = _simulated(recipe, costs.at(*shares), watch, schedule, steps, 0)
        shares = (0.5 * (shares[0] + busy[0]), 0.5 * (shares[1] + busy[1]))
    runs = [_simulated(recipe, costs.at(*shares), watch, schedule, steps, seed) for seed in range(SEEDS)]
    return statistics.fmean(run[0] for run in runs), statistics.fmean(run[1] for run in runs)


def _simulated(recipe: Recipe, costs: tuple[StepCost, TrainCost], watch: Watch, schedule: str,
               steps: int, seed: int) -> tuple[float, float, float, float]:
    """(seconds per step, trainer idle, busy share of the learner, of the engine)."""
    idle: list[float] = []

    class Waits:
        def on(self, at: float, event: Event) -> None:
            if isinstance(event, BatchTaken):
                idle.append(event.waited)

    world = World(
        pools={"cpu": SimPool(engines=1, cost=replace(costs[0], load_s=statistics.fmean(watch.loaded)))},
        affinity={}, weights={name: entry.weight for name, entry in recipe.domains.items()},
        domains=loads(recipe, watch), schedule=ScheduleSettings(name=schedule), rollout=recipe.rollout,
        pipeline=PipelineSettings(steps=steps, checkpoint_every=0), algo=recipe.algorithm,
        reward=RewardCost(cold_start_s=0.0), train=costs[1], publish_s=statistics.fmean(watch.published),
        wasted_share=1.0)
    result = simulate(world, seed, [Waits()])
    seconds = result.step_ends[-1] - result.step_ends[SKIPPED - 1]
    return (seconds / (steps - SKIPPED), sum(idle[SKIPPED:]) / seconds, result.busy["train"], result.busy["cpu"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help=f"optimizer steps of each run, more than {SKIPPED}")
    parser.add_argument("--json", type=Path, help="write the figures here")
    arguments = parser.parse_args()
    if arguments.steps <= SKIPPED:
        parser.error(f"--steps must be more than {SKIPPED}; got {arguments.steps}")
    recipe = load_recipe(RECIPE, [f"pipeline.steps={arguments.steps}", "pipeline.checkpoint_every=0",
                                  "evaluation.tasks=0", "algorithm.filter=none"])
    alone = asyncio.run(engine_cost(recipe, first_policy(recipe)))
    watches = {name: asyncio.run(real(replace(recipe, schedule=ScheduleSettings(name=name))))
               for name in (*SCHEDULES, OVERLAPPED)}
    beside = asyncio.run(engine_beside(recipe, watches["sync"].batch))
    learner, overlapped = learner_cost(watches["sync"]), watches[OVERLAPPED]
    costs = Costs(alone, beside, learner, learner + (learner_cost(overlapped) - learner) / overlapped.decoding)
    for what, cost, learner in (("alone", alone, costs.learner), ("beside the other", beside, costs.learner_beside)):
        print(f"{what}: engine step {cost.overhead_s * 1e3:.2f} ms + {(cost.sequence_s + cost.token_s) * 1e6:.0f} us a "
              f"sequence, a turn {cost.turn_tokens * cost.token_s * 1e6:.0f} us, prefill {1 / cost.token_s:,.0f} "
              f"tokens/s; learner {1 / learner:,.0f} tokens/s", flush=True)
    print(f"{'schedule':10} {'s/step real':>12} {'simulated':>10} {'ratio':>6}   {'idle real':>9} {'simulated':>10}")
    rows = {}
    for name, watch in ((name, watches[name]) for name in SCHEDULES):
        step, idle = predicted(recipe, costs, watches["sync"], name, arguments.steps)
        rows[name] = {"step": [watch.step_seconds, step], "idle": [watch.idle, idle]}
        print(f"{name:10} {watch.step_seconds:12.2f} {step:10.2f} {step / watch.step_seconds:6.2f}   {watch.idle:9.1%} "
              f"{idle:10.1%}", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
