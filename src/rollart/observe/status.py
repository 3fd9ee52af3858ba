"""status.json, written about once a second while the run lives, and `rollart status`, which reads it at any time.

Keeps true: the file is whole at any instant; what is shown says whether the run lives, has ended or was killed (from
the folder's lock, not from the file). Waits: for the next second.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from rollart.core.errors import ConfigError
from rollart.observe.ledger_view import LedgerView
from rollart.observe.metrics import read_metrics
from rollart.observe.run_folder import RunFolder, atomic_write, read_object

NARROW: Any = {"title_justify": "left", "box": box.SIMPLE, "show_edge": False, "pad_edge": False,
               "padding": (0, 1, 0, 0)}
"""Of tables with so many columns that they only just fit 80 characters."""


class StatusWriter:
    """`snapshot` gives what the run knows of itself, as JSON: any of the sections below, and others.

        versions  {trainer, live, steps}                  slots    {open, ready, training, free}
        waits     [{who, what, seconds}]                  rates    {name: number}
        in_flight [{id, task, stage, stage_seconds, age_seconds, turns}], the oldest first
        engines   [{id, pool, version, running, ...}]
    """

    def __init__(self, path: str | Path, snapshot: Callable[[], Mapping[str, Any]], *, seconds: float = 1.0) -> None:
        self._path, self._snapshot, self._seconds = RunFolder(path).status, snapshot, seconds

    def write(self) -> None:
        status = {"pid": os.getpid(), "at": time.time(), **self._snapshot()}
        with suppress(OSError):  # a full disk ends the run elsewhere; here the next second tries again
            atomic_write(self._path, json.dumps(status, default=str), durable=False)

    async def run(self) -> None:
        """Write until cancelled, and once more then."""
        try:
            while True:
                self.write()
                await asyncio.sleep(self._seconds)
        finally:
            self.write()


def run_state(run_path: str | Path) -> str:
    """One line: `running (process N)`, `finished`, `interrupted`, `failed: ...`, `killed ...` or `no run here`."""
    folder = RunFolder(run_path)
    if not folder.exists():
        return "no run here"
    if (pid := folder.holder()) is not None:
        return f"running (process {pid})"
    with LedgerView(folder.database) as ledger:
        ended, started = ledger.meta("ended"), ledger.meta("started_at")
    if ended:
        return str(ended["reason"])
    if started is None:
        return f"stopped before its first step; continue it with: rollart train --resume {shlex.quote(str(run_path))}"
    return f"killed (it did not end by itself); continue it with: rollart train --resume {shlex.quote(str(run_path))}"


def read_status(run_path: str | Path) -> dict[str, Any]:
    """The newest status.json, or {} if none was written. Raises ConfigError for one that this did not write."""
    path = RunFolder(run_path).status
    try:
        status = read_object(path)
    except FileNotFoundError:
        return {}
    kinds = {"at": int | float, "versions": dict, "in_flight": list, "waits": list}
    if wrong := [name for name, kind in kinds.items() if not isinstance(status.get(name, ()), kind | tuple)]:
        raise ConfigError(f"{path} is damaged ({wrong[0]} is {status[wrong[0]]!r}): remove it, a live run writes it "
                          "anew")
    return status


def render_status(run_path: str | Path) -> RenderableType:
    """What `rollart status RUN` prints: state, ledger, success per domain, and the newest status of a live run."""
    folder, state = RunFolder(run_path), run_state(run_path)
    status = read_status(run_path)
    colour = "green" if state.startswith(("running", "finished")) else "yellow"
    head = Text.assemble((f"{folder.path}  ", "bold"), (state, colour))
    if status and state.startswith("running"):
        head.append(f"  {max(0.0, time.time() - status.get('at', 0.0)):.0f} s ago", "dim")
    parts: list[RenderableType] = [head]
    with LedgerView(folder.database) as ledger:
        if state.startswith("running") and not status:
            parts.append(Text("it is being prepared; its own screen shows how far it is", "dim"))
        parts += _progress(read_metrics(folder.metrics), ledger.evaluations())
        if by_domain := ledger.by_domain():
            parts.append(ledger_table(by_domain, ledger.counts()))
    shown = {key: value for key, value in status.items() if key not in ("pid", "at") and value}
    if "waits" in shown:
        shown["waits"] = waits(status)
    if state.startswith("running"):
        parts += [_section(name, value) for name, value in shown.items()]
    elif oldest := shown.get("in_flight"):
        parts.append(_section("in flight when it was last seen", oldest[:5]))
    return Group(*parts)


def _progress(lines: Sequence[Mapping[str, Any]], evaluations: Sequence[Mapping[str, Any]]) -> list[RenderableType]:
    steps = [line for line in lines if line["kind"] == "step"]
    if not steps:
        return [Text("no step has ended yet", "dim")]
    last, of = steps[-1], [line["steps"] for line in lines if line["kind"] == "start"]
    text = f"step {last['version']}" + (f" of {of[-1]}" if of else "")
    text += (f", {last['wall_seconds']:.0f} s, last step {last['seconds']:.1f} s after {last['waited']:.1f} s of "
             f"waiting, staleness at most {last['staleness']['max']}")
    recent = Table("domain", *right("last steps", "held out, 95 %", "at version"), title="success",
                   title_justify="left")
    for domain in sorted({d for line in steps for d in line["successes"]}):
        seen = [line["successes"][domain] for line in steps if domain in line["successes"]][-10:]
        held = [(f"{e['success']:.2f} ({e['interval'][0]:.2f}-{e['interval'][1]:.2f})", str(e["version"]))
                for e in evaluations if e["domain"] == domain]
        recent.add_row(domain, f"{sum(seen) / len(seen):.2f}", *(held[-1] if held else ("-", "-")))
    return [Text(text), recent]


def waits(status: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Who waits for what. The supervisor always waits for a loss and is left out."""
    return [wait for wait in status.get("waits", ()) if wait["who"] != "supervisor"]


def right(*names: str) -> list[Column]:
    """Columns of numbers."""
    return [Column(name, justify="right") for name in names]


def ledger_table(by_domain: Mapping[str, Mapping[str, int]], counts: Mapping[str, int]) -> Table:
    """Trajectories by domain and fate, with their sum."""
    table = Table(title="trajectories", show_footer=len(by_domain) > 1, **NARROW)
    table.add_column("domain", footer="all")
    for name, n in counts.items():
        table.add_column(name.replace("_", " "), justify="right", footer=f"{n:,}")
    for domain, numbers in by_domain.items():
        table.add_row(domain, *(f"{numbers[name]:,}" for name in counts))
    return table


def _section(name: str, value: Any) -> RenderableType:
    """Any part of a snapshot: mappings as one line, lists of mappings as a table, else as text."""
    if isinstance(value, Mapping):
        return Text(f"{name}: " + ", ".join(f"{key} {_short(item)}" for key, item in value.items()).replace("_", " "))
    if isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(row, Mapping) for row in value):
        columns = list(dict.fromkeys(key for row in value for key in row))
        table = Table(*(column.replace("_", " ") for column in columns), **NARROW)
        for row in value[:5 if name == "in_flight" else 20]:
            table.add_row(*(Text(_short(row.get(column, ""))) for column in columns))
        return Group(Text(name.replace("_", " "), "italic"), table)  # a title would wrap where the table is narrow
    return Text(f"{name}: {_short(value)}")


def _short(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
