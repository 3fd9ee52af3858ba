"""Composition root: a recipe and a run folder become a running system. The only place that knows the backends.

Order of things: model (warm-started or from a checkpoint) -> learner, engines -> proxy -> rollout -> pipeline; then the
journal's subscribers watch it. Nothing is started before everything has been built, and all that was started is
closed again, whatever happens.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import inspect
import json
import os
import sys
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollart.backends.process.environments import ProcessEnvironments
from rollart.backends.scorers import Scorers, open_scorers
from rollart.config.recipe import Recipe
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
from rollart.core.errors import ConfigError, InvariantViolated, RollArtError, RunError, first_error
from rollart.core.events import Event, RewardsSampled, RunEnded, StepEnded
from rollart.core.ports import EnvironmentPool, Trainer
from rollart.core.tokens import Counted, floats, ids, join
from rollart.core.types import Completion, EvalResult, Finish, Manifest, Restored, Version
from rollart.envs.demonstrations import Demonstration, demonstrations
from rollart.envs.latency import InjectedLatency
from rollart.observe.invariants import Bounds, Invariants
from rollart.observe.journal import Journal, Subscriber
from rollart.observe.ledger import Ledger
from rollart.observe.run_folder import RunFolder

if TYPE_CHECKING:
    from rollart.backends.torch.chat import Chat
    from rollart.backends.torch.engine import EmbeddedEngine
    from rollart.backends.torch.learner import TorchTrainer
    from rollart.backends.torch.transformer import Transformer
    from rollart.backends.torch.weights import MemoryWeights

Progress = Callable[[str, int, int, float], None]
"""Called with what is done, its step, the number of steps, and a figure (the loss)."""


@dataclass(frozen=True)
class Policy:
    """A model and how it speaks."""

    model: Transformer
    chat: Chat


def load_policy(folder: Path, recipe: Recipe) -> Policy:
    """From a Hugging Face checkpoint folder, with the recipe's way to chat. Raises ConfigError."""
    from rollart.backends.torch.chat import load_chat
    from rollart.backends.torch.checkpoint import load_model

    if not folder.is_dir():
        raise ConfigError(f"model folder {folder} does not exist: set model.path to a Hugging Face checkpoint folder")
    return Policy(load_model(folder), load_chat(folder, recipe.chat))


def first_policy(recipe: Recipe, progress: Progress = lambda *_: None) -> Policy:
    """The model that a new run starts from: a folder, or the small one, warm-started if the recipe says so.

    Warm starts are kept in the user's cache folder, under all that they depend on.
    """
    from rollart.backends.torch import warm_start as warm
    from rollart.backends.torch.chat import ByteChat
    from rollart.backends.torch.checkpoint import save_model
    from rollart.backends.torch.threads import available
    from rollart.backends.torch.transformer import small_model

    def base() -> Policy:
        if recipe.model.path:
            return load_policy(Path(recipe.model.path), recipe)
        return Policy(small_model(recipe.model.small, draw(recipe.seed, "model")), ByteChat())

    if recipe.warm_start is None:
        return base()
    if recipe.model.path and not Path(recipe.model.path).is_dir():
        return base()  # says that it does not exist
    key = _warm_key(recipe)
    found = warm.cached(cache_folder(), key)
    if found is None:
        policy = base()
        _context(recipe, policy)  # what does not fit together is said before minutes of imitation
        warm.imitate(policy.model, _imitation(recipe, policy.chat), recipe.warm_start, len(available()),
                     lambda step, steps, loss: progress("warm start", step, steps, loss))
        found = warm.store(cache_folder(), key, lambda folder: save_model(policy.model, folder, policy.chat))
    return load_policy(found, recipe)


def _context(recipe: Recipe, policy: Policy) -> int:
    """The longest trajectory in tokens. Raises ConfigError where model, chat and settings do not fit together."""
    model, needed = policy.model.config, policy.chat.vocabulary_size
    if model.vocabulary < needed:
        raise ConfigError(f"the chat has {needed} token ids, the model {model.vocabulary}: raise its vocabulary")
    context = recipe.rollout.context_tokens or recipe.engine.context_tokens or model.context_tokens
    if context > model.context_tokens:
        raise ConfigError(f"a context of {context} tokens was asked for, the model has {model.context_tokens}: lower "
                          "rollout.context_tokens or engine.context_tokens")
    held = recipe.engine.context_tokens or model.context_tokens
    if held > recipe.engine.kv_tokens:
        raise ConfigError(f"engine.kv_tokens must hold one whole context of {held} tokens; got "
                          f"{recipe.engine.kv_tokens}: raise it, or lower engine.context_tokens")
    return context


def cache_folder() -> Path:
    """Where warm starts are kept: $ROLLART_CACHE, or rollart/ in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("ROLLART_CACHE") or Path(base) / "rollart") / "warm_start"


def _warm_key(recipe: Recipe) -> dict[str, Any]:
    plain = recipe.to_json()
    domains = {name: {k: v for k, v in table.items() if k not in ("weight", "latency")}
               for name, table in plain["domains"].items()}
    files = []
    if recipe.model.path:
        files = [(str(f), f.stat().st_size, f.stat().st_mtime_ns)
                 for f in sorted(Path(recipe.model.path).resolve().iterdir())]
    key = {"model": plain["model"], "files": files, "warm_start": plain["warm_start"], "domains": domains,
           "seed": recipe.seed, "code": _code_hash(recipe)}
    return json.loads(json.dumps(key))  # type: ignore[no-any-return]


def _code_hash(recipe: Recipe) -> str:
    """Of the code that a warm start depends on: players and texts of its domains, chat, model, imitation."""
    from rollart.backends.torch import chat, moe, optimizer, scoring, shapes, transformer, warm_start
    from rollart.envs import demonstrations as playing

    modules = [sys.modules[type(recipe.domain(name)).__module__] for name in recipe.domains]
    digest = hashlib.sha256()
    for module in (*modules, chat, moe, optimizer, scoring, shapes, transformer, warm_start, playing):
        digest.update(inspect.getsource(module).encode())
    return digest.hexdigest()[:16]


def _imitation(recipe: Recipe, chat: Chat) -> list[tuple[Sequence[int], Sequence[int]]]:
    """Demonstrations of every domain as (ids, mask), mask 1 on the player's actions."""
    settings = recipe.warm_start
    assert settings is not None
    sequences: list[tuple[Sequence[int], Sequence[int]]] = []
    for name in recipe.domains:
        rate = settings.error_rates.get(name, settings.error_rate)
        count = settings.episodes.get(name, settings.demonstrations)
        for episode in demonstrations(recipe.domain(name), count, seed=draw(recipe.seed, "demo"),
                                      error_rate=rate):
            sequences.append(_rendered(chat, episode))
    return sequences


def _rendered(chat: Chat, episode: Demonstration) -> tuple[Sequence[int], Sequence[int]]:
    """A demonstration as the tokens that a rollout of the same words would have."""
    out = join(chat.prompt(episode.start.messages))
    mask = [0] * len(out)
    for i, text in enumerate(episode.actions):
        action = chat.action(text)
        said = Completion(action, floats([0.0] * len(action)), ((0, 0),), Finish.STOP)
        last = i + 1 == len(episode.actions)
        reply = ids() if last else chat.reply(said, episode.observations[i].messages)
        out = join(out, action, reply)
        mask += [1] * len(action) + [0] * len(reply)
    assert not isinstance(out, Counted)
    return out, mask


class LocalCluster:
    """The Cluster port for engines in this process."""

    def __init__(self, engines: Sequence[EmbeddedEngine]) -> None:
        self._engines = {engine.id: engine for engine in engines}
        self._lost: asyncio.Queue[str] = asyncio.Queue()
        for engine in engines:
            engine.on_lost(lambda id=engine.id: self._lost.put_nowait(id))

    async def wait_lost(self) -> str:
        return await self._lost.get()

    async def restart(self, engine: str) -> None:
        await self._engines[engine].restart()


class FolderCheckpoints:
    """The pipeline's Checkpoints in a run folder: the ledger first, the marker last."""

    def __init__(self, folder: RunFolder, ledger: Ledger, keep: int) -> None:
        self._folder, self._ledger, self._keep = folder, ledger, keep

    async def save(self, version: Version, state: Mapping[str, Any], trainer: Trainer) -> str:
        self._ledger.flush()
        path = self._folder.begin_checkpoint(version)
        (path / "state.json").write_text(json.dumps(dict(state)))
        await trainer.save(path)
        self._ledger.flush()
        await asyncio.to_thread(self._folder.complete_checkpoint, path, self._keep)
        return str(path)


class LedgerCheck:
    """I2 in production: after each step the ledger's counts must be those of the control plane."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.rollout: RolloutScheduler | None = None
        self.before = 0

    def on(self, at: float, event: Event) -> None:
        if isinstance(event, StepEnded) and self.rollout:
            self._ledger.check(self.rollout.unsettled, self.before + self.rollout.dispatched)


@dataclass
class Run:
    """Everything of one run, ready to go."""

    recipe: Recipe
    folder: RunFolder
    pipeline: Pipeline
    proxy: LLMProxy
    environments: ProcessEnvironments
    engines: Sequence[EmbeddedEngine]
    trainer: TorchTrainer
    ledger: Ledger
    journal: Journal
    restored: Restored | None
    scorers: Scorers

    def snapshot(self) -> dict[str, Any]:
        """What `rollart status` shows of a live run."""
        buffer, rollout, time = self.pipeline.buffer, self.pipeline.rollout, now()
        environments = self.environments.stats()
        engines = []
        for engine in self.engines:
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
        ledger = Ledger(folder.database)
        stack.callback(ledger.close)
        checkpoint = folder.newest_checkpoint() if resume else None
        version = checkpoint[0] if checkpoint else 0
        if version > recipe.pipeline.steps:
            raise ConfigError(f"pipeline.steps = {recipe.pipeline.steps} is below the checkpoint's {version} steps: "
                              "set it higher")
        scorer = await open_scorers({name: recipe.domain(name).reward for name in recipe.domains}, recipe.reward)
        stack.push_async_callback(scorer.close)
        # Adapters belong to the model that the run began with; the checkpoint's own has them merged in.
        whole = checkpoint if not recipe.lora else None
        policy = load_policy(whole[1], recipe) if whole else await _in_thread(recipe, progress)
        copied = recipe.algorithm.reference == "copy"
        reference = (await _in_thread(recipe, progress)).model if copied else None
        restored = ledger.recover(version) if resume else None

        check = LedgerCheck(ledger)
        journal = Journal([_invariants(recipe), ledger, *subscribers(ledger), check])
        context = _context(recipe, policy)
        trainer, weights = _trainer(recipe, policy, reference)
        stack.callback(trainer.close)
        if checkpoint:
            await trainer.load(checkpoint[1])
        engines = [_engine(f"{pool}-{i}", pool, recipe, policy, weights)
                   for pool, settings in recipe.pools.items() for i in range(settings.replicas)]
        eval_engines = [_engine("eval", "eval", recipe, policy, weights)] if recipe.evaluation.tasks else []
        for engine in (*engines, *eval_engines):
            engine.start()
            stack.push_async_callback(engine.close)
        environments = _environments(recipe)
        stack.push_async_callback(environments.close)

        changed = Changed()
        affinity = {domain: pool for pool, settings in recipe.pools.items() for domain in settings.domains}
        rollout_settings = dataclasses.replace(recipe.rollout, context_tokens=context)
        proxy = LLMProxy(engines, affinity, journal=journal, changed=changed, full=recipe.engine.max_concurrent)
        schedule = recipe.schedule.schedule
        services = Services(
            proxy=proxy, environments=_with_latency(recipe, environments), renderer=policy.chat, scorer=scorer,
            journal=journal, settings=rollout_settings, sampling=recipe.sampling, seed=draw(recipe.seed, "rollout"),
            wave=Wave(changed, rollout_settings.stall_seconds) if schedule.turn_barrier else None)
        buffer = SampleBuffer(batch_groups=rollout_settings.batch_groups, alpha=recipe.schedule.bound,
                              schedule=schedule, stale=recipe.schedule.stale,
                              spare_groups=rollout_settings.spare_groups, version=version)
        tasks = TaskMix({name: Share(entry.weight, lru_cache(256)(partial(recipe.domain(name).task, split="train")))
                         for name, entry in recipe.domains.items()}, draw(recipe.seed, "tasks"))
        copies = rollout_settings.group_size + rollout_settings.spares
        environments.upcoming = lambda: (task for task in tasks.peek() for _ in range(copies))
        rollout = RolloutScheduler(services, buffer, tasks, changed)
        sync = WeightSync(trainer, proxy, journal)
        cluster = LocalCluster([*engines, *eval_engines])
        supervisor = Supervisor(cluster, proxy, sync, changed)
        pipeline = Pipeline(recipe.pipeline, algo=recipe.algorithm, buffer=buffer, changed=changed, rollout=rollout,
                            sync=sync, supervisor=supervisor, trainer=trainer, tasks=tasks, journal=journal,
                            checkpoints=FolderCheckpoints(folder, ledger, recipe.keep_checkpoints),
                            evaluator=_evaluator(recipe, services, eval_engines, environments, changed, cluster))
        check.rollout, check.before = rollout, ledger.counts()["dispatched"]
        if checkpoint and pipeline.evaluator:
            pipeline.evaluator.number = json.loads((checkpoint[1] / "state.json").read_text())["evaluations"]
        yield Run(recipe, folder, pipeline, proxy, environments, engines, trainer, ledger, journal, restored,
                  scorer)


def _invariants(recipe: Recipe) -> Invariants:
    rollout, schedule = recipe.rollout, recipe.schedule.schedule
    return Invariants(Bounds(
        alpha=recipe.schedule.bound, slots=(recipe.schedule.bound + 1) * rollout.batch_groups + rollout.spare_groups,
        group_size=rollout.group_size, free=schedule.free,
        bounded=schedule.check_always, max_replacements=rollout.max_replacements, pinned=("eval",)))


async def _in_thread(recipe: Recipe, progress: Progress) -> Policy:
    """`first_policy` beside the event loop; a cancel ends it at its next step."""
    stop = threading.Event()

    def tell(what: str, step: int, steps: int, figure: float) -> None:
        if stop.is_set():
            raise RunError(f"{what} was interrupted")
        progress(what, step, steps, figure)

    try:
        return await asyncio.to_thread(first_policy, recipe, tell)
    finally:
        stop.set()


def _trainer(recipe: Recipe, policy: Policy, reference: Transformer | None) -> tuple[TorchTrainer, MemoryWeights]:
    from rollart.backends.torch.checkpoint import save_model
    from rollart.backends.torch.learner import TorchTrainer
    from rollart.backends.torch.lora import AdapterWeights
    from rollart.backends.torch.threads import shares
    from rollart.backends.torch.weights import MemoryWeights

    weights = AdapterWeights(policy.model.state_dict(), recipe.lora) if recipe.lora else MemoryWeights()
    settings = recipe.learner
    if settings.schedule != "constant" and not settings.total_steps:
        settings = dataclasses.replace(settings, total_steps=recipe.pipeline.steps)
    trainer = TorchTrainer(policy.model, settings, recipe.algorithm, weights,
                           temperature=recipe.sampling.temperature, seed=draw(recipe.seed, "learner"),
                           export=lambda folder: save_model(policy.model, folder, policy.chat),
                           reference=reference, lora=recipe.lora, base=recipe.model.path,
                           cores=shares()[1])
    return trainer, weights


def _engine(id: str, pool: str, recipe: Recipe, policy: Policy, weights: MemoryWeights) -> EmbeddedEngine:
    from rollart.backends.torch.engine import EmbeddedEngine
    from rollart.backends.torch.threads import shares

    return EmbeddedEngine(id, pool, policy.model, weights, recipe.engine, shares()[0])


def _environments(recipe: Recipe) -> ProcessEnvironments:
    """As many processes as episodes can run at once, unless the recipe says fewer."""
    settings, rollout = recipe.environments, recipe.rollout
    if not settings.max_processes:
        most = recipe.slots * (rollout.group_size + rollout.spares) + recipe.evaluation.concurrent
        settings = dataclasses.replace(settings, max_processes=most)
    return ProcessEnvironments({name: entry.settings for name, entry in recipe.domains.items()}, settings,
                               wait_seconds=0.9 * rollout.open_seconds, open_seconds=rollout.open_seconds,
                               call_seconds=rollout.environment_seconds)


def _with_latency(recipe: Recipe, pool: EnvironmentPool) -> EnvironmentPool:
    latencies = {name: entry.latency for name, entry in recipe.domains.items() if entry.latency}
    return InjectedLatency(pool, latencies, draw(recipe.seed, "latency")) if latencies else pool


def _evaluator(recipe: Recipe, services: Services, engines: Sequence[EmbeddedEngine], environments: EnvironmentPool,
               changed: Changed, cluster: LocalCluster | None = None) -> Evaluator | None:
    """Evaluation plays the domains as they are, without injected latency, on an engine of its own."""
    if not engines:
        return None
    proxy = LLMProxy(engines, {}, journal=services.journal, changed=changed, wait_seconds=30.0)
    own = dataclasses.replace(services, proxy=proxy, environments=environments, wave=None,
                              sampling=recipe.evaluation.sampling)
    domains = [recipe.domain(name) for name in recipe.domains]
    tasks = [domain.task(i, "eval") for i in range(recipe.evaluation.tasks) for domain in domains]
    return Evaluator(own, tasks, concurrent=recipe.evaluation.concurrent, cluster=cluster)


async def evaluate_policy(recipe: Recipe, folder: Path, tasks: int) -> tuple[EvalResult, ...]:
    """Held-out success of a checkpoint folder, as `rollart eval` prints it."""
    from rollart.backends.torch.weights import MemoryWeights

    recipe = dataclasses.replace(recipe, evaluation=dataclasses.replace(recipe.evaluation, tasks=tasks))
    policy = load_policy(folder, recipe)
    weights = MemoryWeights()
    manifest: Manifest = weights.put(0, policy.model.state_dict())
    async with AsyncExitStack() as stack:
        engine = _engine("eval", "eval", recipe, policy, weights)
        engine.start()
        stack.push_async_callback(engine.close)
        environments = _environments(recipe)
        stack.push_async_callback(environments.close)
        scorer = await open_scorers({name: recipe.domain(name).reward for name in recipe.domains}, recipe.reward)
        stack.push_async_callback(scorer.close)
        journal = Journal([])
        context = _context(recipe, policy)
        services = Services(proxy=LLMProxy([engine], {}, journal=journal, changed=Changed()),
                            environments=environments, renderer=policy.chat, scorer=scorer, journal=journal,
                            settings=dataclasses.replace(recipe.rollout, context_tokens=context),
                            seed=draw(recipe.seed, "eval"))
        evaluator = _evaluator(recipe, services, [engine], environments, Changed())
        assert evaluator is not None
        return await evaluator.run(manifest)
