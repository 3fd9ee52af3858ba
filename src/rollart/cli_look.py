"""`rollart status | report | eval`: looking at a run from outside it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Annotated

import typer

from rollart.cli_base import Sets, clear_errors, console
from rollart.config.recipe import from_tables, load_recipe
from rollart.core.errors import ConfigError, RunError
from rollart.observe.run_folder import RunFolder


def evaluate(
    target: Annotated[Path, typer.Argument(metavar="RUN|CHECKPOINT", help="A run folder (its newest checkpoint) "
                                             "or a checkpoint folder.")],
    recipe: Annotated[Path | None, typer.Option(help="Recipe with the domains, for a bare checkpoint folder.")] = None,
    tasks: Annotated[int | None, typer.Option(min=1, help="Held-out tasks per domain.  [default: the recipe's]",
                                              show_default=False)] = None,
    samples: Annotated[int | None, typer.Option(min=1, help="Attempts at each task, for pass@k.  [default: the "
                                                            "recipe's]", show_default=False)] = None,
    sets: Sets = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Held-out success per domain of a run's newest checkpoint, or of any checkpoint folder."""
    with clear_errors():
        from rollart.config.toml import override

        folder = RunFolder(target)
        owner = RunFolder(target.resolve().parent.parent)  # of a checkpoint that lies in its run
        given = {"tasks": tasks, "samples": samples}
        sets = [*(sets or []), *(f"evaluation.{key}={value}" for key, value in given.items() if value)]
        if folder.database.exists():
            if recipe:
                raise ConfigError(f"{target} is a run with a recipe of its own: leave --recipe out")
            tables = folder.read_config()
            override(tables, sets)
            settings, newest = from_tables(tables), folder.newest_checkpoint()
            if newest is None:
                raise ConfigError(f"{target} has no whole checkpoint yet: wait for one, or name a checkpoint folder")
            path = newest[1]
        elif recipe is None and owner.database.exists():
            tables = owner.read_config()
            override(tables, sets)
            settings, path = from_tables(tables), target
        elif recipe is None:
            raise ConfigError(f"{target} is not a run folder (no config.json of a run): for a checkpoint folder, name "
                              "the recipe that has the domains with --recipe")
        else:
            settings, path = load_recipe(recipe, sets), target
        if not settings.evaluation.tasks:
            raise ConfigError("evaluation.tasks = 0 leaves nothing to play: set --tasks")
        from rollart.build import evaluate_policy

        try:
            results = asyncio.run(evaluate_policy(settings, path))
        except ConfigError:
            newest = folder.newest_checkpoint() if folder.database.exists() else None
            if newest is None or newest[1] == path:
                raise
            path = newest[1]  # a run that goes on has removed the older one meanwhile
            results = asyncio.run(evaluate_policy(settings, path))
        if not results:
            raise RunError(f"{path} could not be evaluated: the engine was lost")
    if as_json:
        typer.echo(json.dumps({r.domain: {"success": r.success, "reward": r.reward, "tasks": r.tasks,
                                          "failed": r.failed, "pass_at": r.pass_at, "interval": r.interval}
                               for r in results}))
        return
    for r in results:
        failed = f", {r.failed} attempts failed" if r.failed else ""
        most = len(r.pass_at)
        passed = "".join(f"pass@{k} {r.pass_at[k - 1]:.3f}   " for k in range(2, most + 1)
                         if k == most or k & (k - 1) == 0)
        low, high = r.interval
        console.print(f"{r.domain:20} success {r.success:.3f} ({low:.3f}-{high:.3f})   {passed}reward {r.reward:.3f}   "
                      f"{r.tasks} tasks{failed}", soft_wrap=True)


def status(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    watching: Annotated[bool, typer.Option("--watch", help="Look again and again, until the run ends or Ctrl-C.")] =
    False,
    seconds: Annotated[float, typer.Option("--every", metavar="SECONDS", min=0.2, max=3600.0,
                                           help="With --watch: time between two looks.")] = 2.0,
) -> None:
    """What a run is doing now: versions, slots, who waits for what, the oldest items in flight."""
    with clear_errors():
        from rollart.observe.status import render_status
        from rollart.observe.watch import watch

        RunFolder(run).read_config()
        if watching:
            watch(run, seconds, console)
            return
        console.print(render_status(run))


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    serve: Annotated[int | None, typer.Option("--serve", metavar="PORT",
                                              help="Serve the live report on this loopback port.")] = None,
) -> None:
    """Write report.html again from what the run has so far, and print its short form."""
    with clear_errors():
        from rollart.observe.report import render_report, write_report

        RunFolder(run).read_config()
        if serve is not None:
            from rollart.observe.serve import serve_report

            serve_report(run, serve, lambda url: console.print(f"live report at {url} (Ctrl-C ends it)"))
            return
        try:
            write_report(run)
        except OSError as error:  # of another user, or on a full disk: it can be read all the same
            console.print(render_report(run))
            raise RunError(f"the page could not be written: {error}") from None
        console.print(render_report(run))
