"""What every command of `rollart` shares: consoles, options, and errors as one clear line with an exit code."""

from __future__ import annotations

import shlex
import shutil
import sqlite3
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from rollart.core.errors import ConfigError, RollArtError, first_error
from rollart.terminal import Terminal, open_streams

console = Terminal()
errors = Terminal(stderr=True)
UsageError = typer.BadParameter.__bases__[0]
"""Of typer, which has it from click or brings its own, by version."""

Sets = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE",
                                                help="Override a recipe key, e.g. pipeline.steps=20. Repeatable.")]


def tell(text: str, style: str = "") -> None:
    """To the person, not into what the command prints."""
    errors.print(text, style=style, soft_wrap=True)


def fail(message: str, code: int) -> None:
    tell(f"error: {message}", "red")
    raise SystemExit(code)


def how_to_resume(run: Path) -> str:
    """The command, as it can be pasted into a shell: also into one that has not this environment's bin on its path."""
    typed = sys.argv[0] if Path(sys.argv[0]).name == "rollart" and not shutil.which("rollart") else "rollart"
    return f"{shlex.quote(typed)} train --resume {shlex.quote(str(run))}"


@contextmanager
def clear_errors(resume: Path | None = None) -> Iterator[None]:
    """One line instead of a traceback for everything a user can do something about."""
    try:
        yield
    except KeyboardInterrupt:
        tell(f"interrupted; continue with: {how_to_resume(resume)}" if resume else "interrupted")
        raise SystemExit(130) from None
    except (RollArtError, OSError, sqlite3.Error, BaseExceptionGroup) as error:
        first = first_error(error)
        if isinstance(first, ConfigError):
            fail(str(first), 2)
        hint = f"; continue with: {how_to_resume(resume)}" if resume and "--resume" not in str(first) else ""
        if isinstance(first, RollArtError | OSError | sqlite3.Error):
            fail(f"{first}{hint}", 1)
        raise first from None


def run_program(app: Callable[..., object]) -> None:
    """Run the command line: a mistake in it is one line and exit code 2, like every other mistake."""
    open_streams()
    try:
        code = app(prog_name="rollart", standalone_mode=False)
    except UsageError as mistake:
        if type(mistake).__name__ == "NoArgsIsHelpError":
            typer.echo(mistake.format_message(), nl=False)
            raise SystemExit(2) from None
        said = " ".join(mistake.format_message().split()).rstrip(".")
        path = mistake.ctx.command_path if mistake.ctx else "rollart"
        fail(f"{said} (see {path} --help)", 2)
    except typer.Abort:
        raise SystemExit(130) from None
    except SystemExit as leaving:
        code = leaving.code
    sys.stdout.flush()
    if not code and (failed := getattr(sys.stdout, "failed", "")):
        fail(f"the output could not be written: {failed}", 1)
    raise SystemExit(code if isinstance(code, int) else 0)
