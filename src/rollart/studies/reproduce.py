"""The paper's tables from simulation: run what they need, print ours beside the paper's, write the page.

Keeps true: a simulation that two tables share runs once; a table's rows are computed from simulations only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markdown import Markdown
from rich.table import Table as RichTable

from rollart.core.errors import ConfigError, RunError
from rollart.envs.domain import nearest
from rollart.observe.charts import ranges_chart
from rollart.observe.run_folder import atomic_write
from rollart.observe.status import right
from rollart.sim.calibration import Calibration
from rollart.sim.workload import DOMAINS, Spread
from rollart.studies.experiments import (
    STALE_COST,
    TABLES,
    TOLERANCE,
    Outcome,
    Row,
    Table,
    Tables,
    paper_cluster,
)
from rollart.studies.parallel import key, map_all, run_key

HEADLINES = {"RollArt over Sync": ("sync", "rollart"), "RollArt over Sync+": ("sync_plus", "rollart"),
             "RollArt over AReaL": ("areal", "rollart")}
"""What the sensitivity shows, for 14B."""


def _ask(tables: Sequence[Table]) -> list[str]:
    """The simulations that these tables need: their rows are asked for once with made-up outcomes."""
    wanted: dict[str, None] = {}

    def record(recipe: Tables) -> Outcome:
        wanted[key(recipe)] = None
        return Outcome(busy={})

    for table in tables:
        table.rows(record)
    return list(wanted)


def run_all(keys: Sequence[str], *, console: Console, processes: int, seed: int, what: str) -> dict[str, Outcome]:
    results = map_all(run_key, [(text, seed) for text in keys], processes, console, what)
    for text, r in zip(keys, results, strict=True):
        if r.ended != "finished":
            raise RunError(f"a simulation ended early ({r.ended}): {text}")
    return {text: Outcome(step=r.step_seconds, train=r.train_seconds / r.steps, busy=r.busy,
                          staleness=r.staleness)
            for text, r in zip(keys, results, strict=True)}


def reproduce_tables(names: Sequence[str], *, console: Console, processes: int = 0, seed: int = 0,
                     sensitivity: bool = False, folder: Path | None = None) -> dict[str, Any]:
    """Run, print, write. Returns {table: {"paper": [...], "ours": [...], "labels": [...], "within": bool}}.

    Raises ConfigError for an unknown table.
    """
    for name in names:
        if name not in TABLES:
            raise ConfigError(f"no table {name}{nearest(name, TABLES)}")
    tables = [TABLES[name] for name in dict.fromkeys(names)]
    found = run_all(_ask(tables), console=console, processes=processes, seed=seed, what="simulations")
    rows = {table.name: list(table.rows(lambda recipe: found[key(recipe)])) for table in tables}
    for table in tables:
        _print(table, rows[table.name], console)
    predicted = [row for shown in rows.values() for row in shown if not row.fitted]
    if predicted:
        within = sum(row.within for row in predicted)
        console.print(f"{within} of {len(predicted)} predicted numbers ({within / len(predicted):.0%}) lie inside the "
                      f"paper's range or within {TOLERANCE:.0%} of it")
    moved = _sensitivity(console, processes, seed) if sensitivity else {}
    if moved:
        console.print(Markdown(_moved(moved)))
    if folder:
        write_page(folder, tables, rows, moved)
        console.print(f"page: {folder / 'reproduction.md'}")
    return {name: {"labels": [row.label for row in shown], "paper": [list(row.paper) for row in shown],
                   "ours": [row.ours for row in shown], "within": all(row.within for row in shown)}
            for name, shown in rows.items()} | ({"sensitivity": moved} if moved else {})


def _range(row: Row) -> str:
    low, high = row.paper
    return f"{low:.4g}" if low == high else f"{low:.4g} - {high:.4g}"


def _print(table: Table, rows: Sequence[Row], console: Console) -> None:
    shown = RichTable("", *right("paper", "ours", ""), title=f"{table.name}: {table.title}", title_justify="left")
    for row in rows:
        shown.add_row(row.label, _range(row), f"{row.ours:.2f}", _verdict(row))
    console.print(shown)


def _verdict(row: Row) -> str:
    return "fitted" if row.fitted else "" if row.within else "differs"


def _sensitivity(console: Console, processes: int, seed: int) -> dict[str, dict[str, list[float]]]:
    """{headline: {constant: [halved, as it is, doubled]}} for the assumed constants."""
    changes: dict[tuple[str, float], Tables] = {("", 1.0): {}}
    for name, value, kind, _ in Calibration.rows():
        if kind == "assumed":
            changes |= {(name, f): {"calibration": {name: min(1.0, value * f) if "efficiency" in name else value * f}}
                        for f in (0.5, 2.0)}
    for domain, load in DOMAINS.items():
        for part in ("action", "observation"):
            spread: Spread = getattr(load, part)
            changes |= {(f"{domain} {part} tokens", f): {"domains": {domain: {part: {
                "mean": spread.mean * f, "sigma": spread.sigma * f}}}} for f in (0.5, 2.0)}
    systems = {system for pair in HEADLINES.values() for system in pair}

    def recipe(change: Tables, system: str) -> Tables:
        tables = paper_cluster(system, "14B", part=2)
        tables["pipeline"]["steps"] = 3
        for section, values in change.items():
            tables[section] = {**tables.get(section, {}), **values}
        return tables

    asked = {(change, system): key(recipe(tables, system)) for change, tables in changes.items() for system in systems}
    found = run_all(sorted(set(asked.values())), console=console, processes=processes, seed=seed, what="sensitivity")

    def ratio(change: tuple[str, float], pair: tuple[str, str]) -> float:
        return found[asked[change, pair[0]]].step / found[asked[change, pair[1]]].step

    names = list(dict.fromkeys(name for name, _ in changes if name))
    return {headline: {name: [ratio((name, 0.5), pair), ratio(("", 1.0), pair), ratio((name, 2.0), pair)]
                       for name in names} for headline, pair in HEADLINES.items()}


# -- the page ------------------------------------------------------------------------------------------------------


def write_page(folder: Path, tables: Sequence[Table], rows: Mapping[str, Sequence[Row]],
               moved: Mapping[str, Mapping[str, Sequence[float]]]) -> None:
    """reproduction.md and its plots; sensitivity.md if it was asked for (an older one stays). Raises RunError."""
    predicted = [row for shown in rows.values() for row in shown if not row.fitted]
    within = sum(row.within for row in predicted)
    out = [_INTRO]
    if predicted:
        out.append(f"**{within} of {len(predicted)}** predicted numbers lie inside the paper's range or within "
                   f"{TOLERANCE:.0%} of it.\n")
    try:
        (folder / "reproduction").mkdir(parents=True, exist_ok=True)
        for table in tables:
            shown = rows[table.name]
            chart = ranges_chart(table.title, [(row.label, *row.paper, row.ours) for row in shown])
            atomic_write(folder / "reproduction" / f"{table.name}.svg", chart)
            out += [f"## {table.title}\n", f"![{table.title}](reproduction/{table.name}.svg)\n",
                    "| | paper | ours | |\n|---|---|---|---|\n" + "\n".join(
                        f"| {row.label} | {_range(row)} | {row.ours:.2f} | {_verdict(row)} |" for row in shown) + "\n"]
            if table.note:
                out.append(table.note + "\n")
        out.append(_constants())
        sensitivity = folder / "sensitivity.md"
        if moved:
            atomic_write(sensitivity, _moved(moved))
        if sensitivity.exists():
            out.append("[How the headlines move](sensitivity.md) when an assumed constant is halved or doubled.\n")
        atomic_write(folder / "reproduction.md", "\n".join(out))
    except OSError as error:
        raise RunError(f"{folder} cannot be written: {error.strerror}") from error


_INTRO = f"""# The paper's numbers in simulation

Written by `rollart reproduce --write docs`: the control plane that trains for real runs unchanged on a
virtual-time loop; engines, learner, links, environments and rewards are replaced by their costs. Bars are the
paper's range, points are ours. *fitted* rows were used to set constants and prove nothing; all other rows are
predictions; *differs* marks those outside the paper's range by more than {TOLERANCE:.0%}. A step's seconds are
those of a steady state: the steps that train what was admitted at the start are left out. Time to a score
assumes that samples x (1 + {STALE_COST:g} x mean staleness) are needed. The paper does not disclose tokens per
turn, latencies, batch sizes of its smaller experiments or how its baselines split their GPUs: what we took is
in `studies/experiments.py` and below.
"""


def _constants() -> str:
    lines = ["## The constants\n", "| constant | value | | from |", "|---|---|---|---|"]
    lines += [f"| `{name}` | {value:g} | {kind} | {source} |" for name, value, kind, source in Calibration.rows()]
    lines += ["", "Episodes by domain; turns follow the paper's table, tokens of FrozenLake and GEM-math are fitted to "
              "its 2 H800 against 6 H20, those of SWE and its times to its step of 365.7 s, the others are assumed. "
              "Mean and standard deviation:", "",
              "| domain | " + " | ".join(_SHOWN) + " |", "|---" * (len(_SHOWN) + 1) + "|"]
    for name, load in DOMAINS.items():
        spreads: list[Spread] = [getattr(load, field) for field in _SHOWN]
        lines.append(f"| {name} | " + " | ".join(f"{s.mean:g} ± {s.sigma:g}" for s in spreads) + " |")
    return "\n".join(lines) + "\n"


_SHOWN = ("turns", "prompt", "observation", "action", "open_s", "step_s", "reward_s")


def _moved(moved: Mapping[str, Mapping[str, Sequence[float]]]) -> str:
    names = list(next(iter(moved.values())))
    lines = ["# How the headlines move\n", "Written by `rollart reproduce --write docs --sensitivity`: 14B on half of "
             "the paper's cluster, when an assumed constant is halved / as it is / doubled (efficiencies at most 1):\n",
             "| constant | " + " | ".join(moved) + " |",
             "|---" * (len(moved) + 1) + "|"]
    for name in names:
        cells = [" / ".join(f"{v:.2f}" for v in shown[name]) for shown in moved.values()]
        lines.append("| " + " | ".join([name, *cells]) + " |")
    return "\n".join(lines) + "\n"
