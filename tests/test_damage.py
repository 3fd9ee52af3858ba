"""What is damaged in a run's folder, or taken away from a live run, is one line and a way out."""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from helpers import command, environment, rollart, tiny_recipe
from rollart.observe.run_folder import RunFolder


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps with checkpoints 2 and 3."""
    folder = tmp_path_factory.mktemp("ended")
    done = rollart("train", tiny_recipe(folder, steps=3), "--run", folder / "run", "--set", "keep_checkpoints=2")
    assert done.returncode == 0, done.stderr
    return folder / "run"


def forget(run: Path) -> None:
    """The ledger as a copy from before the last step has it."""
    with closing(sqlite3.connect(run / "run.db")) as db:
        db.execute("DELETE FROM trajectories WHERE step = 2")
        db.commit()


def flip(run: Path) -> None:
    file = run / "checkpoints" / "000003" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)


def rewrite(statement: str) -> Callable[[Path], None]:
    """What a ledger's pages hold is another, and SQLite does not notice it."""
    def damage(run: Path) -> None:
        with closing(sqlite3.connect(run / "run.db")) as db:
            assert db.execute(statement).rowcount
            db.commit()
    return damage


def scribble(run: Path) -> None:
    data = bytearray((run / "run.db").read_bytes())
    data[4096:] = bytes([0xA5]) * (len(data) - 4096)
    (run / "run.db").write_bytes(data)


@pytest.mark.parametrize(("damage", "readers"), [
    (rewrite("UPDATE meta SET value = '{' WHERE key = 'ended'"), ("status", "report")),
    (rewrite("UPDATE meta SET value = '{' WHERE key = 'latencies'"), ("report", "train")),
    (rewrite("UPDATE meta SET value = '{' WHERE key = 'source'"), ("train",)),
    (rewrite("UPDATE trajectories SET fate = 'trainee' WHERE grp = 0"), ("status", "report", "train")),
    (rewrite("UPDATE payloads SET body = x'02000000'"), ("report",)),
    (rewrite("UPDATE payloads SET body = x'020400000022225B5D'"), ("report",)),
    (scribble, ("status", "report", "train")),
    (lambda run: ((run / "run.db").unlink(), (run / "run.db").mkdir()), ("status", "report", "train")),
], ids=["end", "latencies", "source", "fate", "short body", "odd body", "pages", "a folder"])
def test_a_ledger_that_holds_other_things_is_one_line_that_names_it(tmp_path: Path, ended: Path,
                                                                    damage: Callable[[Path], object],
                                                                    readers: tuple[str, ...]) -> None:
    run = tmp_path / "run"
    shutil.copytree(ended, run)
    damage(run)
    for reader in readers:
        more = ("--resume", run, "--set", "pipeline.steps=4") if reader == "train" else (run,)
        seen = rollart(reader, *more)
        assert seen.returncode in (1, 2)
        assert seen.stderr.count("\n") == 1, seen.stderr
        assert str(run / "run.db") in seen.stderr


@pytest.mark.parametrize(("damage", "told"), [
    (lambda run: (run / "run.db").unlink(), "run.db has 0 of the 3 steps"),
    (lambda run: (run / "run.db").write_bytes(b""), "run.db has 0 of the 3 steps"),
    (forget, "run.db has 2 of the 3 steps"),
    (flip, "000003 is damaged (model.safetensors has other bytes"),
    (lambda run: (run / "checkpoints/000003/optimizer.pt").write_bytes(b""), "(optimizer.pt has 0 bytes"),
    (lambda run: (run / "checkpoints/000003/state.json").unlink(), "(state.json is missing)"),
    (lambda run: (run / "metrics.jsonl").write_bytes(b"\xff\n"), "metrics.jsonl line 1 is damaged"),
    (lambda run: (run / "config.json").write_bytes(b"{"), "config.json must hold JSON"),
], ids=["no ledger", "empty ledger", "older ledger", "weights", "optimizer", "state", "metrics", "config"])
def test_a_resume_of_a_damaged_run_is_refused_in_one_line(tmp_path: Path, ended: Path,
                                                          damage: Callable[[Path], object], told: str) -> None:
    run = tmp_path / "run"
    shutil.copytree(ended, run)
    damage(run)
    for _ in range(2):  # the first attempt changes nothing
        done = rollart("train", "--resume", run, "--set", "pipeline.steps=4")
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
        assert told in done.stderr
        if told.startswith("run.db") or "line 1" in told:
            break
    if "000003" in done.stderr:
        assert "the older whole one, 000002" in done.stderr
        shutil.rmtree(run / "checkpoints" / "000003")
        done = rollart("train", "--resume", run, "--set", "pipeline.steps=4")
        assert done.returncode == 0, done.stderr
        with closing(sqlite3.connect(run / "run.db")) as db:
            steps = dict(db.execute("SELECT step, count(*) FROM trajectories WHERE fate = 'trained' GROUP BY 1"))
        assert steps == dict.fromkeys(range(4), 8)


def test_a_ledger_that_is_removed_under_a_live_run_ends_it_with_one_line(tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = subprocess.Popen(command("train", tiny_recipe(tmp_path, steps=100_000), "--run", run),
                               stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment())
    try:
        deadline = time.monotonic() + 120
        while RunFolder(run).newest_checkpoint() is None:
            assert time.monotonic() < deadline, "no checkpoint in two minutes"
            time.sleep(0.05)
        for file in run.glob("run.db*"):
            file.unlink()
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 1
    assert f"error: the ledger {run / 'run.db'} was removed or replaced under the run" in errors
    assert "Traceback" not in errors
