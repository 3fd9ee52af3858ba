"""S1, S4: kill -9 at random moments, each followed by a resume."""

from __future__ import annotations

import json
import random
import signal
import sqlite3
import subprocess
import time
from pathlib import Path

import pytest

from helpers import command, environment, rollart, tiny_recipe

KILLS = 20
STEPS = 60
PER_STEP = 8


def counts(run: Path) -> dict[str, int]:
    with sqlite3.connect(run / "run.db") as db:
        found = dict(db.execute("SELECT fate, count(*) FROM trajectories GROUP BY fate"))
    return {name: found.get(name, 0) for name in ("trained", "filtered", "stale", "failed", "cancelled", "in_flight")}


def start_and_kill(arguments: list[object], run: Path, chance: random.Random) -> None:
    """Start, wait until the run lives, then kill -9 at a random moment of the next second."""
    before = (run / "status.json").stat().st_mtime_ns if (run / "status.json").exists() else 0
    process = subprocess.Popen(command(*arguments), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                               env=environment())
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        if (run / "status.json").exists() and (run / "status.json").stat().st_mtime_ns > before:
            time.sleep(chance.uniform(0.0, 1.0))
            process.kill()
            break
        time.sleep(0.01)
    _, errors = process.communicate(timeout=60)
    assert process.returncode in (-signal.SIGKILL, 0), errors.decode()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_after_each_of_twenty_kills_the_ledger_holds_and_the_end_is_exact(tmp_path):
    chance = random.Random(7)
    run = tmp_path / "run"
    recipe = tiny_recipe(tmp_path, steps=STEPS, extra="\n[environments]\nidle_processes = 16\n")
    start_and_kill(["train", recipe, "--run", run], run, chance)
    for _ in range(KILLS - 1):
        dispatched = sum(counts(run).values())
        start_and_kill(["train", "--resume", run], run, chance)
        now = counts(run)
        assert sum(now.values()) >= dispatched, "a dispatched trajectory was forgotten"
        assert now["trained"] + now["filtered"] <= STEPS * PER_STEP
    last = rollart("train", "--resume", run)
    assert last.returncode == 0, last.stderr
    final = counts(run)
    assert final["in_flight"] == 0
    assert final["trained"] + final["filtered"] == STEPS * PER_STEP
    with sqlite3.connect(run / "run.db") as db:
        per_step = dict(db.execute(
            "SELECT step, count(*) FROM trajectories WHERE fate IN ('trained', 'filtered') GROUP BY step"))
    assert per_step == dict.fromkeys(range(STEPS), PER_STEP), "each step trained one batch, and none twice"
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == STEPS
    assert summary["staleness"]["max"] <= summary["staleness"]["bound"]
    assert summary["ledger"]["dispatched"] == sum(final.values())


def test_an_interrupt_ends_cleanly_says_how_to_go_on_and_can_go_on(tmp_path):
    run = tmp_path / "run"
    process = subprocess.Popen(command("train", tiny_recipe(tmp_path, steps=1000), "--run", run),
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment())
    for line in process.stdout:
        if line.startswith("step 2"):
            process.send_signal(signal.SIGINT)
            break
    out, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert f"rollart train --resume {run}" in errors
    assert "Traceback" not in errors + out
    reached = json.loads((run / "summary.json").read_text())["steps"]
    assert counts(run)["trained"] == reached * PER_STEP
    after = rollart("train", "--resume", run, "--set", f"pipeline.steps={reached + 1}")
    assert after.returncode == 0, after.stderr
    assert counts(run)["trained"] == (reached + 1) * PER_STEP
    assert counts(run)["in_flight"] == 0
