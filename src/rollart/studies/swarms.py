"""Many random worlds in parallel, and what broke."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Sequence

from rich.console import Console

from rollart.sim.swarm import attempt
from rollart.sim.world import SimResult
from rollart.studies.parallel import map_all

CHUNK = 25
"""Seeds that a process takes at a time."""


def attempt_all(seeds: Sequence[int]) -> list[SimResult | str]:
    return [attempt(seed) for seed in seeds]


def run_swarm(seeds: Sequence[int], processes: int, console: Console) -> bool:
    """Run, print, and say whether all held. Failures are grouped by their text without numbers."""
    began = time.monotonic()
    chunks = [seeds[i:i + CHUNK] for i in range(0, len(seeds), CHUNK)]
    results = [result for part in map_all(attempt_all, [(chunk,) for chunk in chunks], processes, console,
                                          f"{len(seeds)} random worlds") for result in part]
    ended, counts, callbacks = Counter[str](), Counter[str](), 0
    kinds: dict[str, list[tuple[int, str]]] = {}
    for seed, result in zip(seeds, results, strict=True):
        if isinstance(result, str):
            kinds.setdefault(re.sub(r"\d+", "N", result)[:80], []).append((seed, result))
        else:
            ended[result.ended.partition(":")[0]] += 1
            counts.update(result.counts)
            callbacks += result.callbacks
    console.print(f"{len(seeds)} seeds in {time.monotonic() - began:.0f} s, {callbacks:,} callbacks; ended: "
                  f"{_listed(ended)}\ntrajectories: {_listed(counts)}")
    for found in sorted(kinds.values(), key=len, reverse=True):
        shown = ", ".join(str(seed) for seed, _ in found[:10])
        console.print(f"FAILED {len(found)} seeds: {shown}{', ...' if len(found) > 10 else ''}; the first: "
                      f"{found[0][1]}\nreplay: rollart simulate swarm --seed {found[0][0]}",
                      markup=False, soft_wrap=True)
    return not kinds


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {n:,}" for name, n in sorted(counts.items()))
