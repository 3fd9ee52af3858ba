"""How long environments take to open and to answer, by domain, in memory that does not grow with the run.

Keeps true: a count is kept in the bucket of its seconds, a fortieth of a decade wide, so a quantile is right to 3 %.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

_STEPS = 40  # buckets a decade

Latencies = dict[str, dict[str, dict[str, int]]]
"""{domain: {"open" | "step" | "retries": {bucket: count}}}; JSON. A retry is an opening that was tried again."""


def add(latencies: Latencies, domain: str, stage: str, seconds: float, count: int = 1) -> None:
    buckets = latencies.setdefault(domain, {}).setdefault(stage, {})
    bucket = str(round(_STEPS * math.log10(max(seconds, 1e-6))))
    buckets[bucket] = buckets.get(bucket, 0) + count


def figures(stages: Mapping[str, Mapping[str, int]]) -> dict[str, Any]:
    """Of one domain: opened, retries, calls, and the median and 99th percentile of open and step (seconds)."""
    counts = {name: sum(stages.get(stage, {}).values())
              for name, stage in (("opened", "open"), ("retries", "retries"), ("calls", "step"))}
    return {**counts, **{f"{stage}_p{share}_seconds": _quantile(stages.get(stage, {}), share / 100)
                         for stage in ("open", "step") for share in (50, 99)}}


def _quantile(buckets: Mapping[str, int], share: float) -> float:
    """0 where nothing was counted."""
    left = math.ceil(share * sum(buckets.values()))
    for bucket in sorted(map(int, buckets)):
        left -= buckets[str(bucket)]
        if left <= 0:
            return float(f"{10 ** (bucket / _STEPS):.3g}")
    return 0.0
