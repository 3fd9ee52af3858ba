"""One simulated run: the real control plane around simulated parts, from one seed.

Keeps true: a world and a seed give the same events in every process and on every Python (floats are added with
math.fsum: `sum` rounds differently from 3.12 on). Every run is checked: the journal's invariants
while it runs, and at its end that nothing is left open (environments, turns, KV) and no task is lost or doubled.
"""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rollart.algo.settings import AlgoSettings
from rollart.control.env_manager import Services
from rollart.control.evaluation import Evaluator
from rollart.control.llm_proxy import LLMProxy
from rollart.control.pipeline import Pipeline, PipelineSettings
from rollart.control.rollout_scheduler import RolloutScheduler
from rollart.control.sample_buffer import SampleBuffer
from rollart.control.settings import RolloutSettings, ScheduleSettings
from rollart.control.supervisor import Supervisor
from rollart.control.wave import Wave
from rollart.control.weight_sync import WeightSync
from rollart.core.changed import Changed
from rollart.core.clock import draw, now
from rollart.core.errors import RunError, Stalled, TrainerLost, first_error
from rollart.core.events import BatchTaken, Event, GroupEnded, GroupReady, StepEnded
from rollart.core.types import Restored, TrajectoryId, Version
from rollart.observe.invariants import Bounds, Invariants
from rollart.observe.journal import Digest, Journal, Subscriber
from rollart.sim.costs import StepCost, TrainCost
from rollart.sim.engine import DisaggregatedEngine, SimEngine
from rollart.sim.faults import CALM, Faults
from rollart.sim.loop import VirtualTimeLoop, run_virtual
from rollart.sim.parts import (
    RewardCost,
    SimCheckpoints,
    SimCluster,
    SimEnvironmentPool,
    SimRenderer,
    SimScorer,
    SimTasks,
    SimTrainer,
    sim_task,
)
from rollart.sim.workload import TOY, Load


@dataclass(frozen=True, kw_only=True)
class SimPool:
    """Engines of one kind. gpus: of each engine, of which one hour costs `price`. Prefill and decode disaggregated:
    `prefill` engines of `prefill_cost` and `decode` engines of `cost` make up one engine (kv_bytes a token move between
    them at `link` bytes/s)."""

    engines: int = 2
    cost: StepCost = field(default_factory=StepCost)
    gpus: int = 1
    price: float = 1.0
    prefill: int = 0
    decode: int = 0
    prefill_cost: StepCost | None = None
    kv_bytes: int = 0
    link: float = 25e9


@dataclass(frozen=True, kw_only=True)
class World:
    """What is simulated.

    pools: the engines. affinity: pool of each domain. weights: share of each domain. domains: what their episodes look
    like. train, train_gpus, train_price: an optimizer step, on how many GPUs at what price an hour (all). reward: where
    rewards run. opening: environments that open at once (0: no limit). eval_tasks: held-out tasks per domain (0: no
    evaluation). step_budget: most virtual seconds between two steps (I7). wasted_share: see `Bounds`. time_limit:
    virtual seconds. publish_s: until a version can be read, beside rollout. jitter: delay timers by chance.
    """

    pools: Mapping[str, SimPool] = field(default_factory=lambda: {"compute": SimPool(), "bandwidth": SimPool()})
    affinity: Mapping[str, str] = field(default_factory=lambda: {"math": "compute", "default": "bandwidth"})
    weights: Mapping[str, float] = field(default_factory=lambda: {"math": 1.0, "game": 1.0, "code": 1.0})
    domains: Mapping[str, Load] = field(default_factory=lambda: TOY)
    schedule: ScheduleSettings = field(default_factory=ScheduleSettings)
    rollout: RolloutSettings = field(default_factory=lambda: RolloutSettings(batch_groups=4, group_size=4))
    pipeline: PipelineSettings = field(default_factory=lambda: PipelineSettings(steps=4, checkpoint_every=0))
    algo: AlgoSettings = field(default_factory=AlgoSettings)
    reward: RewardCost = field(default_factory=RewardCost)
    train: TrainCost = field(default_factory=TrainCost)
    train_gpus: int = 1
    train_price: float = 1.0
    faults: Faults = CALM
    opening: int = 0
    eval_tasks: int = 0
    publish_s: float = 3.0
    step_budget: float = 4 * 3_600.0
    wasted_share: float = 1.0
    time_limit: float = 10 * 86_400.0
    jitter: bool = False


@dataclass(frozen=True, kw_only=True)
class SimResult:
    """What came out. ended: finished, or the expected error that ended the run. counts, tokens: trajectories and their
    sampled tokens by fate. seconds: virtual. busy: share of the time that each pool, the trainer ("train") and reward
    instances ("reward") worked. reward_seconds: instance-seconds. prefill_tokens, preempted: of all engines. step_ends:
    when each step ended. bound: of staleness. train_seconds: of all steps. staleness: mean of what was
    trained, in versions."""

    digest: str
    ended: str
    counts: Mapping[str, int]
    tokens: Mapping[str, int]
    steps: int
    seconds: float
    events: int
    callbacks: int
    busy: Mapping[str, float]
    reward_seconds: float
    cold_starts: int
    prefill_tokens: int
    preempted: int
    step_ends: tuple[float, ...]
    bound: int
    train_seconds: float
    staleness: float

    @property
    def step_seconds(self) -> float:
        """Seconds of a step on average, those left out that train what was admitted at the start (bound + 1)."""
        skip = min(self.bound + 1, len(self.step_ends) - 1)
        return (self.step_ends[-1] - self.step_ends[skip - 1]) / (len(self.step_ends) - skip)


class _Steps:
    """When steps ended, and how stale what they trained was."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.stale: Counter[int] = Counter()

    def on(self, at: float, event: Event) -> None:
        match event:
            case StepEnded():
                self.ends.append(at)
            case BatchTaken(staleness=staleness):
                self.stale.update(staleness)


class _Honesty:
    """What only the simulator knows: who really answered, and where each task is."""

    def __init__(self, scorer: SimScorer, tasks: SimTasks, restored: Restored | None,
                 violated: Callable[[str, str], None]) -> None:
        self._scorer, self._tasks, self._violated = scorer, tasks, violated
        self._trained = self._failed = 0
        self._held = len(restored.groups) if restored else 0
        if restored:
            scorer.answered.update((member.id, None) for group in restored.groups for member in group.finished)

    def on(self, at: float, event: Event) -> None:
        match event:
            case GroupReady(group):
                for member in group.members:
                    if member.id not in self._scorer.answered:
                        self._violated("I2", f"{member.id} counts as good, and no scorer has answered for it")
                    del self._scorer.answered[member.id]
            case BatchTaken(groups=groups):
                self._trained += len(groups)
            case GroupEnded(kept=False, reason=reason):
                self._failed += reason.startswith("quarantined")  # a task that failed before comes again

    def close(self) -> None:
        drawn, returned = self._tasks.drawn + self._held, self._tasks.returned
        if drawn != returned + self._trained + self._failed:
            self._violated("I2", f"{drawn} tasks were drawn, {returned} came back, {self._trained} were trained, "
                           f"{self._failed} failed: a task is lost or doubled")


class SimRun:
    """All objects of one run, wired. To go on after a crash: the checkpoint's version and what the ledger restored."""

    def __init__(self, world: World, seed: int, *, subscribers: Sequence[Subscriber] = (), version: Version = 0,
                 restored: Restored | None = None, digest: bool = True) -> None:
        self.world, self.seed, self._restored = world, seed, restored
        schedule, settings, faults = world.schedule, world.rollout, world.faults
        self.tasks = SimTasks(world.weights, world.domains, seed=draw(seed, "tasks"))
        self.scorer = SimScorer(seed=seed, faults=faults, domains=world.domains, cost=world.reward)
        self.invariants = Invariants(Bounds(
            alpha=schedule.bound, slots=(schedule.bound + 1) * settings.batch_groups + settings.spare_groups,
            group_size=settings.group_size, free=schedule.schedule.free, bounded=schedule.schedule.check_always,
            max_replacements=settings.max_replacements, pinned=("eval-0",), step_seconds=world.step_budget,
            wasted_share=world.wasted_share))
        violated = self.invariants.fail
        self.pool = SimEnvironmentPool(seed=seed, faults=faults, domains=world.domains, violated=violated,
                                       opening=world.opening)
        self.trainer = SimTrainer(seed=seed, faults=faults, violated=violated, publish_s=world.publish_s,
                                  cost=world.train)
        self.trainer.version = version
        self.engines = [self._engine(f"{name}-{i}", name, pool) for name, pool in world.pools.items()
                        for i in range(pool.engines)]
        self.cluster = SimCluster(self.engines, seed=seed, faults=faults)
        self.buffer = SampleBuffer(batch_groups=settings.batch_groups, alpha=schedule.bound, schedule=schedule.schedule,
                                   stale=schedule.stale, spare_groups=settings.spare_groups, version=version)
        self.digest, self.honesty = Digest(), _Honesty(self.scorer, self.tasks, restored, violated)
        told = [self.digest] if digest else []
        self.steps = _Steps()
        self.journal = Journal([*told, self.invariants, self.honesty, self.steps, *subscribers],
                               asyncio.get_running_loop().time)
        self.pipeline = self._pipeline()

    def _engine(self, id: str, name: str, pool: SimPool) -> SimEngine | DisaggregatedEngine:
        if not pool.prefill:
            return self._unit(id, name, pool.cost)
        return DisaggregatedEngine(
            id, name, [self._unit(f"{id}-prefill-{i}", name, pool.prefill_cost or pool.cost)
                       for i in range(pool.prefill)],
            [self._unit(f"{id}-decode-{i}", name, pool.cost) for i in range(pool.decode)], kv_bytes=pool.kv_bytes,
            link=pool.link, says=self._says)

    def _unit(self, id: str, pool: str, cost: StepCost) -> SimEngine:
        return SimEngine(id, pool, seed=self.seed, cost=cost, says=self._says, violated=self.invariants.fail)

    def _says(self, id: TrajectoryId, domain: str, turn: int) -> int:
        return self.world.domains[domain].says(self.seed, id, turn)

    @property
    def units(self) -> list[SimEngine]:
        """All engines, those of a disaggregated one singly."""
        return [unit for engine in self.engines
                for unit in (engine.units if isinstance(engine, DisaggregatedEngine) else [engine])]

    def _pipeline(self) -> Pipeline:
        world, changed, journal = self.world, Changed(), self.journal
        proxy = LLMProxy(self.engines, world.affinity, journal=journal, changed=changed)
        wave = Wave(changed, world.rollout.stall_seconds) if world.schedule.schedule.turn_barrier else None
        services = Services(proxy=proxy, environments=self.pool, renderer=SimRenderer(), scorer=self.scorer,
                            journal=journal, settings=world.rollout, seed=self.seed, wave=wave)
        rollout = RolloutScheduler(services, self.buffer, self.tasks, changed)
        sync = WeightSync(self.trainer, proxy, journal)
        evaluator = None
        if world.eval_tasks:
            self.engines.append(self._engine("eval-0", "eval", next(iter(world.pools.values()))))
            pinned = LLMProxy(self.engines[-1:], {}, journal=journal, changed=changed)
            held_out = [replace(sim_task(domain, world.domains[domain], i), id=f"{domain}-held-out:{i}")
                        for domain in world.weights for i in range(world.eval_tasks)]
            evaluator = Evaluator(Services(proxy=pinned, environments=self.pool, renderer=SimRenderer(),
                                           scorer=self.scorer, journal=journal, settings=world.rollout,
                                           seed=self.seed), held_out)
        return Pipeline(world.pipeline, algo=world.algo, buffer=self.buffer, changed=changed, rollout=rollout,
                        sync=sync, supervisor=Supervisor(self.cluster, proxy, sync, changed), trainer=self.trainer,
                        tasks=self.tasks, journal=journal, evaluator=evaluator,
                        checkpoints=SimCheckpoints() if world.pipeline.checkpoint_every else None)

    async def main(self) -> tuple[str, float]:
        """The whole run and the checks at its end; returns how it ended and when (virtual seconds)."""
        self.cluster.begin()
        try:
            await self.pipeline.run(self._restored)
        except BaseExceptionGroup as group:
            leaves = _leaves(group)
            if any(isinstance(leaf, Stalled) or not isinstance(leaf, RunError | TrainerLost) for leaf in leaves):
                raise
            return f"{type(leaves[0]).__name__}: {leaves[0]}", now()
        self._check_end()
        return "finished", now()

    def _check_end(self) -> None:
        self.invariants.close()
        self.honesty.close()
        if self.pool.live:
            self.invariants.fail("I3", f"{len(self.pool.live)} environments are still open after the run: "
                                 f"{', '.join(task.id for task in self.pool.live.values())}")
        if self.buffer.open or self.buffer.ready:
            self.invariants.fail("I4", f"slots are still held after the run by the groups "
                                 f"{', '.join(map(str, (*self.buffer.open, *self.buffer.ready)))}")
        for engine in self.engines:
            if engine.in_flight or engine.kv:
                self.invariants.fail("I3", f"{engine.id} still has {engine.in_flight} turns and the KV of "
                                     f"{len(engine.kv)} trajectories after the run")


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in _leaves(inner)]
    return [error]


def simulate(world: World, seed: int, subscribers: Sequence[Subscriber] = (), *, digest: bool = True) -> SimResult:
    """Run one world from one seed; `subscribers` hear its journal. `digest`: a fingerprint of it, a tenth of the time.

    Raises InvariantViolated, Stalled, Deadlock or NoProgress if the control plane is wrong. An error that bad luck may
    bring (a lost trainer, no engine left, too many failed groups) is in `ended`.
    """
    loop = VirtualTimeLoop(time_limit=world.time_limit, jitter_seed=seed if world.jitter else None)

    async def main() -> tuple[SimRun, str, float, float]:
        run = SimRun(world, seed, subscribers=subscribers, digest=digest)
        return run, *await run.main(), run.scorer.warm

    collecting = gc.isenabled()
    gc.disable()  # many live tasks and timers, no cycles to speak of: collecting took most of the time of large runs
    try:
        run, ended, seconds, warm = run_virtual(main(), loop=loop)
    except BaseExceptionGroup as group:
        raise first_error(group) from group
    finally:
        if collecting:
            gc.enable()
    invariants, units = run.invariants, run.units
    busy = {name: sum(unit.busy for unit in units if unit.pool == name) / (seconds * sum(
        unit.pool == name for unit in units)) for name in world.pools} if seconds else {}
    return SimResult(digest=run.digest.hexdigest() if digest else "", ended=ended, seconds=seconds,
                     steps=invariants.trainer,
                     counts=_named(invariants.fates), tokens=_named(invariants.tokens), events=run.journal.sequence,
                     callbacks=loop.callbacks,
                     busy={**busy, "train": run.trainer.busy / seconds if seconds else 0.0,
                           "reward": run.scorer.busy / warm if warm else 0.0},
                     reward_seconds=warm, cold_starts=run.scorer.cold_starts,
                     prefill_tokens=sum(unit.prefill_tokens for unit in units),
                     preempted=sum(unit.preempted for unit in units), step_ends=tuple(run.steps.ends),
                     bound=world.schedule.bound,
                     train_seconds=run.trainer.busy,
                     staleness=run.steps.stale.total() and sum(age * n for age, n in run.steps.stale.items())
                     / run.steps.stale.total())


def _named(counts: Counter) -> dict[str, int]:
    return {str(fate): n for fate, n in sorted(counts.items())}
