"""S1, S4: kill -9 at random moments, each followed by a resume; and looks of every sort at a run, dead or alive."""

from __future__ import annotations

import json
import random
import shutil
import signal
import sqlite3
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from helpers import command, environment, rollart, tiny_recipe
from rollart.observe.run_folder import RunFolder

KILLS = 6  # the long test below has twenty
STEPS = 60
PER_STEP = 8


def counts(run: Path) -> dict[str, int]:
    """As any program would: a connection that may write, opened and closed."""
    with closing(sqlite3.connect(run / "run.db")) as db:
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
def test_after_each_kill_the_ledger_holds_and_the_end_is_exact(tmp_path):
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


@contextmanager
def served(run: Path) -> Iterator[str]:
    """The address of `rollart report --serve`."""
    server = subprocess.Popen(command("report", run, "--serve", 0), stdout=subprocess.PIPE, text=True,
                              env=environment())
    try:
        yield server.stdout.readline().split()[3]
    finally:
        server.terminate()
        server.communicate(timeout=60)


def looks(run: Path, page: str, copy: Path) -> dict[str, Callable[[], object]]:
    """Every sort of look at a run, by name; each raises if it does not get to see it."""
    def cp() -> None:  # may miss a file that is being replaced, and may be torn: it is the run that must not mind
        shutil.rmtree(copy, ignore_errors=True)
        subprocess.run(["cp", "-r", run, copy], stderr=subprocess.DEVNULL, check=False)
        assert (copy / "run.db").exists()

    def told(name: str) -> None:
        done = rollart(name, run)
        assert done.returncode == 0, done.stderr
        assert "trajectories" in done.stdout

    found: dict[str, Callable[[], object]] = {
        "status": lambda: told("status"), "python": lambda: counts(run)["trained"], "cp": cp,
        "report": lambda: told("report"), "serve": lambda: urllib.request.urlopen(page, timeout=60).read()}
    if shutil.which("sqlite3"):
        found["sqlite3"] = lambda: subprocess.run(["sqlite3", run / "run.db", "select count(*) from trajectories"],
                                                  stdout=subprocess.DEVNULL, check=True)
    return found


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("kills", "each"), [(3, 6), pytest.param(20, 10, marks=pytest.mark.long)])
def test_looks_at_a_run_change_nothing_of_it_alive_or_killed(tmp_path, kills, each):
    """`each` looks in a life, and one of every sort between a kill and its resume; then the ledger is exact."""
    run, seen, lives = tmp_path / "run", 0, 0
    recipe = tiny_recipe(tmp_path, steps=100_000, extra="\n[environments]\nidle_processes = 16\n")
    arguments = ["train", recipe, "--run", run]
    while lives < kills:
        process = subprocess.Popen(command(*arguments), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                                   env=environment())
        try:
            before, deadline = RunFolder(run).newest_checkpoint() or (0, run), time.monotonic() + 120
            while (RunFolder(run).newest_checkpoint() or (0, run))[0] < before[0] + 2:
                assert process.poll() is None, process.stderr.read()
                assert time.monotonic() < deadline, "no checkpoint in two minutes"
                time.sleep(0.02)
            with served(run) as page:
                sorts = looks(run, page, tmp_path / "copy")
                for n in range(each):
                    list(sorts.values())[(lives * each + n) % len(sorts)]()
                    assert process.poll() is None, (list(sorts)[n % len(sorts)], process.returncode)
                there = counts(run)
                process.kill()
                process.wait()
                for look in sorts.values():
                    look()
                seen, lives = seen + each + len(sorts), lives + 1
        finally:
            process.kill()
            process.communicate()
        assert sum(counts(run).values()) >= sum(there.values()), "a dispatched trajectory was forgotten"
        assert counts(run)["trained"] >= there["trained"], "what was committed was lost"
        arguments = ["train", "--resume", run]
    steps = RunFolder(run).newest_checkpoint()[0] + 3
    last = rollart(*arguments, "--set", f"pipeline.steps={steps}")
    assert last.returncode == 0, last.stderr
    final = counts(run)
    assert final["in_flight"] == 0
    assert final["trained"] + final["filtered"] == steps * PER_STEP
    with closing(sqlite3.connect(run / "run.db")) as db:
        per_step = dict(db.execute(
            "SELECT step, count(*) FROM trajectories WHERE fate IN ('trained', 'filtered') GROUP BY step"))
    assert per_step == dict.fromkeys(range(steps), PER_STEP), "each step trained one batch, and none twice"
    assert json.loads((run / "summary.json").read_text())["ledger"]["dispatched"] == sum(final.values())
    print(f"{seen} looks, {kills} kills, {steps} steps, {sum(final.values())} trajectories: {final}")
