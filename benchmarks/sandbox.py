"""Opening, running and closing sandboxes, with and without those that wait ready; and what is left afterwards.

    python benchmarks/sandbox.py [--cycles 1000] [--kind bubblewrap] [--pause 0.1]
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter, sleep

from rollart.sandbox import SandboxSettings, choose, open_sandbox
from rollart.sandbox.box import close_warm


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cycles", type=int, default=1000, help="open and close so often, in all")
    parser.add_argument("--kind", default="auto")
    parser.add_argument("--pause", type=float, default=0.1, help="seconds from a close to the next opening, if warm: "
                        "an episode's turns; those that wait ready start meanwhile")
    options = parser.parse_args()
    kind = choose(options.kind)
    with tempfile.TemporaryDirectory() as folder:
        for i in range(300):
            Path(folder, f"module_{i}.py").write_text("x = 1\n" * 400)
        rows = [(warm, template) for warm in (0, 1) for template in (None, Path(folder))]
        print(f"{kind}: milliseconds, median and 99th percentile of {options.cycles // len(rows)} cycles a row\n")
        print(f"{'':34}{'open':>14}{'first command':>16}{'second':>14}{'close':>14}")
        before = left()
        for warm, template in rows:
            settings = SandboxSettings(kind=kind, warm=warm)
            times = [cycle(settings, template, options.pause * warm) for _ in range(options.cycles // len(rows))]
            name = f"{'warm' if warm else 'cold'}, {'template of 300 files' if template else 'empty'}"
            print(f"{name:34}" + "".join(f"{shown(column):>{width}}" for column, width in
                                         zip(zip(*times, strict=True), (14, 16, 14, 14), strict=True)), flush=True)
            close_warm()
        print(f"\nleft behind (processes, mounts, folders, descriptors): before {before}, after {left()}")


def cycle(settings: SandboxSettings, template: Path | None, pause: float) -> tuple[float, float, float, float]:
    """Seconds of each stage."""
    started = perf_counter()
    sandbox = open_sandbox(settings, template)
    opened = perf_counter()
    sandbox.run(["true"])
    first = perf_counter()
    sandbox.run(["true"])
    second = perf_counter()
    sandbox.close()
    closed = perf_counter()
    sleep(pause)
    return opened - started, first - opened, second - first, closed - second


def shown(seconds: tuple[float, ...]) -> str:
    ordered = sorted(seconds)
    return f"{median(ordered) * 1e3:.1f} {ordered[int(len(ordered) * 0.99)] * 1e3:.1f}"


def left() -> tuple[int, int, int, int]:
    """What there is of ours on this machine."""
    ours = 0
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            ours += f"rollart-sandbox-{os.getpid()}-".encode() in path.read_bytes()
        except OSError:
            pass
    mounts = len(Path("/proc/self/mounts").read_text().splitlines())
    folders = len(list(Path(tempfile.gettempdir()).glob(f"rollart-sandbox-{os.getpid()}-*")))
    return ours, mounts, folders, len(os.listdir("/proc/self/fd"))


if __name__ == "__main__":
    main()
