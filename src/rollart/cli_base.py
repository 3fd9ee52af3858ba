"""What every command of `rollart` shares: consoles, options, and errors as one clear line with an exit code."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from rollart.core.errors import ConfigError, RollArtError, first_error

console = Console()
errors = Console(stderr=True)

Sets = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE",
                                                help="Override a recipe key, e.g. pipeline.steps=20. Repeatable.")]


def tell(text: str, style: str = "") -> None:
    """To the person, not into what the command prints."""
    errors.print(text, style=style, highlight=False, markup=False, soft_wrap=True)


def fail(message: str, code: int) -> None:
    tell(f"error: {message}", "red")
    raise SystemExit(code)


@contextmanager
def clear_errors(resume: Path | None = None) -> Iterator[None]:
    """One line instead of a traceback for everything a user can do something about."""
    try:
        yield
    except KeyboardInterrupt:
        tell("interrupted")
        raise SystemExit(130) from None
    except (RollArtError, OSError, sqlite3.Error, BaseExceptionGroup) as error:
        first = first_error(error)
        if isinstance(first, ConfigError):
            fail(str(first), 2)
        hint = f"; continue with: rollart train --resume {resume}" if resume and "--resume" not in str(first) else ""
        if isinstance(first, RollArtError | OSError | sqlite3.Error):
            fail(f"{first}{hint}", 1)
        raise first from None
