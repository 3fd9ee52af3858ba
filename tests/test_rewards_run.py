"""Rewards in real runs and on the command line."""

import json
import os

import pytest

from helpers import environment, rollart, tiny_recipe
from played import played
from rollart.observe.summary import reward_figures
from rollart.rewards.contract import to_json

ELASTIC = """
[reward]
where = "elastic"
[reward.elastic]
max_instances = 3
idle_seconds = 0.5
"""


def here(**more):
    tests = os.path.dirname(os.path.abspath(__file__))
    return {**environment(), "PYTHONPATH": os.pathsep.join([tests, os.environ.get("PYTHONPATH", "")]), **more}


def test_a_run_scores_every_trajectory_once_on_the_elastic_platform_and_tells_about_it(tmp_path):
    recipe, run = tiny_recipe(tmp_path, steps=2, extra=ELASTIC), tmp_path / "run"
    recipe.write_text(recipe.read_text().replace("[pipeline]", '[schedule]\nname = "sync"\n[pipeline]'))
    done = rollart("train", recipe, "--run", run)
    assert done.returncode == 0, done.stderr
    summary = json.loads((run / "summary.json").read_text())
    rewards = summary["rewards"]
    assert rewards["scored"] == rewards["calls"] == rewards["attempts"]
    assert rewards["scored"] >= summary["ledger"]["trained"] == 16
    assert rewards["failed"] == 0
    assert 0 < rewards["peak_instances"] <= 3
    assert 0 < rewards["utilisation"] < 1
    report = (run / "report.html").read_text()
    assert "Trajectories being scored" in report
    assert "Instances or reserved processes" in report
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    instances = [line["figures"]["instances"] for line in lines if line["kind"] == "rewards"]
    assert max(instances) >= 1
    tried = rollart("reward", "try", "calculator", run, "--json", "--where", "processes")
    assert tried.returncode == 0, tried.stderr
    assert json.loads(tried.stdout)["scored"] >= 1


@pytest.mark.parametrize(("table", "says"), [
    ('where = "http://127.0.0.1:9/x"', "the reward of domain frozen_lake at http://127.0.0.1:9/x does not work"),
    ('where = "elastic"\nfunctions = { calculator = "reward_functions:nan" }', "must be a finite number; got nan"),
    ('places = { calculater = "elastic" }', "reward.places: no domain calculater: did you mean 'calculator'?"),
    ('[reward.call]\nhedge = 95.0', "hedge must be a percentile from 0 (off) to below 1; got 95.0")])
def test_a_mistake_is_one_clear_line_before_the_first_trajectory(table, says, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", here()["PYTHONPATH"])
    run = tmp_path / "run"
    done = rollart("train", tiny_recipe(tmp_path, extra=f"\n[reward]\n{table}\n"), "--run", run)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: ")
    assert says in done.stderr
    assert done.stderr.count("\n") == 1
    assert not run.exists()


def test_try_compares_recorded_scores_and_says_what_failed(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", here()["PYTHONPATH"])
    episodes, file = played(30), tmp_path / "recorded.jsonl"
    file.write_text("".join(json.dumps({**to_json(asked), "score": {"value": score.value}}) + "\n"
                            for asked, score in episodes if asked.domain == "calculator"))
    same = rollart("reward", "try", "calculator", file, "--json", "--save", tmp_path / "new.jsonl")
    figures = json.loads(same.stdout)
    assert (figures["trajectories"], figures["scored"], figures["changed"]) == (10, 10, 0)
    assert figures["mean"] == figures["mean_before"]
    assert json.loads((tmp_path / "new.jsonl").read_text().splitlines()[0])["new"]["parts"]
    other = rollart("reward", "try", "reward_functions:fine", file)
    assert "10 changed" in other.stdout
    broken = rollart("reward", "try", "reward_functions:raises", file)
    assert broken.returncode == 1
    assert "0 of 10 scored, 10 failed" in broken.stdout


@pytest.mark.parametrize(("arguments", "says"), [
    (("serve", "nowhere:f"), "needs the module nowhere"),
    (("package", "guess", "--target", "azure"), "--target must be one of"),
    (("try", "guess", "nothing.json"), "no file of reward requests"),
    (("try", "guess", "."), "holds no run"), (("try", "reward_functions:unit_tests", "x.json"), "no file")])
def test_mistakes_of_the_reward_commands_are_one_line(arguments, says, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", here()["PYTHONPATH"])
    done = rollart("reward", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert says in done.stderr
    assert done.stderr.count("\n") == 1


def test_the_figures_of_a_resumed_run_are_those_of_all_its_processes():
    def sample(**figures):
        return {"kind": "rewards", "version": 0, "wall_seconds": 1.0, "figures": figures}

    lines = [{"kind": "start"}, sample(calls=3, instances=2, latency_p95_seconds=0.5, busy_seconds=1, alive_seconds=4),
             sample(calls=5, instances=1, latency_p95_seconds=0.4, busy_seconds=2, alive_seconds=8),
             {"kind": "start"}, sample(calls=7, instances=0, latency_p95_seconds=0.3, busy_seconds=2, alive_seconds=8)]
    assert reward_figures(lines) == {"calls": 12, "instances": 0, "latency_p95_seconds": 0.4, "busy_seconds": 4,
                                     "alive_seconds": 16, "utilisation": 0.25}
    assert reward_figures([]) == {}
