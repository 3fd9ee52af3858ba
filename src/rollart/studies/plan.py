"""Placements of a cluster, compared by simulation: who trains, which pool each domain prefers, tensor parallel, alpha,
spares.

How it searches: (1) each domain alone on GPUs of each kind at equal price: what it prefers; (2) how many GPUs of which
kind train, with the domains where they prefer to be; (3) for the best of those, fewer domains bound, alpha, spares and
tensor parallel; all at a part of the size where that divides. (4) The best few at full size, which is what is printed.
Keeps true: placements are ranked by seconds (or cost) of a step x (1 + STALE_COST x mean staleness), so that a larger
alpha is not free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rich.console import Console
from rich.table import Table

from rollart.config.simulation import SimRecipe, simulation_from
from rollart.core.errors import ConfigError
from rollart.observe.status import right
from rollart.sim.costs import GPUS, Inventory, Part, engine_cost, train_cost
from rollart.sim.world import SimResult
from rollart.studies.experiments import STALE_COST, Tables
from rollart.studies.parallel import key, map_all, run_key

SHARES = (0.125, 0.25, 0.375, 0.5, 0.625)
"""Of the GPUs of a kind that train."""
PARTS = (4, 2, 1)
"""The search runs at 1/4 of the size if all GPU counts and the batch divide by it, else at 1/2, else whole."""
PREFERS = 1.05
"""A domain prefers a kind of GPU if it is at least this much faster there at equal price."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """pools: kind -> (GPUs, tensor parallel). bound: domain -> kind."""

    train: str
    train_gpus: int
    pools: dict[str, tuple[int, int]]
    bound: dict[str, str] = field(default_factory=dict)
    alpha: int = 1
    spares: int = 0

    @property
    def price(self) -> float:
        """Per hour, in hours of one H20."""
        return self.train_gpus * GPUS[self.train].price + sum(n * GPUS[k].price for k, (n, _) in self.pools.items())

    def tables(self, base: Tables, part: int = 1) -> Tables:
        """The recipe of this placement, at 1/`part` of its size."""
        tables = {k: v for k, v in base.items() if k not in ("pools", "train", "name", "seed")}
        tables["train"] = {"gpu": self.train, "gpus": self.train_gpus // part}
        tables["pools"] = {kind.lower(): {
            "gpu": kind, "gpus": gpus // part, "tensor_parallel": tp,
            "domains": [d for d, k in self.bound.items() if k == kind]} for kind, (gpus, tp) in self.pools.items()}
        free = [d for d in base["domains"] if d not in self.bound]
        if self.bound and free:
            next(iter(tables["pools"].values()))["domains"].append("default")
        rollout = dict(base.get("rollout", {}))
        rollout["batch_groups"] = rollout.get("batch_groups", 16) // part
        tables["rollout"] = {**rollout, "spares": self.spares}
        tables["schedule"] = {"name": "rollart", "alpha": self.alpha}
        tables["pipeline"] = {"steps": self.alpha + 4}
        return tables

    def __str__(self) -> str:
        pools = ", ".join(f"{n} {kind} (tensor parallel {tp})" for kind, (n, tp) in self.pools.items())
        return f"train on {self.train_gpus} {self.train}; roll out on {pools}"


@dataclass(frozen=True, kw_only=True)
class Scored:
    placement: Placement
    step: float
    staleness: float
    busy: dict[str, float]

    @property
    def effective(self) -> float:
        """Seconds of a step, staleness charged."""
        return self.step * (1 + STALE_COST * self.staleness)

    @property
    def cost(self) -> float:
        """Of such a step, in hours of one H20."""
        return self.effective / 3600.0 * self.placement.price


@dataclass(frozen=True, kw_only=True)
class Plan:
    """best: the placements at full size, the best first. preferences: {domain: {kind: seconds at equal price}}."""

    goal: str
    best: list[Scored]
    preferences: dict[str, dict[str, float]]
    reasons: list[str]
    simulations: int

    def to_json(self) -> dict[str, Any]:
        return {"goal": self.goal, "simulations": self.simulations, "reasons": self.reasons,
                "preferences": self.preferences,
                "placements": [{"train": {"gpu": s.placement.train, "gpus": s.placement.train_gpus},
                                "pools": {k: {"gpus": n, "tensor_parallel": tp}
                                          for k, (n, tp) in s.placement.pools.items()},
                                "domains": s.placement.bound, "alpha": s.placement.alpha,
                                "spares": s.placement.spares, "seconds_per_step": s.step,
                                "cost_per_step": s.cost, "staleness": s.staleness, "busy": s.busy}
                               for s in self.best]}


class Search:
    """One search; every simulation is asked for once."""

    def __init__(self, base: Tables, cluster: Inventory, goal: str, budget: float | None, processes: int,
                 console: Console) -> None:
        self.base, self.cluster, self.goal, self.budget = base, cluster, goal, budget
        self.processes, self.console = processes, console
        self.known: dict[str, SimResult] = {}
        probe = {**base, "pools": {"probe": {"gpu": "B200", "gpus": 8, "tensor_parallel": 8}},
                 "train": {"gpu": "B200", "gpus": 4096}}
        self.recipe: SimRecipe = simulation_from(probe)
        self.tensor = {part.gpu.name: self._smallest(part) for part in cluster.parts}
        if not any(self.tensor.values()):
            raise ConfigError(f"{self.recipe.model.name} fits no engine of {cluster}, not even with 8 GPUs each")

    def _smallest(self, part: Part) -> int:
        """The smallest tensor parallel size with which the model fits; 0 if none does."""
        for size in (1, 2, 4, 8):
            try:
                engine_cost(self.recipe.model, part.gpu, size, self.recipe.calibration)
            except ConfigError:
                continue
            return size if part.count >= size else 0
        return 0

    def simulate(self, recipes: Sequence[Tables], what: str) -> list[SimResult]:
        keys = [key(tables) for tables in recipes]
        new = sorted({k for k in keys if k not in self.known})
        if new:
            results = map_all(run_key, [(k, 0) for k in new], self.processes, self.console, what)
            self.known.update(zip(new, results, strict=True))
        return [self.known[k] for k in keys]

    def score(self, placements: Sequence[Placement], what: str, part: int = 1) -> list[Scored]:
        """The best first."""
        results = self.simulate([p.tables(self.base, part) for p in placements], what)
        scored = [Scored(placement=p, step=r.step_seconds, staleness=r.staleness, busy=dict(r.busy))
                  for p, r in zip(placements, results, strict=True) if r.ended == "finished"]
        if not scored:
            raise ConfigError(f"no placement on {self.cluster} makes its steps in time; the first: {results[0].ended}")
        return sorted(scored, key=lambda s: s.cost if self.goal == "cost" else s.effective)

    def preferences(self) -> dict[str, dict[str, float]]:
        """Seconds of a batch of each domain alone on GPUs of each kind at about equal price and the cluster's load."""
        kinds = [kind for kind, tp in self.tensor.items() if tp]
        if len(kinds) < 2:
            return {}
        dearest = max(GPUS[kind].price * self.tensor[kind] for kind in kinds)
        in_flight = 2 * self.recipe.rollout.batch_groups / sum(part.price for part in self.cluster.parts)
        groups = max(2, round(in_flight * 2 * dearest))
        asked = [(domain, kind) for domain in self.base["domains"] for kind in kinds]
        recipes = []
        for domain, kind in asked:
            tp = self.tensor[kind]
            engines = max(1, round(2 * dearest / (GPUS[kind].price * tp)))
            tables = {k: v for k, v in self.base.items() if k not in ("name", "seed")}
            tables |= {"domains": {domain: self.base["domains"][domain]}, "schedule": {"name": "sync_plus"},
                       "pipeline": {"steps": 4}, "weights": {"colocated": True},
                       "train": {"gpu": kind, "gpus": 8, "cost": {"fixed_s": 0.1, "token_s": 0.0}},
                       "pools": {"p": {"gpu": kind, "gpus": engines * tp, "tensor_parallel": tp}},
                       "rollout": {**self.base.get("rollout", {}), "batch_groups": groups}}
            recipes.append(tables)
        results = self.simulate(recipes, "what each domain prefers")
        out: dict[str, dict[str, float]] = {}
        for (domain, kind), result in zip(asked, results, strict=True):
            if result.ended != "finished":
                raise ConfigError(f"domain {domain} alone on {kind}: {result.ended}")
            out.setdefault(domain, {})[kind] = result.step_seconds
        return out

    def splits(self, bound: dict[str, str]) -> list[Placement]:
        """Who trains: each kind that can, with several shares; the rest rolls out. Within the budget."""
        out = []
        for scale in (1.0, 0.75, 0.5) if self.goal == "cost" or self.budget else (1.0,):
            counts = {p.gpu.name: int(p.count * scale) for p in self.cluster.parts}
            for trainer in counts:
                for share in SHARES:
                    placement = self._split(counts, trainer, share, bound)
                    if placement and (self.budget is None or placement.price <= self.budget):
                        out.append(placement)
        if not out:
            limit = f" within {self.budget:g} H20-hours an hour" if self.budget else ""
            raise ConfigError(f"no placement of {self.recipe.model.name} on {self.cluster}{limit}: the learner and one "
                              "engine do not fit; give more GPUs" + (" or a larger --budget" if self.budget else ""))
        return list({str(p): p for p in out}.values())

    def _split(self, counts: dict[str, int], trainer: str, share: float, bound: dict[str, str]) -> Placement | None:
        step = 8 if counts[trainer] >= 16 else max(1, self.tensor[trainer])
        train = max(step, round(counts[trainer] * share / step) * step)
        try:
            train_cost(self.recipe.model, GPUS[trainer], train, self.recipe.calibration)
        except ConfigError:
            return None
        pools = {}
        for kind, count in counts.items():
            tp = self.tensor[kind]
            left = count - (train if kind == trainer else 0)
            if tp and left >= tp:
                pools[kind] = (left // tp * tp, tp)
        if not pools:
            return None
        kept = {d: k for d, k in bound.items() if k in pools} if len(pools) > 1 else {}
        return Placement(train=trainer, train_gpus=train, pools=pools, bound=kept)

    def variants(self, best: Placement, order: Sequence[str]) -> list[Placement]:
        """Beside the best: fewer domains bound (the most indifferent first), alpha, spares, tensor parallel."""
        out = [best]
        bound = dict(best.bound)
        for domain in order:
            if domain in bound:
                del bound[domain]
                out.append(replace(best, bound=dict(bound)))
        out += [replace(best, alpha=alpha) for alpha in (2, 4)]
        out += [replace(best, spares=spares) for spares in (1, 2)]
        for kind, (gpus, tp) in best.pools.items():
            if tp < 8 and gpus % (2 * tp) == 0:
                out.append(replace(best, pools={**best.pools, kind: (gpus, 2 * tp)}))
        return out

    def part(self, placements: Sequence[Placement]) -> int:
        groups = self.base.get("rollout", {}).get("batch_groups", 16)
        for part in PARTS:
            if groups % part == 0 and groups // part >= 8 and all(
                    p.train_gpus % part == 0 and all(n % (part * tp) == 0 for n, tp in p.pools.values())
                    for p in placements):
                return part
        return 1


def make_plan(base: Tables, cluster: Inventory, *, goal: str, budget: float | None, processes: int,
              console: Console) -> Plan:
    """Raises ConfigError where nothing fits."""
    search = Search(base, cluster, goal, budget, processes, console)
    seconds = search.preferences()
    gain = {d: max(s.values()) / min(s.values()) for d, s in seconds.items()}
    bound = {d: min(s, key=lambda kind: s[kind]) for d, s in seconds.items() if gain[d] >= PREFERS}
    splits = search.splits(bound)
    part = search.part(splits)
    first = search.score(splits, "who trains", part)
    order = sorted(gain, key=lambda d: gain[d])
    candidates = [v for scored in first[:2] for v in search.variants(scored.placement, order)]
    part = search.part(candidates)
    second = search.score(candidates, "pools, alpha, spares, tensor parallel", part)
    finalists = [second[0].placement, _combined(second, first[0].placement), second[1].placement, first[0].placement]
    full = search.score(list({repr(p): p for p in finalists}.values()), "the best at full size")
    return Plan(goal=goal, best=full, preferences=seconds, simulations=len(search.known),
                reasons=_reasons(search, full, first, second, seconds, gain))


def _combined(scored: Sequence[Scored], start: Placement) -> Placement:
    """Every single change that helped the same split, together."""
    same = [s for s in scored if s.placement.train_gpus == start.train_gpus and s.placement.train == start.train]
    reference = next((s for s in same if s.placement == start), None)
    out = start
    for s in same if reference else []:
        if reference is None or s.effective >= reference.effective:
            continue
        for name in ("bound", "alpha", "spares", "pools"):
            if getattr(s.placement, name) != getattr(start, name) and getattr(out, name) == getattr(start, name):
                out = replace(out, **{name: getattr(s.placement, name)})
    return out


def _reasons(search: Search, full: Sequence[Scored], first: Sequence[Scored], second: Sequence[Scored],
             seconds: dict[str, dict[str, float]], gain: dict[str, float]) -> list[str]:
    best = full[0]
    pools = {k: v for k, v in best.busy.items() if k not in ("train", "reward")}
    out = [f"training is busy {best.busy['train']:.0%} of the time, " + ", ".join(
        f"{name} {share:.0%}" for name, share in pools.items()) + (
        ": training is the bottleneck" if best.busy["train"] > 0.8 else
        ": rollout is the bottleneck" if max(pools.values()) > 0.8 else
        ": neither is saturated, long episodes set the pace")]
    if not seconds:
        kinds = [p.gpu.name for p in search.cluster.parts]
        out.append("affinity brings nothing: " + (f"all engines run on {kinds[0]}" if len(kinds) == 1 else
                                                  "only one kind of GPU can hold an engine"))
    for domain in sorted(gain, key=lambda d: -gain[d]):
        kind = min(seconds[domain], key=lambda k: seconds[domain][k])
        out.append(f"{domain}: {gain[domain]:.2f}x faster on {kind} at equal price" if gain[domain] >= PREFERS else
                   f"{domain}: as fast on either kind")
    worst = first[-1]
    slower = worst.effective / first[0].effective
    out.append(f"of {len(first)} splits the worst, {worst.placement}, takes {slower:.2f}x the time of the best")
    loose = [s for s in second if not s.placement.bound]
    tied = [s for s in second if s.placement.bound]
    if loose and tied:
        ratio = loose[0].effective / tied[0].effective
        out.append(f"binding domains to pools against none bound: {ratio:.2f}x"
                   + (", affinity brings nothing here" if ratio < 1.01 else ""))
    return out


def show_plan(plan: Plan, console: Console) -> None:
    table = Table("placement", "domains", *right("alpha", "spares", "s/step", "cost/step", "stale"),
                  title=f"placements by {plan.goal} ({plan.simulations} simulations)", title_justify="left")
    for s in plan.best:
        p = s.placement
        kinds: dict[str, list[str]] = {}
        for domain, kind in p.bound.items():
            kinds.setdefault(kind, []).append(domain)
        where = "; ".join(f"{kind}: {', '.join(names)}" for kind, names in kinds.items()) or "any pool"
        table.add_row(str(p), where, str(p.alpha), str(p.spares), f"{s.step:,.1f}", f"{s.cost:,.2f}",
                      f"{s.staleness:.2f}")
    console.print(table)
    for reason in plan.reasons:
        console.print(f"- {reason}")
