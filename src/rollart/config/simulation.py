"""A simulation recipe: a cluster, a model and a mix of domains, made into the world that the simulator runs.

    [model]         name = "Qwen3-8B", or the numbers of `sim.costs.Shape`
    [train]         gpu = "H800", gpus = 32
    [pools.h800]    gpu = "H800", gpus = 64, tensor_parallel = 1, domains = ["swe"]
    [domains.swe]   weight = 1.0, load = "swe" (a preset), then any key of `sim.workload.Load`, or records = "PATH"
    [pipeline], [schedule], [rollout], [algorithm] as for training; [weights], [reward], [environments], [faults],
    [calibration]

Keeps true: what `to_json` gives builds the same recipe again; a recipe that cannot run is refused with one line.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rollart.algo.settings import AlgoSettings
from rollart.config.toml import as_tables, build, check_pools, read_recipe, read_toml, sections
from rollart.control.pipeline import PipelineSettings
from rollart.control.settings import RolloutSettings, ScheduleSettings
from rollart.core.errors import ConfigError
from rollart.core.ranges import at_least
from rollart.envs.domain import nearest
from rollart.sim.calibration import Calibration
from rollart.sim.costs import MODELS, Shape, StepCost, TrainCost, engine_cost, gpu_kind, train_cost, transfer
from rollart.sim.faults import Faults
from rollart.sim.parts import RewardCost
from rollart.sim.records import read_records
from rollart.sim.workload import DOMAINS, Load, Spread
from rollart.sim.world import SimPool, World


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """The learner's GPUs. cost: measured seconds instead of those of the model and the GPUs."""

    gpu: str = "H800"
    gpus: int = 8
    cost: TrainCost | None = None

    def __post_init__(self) -> None:
        at_least(self, 1, "gpus")


@dataclass(frozen=True, kw_only=True)
class SimPoolSettings:
    """One pool of engines: so many GPUs of one kind, `tensor_parallel` to an engine. domains: those that prefer it.

    prefill_gpus: GPUs of kind prefill_gpu that only prefill, beside `gpus` that only decode (0: each engine does both);
    the pool is then one engine of prefill_gpus / tensor_parallel prefill and gpus / tensor_parallel decode units.
    cost: measured seconds instead of those of the model and the GPU.
    """

    gpu: str = "H800"
    gpus: int = 8
    tensor_parallel: int = 1
    domains: tuple[str, ...] = ()
    prefill_gpu: str = ""
    prefill_gpus: int = 0
    cost: StepCost | None = None

    def __post_init__(self) -> None:
        at_least(self, 1, "gpus", "tensor_parallel")
        at_least(self, 0, "prefill_gpus")
        if self.gpus % self.tensor_parallel or self.prefill_gpus % self.tensor_parallel:
            raise ValueError(f"gpus = {self.gpus} and prefill_gpus = {self.prefill_gpus} must be multiples of "
                             f"tensor_parallel = {self.tensor_parallel}")
        if bool(self.prefill_gpu) != bool(self.prefill_gpus):
            raise ValueError("prefill_gpu and prefill_gpus go together")


@dataclass(frozen=True, kw_only=True)
class WeightSettings:
    """blocking: rollout stands still while weights are pushed and pulled. colocated: engines and learner share a
    cluster, weights go by RDMA instead of through the store."""

    blocking: bool = False
    colocated: bool = False


@dataclass(frozen=True, kw_only=True)
class SimEnvironments:
    """opening: environments that open at once, as through one image registry (0: no limit)."""

    opening: int = 0

    def __post_init__(self) -> None:
        at_least(self, 0, "opening")


@dataclass(frozen=True, kw_only=True)
class SimDomain:
    """One domain of the mix. load: the preset that its other keys change. records: a file of recorded episodes."""

    weight: float = 1.0
    load: str = ""
    records: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class SimRecipe:
    """Everything that a simulation is made from."""

    name: str = "simulation"
    seed: int = 0
    pipeline: PipelineSettings = field(default_factory=lambda: PipelineSettings(steps=6, checkpoint_every=0))
    schedule: ScheduleSettings = field(default_factory=ScheduleSettings)
    rollout: RolloutSettings = field(default_factory=RolloutSettings)
    algorithm: AlgoSettings = field(default_factory=AlgoSettings)
    train: TrainSettings = field(default_factory=TrainSettings)
    weights: WeightSettings = field(default_factory=WeightSettings)
    reward: RewardCost = field(default_factory=RewardCost)
    environments: SimEnvironments = field(default_factory=SimEnvironments)
    faults: Faults = field(default_factory=Faults)
    calibration: Calibration = field(default_factory=Calibration)
    model: Shape = field(default_factory=lambda: MODELS["Qwen3-8B"])
    pools: Mapping[str, SimPoolSettings] = field(default_factory=dict)
    domains: Mapping[str, SimDomain] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Plain data, complete, in the form that `simulation_from` reads."""
        plain = as_tables(self)
        for name, domain in self.domains.items():
            plain["domains"][name] = {"weight": domain.weight, **domain.settings,
                                      **{k: v for k in ("load", "records") if (v := getattr(domain, k))}}
        for section, keys in ACTS.items():
            plain[section] = {k: plain[section][k] for k in keys}
        return plain

    def loads(self) -> dict[str, Load]:
        """What episodes of each domain look like. Raises ConfigError."""
        return {name: _load(name, domain) for name, domain in self.domains.items()}

    def world(self) -> World:
        """Raises ConfigError where model, GPUs, pools and domains do not fit together."""
        moving = transfer(self.model, self.calibration, colocated=self.weights.colocated)
        pools = {name: self._pool(name, pool, moving.push + moving.pull if self.weights.blocking else moving.exposed)
                 for name, pool in self.pools.items()}
        affinity = {domain: name for name, pool in self.pools.items() for domain in pool.domains}
        loads = self.loads()
        gpu = gpu_kind(self.train.gpu, "train.gpu")
        return World(
            pools=pools, affinity=affinity, weights={name: d.weight for name, d in self.domains.items()},
            domains=loads, schedule=self.schedule, rollout=self.rollout, pipeline=self.pipeline,
            algo=self.algorithm, reward=self.reward, faults=self.faults, opening=self.environments.opening,
            train=self.train.cost or train_cost(self.model, gpu, self.train.gpus, self.calibration),
            train_gpus=self.train.gpus, train_price=gpu.price * self.train.gpus,
            publish_s=0.0 if self.weights.blocking else moving.push + moving.pull - moving.exposed,
            step_budget=10 * 86_400.0, time_limit=365 * 86_400.0)

    def _pool(self, name: str, pool: SimPoolSettings, load_s: float) -> SimPool:
        gpu, tp = gpu_kind(pool.gpu, f"pools.{name}.gpu"), pool.tensor_parallel

        def cost(kind: str) -> StepCost:
            try:
                return engine_cost(self.model, gpu_kind(kind, f"pools.{name}"), tp, self.calibration, load_s=load_s)
            except ConfigError as error:
                raise ConfigError(f"pools.{name}: {error}") from None

        own = dataclasses.replace(pool.cost, load_s=load_s) if pool.cost and not pool.cost.load_s else pool.cost
        if not pool.prefill_gpus:
            return SimPool(engines=pool.gpus // tp, cost=own or cost(pool.gpu), gpus=tp, price=gpu.price * tp)
        other = gpu_kind(pool.prefill_gpu, f"pools.{name}.prefill_gpu")
        return SimPool(engines=1, cost=own or cost(pool.gpu), gpus=pool.gpus + pool.prefill_gpus,
                       price=gpu.price * pool.gpus + other.price * pool.prefill_gpus,
                       prefill=pool.prefill_gpus // tp, decode=pool.gpus // tp, prefill_cost=cost(pool.prefill_gpu),
                       kv_bytes=self.model.kv_bytes, link=self.calibration.kv_bytes_per_s)


SECTIONS = sections(SimRecipe)
ACTS = {"algorithm": ("filter", "truncated"),
        "pipeline": ("steps", "checkpoint_every", "step_seconds", "max_empty_batches")}
"""Keys of sections shared with training that mean something here (of other sections: all)."""


def load_simulation(path: Path, assignments: Sequence[str] = ()) -> SimRecipe:
    """A checked simulation recipe. Raises ConfigError in one line."""
    return simulation_from(read_toml(path, assignments))


def simulation_from(tables: Mapping[str, Any]) -> SimRecipe:
    """A checked recipe from plain tables. Raises ConfigError."""
    if foreign := {"engine", "evaluation", "learner", "warm_start"} & tables.keys():
        raise ConfigError(f"[{min(foreign)}] belongs to a training recipe: use rollart train")
    readers = {key: partial(_section, key) for key in SECTIONS} | {
        "model": _model,
        "pools": lambda pools: {name: build(SimPoolSettings, table, f"pools.{name}") for name, table in pools.items()},
        "domains": lambda domains: {name: _domain(name, table) for name, table in domains.items()}}
    values = read_recipe(tables, {"name": str, "seed": int}, readers)
    if "pipeline" in values and "checkpoint_every" not in tables["pipeline"]:
        values["pipeline"] = dataclasses.replace(values["pipeline"], checkpoint_every=0)
    recipe = SimRecipe(**values)
    _check(recipe)
    return recipe


def _section(key: str, table: Mapping[str, Any]) -> Any:
    if void := [k for k in table if k not in ACTS.get(key, table)]:
        raise ConfigError(f"{key}.{void[0]} has no effect in a simulation, which does not learn: leave it out")
    return build(SECTIONS[key], table, key)


def _model(table: Mapping[str, Any]) -> Shape:
    name = table.get("name", "custom")
    if set(table) <= {"name"} and name not in MODELS:
        raise ConfigError(f"model.name: no model {name}{nearest(str(name), MODELS)}; or give "
                          "the numbers (layers, hidden, heads, ...)")
    base = dataclasses.asdict(MODELS[name]) if name in MODELS else {}
    return build(Shape, {**base, **table}, "model")


def _domain(name: str, table: Any) -> SimDomain:
    if not isinstance(table, Mapping):
        raise ConfigError(f"domains.{name} must be a table [domains.{name}]; got {table!r}")
    settings = dict(table)
    chosen = {key: settings.pop(key) for key in ("weight", "load", "records") if key in settings}
    domain = build(SimDomain, chosen, f"domains.{name}")
    if domain.weight < 0:
        raise ConfigError(f"domains.{name}.weight must be at least 0; got {domain.weight}")
    domain = dataclasses.replace(domain, settings=settings)
    _load(name, domain)
    return domain


def _load(name: str, domain: SimDomain) -> Load:
    preset = domain.load or (name if name in DOMAINS else "")
    if preset and preset not in DOMAINS:
        raise ConfigError(f"domains.{name}.load: no preset {preset}{nearest(preset, DOMAINS)}")
    if not preset and not domain.records and not domain.settings:
        raise ConfigError(f"domains.{name} says nothing of its episodes, and {name} is no preset"
                          f"{nearest(name, DOMAINS)}; or give load, records or numbers")
    if domain.records and (void := {"turns", "prompt", "observation", "action"} & domain.settings.keys()):
        raise ConfigError(f"domains.{name}.{min(void)} has no effect beside records: remove one of them")
    base = DOMAINS[preset] if preset else Load()
    values = {f.name: getattr(base, f.name) for f in dataclasses.fields(Load)}
    for key, value in domain.settings.items():
        old = values.get(key)
        # a table changes some numbers of a distribution, a number is a fixed value
        if isinstance(old, Spread) and isinstance(value, Mapping):
            value = {**dataclasses.asdict(old), **value}
        elif isinstance(old, Spread) and isinstance(value, int | float) and not isinstance(value, bool):
            value = {"mean": float(value)}
        values[key] = value
    if domain.records:
        recorded = read_records(Path(domain.records))
        values["records"] = recorded.records
        values["max_turns"] = max(len(record.actions) for record in recorded.records)
        values["max_tokens"] = max(max(record.actions) for record in recorded.records)
        if recorded.gaps and "step_s" not in domain.settings:
            values["step_s"] = Spread(values=recorded.gaps)
    plain = {key: dataclasses.asdict(v) if isinstance(v, Spread) else v for key, v in values.items()
             if key != "records"}
    return dataclasses.replace(build(Load, plain, f"domains.{name}"), records=values["records"])


def _check(recipe: SimRecipe) -> None:
    """What no single section can see."""
    if not recipe.domains or not any(domain.weight for domain in recipe.domains.values()):
        raise ConfigError("a simulation needs at least one domain with a weight above 0, for example [domains.swe]")
    if not recipe.pools:
        raise ConfigError("a simulation needs at least one pool of engines, for example [pools.h800]")
    bound = check_pools(recipe.pools, (*recipe.domains, "default"))
    if bound and "default" not in bound and (loose := [d for d in recipe.domains if d not in bound]):
        raise ConfigError(f"domain {loose[0]} has no pool: name it in the domains of one of {', '.join(recipe.pools)}, "
                          'or give one of them domains = ["default"]')
    recipe.world()
