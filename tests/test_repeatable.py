"""Two runs of schedule `sync` with one seed on one machine are the same run: docs/algorithms.md says what else is."""

import json
import sqlite3

import pytest

from helpers import rollart, tiny_recipe

CLOCKED = ("seconds", "tokens_per_second")


def figures(run):
    """Every figure of every step but those of the clock, and every trajectory that a step took."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [{name: value for name, value in line["metrics"].items() if name not in CLOCKED}
             for line in lines if "metrics" in line]
    with sqlite3.connect(run / "run.db") as db:
        rows = db.execute("SELECT grp, member, fate, step, reward, prompt, sampled, turns FROM trajectories "
                          "WHERE step IS NOT NULL ORDER BY grp, member")
        return steps, rows.fetchall()


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_two_sync_runs_of_one_seed_are_equal_in_every_figure(tmp_path, precision):
    recipe = tiny_recipe(tmp_path, steps=6, seed=3, extra='[schedule]\nname = "sync"\n')
    seen = []
    for name in ("one", "two"):
        done = rollart("train", recipe, "--run", tmp_path / name, "--set", f"learner.precision={precision}")
        assert done.returncode == 0, done.stderr
        seen.append(figures(tmp_path / name))
    (steps, rows), again = seen
    assert len(steps) == 6
    assert "logprob_gap" in steps[0]
    assert len(rows) == 6 * 8
    assert (steps, rows) == again
