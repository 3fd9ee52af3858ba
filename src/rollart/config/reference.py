"""docs/recipes.md, written from the settings themselves: `python -m rollart.config.reference > docs/recipes.md`.

Keeps true: the page has every key with its default, and no other; a test compares it.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

from rollart.config import simulation
from rollart.config.recipe import SECTIONS, PoolSettings
from rollart.core.errors import ConfigError
from rollart.envs.domain import ADAPTERS, DOMAINS, domain_class
from rollart.envs.latency import Latency
from rollart.sim.costs import StepCost, TrainCost
from rollart.sim.workload import Load, Spread

HEAD = """# Recipes

A recipe is a TOML file; `recipes/quickstart.toml` is one. Every key has a default except the domains. On the command
line `--set a.b=value` overrides a key; `--dry-run` prints the whole resolved recipe. An unknown key is refused with the
nearest name. Sizes name their unit: groups, trajectories, tokens, seconds.

This page is written from the settings: `python -m rollart.config.reference > docs/recipes.md`.

## Top level

    name = "run"            # shown in reports
    seed = 0                # of model, tasks, sampling, evaluation
    keep_checkpoints = 2    # the newest so many stay on disk
"""

SIMULATION = """# Simulation recipes

What `rollart simulate` and `rollart plan` read; `recipes/sim_paper.toml` is one, docs/simulator.md explains.
`[schedule]` and `[rollout]` are as above; of `[pipeline]` only steps, checkpoint_every, step_seconds and
max_empty_batches, and of `[algorithm]` only filter and truncated, mean something here: other keys are refused.
`model.name` alone takes a known shape. A domain takes a preset by its name or by `load = "swe"` (swe, webshop,
frozen_lake, math, game), then changes keys of it: a number fixes a distribution, a table changes some of its numbers;
`records = "PATH"` takes recorded episodes instead; `weight` is its share.
"""


def reference() -> str:
    """The whole page as Markdown."""
    parts = [HEAD]
    parts += [_section(f"[{name}]", kind) for name, kind in SECTIONS.items()]
    parts.append(_section("[pools.NAME]", PoolSettings))
    parts.append("## [domains.NAME]\n\n`weight` (default 1.0) is the domain's share of the mix. The other keys are the "
                 "domain's own; a domain of your own is named `[domains.\"module:Class\"]`. `curriculum` has lists of "
                 "settings, one value a level, as `{ difficulty = [0, 1] }`: training begins with the first level and "
                 "moves on with the domain's success; what is evaluated has the settings beside it. "
                 "`class = \"gem\"` (or another domain below, or module:Class) leaves NAME free; "
                 "docs/environments.md explains adapters.\n")
    for name in (*DOMAINS, *ADAPTERS):
        try:
            parts.append(_section(f"[domains.{name}]", domain_class(name).Settings, level="###"))
        except ConfigError as missing:
            parts.append(f"### [domains.{name}]\n\n{missing}\n")
    parts.append(_section("[domains.NAME.latency]", Latency, level="###"))
    parts.append(SIMULATION)
    parts += [_section(f"[{name}]", kind) for name, kind in simulation.SECTIONS.items()
              if SECTIONS.get(name) is not kind]
    parts += [_section("[pools.NAME]", simulation.SimPoolSettings),
              _section("[pools.NAME.cost]", StepCost, level="###"), _section("[train.cost]", TrainCost, level="###"),
              _section("[domains.NAME]", Load),
              _section("[domains.NAME.turns], the same for every distribution", Spread, level="###")]
    return "\n".join(parts)


def _section(title: str, kind: Any, level: str = "##") -> str:
    text = inspect.cleandoc(kind.__doc__ or "").replace(" Raises ValueError.", "").replace("Raises ValueError.", "")
    keys = "".join(f"{field.name} = {_default(field)}\n" for field in dataclasses.fields(kind)
                   if not dataclasses.is_dataclass(_value(field))
                   and not (kind is Load and field.name == "records"))  # a path in a recipe, explained above
    nested = "".join("\n" + _section(f"{title[:-1]}.{field.name}]", type(_value(field)), "###")
                     for field in dataclasses.fields(kind) if dataclasses.is_dataclass(_value(field))
                     and not isinstance(_value(field), Spread))  # all alike: one section after them
    table = f"```toml\n{keys}```\n" if keys else ""
    return f"{level} {title}\n\n```text\n{text.strip()}\n```\n\n{table}{nested}"


def _value(field: dataclasses.Field[Any]) -> Any:
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default


def _default(field: dataclasses.Field[Any]) -> str:
    value = _value(field)
    if value is None:
        return "(unset)"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    if value == float("inf"):
        return "inf"
    if isinstance(value, tuple | list):
        return "[" + ", ".join(f'"{item}"' for item in value) + "]"
    return "{}" if value == {} else repr(value)


if __name__ == "__main__":
    print(reference())
