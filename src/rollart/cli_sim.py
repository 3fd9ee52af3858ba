"""The commands of the simulator: simulate, swarm, reproduce, plan."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.status import Status
from rich.table import Table

from rollart.cli_base import Sets, clear_errors, console, errors, tell
from rollart.core.errors import ConfigError, RunError
from rollart.core.events import Event, StepEnded
from rollart.observe.status import right


def _write_json(path: Path | None, value: Any) -> None:
    """To a file, or to the terminal for `-`."""
    if path is None:
        return
    text = json.dumps(value, indent=2) + "\n"
    if str(path) == "-":
        typer.echo(text, nl=False)
        return
    try:
        path.write_text(text)
    except OSError as error:
        raise RunError(f"{path} cannot be written: {error.strerror}") from None


def _writable(*paths: Path | None) -> None:
    """Refuse a file that cannot be written before the work, not after it. Raises ConfigError."""
    for path in paths:
        if path is None or str(path) == "-":
            continue
        folder = path.parent
        if path.is_dir() or not folder.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
            raise ConfigError(f"{path} cannot be written: name a file in a folder that exists and can be written")


class _Steps:
    """Tells a terminal how far a simulation is; elsewhere nothing is shown."""

    def __init__(self, status: Status, steps: int) -> None:
        self._status, self._steps = status, steps

    def on(self, at: float, event: Event) -> None:
        if isinstance(event, StepEnded):
            self._status.update(f"step {event.version} of {self._steps}, {at:,.0f} simulated seconds")


Json = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the figures as JSON (- : print).")]


def simulate(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A simulation recipe, e.g. "
                                          "recipes/sim_paper.toml; or `swarm`: the "
                                          "random world that `rollart swarm` made from --seed.")],
    seed: Annotated[int | None, typer.Option(min=0, help="Of everything. Default: the recipe's.")] = None,
    json_file: Json = None,
    trace: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a timeline for Perfetto.")] = None,
    sets: Sets = None,
) -> None:
    """Run a recipe in virtual time, with the real control plane, and say what it would take."""
    from rollart.config.simulation import load_simulation
    from rollart.observe.trace import Trace
    from rollart.sim.swarm import FAILURES, draw_world
    from rollart.studies.simulation import run_world

    with clear_errors():
        _writable(json_file, trace)
        if str(trace) == "-":
            raise ConfigError("--trace needs the name of a file; only --json prints with -")
        timeline = Trace() if trace else None
        watchers = [timeline] if timeline else []
        began = time.monotonic()
        if recipe == "swarm":
            if sets:
                raise ConfigError("a world of the swarm is what its seed makes it: leave --set out")
            try:
                summary = run_world(draw_world(seed or 0), seed or 0, *watchers)
            except FAILURES as failure:
                raise RunError(f"seed {seed or 0}: {type(failure).__name__}: {failure}") from None
        else:
            settings = load_simulation(Path(recipe), sets or [])
            with errors.status("simulating ...") as status:
                steps = _Steps(status, settings.pipeline.steps)
                summary = run_world(settings.world(), settings.seed if seed is None else seed, steps, *watchers)
        took = time.monotonic() - began
        if timeline and trace:
            timeline.write(trace)
        _write_json(json_file, summary)
    if str(json_file) != "-":
        _show(summary, took)
        if trace:
            console.print(f"timeline: {trace} (open it in ui.perfetto.dev)")
    if summary["ended"] != "finished":
        raise SystemExit(1)


def _show(summary: dict[str, Any], took: float) -> None:
    wall, steps = summary["wall_seconds"], summary["steps"]
    if not steps:
        console.print(f"no step was made; {summary['ended']}")
        return
    tell(f"{wall:,.0f} simulated seconds in {took:.1f} s, {wall / max(took, 1e-9):,.0f} x real time")
    console.print(f"{steps} steps, {summary['seconds_per_step']:,.1f} s each; {summary['ended']}")
    table = Table("pool", *right("GPU-hours", "busy"), title="where the GPUs were", title_justify="left")
    for name, hours in summary["gpu_hours"].items():
        table.add_row(name, f"{hours:,.1f}", f"{summary['utilisation'][name]:.0%}")
    console.print(table)
    stale, tokens, rewards = summary["staleness"], summary["tokens"], summary["rewards"]
    wasted = tokens["wasted"] / max(tokens["generated"], 1)
    counts = ", ".join(f"{name} {n:,}" for name, n in summary["ledger"].items() if n)
    console.print(f"cost {summary['cost']:,.1f} H20-hours; trainer waits for a batch "
                  f"{summary['trainer_idle_fraction']:.0%} of the time\n"
                  f"staleness {stale['mean']:.2f} on average, {stale['max']} at most (bound {stale['bound']})\n"
                  f"trajectories: {counts}\n"
                  f"tokens: {tokens['generated']:,} sampled, {wasted:.1%} wasted, "
                  f"{summary['engines']['prefill_tokens']:,} prefilled, {summary['engines']['preempted']:,} turns "
                  f"preempted\nrewards: {rewards['instance_seconds']:,.0f} instance-seconds, "
                  f"{rewards['utilisation']:.0%} busy, {rewards['cold_starts']:,} cold starts\n"
                  f"digest {summary['digest']}")


def swarm(
    seeds: Annotated[int, typer.Option(min=1, help="How many random worlds.")] = 200,
    first: Annotated[int, typer.Option(min=0, help="The first seed.")] = 0,
    processes: Annotated[int, typer.Option(min=0, help="How many at once (0: one a core).")] = 0,
) -> None:
    """Run the control plane in random worlds with random faults; every invariant is checked. Exit code 1: one broke."""
    from rollart.studies.swarms import run_swarm

    with clear_errors():
        if not run_swarm(range(first, first + seeds), processes, console):
            raise SystemExit(1)


def reproduce(
    tables: Annotated[list[str] | None, typer.Argument(metavar="TABLE", help="Which tables (default: all); see "
                                                       "--list.")] = None,
    json_file: Json = None,
    listed: Annotated[bool, typer.Option("--list", help="List the tables and stop.")] = False,
    sensitivity: Annotated[bool, typer.Option(help="Also halve and double each assumed constant.")] = False,
    write: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Write reproduction.md and plots here.")] = None,
    processes: Annotated[int, typer.Option(min=0, help="How many simulations at once (0: one a core).")] = 0,
    seed: Annotated[int, typer.Option(help="Of every simulation.")] = 0,
) -> None:
    """The paper's experiments in simulation: ours beside the paper's."""
    from rollart.studies.reproduce import TABLES, reproduce_tables

    with clear_errors():
        _writable(json_file)
        at = next((path for path in (write, *write.parents) if path.exists()), None) if write else None
        if at and not (at.is_dir() and os.access(at, os.W_OK)):
            raise ConfigError(f"--write {write} is no folder that can be written or made")
        if listed:
            for table in TABLES.values():
                console.print(f"{table.name:12} {table.title}")
            return
        result = reproduce_tables(tables or list(TABLES), processes=processes, seed=seed,
                                  sensitivity=sensitivity, folder=write,
                                  console=errors if str(json_file) == "-" else console)
        _write_json(json_file, result)


def plan(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="A simulation recipe: its model, mix and batch are "
                                           "kept.")],
    cluster: Annotated[str, typer.Option(help="What there is, e.g. 96xH800,32xH20.")],
    budget: Annotated[float | None, typer.Option(help="Most to spend per hour, in hours of one H20.")] = None,
    goal: Annotated[str, typer.Option(help="time (per trained step) or cost (per trained step).")] = "time",
    json_file: Json = None,
    processes: Annotated[int, typer.Option(min=0, help="How many simulations at once (0: one a core).")] = 0,
    sets: Sets = None,
) -> None:
    """Search placements of a cluster by simulation and print the best, with reasons."""
    from rollart.config.toml import read_toml
    from rollart.sim.costs import parse_cluster
    from rollart.studies.plan import make_plan, show_plan

    with clear_errors():
        _writable(json_file)
        if goal not in ("time", "cost"):
            raise ConfigError(f"--goal must be time or cost; got {goal!r}")
        if budget is not None and not budget > 0:
            raise ConfigError(f"--budget must be above 0 H20-hours an hour; got {budget:g}")
        found = make_plan(read_toml(recipe, sets or []), parse_cluster(cluster), goal=goal, budget=budget,
                          processes=processes, console=console)
        _write_json(json_file, found.to_json())
    if str(json_file) != "-":
        show_plan(found, console)
