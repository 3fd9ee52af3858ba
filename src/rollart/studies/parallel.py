"""Many simulations at once: one process a core, with progress."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from rollart.config.simulation import simulation_from
from rollart.sim.world import SimResult, simulate

T = TypeVar("T")


def cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def key(tables: dict[str, Any]) -> str:
    """A name for a recipe that two equal ones share."""
    return json.dumps(tables, sort_keys=True)


def run_key(text: str, seed: int) -> SimResult:
    """Simulate the recipe that `key` wrote."""
    return simulate(simulation_from(json.loads(text)).world(), seed, digest=False)


def map_all(function: Callable[..., T], calls: Sequence[tuple[Any, ...]], processes: int, console: Console,
            what: str) -> list[T]:
    """function(*call) of each call, in their order; `processes` at once (0: one a core). The first error ends it."""
    workers = min(processes or cores(), len(calls)) or 1
    out: list[Any] = [None] * len(calls)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task(what, total=len(calls))
        context = multiprocessing.get_context("spawn")
        before = signal.signal(signal.SIGTERM, _stop)
        with ProcessPoolExecutor(workers, mp_context=context) as pool:
            futures = {pool.submit(function, *call): i for i, call in enumerate(calls)}
            try:
                for future in as_completed(futures):
                    out[futures[future]] = future.result()
                    progress.advance(bar)
            except BaseException:
                for child in multiprocessing.active_children():
                    child.terminate()
                pool.shutdown(cancel_futures=True)
                raise
            finally:
                signal.signal(signal.SIGTERM, before)
    return out


def _stop(number: int, frame: object) -> None:
    """SIGTERM: end like Ctrl-C, so that no worker is left behind."""
    raise KeyboardInterrupt
