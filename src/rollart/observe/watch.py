"""`rollart status --watch`: a run looked at again and again until it ends, from a process of its own.

Keeps true: it only reads, as `rollart status` does. In a terminal it has a screen of its own and leaves the last look
behind; elsewhere every look is one line. Waits: `seconds` between two looks.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.live import Live
from rich.text import Text

from rollart.observe.status import read_status, render_status, run_state, waits
from rollart.terminal import Terminal


def watch(run: Path, seconds: float, console: Terminal) -> None:
    """Show `run` every `seconds` until it ends, Ctrl-C, or nobody reads the output any more."""
    before = signal.signal(signal.SIGTERM, _leave)  # so that the terminal gets its own screen back
    try:
        with suppress(KeyboardInterrupt):
            if console.live:
                _on_a_screen(run, seconds, console)
            else:
                while _running(run) and not console.gone:
                    console.print(glance(run), soft_wrap=True)
                    time.sleep(seconds)
    finally:
        signal.signal(signal.SIGTERM, before)
    console.print(render_status(run))


def _on_a_screen(run: Path, seconds: float, console: Terminal) -> None:
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while _running(run) and not console.gone:
            head = Text(waiting(read_status(run)), no_wrap=True, overflow="ellipsis")
            live.update(Group(head, render_status(run)), refresh=True)
            time.sleep(seconds)


def _running(run: Path) -> bool:
    return run_state(run).startswith("running")


def glance(run: Path) -> str:
    """One line: state, step, and what the run waits for."""
    status = read_status(run)
    versions = status.get("versions", {})
    step = f"; step {versions['trainer']} of {versions['steps']}" if versions else ""
    return f"{time.strftime('%H:%M:%S')} {run_state(run)}{step}; {waiting(status)}"


def waiting(status: Mapping[str, Any]) -> str:
    """`waits: train for a full batch of 24 groups (3 s)`."""
    if not (found := waits(status)):
        return "nothing waits" if status else "waits: for its preparation"
    return "waits: " + ", ".join(f"{w['who']} for {w['what']} ({w['seconds']:.0f} s)" for w in found)


def _leave(number: int, frame: object) -> None:
    raise SystemExit(128 + number)
