"""The parts of a run, made from a recipe: for this process (`local_parts`), or one at a time by a worker in an actor.

Keeps true: a part is made in one way, wherever it runs.
"""

from __future__ import annotations

import asyncio
import dataclasses
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollart.algo.catalogue import OWN, function
from rollart.backends.process.environments import ProcessEnvironments
from rollart.backends.scorers import by_place
from rollart.config.recipe import Recipe
from rollart.control.mending import MendingTrainer
from rollart.core.clock import draw
from rollart.core.errors import ConfigError
from rollart.core.ports import Cluster
from rollart.core.types import Version
from rollart.policy import Policy

if TYPE_CHECKING:
    from rollart.backends.torch.learner import TorchTrainer
    from rollart.backends.torch.ranks import RankedTrainer
    from rollart.backends.torch.settings import LearnerSettings
    from rollart.backends.torch.transformer import Transformer

Newest = Callable[[], tuple[Version, Path] | None]
"""Version and folder of the newest whole checkpoint."""


@dataclass(frozen=True)
class Parts:
    """What the control plane drives. Engines and environments also have `stats` for status; the trainer is loaded."""

    trainer: Any
    engines: Sequence[Any]
    eval_engines: Sequence[Any]
    environments: Any
    cluster: Cluster


class EngineCluster:
    """The Cluster port over engines that tell their loss and start again where they were."""

    def __init__(self, engines: Sequence[Any]) -> None:
        self._engines = {engine.id: engine for engine in engines}
        self._lost: asyncio.Queue[str] = asyncio.Queue()
        for engine in engines:
            engine.on_lost(lambda id=engine.id: self._lost.put_nowait(id))

    async def wait_lost(self) -> str:
        return await self._lost.get()

    async def restart(self, engine: str) -> None:
        await self._engines[engine].restart()


async def local_parts(stack: AsyncExitStack, recipe: Recipe, policy: Policy, reference: Policy | None,
                      checkpoint: Path | None, newest: Newest) -> Parts:
    """Everything in this process, but for the learner's ranks where it has several; `stack` closes it."""
    from rollart.backends.torch.lora import AdapterWeights
    from rollart.backends.weights import open_reader, open_writer

    if recipe.learner.ranks > 1:
        weights: Any = open_reader(recipe.weights)
        ranks = make_ranked(recipe, policy, reference)
        stack.callback(ranks.close)
        await ranks.start()
        trainer: Any = MendingTrainer(ranks, newest, redo_batches=recipe.cluster.redo_batches,
                                      max_restarts=recipe.cluster.max_restarts)
    else:
        writer: Any = AdapterWeights(policy.model.state_dict(), recipe.lora) if recipe.lora else open_writer(
            recipe.weights)
        weights = writer if recipe.lora else open_reader(recipe.weights, writer)
        stack.callback(writer.close)
        trainer = make_trainer(recipe, policy, reference and reference.model, writer)
        stack.callback(trainer.close)
    if checkpoint:
        await trainer.load(checkpoint)
    engines = [make_engine(id, pool, recipe, policy, weights) for id, pool in engine_ids(recipe)]
    evaluating = [make_engine("eval", "eval", recipe, policy, weights)] if recipe.evaluation.tasks else []
    for engine in engines:
        if hasattr(engine, "probe"):  # its other side can be looked at before anything starts
            await engine.probe()
    for engine in (*engines, *evaluating):
        engine.start()
        stack.push_async_callback(engine.close)
    environments = make_environments(recipe)
    stack.push_async_callback(environments.close)
    return Parts(trainer, engines, evaluating, environments, EngineCluster([*engines, *evaluating]))


def engine_ids(recipe: Recipe) -> list[tuple[str, str]]:
    """(engine, pool) of all training engines, in order."""
    return [(f"{pool}-{i}", pool) for pool, settings in recipe.pools.items() for i in range(settings.replicas)]


def make_trainer(recipe: Recipe, policy: Policy, reference: Transformer | None, weights: Any) -> TorchTrainer:
    """`weights`: where it publishes to."""
    from rollart.backends.torch.checkpoint import save_model
    from rollart.backends.torch.learner import TorchTrainer
    from rollart.backends.torch.threads import shares

    return TorchTrainer(policy.model, learner_settings(recipe), recipe.algorithm, weights,
                        temperature=recipe.sampling.temperature, seed=draw(recipe.seed, "learner"),
                        export=lambda folder: save_model(policy.model, folder, policy.chat),
                        reference=reference, lora=recipe.lora, base=recipe.model.path, cores=shares()[1])


def make_ranked(recipe: Recipe, policy: Policy, reference: Policy | None, launch: Any = None) -> RankedTrainer:
    """The learner over recipe.learner.ranks processes: on this machine, or (`launch`) elsewhere. Raises ConfigError."""
    from rollart.backends.torch.checkpoint import save_shape
    from rollart.backends.torch.ranks import RankedTrainer, RankSpec

    if recipe.lora:
        raise ConfigError(f"[lora] needs the learner in one process: set learner.ranks = 1; got {recipe.learner.ranks}")

    def source(model: Policy) -> Any:
        return str(model.folder) if model.folder else (model.config, model.model.state_dict())

    spec = RankSpec(model=source(policy), settings=learner_settings(recipe), algo=recipe.algorithm,
                    weights=recipe.weights, temperature=recipe.sampling.temperature, seed=draw(recipe.seed, "learner"),
                    reference=source(reference) if reference else None)
    return RankedTrainer(spec, launch, export=lambda folder: save_shape(policy.config, folder, policy.chat))


def learner_settings(recipe: Recipe) -> LearnerSettings:
    """With the run's length as that of its schedule; precision `auto` is float32 where an engine is embedded, for it
    samples in float32."""
    settings = recipe.learner
    if settings.precision == "auto" and any(pool.engine == "embedded" for pool in recipe.pools.values()):
        settings = dataclasses.replace(settings, precision="float32")
    if settings.schedule != "constant" and not settings.total_steps:
        settings = dataclasses.replace(settings, total_steps=recipe.pipeline.steps)
    return settings


def make_engine(id: str, pool: str, recipe: Recipe, policy: Policy, weights: Any) -> Any:
    """`weights`: where it reads from. An evaluation's engine is embedded, or vLLM's where the first pool's is."""
    settings = recipe.pools.get(pool) or next(iter(recipe.pools.values()))
    if settings.engine == "server" and pool in recipe.pools:
        from rollart.backends.vllm.server import OpenAIEngine

        return OpenAIEngine(id, pool, settings.urls[int(id.rpartition("-")[2])], recipe.server, weights)
    if settings.engine == "vllm":
        from rollart.backends.vllm.engine import VLLMEngine

        return VLLMEngine(id, pool, _model_folder(recipe, policy), recipe.vllm, weights)
    from rollart.backends.torch.engine import EmbeddedEngine
    from rollart.backends.torch.threads import shares

    return EmbeddedEngine(id, pool, policy.model, weights, recipe.engine, shares()[0])


def reward_names(recipe: Recipe) -> dict[str, str]:
    """Each domain's own reward."""
    return {name: recipe.domain(name).reward for name in recipe.domains}


def check_parts(recipe: Recipe, *, here: bool = True) -> None:
    """What can be refused before a run begins: what vLLM and the model do not allow, a weights.folder that cannot be
    used, rewards on Ray Serve without Ray, pieces of one's own that cannot be imported. `here`: the parts are to run on
    this machine. Raises ConfigError."""
    if here:
        by_place(reward_names(recipe), recipe.reward, on_ray=False)
        for kind, name in sorted(recipe.algorithm.chosen):
            if OWN.fullmatch(name):
                function(kind, name)
    if here and recipe.weights.carrier == "file":
        from rollart.backends.weights import open_writer

        open_writer(recipe.weights).close()
    if any(pool.engine == "vllm" for pool in recipe.pools.values()):
        from rollart.backends.vllm.checks import check_model, check_vllm, read_config

        if here:
            check_vllm()
        small = recipe.model.small
        check_model(read_config(Path(recipe.model.path)) if recipe.model.path else {
            "num_attention_heads": small.heads, "num_key_value_heads": small.kv_heads,
            "max_position_embeddings": small.context_tokens}, recipe.vllm)


def _model_folder(recipe: Recipe, policy: Policy) -> Path:
    """A checkpoint folder of the model's shape: the recipe's, or one that lasts as long as this process."""
    from rollart.backends.torch.checkpoint import save_model

    if recipe.model.path:
        return Path(recipe.model.path)
    folder = Path(_scratch().name)
    if not (folder / "config.json").exists():
        save_model(policy.model, folder, policy.chat)
    return folder


@cache
def _scratch() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="rollart-model-")


def make_environments(recipe: Recipe) -> ProcessEnvironments:
    """As many processes as episodes can run at once, unless the recipe says fewer."""
    settings, rollout = recipe.environments, recipe.rollout
    if not settings.max_processes:
        most = recipe.slots * (rollout.group_size + rollout.spares) + recipe.evaluation.concurrent
        settings = dataclasses.replace(settings, max_processes=most)
    return ProcessEnvironments({name: entry.settings for name, entry in recipe.domains.items()}, settings,
                               wait_seconds=0.9 * rollout.open_seconds, open_seconds=rollout.open_seconds,
                               call_seconds=rollout.environment_seconds)
