"""A tiny recipe for real runs in tests: seconds, not minutes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TINY = """
name = "tiny"
seed = {seed}

[pipeline]
steps = {steps}
checkpoint_every = 1

[rollout]
batch_groups = 2
group_size = 4

[model.small]
layers = 1
width = 32
heads = 2
kv_heads = 1
mlp = 64

[evaluation]
tasks = 0

[domains.frozen_lake]
size = 2
max_turns = 3

[domains.calculator]
smallest = 2
largest = 2
max_turns = 2
max_tokens = 6
"""


PRECISION = os.environ.get("ROLLART_TEST_PRECISION", "")
"""What `learner.precision` is set to where a test does not choose it; empty: the product's default."""
GAP = 2e-2 if PRECISION == "bfloat16" else 1e-4
"""The most that engine (float32 on a CPU) and learner may differ by in a log-prob, on average, with equal weights."""


def tiny_recipe(folder: Path, *, steps: int = 3, seed: int = 0, extra: str = "") -> Path:
    path = folder / "tiny.toml"
    path.write_text(TINY.format(steps=steps, seed=seed) + extra)
    return path


def rollart(*arguments: object, **options: object) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=240, check=False,
                          env=environment(), **options)  # type: ignore[call-overload, no-any-return]


def command(*arguments: object) -> list[str]:
    forced = ["--set", f"learner.precision={PRECISION}"] if PRECISION and arguments[:1] == ("train",) else []
    return [sys.executable, "-m", "rollart", *(str(a) for a in arguments), *forced]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "COLUMNS": "120"}
