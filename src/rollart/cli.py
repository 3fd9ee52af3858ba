"""The `rollart` command. Exit codes: 0 done, 1 the run failed, 2 a user's mistake, 130 interrupted (resumable)."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from rollart import __version__, cli_sim
from rollart.cli_base import Sets, clear_errors, console, how_to_resume, run_program, tell
from rollart.cli_envs import envs_app
from rollart.cli_look import evaluate, report, status
from rollart.cli_reward import reward_app
from rollart.config.recipe import Recipe, from_tables, load_recipe
from rollart.core.errors import ConfigError, RollArtError, first_error
from rollart.observe.run_folder import RunFolder

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
                  help="Disaggregated, asynchronous, multi-task agentic RL training of LLMs.")
app.add_typer(envs_app, name="envs")
app.add_typer(reward_app, name="reward")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"rollart {__version__}")
        raise typer.Exit


@app.callback()
def root(version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True,
                                               help="Print the version and exit.")] = False) -> None:
    """Disaggregated, asynchronous, multi-task agentic RL training of LLMs."""


@app.command()
def train(
    recipe: Annotated[Path | None, typer.Argument(metavar="RECIPE", help="A TOML recipe, e.g. "
                                                  "recipes/quickstart.toml.")] = None,
    run: Annotated[Path | None, typer.Option("--run", help="Folder for this run (new). Default: runs/NAME-N.")] = None,
    resume: Annotated[Path | None, typer.Option("--resume", help="Go on with the run in this folder.")] = None,
    sets: Sets = None,
    ray: Annotated[str, typer.Option("--ray", metavar="ADDRESS", help="Run on Ray: HOST:PORT of its head, auto, or "
                                     "local (start the recipe's nodes here). Sets cluster.address.")] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check the recipe, print what would run, stop.")] = False,
) -> None:
    """Train by a recipe, or go on with an interrupted run."""
    with clear_errors():
        if (recipe is None) == (resume is None):
            raise ConfigError("train needs either a RECIPE to start or --resume FOLDER to go on; got "
                              + ("both" if recipe else "neither"))
        if resume and run:
            raise ConfigError("--run names a new run, --resume an old one: give one of them")
        if resume:
            from rollart.config.toml import override

            tables = RunFolder(resume).read_config()
            before = from_tables(tables)
            override(tables, sets or [])
            settings = from_tables(tables)
            _check_resume(before, settings)
        else:
            assert recipe is not None
            settings = load_recipe(recipe, sets or [])
        if ray:
            settings = replace(settings, cluster=replace(settings.cluster, address=ray))
        if not settings.cluster.address:
            from rollart.parts import check_parts

            check_parts(settings)
        if dry_run:
            _describe(settings)
            return
        folder = RunFolder(resume or run or _free_folder(settings.name))
        config_before = folder.resume() if resume else None
        had = folder.trajectories()
        if resume:
            folder.rewrite_config(settings.to_json())
        else:
            folder.create(settings.to_json())
    with clear_errors(folder.path):
        try:
            with folder:
                finished = asyncio.run(_train(settings, folder, resume=bool(resume)))
        except asyncio.CancelledError:
            finished = False
        except BaseException as error:
            with suppress(OSError, RollArtError, sqlite3.Error):  # what ended the run is what is told
                if not isinstance(first_error(error), ConfigError):
                    _report(folder)
                elif folder.trajectories() > had:  # it was said late: what has been done stays
                    _report(folder)
                    tell(f"the run is kept; once this is mended: {how_to_resume(folder.path)}")
                elif config_before is None:
                    folder.discard()
                else:
                    folder.rewrite_config(config_before)  # what was refused changes nothing
            raise
        _report(folder)
    if not finished:
        tell(f"interrupted; continue with: {how_to_resume(folder.path)}")
        raise SystemExit(130)


def _check_resume(before: Recipe, after: Recipe) -> None:
    """What a run is made of stays as it began; the rest may change. Raises ConfigError."""
    for name in ("seed", "model", "chat", "lora", "warm_start", "domains"):
        if getattr(before, name) != getattr(after, name):
            raise ConfigError(f"--resume goes on with the same {name}: leave {name} out of --set, or start a new run")


def _free_folder(name: str) -> Path:
    number = 1
    while (path := Path("runs") / f"{name}-{number}").exists():
        number += 1
    return path


def _describe(recipe: Recipe) -> None:
    """The resolved recipe and what it amounts to."""
    rollout, bound = recipe.rollout, recipe.schedule.bound
    slots = recipe.slots
    per_step = rollout.batch_groups * rollout.group_size
    weights = {name: entry.weight for name, entry in recipe.domains.items()}
    console.print_json(json.dumps(recipe.to_json()))
    console.print(f"{recipe.pipeline.steps} steps of {rollout.batch_groups} groups x {rollout.group_size} = {per_step} "
                  f"trajectories; schedule {recipe.schedule.name}, at most {bound} versions old, {slots} group slots, "
                  f"up to {slots * (rollout.group_size + rollout.spares)} environments at once")
    console.print("domains by weight: " + ", ".join(f"{n} {w / sum(weights.values()):.0%}" for n, w in weights.items()))
    if recipe.cluster.address or recipe.cluster.pools:
        from rollart.build_ray import plan_lines

        for line in plan_lines(recipe):
            console.print(line, soft_wrap=True)


async def _train(recipe: Recipe, folder: RunFolder, *, resume: bool) -> bool:
    from rollart.observe.ledger import Ledger
    from rollart.observe.ledger_view import LedgerView
    from rollart.observe.metrics import Metrics
    from rollart.observe.progress import ProgressView
    from rollart.observe.status import StatusWriter
    from rollart.signals import heeded

    view = ProgressView(console, f"{recipe.name}: {folder.path}", recipe.schedule.bound)
    with LedgerView(folder.database) as before:  # while no ledger is open in this process
        view.earlier(before.evaluations())

    def watchers(ledger: Ledger) -> list[Any]:
        metrics = Metrics(folder.metrics, ledger.accounts, staleness_bound=recipe.schedule.bound)
        return [metrics, view.watch(ledger.accounts)]

    runs: list[Any] = []

    def ask() -> bool:
        for run in runs:
            view.note("ending after the step or evaluation under way; Ctrl-C again ends at once (both can go on)")
            run.pipeline.stop()
        return bool(runs)

    with view, heeded(ask, pause=view.pause, resume=view.resume):
        from rollart.build import open_run  # takes seconds, with a panel and heeding signals

        async with open_run(recipe, folder, resume=resume, subscribers=watchers, progress=view.preparing) as run:
            runs.append(run)
            status = asyncio.create_task(StatusWriter(folder.path, run.snapshot).run(), name="status")
            try:
                return await run.train()
            finally:
                status.cancel()
                await asyncio.wait([status])


def _report(folder: RunFolder) -> None:
    """The end of a run, however it ended: summary.json, report.html and their short form."""
    from rollart.observe.report import render_report, write_report
    from rollart.observe.summary import write_summary

    if folder.metrics.exists():
        write_summary(folder.path)
        write_report(folder.path)
        console.print(render_report(folder.path))


app.command(name="status")(status)
app.command(name="report")(report)
app.command(name="eval")(evaluate)


@app.command()
def algorithms(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="One algorithm, e.g. gspo.")] = None,
) -> None:
    """The algorithms, each as its block of a recipe, and the pieces they are made of: formula, source, defaults."""
    with clear_errors():
        from rollart.algo.listing import listing

        for style, line in listing(name):
            console.print(line, style=style, soft_wrap=True)


@app.command()
def doctor() -> None:
    """What is installed here, what works, and what would enable the rest."""
    from rollart.doctor import check_up

    raise SystemExit(0 if check_up(console) else 1)


for command in (cli_sim.simulate, cli_sim.plan, cli_sim.reproduce, cli_sim.swarm):
    app.command()(command)


def main() -> None:
    """Entry point of the installed program and of `python -m rollart`."""
    run_program(app)


if __name__ == "__main__":
    main()
