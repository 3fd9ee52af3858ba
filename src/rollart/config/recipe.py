"""A recipe: everything a run is made from, composed of the settings of those who use them.

Keeps true: what is written to a run's config.json builds the same recipe again.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from rollart.algo.catalogue import resolve
from rollart.algo.settings import AlgoSettings
from rollart.backends.process.environments import ProcessSettings
from rollart.backends.ray.settings import ClusterSettings
from rollart.backends.torch.settings import (
    ChatSettings,
    EngineSettings,
    LearnerSettings,
    LoraSettings,
    SmallModel,
    WarmStartSettings,
)
from rollart.backends.vllm.settings import ServerSettings, VLLMSettings
from rollart.backends.weights.settings import WeightsSettings
from rollart.config import toml
from rollart.control.pipeline import PipelineSettings
from rollart.control.settings import FreeSlots, RolloutSettings, ScheduleSettings
from rollart.core.errors import ConfigError
from rollart.core.ranges import at_least
from rollart.core.types import Sampling, StalePolicy
from rollart.envs.domain import Domain, make_domain
from rollart.envs.latency import Latency
from rollart.rewards.settings import RewardSettings


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """The model to train: a Hugging Face checkpoint folder at `path`, or (without one) `small`, made on the spot."""

    path: str = ""
    small: SmallModel = field(default_factory=SmallModel)


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings:
    """tasks: held-out tasks per domain (0: no evaluation). samples: attempts at each, for pass@k. concurrent: episodes
    at once. sampling: how they sample."""

    tasks: int = 64
    samples: int = 1
    concurrent: int = 64
    sampling: Sampling = field(default_factory=Sampling)

    def __post_init__(self) -> None:
        at_least(self, 0, "tasks")
        at_least(self, 1, "samples", "concurrent")
        if self.samples > 1 and self.sampling.temperature == 0:
            raise ValueError(f"samples = {self.samples} with sampling.temperature = 0 plays one episode "
                             f"{self.samples} times: set samples = 1 or a temperature above 0")


@dataclass(frozen=True, kw_only=True)
class PoolSettings:
    """One pool of engines: how many replicas it has. `domains`: the task domains that prefer it. `engine`: embedded
    ([engine]), vllm ([vllm]), or server: OpenAI-compatible servers at `urls`, one a replica ([server]).

    On a cluster: hardware: the pool of nodes that they prefer (empty: any).
    """

    replicas: int = 1
    domains: tuple[str, ...] = ()
    engine: Literal["embedded", "vllm", "server"] = "embedded"
    urls: tuple[str, ...] = ()
    hardware: str = ""

    def __post_init__(self) -> None:
        at_least(self, 1, "replicas")
        if len(self.urls) != (self.replicas if self.engine == "server" else 0):
            raise ValueError(f"engine = {self.engine!r} with {self.replicas} replicas needs "
                             f"{self.replicas if self.engine == 'server' else 'no'} urls; got {len(self.urls)}")
        if bad := [url for url in self.urls if not url.startswith(("http://", "https://"))]:
            raise ValueError(f"urls must begin with http:// or https://; got {bad[0]!r}")


@dataclass(frozen=True, kw_only=True)
class DomainEntry:
    """One domain of the mix: its weight, what injects latency, and all of the domain's own settings.

    curriculum: settings as lists of equal length, one value a level, the easiest first.
    """

    weight: float
    settings: Mapping[str, Any]
    latency: Latency | None
    curriculum: Mapping[str, Sequence[Any]] = field(default_factory=dict)

    def levels(self, name: str) -> list[Domain]:
        """The domain at each level of its curriculum; without one, the domain alone. Raises ConfigError."""
        lengths = {len(values) for values in self.curriculum.values()} or {1}
        if len(lengths) > 1 or 0 in lengths:
            raise ConfigError(f"domains.{name}.curriculum: its lists need one length, one value a level; got "
                              f"{dict(self.curriculum)}")
        return [make_domain(name, {**self.settings, **{key: values[level] for key, values in self.curriculum.items()}})
                for level in range(lengths.pop())]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """name: shown in reports. seed: of everything. keep_checkpoints: the newest so many stay on disk."""

    name: str = "run"
    seed: int = 0
    keep_checkpoints: int = 2
    pipeline: PipelineSettings = field(default_factory=PipelineSettings)
    schedule: ScheduleSettings = field(default_factory=ScheduleSettings)
    rollout: RolloutSettings = field(default_factory=RolloutSettings)
    sampling: Sampling = field(default_factory=Sampling)
    algorithm: AlgoSettings = field(default_factory=AlgoSettings)
    learner: LearnerSettings = field(default_factory=LearnerSettings)
    model: ModelSettings = field(default_factory=ModelSettings)
    chat: ChatSettings = field(default_factory=ChatSettings)
    lora: LoraSettings | None = None
    warm_start: WarmStartSettings | None = None
    engine: EngineSettings = field(default_factory=EngineSettings)
    vllm: VLLMSettings = field(default_factory=VLLMSettings)
    server: ServerSettings = field(default_factory=ServerSettings)
    pools: Mapping[str, PoolSettings] = field(default_factory=lambda: {"default": PoolSettings()})
    environments: ProcessSettings = field(default_factory=ProcessSettings)
    reward: RewardSettings = field(default_factory=RewardSettings)
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    weights: WeightsSettings = field(default_factory=WeightsSettings)
    cluster: ClusterSettings = field(default_factory=ClusterSettings)
    domains: Mapping[str, DomainEntry] = field(default_factory=dict)

    @property
    def slots(self) -> int:
        """Most groups that are open, ready or in training at once."""
        held = 1 if self.schedule.schedule.free is FreeSlots.TAKEN else self.schedule.bound + 1
        return held * self.rollout.batch_groups + self.rollout.spare_groups

    def domain(self, name: str) -> Domain:
        """The domain as this recipe sets it. Raises ConfigError."""
        return make_domain(name, self.domains[name].settings)

    def to_json(self) -> dict[str, Any]:
        """Plain data, complete, in the form that `from_tables` reads."""
        plain = toml.as_tables(self)
        plain["domains"] = {name: {"weight": entry.weight, **entry.settings,
                                   **({"curriculum": dict(entry.curriculum)} if entry.curriculum else {}),
                                   **({"latency": dataclasses.asdict(entry.latency)} if entry.latency else {})}
                            for name, entry in self.domains.items()}
        return plain


SECTIONS = toml.sections(Recipe)


def load_recipe(path: Path, assignments: Sequence[str] = ()) -> Recipe:
    """Read a TOML recipe, apply `a.b=c` overrides, check everything. Raises ConfigError in one line."""
    return from_tables(toml.read_toml(path, assignments))


def from_tables(tables: Mapping[str, Any]) -> Recipe:
    """A checked recipe from plain tables. Raises ConfigError."""
    if foreign := {"train", "faults", "calibration"} & tables.keys():
        raise ConfigError(f"[{min(foreign)}] belongs to a simulation recipe: use rollart simulate or rollart plan")
    readers = {key: partial(toml.build, kind, where=key) for key, kind in SECTIONS.items()} | {
        "algorithm": lambda table: toml.build(AlgoSettings, resolve(table), "algorithm"),
        "pools": lambda pools: {name: toml.build(PoolSettings, pool, f"pools.{name}") for name, pool in pools.items()},
        "domains": lambda domains: {name: _domain(name, table) for name, table in domains.items()}}
    recipe = Recipe(**toml.read_recipe(tables, {"name": str, "seed": int, "keep_checkpoints": int}, readers))
    _check(recipe)
    return recipe


def _domain(name: str, table: Any) -> DomainEntry:
    if not isinstance(table, Mapping):
        raise ConfigError(f"domains.{name} must be a table [domains.{name}]; got {table!r}")
    settings = dict(table)
    weight = settings.pop("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < math.inf:
        raise ConfigError(f"domains.{name}.weight must be a finite number >= 0; got {weight!r}")
    latency = settings.pop("latency", None)
    curriculum = settings.pop("curriculum", {})
    if not isinstance(curriculum, Mapping) or not all(isinstance(values, list) for values in curriculum.values()):
        raise ConfigError(f"domains.{name}.curriculum must have lists of settings, such as {{ difficulty = [0, 1] }}; "
                          f"got {curriculum!r}")
    kind = {"class": settings["class"]} if "class" in settings else {}
    resolved = {**kind, **dataclasses.asdict(make_domain(name, settings).settings)}
    entry = DomainEntry(weight=float(weight), settings=resolved, curriculum=curriculum,
                        latency=None if latency is None else toml.build(Latency, latency, f"domains.{name}.latency"))
    entry.levels(name)  # a mistake in a level is said now
    return entry


def _check(recipe: Recipe) -> None:
    """What no single section can see."""
    if not recipe.domains:
        raise ConfigError("a recipe needs at least one task domain, for example [domains.frozen_lake]")
    if not any(entry.weight for entry in recipe.domains.values()):
        raise ConfigError("at least one domain needs a weight above 0; all are 0")
    if not re.fullmatch(r"[\w. -]{1,100}", recipe.name) or recipe.name.startswith("."):
        raise ConfigError(f"name must be 1 to 100 letters, digits, spaces or -_. and not begin with a dot (a run's "
                          f"folder is called so); got {recipe.name!r}")
    if recipe.keep_checkpoints < 1:
        raise ConfigError(f"keep_checkpoints must be at least 1; got {recipe.keep_checkpoints}")
    rollout, minibatches = recipe.rollout, recipe.learner.minibatches
    if rollout.batch_groups % minibatches:
        raise ConfigError(f"rollout.batch_groups = {rollout.batch_groups} groups cannot be split into "
                          f"learner.minibatches = {minibatches} equal parts: {rollout.batch_groups} % {minibatches} = "
                          f"{rollout.batch_groups % minibatches}")
    if rollout.spare_groups and recipe.schedule.stale is StalePolicy.WAIT:
        raise ConfigError(f"schedule.stale = wait trains every group, so rollout.spare_groups must be 0; "
                          f"got {rollout.spare_groups}")
    _check_algorithm(recipe)
    if recipe.model.path and recipe.model.small != SmallModel():
        raise ConfigError("model.path and model.small exclude each other: remove one")
    sampling = recipe.sampling
    if not sampling.temperature or sampling.top_p != 1 or sampling.top_k:
        raise ConfigError("the learner recomputes the log-probs of what was sampled, so sampling needs temperature > "
                          f"0, top_p = 1 and top_k = 0; got {sampling}")
    scoring = recipe.reward.score_seconds * (1 + recipe.reward.retries)
    if scoring > rollout.score_seconds:
        raise ConfigError(f"reward.score_seconds x (1 + reward.retries) = {scoring:g} s does not fit into "
                          f"rollout.score_seconds = {rollout.score_seconds:g} s")
    toml.refuse_unknown("reward.places", recipe.reward.places, recipe.domains)
    toml.refuse_unknown("reward.functions", recipe.reward.functions, recipe.domains)
    if recipe.warm_start:
        toml.refuse_unknown("warm_start", (*recipe.warm_start.error_rates, *recipe.warm_start.episodes), recipe.domains)
    if not recipe.pools:
        raise ConfigError("at least one pool of engines is needed, for example [pools.default]")
    toml.check_pools(recipe.pools, recipe.domains)
    learner = recipe.learner
    if learner.schedule != "constant" and learner.warmup_steps >= (learner.total_steps or recipe.pipeline.steps):
        raise ConfigError(f"learner.warmup_steps = {learner.warmup_steps} must be below the schedule's length of "
                          f"{learner.total_steps or recipe.pipeline.steps} steps")
    needed = max(level.settings.max_tokens for name, entry in recipe.domains.items() for level in entry.levels(name))
    kinds = {pool.engine for pool in recipe.pools.values()}
    if "vllm" in kinds and 0 < recipe.vllm.context_tokens < rollout.context_tokens:
        raise ConfigError(f"rollout.context_tokens = {rollout.context_tokens} must be at most vllm.context_tokens = "
                          f"{recipe.vllm.context_tokens}")
    if recipe.lora and kinds != {"embedded"}:
        raise ConfigError("[lora] sends adapters only, which embedded engines alone merge: leave pools.*.engine out")
    engine = recipe.engine.context_tokens
    if engine and rollout.context_tokens > engine:
        raise ConfigError(f"rollout.context_tokens = {rollout.context_tokens} must be at most engine.context_tokens = "
                          f"{engine}")
    limit = rollout.context_tokens or engine
    if limit and needed >= limit:
        raise ConfigError(f"an action of {needed} tokens does not fit a context of {limit} tokens: raise "
                          "engine.context_tokens or lower the domain's max_tokens")


def _check_algorithm(recipe: Recipe) -> None:
    """The learning rule against the model and the groups that it is given."""
    algo, model = recipe.algorithm, recipe.model
    if algo.grouped and recipe.rollout.group_size < 2:
        raise ConfigError(f"algorithm.advantage = {algo.advantage!r} compares the trajectories of a group, so "
                          f"rollout.group_size must be at least 2; got {recipe.rollout.group_size}")
    if not algo.grouped and "zero_variance" in algo.filter and recipe.rollout.group_size < 2:
        raise ConfigError("algorithm.filter = 'zero_variance' leaves out every group of one: rollout.group_size = 1")
    if algo.reference == "adapter_off" and recipe.lora is None:
        raise ConfigError("algorithm.reference = 'adapter_off' needs an adapter: set [lora], or reference = 'copy'")
    if algo.router_coefficient and not model.path and not model.small.experts:
        raise ConfigError(f"algorithm.router_coefficient = {algo.router_coefficient:g} needs a mixture of experts; got "
                          "model.small.experts = 0")
    if recipe.chat != ChatSettings() and not model.path:
        raise ConfigError("[chat] is about the chat template of a checkpoint folder: set model.path, or leave it out")
