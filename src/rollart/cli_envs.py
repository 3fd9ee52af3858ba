"""`rollart envs list | play | make-swe`: the task domains, apart from any run."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.padding import Padding
from rich.text import Text

from rollart.cli_base import clear_errors, console
from rollart.core.errors import ConfigError

envs_app = typer.Typer(no_args_is_help=True, help="List the task domains, or play one in the terminal.")


@envs_app.command("list")
def envs_list() -> None:
    """The task domains that ship, and the adapters to those of others, with their settings."""
    import dataclasses

    from rollart.envs.domain import ADAPTERS, DOMAINS, domain_class

    for name in (*DOMAINS, *ADAPTERS):
        try:
            kind = domain_class(name)
        except ConfigError as missing:
            console.print(Text.assemble((name, "bold"), f": {missing}"), soft_wrap=True)
            continue
        about = (kind if name in ADAPTERS else sys.modules[kind.__module__]).__doc__ or ""
        console.print(Text.assemble((name, "bold"), f": {about.strip().splitlines()[0]}"), soft_wrap=True)
        usual = {f.name: f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
                 for f in dataclasses.fields(kind.Settings)}
        console.print(Padding(", ".join(f"{key} = {value!r}" for key, value in usual.items()), (0, 0, 0, 4)))


@envs_app.command("play")
def envs_play(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A domain, e.g. frozen_lake.")],
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
        play(make_domain(name, table), index, split=split, who=who, seed=seed,  # type: ignore[arg-type]
             error_rate=error_rate, write=lambda text: console.print(text, soft_wrap=True))


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
