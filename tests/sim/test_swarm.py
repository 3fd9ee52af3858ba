"""The whole control plane under random faults holds I1-I8, and every broken variant of it is caught by name."""

import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from mutants import MUTANTS

from rollart.control.settings import SCHEDULES
from rollart.core.types import StalePolicy
from rollart.sim.swarm import attempt, draw_world
from rollart.sim.world import simulate

SEEDS = 500
MUTANT_SEEDS = 60


@pytest.mark.parametrize("seeds", [100, pytest.param(SEEDS, marks=pytest.mark.long)])
def test_random_worlds_hold_every_invariant(seeds):
    results = [attempt(seed) for seed in range(seeds)]
    assert not [result for result in results if isinstance(result, str)][:3]
    ended = Counter(result.ended.partition(":")[0] for result in results)
    assert ended["finished"] > 0.9 * seeds, ended
    counts = sum((Counter(result.counts) for result in results), Counter())
    assert min(counts[fate] for fate in ("trained", "filtered", "stale", "failed", "cancelled")) > seeds / 10


def test_the_worlds_cover_every_schedule_policy_and_kind_of_fault():
    worlds = [draw_world(seed) for seed in range(SEEDS)]
    assert {(w.schedule.name, w.schedule.stale) for w in worlds} == {(s, p) for s in SCHEDULES for p in StalePolicy}
    for fault in ("engine_mtbf", "no_capacity", "open_fails", "open_hangs", "step_fails", "step_hangs", "score_fails",
                  "score_hangs", "trainer_fails"):
        assert 0.2 * SEEDS < sum(getattr(w.faults, fault) > 0 for w in worlds) < 0.6 * SEEDS, fault


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_broken_control_plane_is_caught_by_the_named_check(mutant):
    with mutant.applied():
        for seed in range(MUTANT_SEEDS):
            if isinstance(reason := attempt(seed), str):
                break
        else:
            pytest.fail(f"{mutant.name} passed {MUTANT_SEEDS} seeds")
    assert any(reason.startswith((f"{name}: ", f"InvariantViolated: {name}: ")) for name in mutant.caught_by), \
        f"seed {seed}: {reason}"


def test_the_digest_is_the_same_in_two_processes_and_differs_between_seeds():
    program = "from rollart.sim.swarm import attempt; print([attempt(seed).digest for seed in (1, 2, 3, 5, 8)])"
    source = Path(__file__).parents[2] / "src"
    outputs = [
        subprocess.run([sys.executable, "-c", program], env={**os.environ, "PYTHONHASHSEED": hash_seed,
                       "PYTHONPATH": str(source)}, capture_output=True, text=True, check=True).stdout
        for hash_seed in ("1", "2")
    ]
    assert outputs[0] == outputs[1]
    assert len(set(outputs[0].split())) == 5
    assert simulate(draw_world(1), 1).digest in outputs[0], "a run depends on the runs before it in its process"


PROGRAM = """
from rollart.sim.swarm import draw_world
from rollart.sim.costs import TrainCost
from rollart.sim.world import simulate
from dataclasses import replace
print([simulate(replace(draw_world(s), train=TrainCost(token_s=1e-4, attention=1e-5)), s).digest for s in range(12)])
"""


def test_the_digest_is_the_same_on_every_supported_python():
    others = [found for minor in (11, 12, 13) if (found := shutil.which(f"python3.{minor}"))]
    source = str(Path(__file__).parents[2] / "src")
    outputs = [subprocess.run([python, "-c", PROGRAM], env={**os.environ, "PYTHONPATH": source}, capture_output=True,
                              text=True) for python in (sys.executable, *others)]
    able = [result for result in outputs if not any(word in result.stderr for word in ("ModuleNotFound", "not found"))]
    assert all(result.returncode == 0 for result in able), [result.stderr[-300:] for result in able]
    assert len({result.stdout for result in able}) == 1
    if len(able) < 3:
        pytest.skip(f"only {len(able) - 1} other Python on PATH that can run the core")
