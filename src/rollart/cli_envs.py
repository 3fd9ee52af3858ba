"""`rollart envs make-swe`: bug-fix tasks out of a package with tests."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated

import typer

from rollart.cli_base import clear_errors, console
from rollart.core.errors import ConfigError


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
