"""Data that nobody on this project wrote: in $ROLLART_DATA, or in shared/data beside the repository."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

FOLDER = Path(os.environ.get("ROLLART_DATA") or Path(__file__).parents[3] / "shared" / "data")


def recorded(name: str) -> str:
    """The file's path; skips the test where it is absent."""
    if not (FOLDER / name).exists():
        pytest.skip(f"needs {name} in $ROLLART_DATA (here {FOLDER})")
    return str(FOLDER / name)
