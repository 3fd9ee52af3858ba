"""The `rollart` command. Exit codes: 0 done, 1 the run failed, 2 a user's mistake, 130 interrupted (resumable)."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from rollart import __version__, cli_sim
from rollart.cli_base import Sets, clear_errors, console, tell
from rollart.cli_reward import reward_app
from rollart.config.recipe import Recipe, from_tables, load_recipe
from rollart.core.errors import ConfigError, RunError, first_error
from rollart.observe.run_folder import RunFolder

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
                  help="Disaggregated, asynchronous, multi-task agentic RL training of LLMs.")
envs_app = typer.Typer(no_args_is_help=True, help="List the task domains, or play one in the terminal.")
app.add_typer(envs_app, name="envs")
app.add_typer(reward_app, name="reward")
for command in (cli_sim.simulate, cli_sim.swarm, cli_sim.reproduce, cli_sim.plan):
    app.command()(command)


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
    recipe: Annotated[Path | None, typer.Argument(help="A TOML recipe, e.g. recipes/quickstart.toml.")] = None,
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
        except (KeyboardInterrupt, asyncio.CancelledError):
            finished = False
        except BaseException as error:
            if not isinstance(first_error(error), ConfigError):
                _report(folder)
            elif folder.trajectories() > had:  # it was said late: what has been done stays
                _report(folder)
                tell(f"the run is kept; once this is mended: rollart train --resume {folder.path}")
            elif config_before is None:
                folder.discard()
            else:
                folder.rewrite_config(config_before)  # what was refused changes nothing
            raise
        _report(folder)
    if not finished:
        tell(f"interrupted; continue with: rollart train --resume {folder.path}")
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
            console.print(line, highlight=False, markup=False, soft_wrap=True)


async def _train(recipe: Recipe, folder: RunFolder, *, resume: bool) -> bool:
    from rollart.build import Run, open_run
    from rollart.observe.ledger import Ledger
    from rollart.observe.metrics import Metrics
    from rollart.observe.progress import ProgressView
    from rollart.observe.status import StatusWriter

    view = ProgressView(console, f"{recipe.name}: {folder.path}", recipe.schedule.bound)

    def watchers(ledger: Ledger) -> list[Any]:
        metrics = Metrics(folder.metrics, ledger.accounts, staleness_bound=recipe.schedule.bound)
        return [metrics, view.watch(ledger.accounts)]

    def stop(run: Run) -> None:
        view.note("ending after the step under way; Ctrl-C again ends at once (both can be resumed)")
        run.pipeline.stop()

    with view:
        async with open_run(recipe, folder, resume=resume, subscribers=watchers, progress=view.preparing) as run:
            status = asyncio.create_task(StatusWriter(folder.path, run.snapshot).run(), name="status")
            try:
                with _signals(lambda: stop(run)):
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


@contextmanager
def _signals(stop: Callable[[], None]) -> Iterator[None]:
    """The first Ctrl-C or SIGTERM asks for a clean end; the second cancels at once (the run stays resumable)."""
    loop, task, asked = asyncio.get_running_loop(), asyncio.current_task(), False

    def on_signal() -> None:
        nonlocal asked
        if asked and task:
            task.cancel()
        else:
            asked = True
            stop()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


@app.command(name="eval")
def evaluate(
    target: Annotated[Path, typer.Argument(help="A run folder (its newest checkpoint) or a checkpoint folder.")],
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
                                          "failed": r.failed, "pass_at": r.pass_at} for r in results}))
        return
    for r in results:
        failed = f", {r.failed} attempts failed" if r.failed else ""
        most = len(r.pass_at)
        passed = "".join(f"pass@{k} {r.pass_at[k - 1]:.3f}   " for k in range(2, most + 1)
                         if k == most or k & (k - 1) == 0)
        console.print(f"{escape(r.domain):20} success {r.success:.3f}   {passed}reward {r.reward:.3f}   "
                      f"{r.tasks} tasks{failed}", soft_wrap=True)


@app.command()
def status(run: Annotated[Path, typer.Argument(help="A run folder.")]) -> None:
    """What a run is doing now: versions, slots, who waits for what, the oldest items in flight."""
    with clear_errors():
        from rollart.observe.status import render_status

        RunFolder(run).read_config()
        console.print(render_status(run))


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
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
        write_report(run)
        console.print(render_report(run))


@envs_app.command("list")
def envs_list() -> None:
    """The task domains that ship, and the adapters to those of others, with their settings."""
    import dataclasses

    from rollart.envs.domain import ADAPTERS, DOMAINS, domain_class

    for name in (*DOMAINS, *ADAPTERS):
        try:
            kind = domain_class(name)
        except ConfigError as missing:
            console.print(f"[bold]{name}[/]: {escape(str(missing))}")
            continue
        about = (kind if name in ADAPTERS else sys.modules[kind.__module__]).__doc__ or ""
        console.print(f"[bold]{name}[/]: {about.strip().splitlines()[0]}", soft_wrap=True)
        for f in dataclasses.fields(kind.Settings):
            usual = f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
            console.print(f"    {f.name} = {usual!r}", highlight=False, markup=False, emoji=False, soft_wrap=True)


@envs_app.command("play")
def envs_play(
    name: Annotated[str, typer.Argument(help="A domain, e.g. frozen_lake.")],
    who: Annotated[str, typer.Option(help="person, script or random.")] = "person",
    index: Annotated[int, typer.Option(min=0, help="Which task.")] = 0,
    split: Annotated[str, typer.Option(help="train or eval.")] = "train",
    seed: Annotated[int, typer.Option(help="Seed of the scripted or random player.")] = 0,
    error_rate: Annotated[float, typer.Option(min=0.0, max=1.0, help="How often the scripted player errs.")] = 0.0,
    sets: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a setting, e.g. "
                                                   "max_turns=8. Repeatable.")] = None,
) -> None:
    """Play one task of a domain: yourself, or watch the scripted or the random player."""
    with clear_errors():
        from rollart.config.toml import override
        from rollart.envs.domain import make_domain
        from rollart.envs.play import play

        table: dict[str, Any] = {}
        override(table, sets or [])
        solved = play(make_domain(name, table), index, split=split, who=who, seed=seed,  # type: ignore[arg-type]
                      error_rate=error_rate, write=lambda text: console.print(
                          text, highlight=False, markup=False, emoji=False, soft_wrap=True))
    console.print("solved" if solved else "not solved")


@envs_app.command()
def make_swe(
    source: Annotated[str, typer.Argument(metavar="PACKAGE|FOLDER|humaneval", help="What pip knows, or a folder.")],
    out: Annotated[Path, typer.Option(help="Folder of the set; goes on with one that was begun.")],
    count: Annotated[int, typer.Option(help="Tasks to have.")] = 100,
    seed: Annotated[int, typer.Option(help="Order of the mutants.")] = 0,
    bugs: Annotated[int, typer.Option(help="Mutations in each task's function.")] = 1,
    workers: Annotated[int, typer.Option(help="Runs of tests at a time; 0: one a core.")] = 0,
    test_seconds: Annotated[float, typer.Option(help="Of a core, for one run of tests.")] = 20.0,
    sandbox: Annotated[str, typer.Option(help="Where they run: auto, bubblewrap, podman, docker or trust.")] = "auto",
) -> None:
    """Make bug-fix tasks: mutate a package's functions, keep what its tests tell apart. Ctrl-C, and go on later."""
    with clear_errors(), console.status("") as status:
        from rollart.envs.swe.make import MakeSettings, make_set

        began = time.monotonic()
        try:
            settings = MakeSettings(count=count, seed=seed, bugs=bugs, workers=workers or os.cpu_count() or 1,
                                    test_seconds=test_seconds, sandbox=sandbox)
        except ValueError as error:
            raise ConfigError(f"make-swe: {error}") from None
        verdicts = make_set(source, out, settings, lambda what, kept, tried: status.update(
            f"{what}: {kept} of {count} tasks from {tried} mutants, {time.monotonic() - began:.0f} s"))
    tried = ", ".join(f"{number} {verdict}" for verdict, number in verdicts.most_common())
    console.print(f"{out}: {verdicts['kept']} of {count} tasks, this time in {time.monotonic() - began:.0f} s; "
                  f"of {verdicts.total()} mutants {tried}")


@app.command()
def algorithms(name: Annotated[str | None, typer.Argument(help="One algorithm, e.g. gspo.")] = None) -> None:
    """The algorithms, each as its block of a recipe, and the pieces they are made of: formula, source, defaults."""
    with clear_errors():
        from rollart.algo.listing import listing

        for style, line in listing(name):
            console.print(line, style=style, highlight=False, markup=False, soft_wrap=True)


@app.command()
def doctor() -> None:
    """What is installed here, what works, and what would enable the rest."""
    from rollart.doctor import check_up

    raise SystemExit(0 if check_up(console) else 1)


def main() -> None:
    """Entry point: typer's own usage errors exit with 2."""
    app()


if __name__ == "__main__":
    main()
