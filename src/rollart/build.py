"""Composition root: a recipe and a run folder become a running system. The only place that knows the backends.

Order of things: model (warm-started or from a checkpoint) -> learner, engines -> proxy -> rollout -> pipeline; then the
journal's subscribers watch it. Nothing is started before everything has been built, and all that was started is
closed again, whatever happens.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollart.algo.samples import unusable
from rollart.backends.process.environments import ProcessEnvironments
from rollart.backends.scorers import Scorers, Site, open_scorers
from rollart.build_ray import domain_pools, open_cluster, plan, ray_parts, serve_site
from rollart.config.recipe import DomainEntry, Recipe
from rollart.control.env_manager import Services
from rollart.control.evaluation import Evaluator
from rollart.control.llm_proxy import LLMProxy
from rollart.control.pipeline import Pipeline
from rollart.control.rollout_scheduler import RolloutScheduler
from rollart.control.sample_buffer import SampleBuffer
from rollart.control.supervisor import Supervisor
from rollart.control.task_mix import Share, TaskMix
from rollart.control.wave import Wave
from rollart.control.weight_sync import WeightSync
from rollart.core.changed import Changed
from rollart.core.clock import draw, now
from rollart.core.errors import ConfigError, InvariantViolated, RollArtError, RunError, TrainerLost, first_error
from rollart.core.events import Event, RewardsSampled, RunEnded, StepEnded
from rollart.core.ports import EnvironmentPool, Trainer
from rollart.core.types import EvalResult, Manifest, Restored, Task, Version
from rollart.envs.latency import InjectedLatency
from rollart.observe.invariants import Bounds, Invariants
from rollart.observe.journal import Journal, Subscriber
from rollart.observe.ledger import Ledger, behind
from rollart.observe.run_folder import RunFolder, read_object
from rollart.parts import EngineCluster, Parts, check_parts, local_parts, make_engine, make_environments, reward_names
from rollart.policy import Policy, Progress, context_tokens, first_policy, load_policy

if TYPE_CHECKING:
    from rollart.backends.ray.cluster import RayCluster


class FolderCheckpoints:
    """The pipeline's Checkpoints in a run folder: the ledger first, the marker last."""

    def __init__(self, folder: RunFolder, ledger: Ledger, keep: int) -> None:
        self._folder, self._ledger, self._keep = folder, ledger, keep

    async def save(self, version: Version, state: Mapping[str, Any], trainer: Trainer) -> str:
        self._ledger.flush(durable=True)  # with it, all steps before `version`: nothing later is needed
        path = self._folder.checkpoint(version)
        try:
            self._folder.begin_checkpoint(version)
            (path / "state.json").write_text(json.dumps(dict(state)))
            await trainer.save(path)
            await asyncio.to_thread(self._folder.complete_checkpoint, path, self._keep)
        except (OSError, TrainerLost) as error:
            raise RunError(f"the checkpoint {path} was not written ({error}): see that its disk has room, then "
                           f"continue with --resume {self._folder.path}") from error
        return str(path)


class LedgerCheck:
    """I2 in production: after each step the ledger's counts must be those of the control plane."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.rollout: RolloutScheduler | None = None
        self.before = 0

    def on(self, at: float, event: Event) -> None:
        if isinstance(event, StepEnded) and self.rollout:
            self._ledger.accounts.check(self.rollout.unsettled, self.before + self.rollout.dispatched)


@dataclass
class Run:
    """Everything of one run, ready to go."""

    recipe: Recipe
    folder: RunFolder
    pipeline: Pipeline
    proxy: LLMProxy
    parts: Parts
    ledger: Ledger
    journal: Journal
    restored: Restored | None
    scorers: Scorers

    def snapshot(self) -> dict[str, Any]:
        """What `rollart status` shows of a live run."""
        buffer, rollout, time = self.pipeline.buffer, self.pipeline.rollout, now()
        environments = self.parts.environments.stats()
        engines = []
        for engine in self.parts.engines:
            stats = engine.stats()
            engines.append({"id": engine.id, "pool": engine.pool, "version": engine.version,
                            "state": engine.lost or "serves", "running": stats.running, "waiting": stats.waiting,
                            "kv_tokens": stats.kv_tokens, "generated": stats.generated, "reused": stats.reused})
        return {
            "versions": {"trainer": buffer.version, "live": self.proxy.version, "steps": self.recipe.pipeline.steps},
            "slots": {"open": len(buffer.open), "ready": len(buffer.ready), "training": sum(buffer.training.values()),
                      "free": buffer.free},
            "waits": [{"who": w.who, "what": w.what, "seconds": round(time - w.since, 1)}
                      for w in self.pipeline.changed.waits[:20]],
            "repairs": {"turns moved": self.proxy.moved, "engine restarts": self.pipeline.supervisor.restarts,
                        "learner restarts": len(getattr(self.parts.trainer, "recoveries", ())),
                        "environment nodes lost": getattr(self.parts.environments, "lost_nodes", 0),
                        "routed to another pool": self.proxy.routing.fallbacks},
            "in_flight": [dataclasses.asdict(item) | {"id": str(item.id)} for item in rollout.in_flight()[:20]],
            "engines": engines,
            "rewards": {name: value for name, value in self.scorers.last.items() if value},
            "environments": {"processes": environments.live, "idle": environments.idle,
                             "opened": environments.opened, "failed": environments.failed,
                             "opened ahead": environments.ahead},
        }

    async def train(self) -> bool:
        """True if it reached the last step, False if it was stopped; see Pipeline.run."""
        watch = asyncio.create_task(self.scorers.watch(self.journal.emit), name="reward figures")
        try:
            finished = await self.pipeline.run(self.restored)
            self.journal.emit(RewardsSampled(await self.scorers.figures()))
            return finished
        except (Exception, asyncio.CancelledError) as error:
            cancelled = isinstance(error, asyncio.CancelledError)
            reason = "interrupted" if cancelled else f"failed: {first_error(error)}"
            with suppress(RollArtError, InvariantViolated):  # the ledger itself may be what failed
                self.journal.emit(RunEnded(self.pipeline.buffer.version, reason))
            raise
        finally:
            watch.cancel()
            await asyncio.wait([watch])


@asynccontextmanager
async def open_run(recipe: Recipe, folder: RunFolder, *, resume: bool,
                   subscribers: Callable[[Ledger], Sequence[Subscriber]] = lambda _: (),
                   progress: Progress = lambda *_: None) -> AsyncIterator[Run]:
    """Build the run in a folder that is locked by the caller; closes every part at the end.

    On resume the newest whole checkpoint is taken; without one the run starts again from version 0, with what the
    ledger knows. Raises ConfigError, RunError.
    """
    async with AsyncExitStack() as stack:
        checkpoint = folder.newest_checkpoint() if resume else None
        version = checkpoint[0] if checkpoint else 0
        state = await asyncio.to_thread(_checked, folder, checkpoint)
        ledger = Ledger(folder.database)
        stack.callback(ledger.close)
        if version > recipe.pipeline.steps:
            raise ConfigError(f"pipeline.steps = {recipe.pipeline.steps} is below the checkpoint's {version} steps: "
                              "set it higher")
        restored = ledger.recover(version) if resume else None
        cluster = await _connect(stack, recipe) if recipe.cluster.address else None
        scorer = await _scorers(stack, recipe, serve_site(recipe, folder, cluster) if cluster else None)
        # Adapters belong to the model that the run began with; the checkpoint's own has them merged in.
        whole = checkpoint if not recipe.lora else None
        policy = load_policy(whole[1], recipe) if whole else await _in_thread(recipe, progress)
        copied = recipe.algorithm.reference == "copy"
        reference = await _in_thread(recipe, progress) if copied else None
        check = LedgerCheck(ledger)
        tasks = TaskMix({name: _share(name, entry) for name, entry in recipe.domains.items()},
                        draw(recipe.seed, "tasks"))
        journal = Journal([_invariants(recipe), ledger, *subscribers(ledger), check, tasks])
        context = context_tokens(recipe, policy)
        folder_or_none = checkpoint[1] if checkpoint else None
        if cluster:
            parts = await ray_parts(stack, recipe, policy, reference, folder_or_none, folder, cluster)
        else:
            parts = await local_parts(stack, recipe, policy, reference, folder_or_none, folder.newest_checkpoint)

        changed = Changed()
        rollout_settings = dataclasses.replace(recipe.rollout, context_tokens=context)
        proxy = LLMProxy(parts.engines, domain_pools(recipe), journal=journal, changed=changed,
                         full=recipe.engine.max_concurrent)
        schedule = recipe.schedule.schedule
        services = Services(
            proxy=proxy, environments=_with_latency(recipe, parts.environments), renderer=policy.chat, scorer=scorer,
            journal=journal, settings=rollout_settings, sampling=recipe.sampling, seed=draw(recipe.seed, "rollout"),
            wave=Wave(changed, rollout_settings.stall_seconds) if schedule.turn_barrier else None)
        buffer = SampleBuffer(batch_groups=rollout_settings.batch_groups, alpha=recipe.schedule.bound,
                              schedule=schedule, stale=recipe.schedule.stale,
                              spare_groups=rollout_settings.spare_groups, version=version)
        if isinstance(parts.environments, ProcessEnvironments):
            copies = rollout_settings.group_size + rollout_settings.spares
            parts.environments.upcoming = lambda: (task for task in tasks.peek() for _ in range(copies))
        rollout = RolloutScheduler(services, buffer, tasks, changed, partial(unusable, settings=recipe.algorithm))
        sync = WeightSync(parts.trainer, proxy, journal)
        supervisor = Supervisor(parts.cluster, proxy, sync, changed, max_restarts=recipe.cluster.max_restarts)
        pipeline = Pipeline(recipe.pipeline, algo=recipe.algorithm, buffer=buffer, changed=changed, rollout=rollout,
                            sync=sync, supervisor=supervisor, trainer=parts.trainer, tasks=tasks, journal=journal,
                            checkpoints=FolderCheckpoints(folder, ledger, recipe.keep_checkpoints),
                            evaluator=_evaluator(recipe, services, parts, changed))
        check.rollout, check.before = rollout, ledger.accounts.counts()["dispatched"]
        if checkpoint and pipeline.evaluator:
            pipeline.evaluator.number = state.get("evaluations", 0)
        yield Run(recipe, folder, pipeline, proxy, parts, ledger, journal, restored, scorer)


def _checked(folder: RunFolder, checkpoint: tuple[Version, Path] | None) -> dict[str, Any]:
    """The state.json of a checkpoint that is as it was written and whose ledger is there. Raises ConfigError."""
    if not checkpoint:
        return {}
    folder.check_checkpoint(checkpoint[0])
    if not folder.database.exists() or not folder.database.stat().st_size:
        raise behind(folder.database, 0, checkpoint[0])
    return read_object(checkpoint[1] / "state.json")


def _share(name: str, entry: DomainEntry) -> Share:
    """The domain's training tasks; number n is number n // levels of level n % levels."""
    levels = entry.levels(name)

    @lru_cache(256)
    def task(number: int) -> Task:
        drawn = levels[number % len(levels)].task(number // len(levels), "train")
        return dataclasses.replace(drawn, id=f"{name}/train/{number}")

    return Share(entry.weight, task, len(levels))


def _invariants(recipe: Recipe) -> Invariants:
    rollout, schedule = recipe.rollout, recipe.schedule.schedule
    return Invariants(Bounds(
        alpha=recipe.schedule.bound, slots=(recipe.schedule.bound + 1) * rollout.batch_groups + rollout.spare_groups,
        group_size=rollout.group_size, free=schedule.free,
        bounded=schedule.check_always, max_replacements=rollout.max_replacements, pinned=("eval",)))


async def _in_thread(recipe: Recipe, progress: Progress) -> Policy:
    """`first_policy` beside the event loop; a cancel ends it at its next step."""
    stop = threading.Event()

    def tell(what: str, step: int, steps: int, figure: float | None) -> None:
        if stop.is_set():
            raise RunError(f"{what} was interrupted")
        progress(what, step, steps, figure)

    try:
        return await asyncio.to_thread(first_policy, recipe, tell)
    finally:
        stop.set()


def _with_latency(recipe: Recipe, pool: EnvironmentPool) -> EnvironmentPool:
    latencies = {name: entry.latency for name, entry in recipe.domains.items() if entry.latency}
    return InjectedLatency(pool, latencies, draw(recipe.seed, "latency")) if latencies else pool


def _evaluator(recipe: Recipe, services: Services, parts: Parts, changed: Changed) -> Evaluator | None:
    """Evaluation plays the domains as they are, without injected latency, on an engine of its own."""
    if not parts.eval_engines:
        return None
    proxy = LLMProxy(parts.eval_engines, {}, journal=services.journal, changed=changed, wait_seconds=30.0)
    own = dataclasses.replace(services, proxy=proxy, environments=parts.environments, wave=None,
                              sampling=recipe.evaluation.sampling)
    domains = [recipe.domain(name) for name in recipe.domains]
    tasks = [domain.task(i, "eval") for i in range(recipe.evaluation.tasks) for domain in domains]
    return Evaluator(own, tasks, samples=recipe.evaluation.samples, concurrent=recipe.evaluation.concurrent,
                     cluster=parts.cluster)


async def evaluate_policy(recipe: Recipe, folder: Path) -> tuple[EvalResult, ...]:
    """Held-out success of a checkpoint folder, as `rollart eval` prints it."""
    from rollart.backends.weights.memory import MemoryWeights

    policy = load_policy(folder, recipe)
    weights = MemoryWeights()
    manifest: Manifest = weights.put(0, policy.model.state_dict())
    async with AsyncExitStack() as stack:
        engine = make_engine("eval", "eval", recipe, policy, weights)
        engine.start()
        stack.push_async_callback(engine.close)
        environments = make_environments(recipe)
        stack.push_async_callback(environments.close)
        scorer = await _scorers(stack, recipe)
        journal, changed = Journal([]), Changed()
        services = Services(proxy=LLMProxy([engine], {}, journal=journal, changed=changed),
                            environments=environments, renderer=policy.chat, scorer=scorer, journal=journal,
                            settings=dataclasses.replace(recipe.rollout, context_tokens=context_tokens(recipe, policy)),
                            seed=draw(recipe.seed, "eval"))
        evaluator = _evaluator(recipe, services, Parts(None, [], [engine], environments, EngineCluster([engine])),
                               changed)
        assert evaluator is not None
        return await evaluator.run(manifest)


async def _connect(stack: AsyncExitStack, recipe: Recipe) -> RayCluster:
    """Join the cluster and see that everything fits, before anything else is begun. Raises ConfigError."""
    check_parts(recipe, here=False)
    cluster = open_cluster(recipe)
    stack.callback(cluster.close)
    plan(recipe, cluster.nodes())
    return cluster


async def _scorers(stack: AsyncExitStack, recipe: Recipe, site: Site | None = None) -> Scorers:
    scorers = await open_scorers(reward_names(recipe), recipe.reward, site)
    stack.push_async_callback(scorers.close)
    return scorers
