"""The parts of a run on a Ray cluster: a plan first, then one actor a role and replica, wrapped into ports.

Keeps true: what cannot be placed is said before anything is started; what was started is closed again, whatever
happens. Waits for actors, each start under cluster.start_seconds.
"""

from __future__ import annotations

import asyncio
import dataclasses
import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from rollart.backends.scorers import Site, by_place
from rollart.config.recipe import Recipe
from rollart.control.mending import MendingTrainer
from rollart.core.errors import ConfigError, EngineLost, EnvironmentFailed, TrainerLost
from rollart.distributed import Need, Node, Placed, Role, affinity, place, render_plan, worker_class
from rollart.observe.run_folder import RunFolder
from rollart.parts import EngineCluster, Parts, check_parts, engine_ids, make_ranked, reward_names
from rollart.policy import Policy, cache_folder

WORKERS: dict[Role, str] = {
    Role.ACTOR_TRAIN: "rollart.workers:LearnerWorker", Role.ACTOR_GEN: "rollart.workers:EngineWorker",
    Role.ENVIRONMENT: "rollart.workers:EnvironmentsWorker"}


def worker_name(recipe: Recipe, role: Role) -> str:
    shipped = "rollart.workers:RankWorker" if role is Role.ACTOR_TRAIN and recipe.learner.ranks > 1 else WORKERS[role]
    return recipe.cluster.workers.get(role.value, shipped)


def planned_nodes(recipe: Recipe) -> list[Node]:
    """The hardware that the recipe itself describes."""
    return [Node(f"{name}-{i}", name, pool.devices or pool.cpus, bool(pool.devices))
            for name, pool in recipe.cluster.pools.items() for i in range(pool.nodes)]


def needs(recipe: Recipe) -> list[Need]:
    """Every process of the run, the one that everything waits for first."""
    mapped = affinity(worker_class(worker_name(recipe, Role.ACTOR_TRAIN), Role.ACTOR_TRAIN))
    out = [Need(name, Role.ACTOR_TRAIN, recipe.cluster.train or mapped.get("default", ""))
           for name in learner_names(recipe)]
    for id, pool in engine_ids(recipe):
        out.append(Need(id, Role.ACTOR_GEN, recipe.pools[pool].hardware, devices(recipe, pool)))
    if recipe.evaluation.tasks:
        out.append(Need("eval", Role.ACTOR_GEN, recipe.cluster.evaluation))
    out.append(Need("environments", Role.ENVIRONMENT, recipe.cluster.environments, spread=True))
    if on_serve(recipe):
        out.append(Need("rewards", Role.REWARD, recipe.cluster.rewards, spread=True))
    return out


def on_serve(recipe: Recipe) -> dict[str, str]:
    """The rewards on Ray Serve: their functions by domain. Raises ConfigError."""
    return by_place(reward_names(recipe), recipe.reward, on_ray=True).get("serve", {})


def serve_site(recipe: Recipe, folder: RunFolder, cluster: Any) -> Site | None:
    """Where the run's rewards on Ray Serve are, if any: not on nodes of other pools, under the name of the run's
    folder, so that a resumed run takes the place of what a killed one left. Raises ConfigError."""
    if not on_serve(recipe):
        return None
    nodes = cluster.nodes()
    mine = {item.node.id for item in plan(recipe, nodes)[0] if item.need.role is Role.REWARD}
    name = f"rollart{re.sub('[^a-zA-Z0-9.]+', '-', str(folder.path.resolve()))}"
    return name, sorted({node.id for node in nodes} - mine), recipe.cluster.start_seconds


def devices(recipe: Recipe, pool: str) -> int:
    """Of one engine."""
    return recipe.vllm.tensor_parallel if recipe.pools[pool].engine == "vllm" else 1


def learner_names(recipe: Recipe) -> list[str]:
    return [f"learner-{i}" for i in range(recipe.learner.ranks)] if recipe.learner.ranks > 1 else ["learner"]


def domain_pools(recipe: Recipe) -> dict[str, str]:
    """Domain (or "default") to pool of engines: the recipe's `domains`, else what hw_mapping says of the engine worker.

    A hardware pool of hw_mapping stands for the first pool of engines on it. Raises ConfigError where there is none.
    """
    out = {domain: pool for pool, settings in recipe.pools.items() for domain in settings.domains}
    on = {settings.hardware: pool for pool, settings in reversed(list(recipe.pools.items()))}
    for domain, hardware in affinity(worker_class(worker_name(recipe, Role.ACTOR_GEN), Role.ACTOR_GEN)).items():
        if hardware not in on:
            raise ConfigError(f"hw_mapping sends {domain} to {hardware}, where no engines are: add a [pools.NAME] with "
                              f"hardware = {hardware!r}")
        out.setdefault(domain, on[hardware])
    return out


def plan(recipe: Recipe, nodes: Sequence[Node]) -> tuple[tuple[Placed, ...], list[str]]:
    """The placement and its lines. Raises ConfigError."""
    placed = place(needs(recipe), nodes)
    pools = domain_pools(recipe)
    domains = {id: [d for d, own in pools.items() if own == pool] for id, pool in engine_ids(recipe)}
    return placed, render_plan(placed, domains)


async def ray_parts(stack: AsyncExitStack, recipe: Recipe, policy: Policy, reference: Policy | None,
                    checkpoint: Path | None, folder: RunFolder, cluster: Any) -> Parts:
    """Every role in actors of a connected `cluster`; `stack` closes them. Raises ConfigError, NoCapacity."""
    from rollart.backends.ray.engines import RemoteEngine
    from rollart.backends.ray.environments import RemoteEnvironments
    from rollart.backends.ray.remote import Remote
    from rollart.backends.ray.trainer import ActorRank, RemoteTrainer
    from rollart.workers import RankWorker

    placed, _ = plan(recipe, cluster.nodes())
    where = {item.need.name: item for item in placed if not item.need.spread}
    policy, reference = _shared(policy, folder), reference and _shared(reference, folder)
    common = {"recipe": recipe.to_json(), "model": str(policy.folder)}
    limits = {"start_seconds": recipe.cluster.start_seconds, "silent_seconds": recipe.cluster.silent_seconds}

    async def remote(name: str, role: Role, lost: Any, spec: Mapping[str, Any]) -> Remote:
        item = where[name]
        (options,) = await cluster.reserve([cluster.demand(item.node, item.need.units)], name)
        return Remote(name, worker_name(recipe, role), role.value, {**common, **spec}, lambda: options, lost, **limits)

    own = {"reference": str(reference.folder)} if reference else {}
    learners = [await remote(name, Role.ACTOR_TRAIN, TrainerLost, {**own, "rank": rank})
                for rank, name in enumerate(learner_names(recipe))]
    for learner in learners:
        stack.push_async_callback(learner.close)

    async def launch(number: int) -> ActorRank:
        await learners[number].start()
        return ActorRank(learners[number])

    kind = worker_class(worker_name(recipe, Role.ACTOR_TRAIN), Role.ACTOR_TRAIN)
    ranked = issubclass(kind, RankWorker)
    inner = make_ranked(recipe, policy, reference, launch) if ranked else RemoteTrainer(kind, learners)
    trainer = MendingTrainer(inner, folder.newest_checkpoint, redo_batches=recipe.cluster.redo_batches,
                             max_restarts=recipe.cluster.max_restarts)
    ids = [*engine_ids(recipe), *([("eval", "eval")] if recipe.evaluation.tasks else [])]
    engines = [RemoteEngine(id, pool, await remote(id, Role.ACTOR_GEN, EngineLost, {"id": id, "pool": pool}))
               for id, pool in ids]
    for engine in engines:
        stack.push_async_callback(engine.remote.close)

    pool = next(item.node.pool for item in placed if item.need.name == "environments")
    environments = RemoteEnvironments(
        lambda: [node.id for node in cluster.nodes() if node.pool == pool],
        lambda node: Remote(f"environments on {node[:8]}", worker_name(recipe, Role.ENVIRONMENT),
                            Role.ENVIRONMENT.value, {"recipe": common["recipe"]}, lambda: cluster.on_node(node),
                            EnvironmentFailed, **limits), 0.9 * recipe.rollout.open_seconds)
    stack.push_async_callback(environments.close)
    async with asyncio.TaskGroup() as starting:
        for part in (inner, environments, *[engine.remote for engine in engines]):
            starting.create_task(part.start())
    if checkpoint:
        await trainer.load(checkpoint)
    evaluating = [engine for engine in engines if engine.pool == "eval" and engine.id == "eval"]
    training = [engine for engine in engines if engine not in evaluating]
    return Parts(trainer, training, evaluating, environments, EngineCluster(engines))


def _shared(policy: Policy, folder: RunFolder) -> Policy:
    """The policy in a folder that every node sees: its own, or (made or warm-started here) a copy in the run's."""
    from rollart.backends.torch.checkpoint import save_model

    target = folder.path.resolve() / "model"
    if policy.folder is None:
        save_model(policy.model, target, policy.chat)
    elif cache_folder().resolve() in policy.folder.resolve().parents:
        shutil.copytree(policy.folder, target, dirs_exist_ok=True)
    else:
        target = policy.folder.resolve()
    return dataclasses.replace(policy, folder=target)


def check_cluster(recipe: Recipe) -> None:
    """What a run on Ray does not have, so far. Raises ConfigError."""
    if recipe.weights.carrier == "memory":
        raise ConfigError("weights.carrier = 'memory' stays inside one process; on a cluster set it to 'file' (nodes "
                          "that share weights.folder), 'collective' or 'mooncake'")
    if served := [name for name, pool in recipe.pools.items() if pool.engine == "server"]:
        raise ConfigError(f"pools.{served[0]}.engine = 'server' is reached without --ray only, so far: leave it out")
    if recipe.lora:
        raise ConfigError("[lora] is not there on a cluster yet: leave it out, or run without --ray")
    if recipe.environments.preopen:
        raise ConfigError("environments.preopen opens nothing ahead on a cluster yet: leave it out, or run without "
                          f"--ray; got {recipe.environments.preopen}")


def open_cluster(recipe: Recipe) -> Any:
    """A connected RayCluster; the caller closes it. Raises ConfigError."""
    check_cluster(recipe)
    try:
        from rollart.backends.ray.cluster import RayCluster
        if on_serve(recipe):
            import rollart.backends.serverless.serve  # noqa: F401
    except ImportError as missing:
        raise ConfigError(f"--ray needs Ray, and rewards on serve its Serve ({missing}): pip install 'rollart[ray]'"
                          ) from None
    cluster = RayCluster(recipe.cluster)
    cluster.connect()
    return cluster


def plan_lines(recipe: Recipe) -> list[str]:
    """The plan, on the cluster at cluster.address, or (for none, and for local) on what [cluster.pools] describes.

    Raises ConfigError.
    """
    if recipe.cluster.address == "local":
        check_cluster(recipe)
    if recipe.cluster.address in ("", "local"):
        if not recipe.model.path or Path(recipe.model.path).is_dir():  # a plan may be made far from the model
            check_parts(recipe, here=False)
        return plan(recipe, planned_nodes(recipe))[1]
    check_parts(recipe, here=False)
    cluster = open_cluster(recipe)
    try:
        return plan(recipe, cluster.nodes())[1]
    finally:
        cluster.close()
