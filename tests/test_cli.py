"""What a person sees who makes a mistake: one clear line, exit code 2, nothing half-written."""

from __future__ import annotations

import json
import re
import shutil
import socket
import sqlite3
import subprocess
import sys

import pytest

from helpers import GAP, command, environment, rollart, tiny_recipe
from rollart.observe.ledger_view import LedgerView


def refused(result: subprocess.CompletedProcess[str], *parts: str, code: int = 2) -> None:
    assert result.returncode == code, (result.returncode, result.stderr, result.stdout)
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    for part in parts:
        assert part in lines[0]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished tiny run."""
    folder = tmp_path_factory.mktemp("finished")
    result = rollart("train", tiny_recipe(folder, steps=2, extra=""), "--run", folder / "run", "--set",
                     "evaluation.tasks=2", "--set", "pipeline.eval_every=1")
    assert result.returncode == 0, result.stderr
    return folder / "run"


def test_a_refused_resume_changes_nothing(finished):
    before = (finished / "config.json").read_text()
    refused(rollart("train", "--resume", finished, "--set", "pipeline.steps=1", "--set", "rollout.spares=1"),
            "pipeline.steps = 1 is below the checkpoint's 2 steps")
    assert (finished / "config.json").read_text() == before


def test_a_folder_with_other_files_and_a_checkpoint_are_no_place_for_a_run(finished, tmp_path):
    (tmp_path / "a").touch()
    refused(rollart("train", tiny_recipe(tmp_path, steps=1, extra=""), "--run", tmp_path), "new or empty folder")
    checkpoint = max((finished / "checkpoints").iterdir())
    refused(rollart("train", "--resume", checkpoint), "is a checkpoint, not a run")
    refused(rollart("train", "--resume", tmp_path / "a"), "holds no run")


def test_what_does_not_fit_is_said_before_the_warm_start(tmp_path):
    recipe = tiny_recipe(tmp_path, steps=1, extra="[warm_start]\ndemonstrations = 1000000\n")
    for assignment, part in (("engine.kv_tokens=1", "engine.kv_tokens must hold one whole context"),
                             ("model.small.vocabulary=10", "the model 10: raise its vocabulary"),
                             ("name=../x", "name must be 1 to 100 letters")):
        refused(rollart("train", recipe, "--run", tmp_path / "run", "--set", assignment), part)
        assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("cache", [{"ROLLART_CACHE": "/proc/x"}, {"XDG_CACHE_HOME": "/proc"}, {"HOME": "/proc"}])
def test_a_cache_that_cannot_be_written_is_said_before_the_warm_start(tmp_path, cache):
    recipe = tiny_recipe(tmp_path, steps=1, extra="[warm_start]\ndemonstrations = 1000000\n")
    env = {name: value for name, value in environment().items() if name not in ("ROLLART_CACHE", "XDG_CACHE_HOME")}
    result = subprocess.run(command("train", recipe, "--run", tmp_path / "run"), capture_output=True, text=True,
                            timeout=60, check=False, env={**env, **cache})
    refused(result, "the warm start is kept in /proc", "set the environment variable ROLLART_CACHE")
    assert not (tmp_path / "run").exists()


def test_a_cache_that_is_full_after_the_warm_start_does_not_lose_it(tmp_path, monkeypatch):
    from rollart import policy
    from rollart.backends.torch import warm_start
    from rollart.config.recipe import load_recipe

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setenv("ROLLART_CACHE", str(tmp_path))
    monkeypatch.setattr(warm_start, "store", full)
    recipe = load_recipe(tiny_recipe(tmp_path, extra="[warm_start]\ndemonstrations = 4\n"))
    steps = []
    made = policy.first_policy(recipe, lambda what, step, of, loss: steps.append(what))
    assert "warm start" in steps
    assert made.made is not None


@pytest.mark.parametrize(("arguments", "part"), [
    (("simulate", "recipes/sim_paper.toml", "--json", "/nowhere/x.json"), "/nowhere/x.json cannot be written"),
    (("simulate", "recipes/sim_paper.toml", "--trace", "-"), "--trace needs the name of a file"),
    (("plan", "recipes/sim_paper.toml", "--cluster", "8xH800", "--budget", "0"), "--budget must be above 0"),
    (("plan", "recipes/sim_paper.toml", "--cluster", "8xH800", "--goal", "fun"), "--goal must be time or cost"),
    (("reproduce", "nope"), "no table nope"),
    (("simulate", "none.toml"), "recipe none.toml does not exist"),
])
def test_the_simulators_commands_refuse_in_one_line(arguments, part):
    refused(rollart(*arguments), part)


def test_a_simulation_that_ends_early_is_a_failure(tmp_path):
    recipe = tmp_path / "tiny.toml"
    recipe.write_text('[rollout]\nbatch_groups = 2\ngroup_size = 2\n[pools.a]\n[domains.game]\n[pipeline]\nsteps = 2\n')
    done = rollart("simulate", recipe, "--json", "-")
    assert (done.returncode, json.loads(done.stdout)["steps"]) == (0, 2), done.stderr
    failed = rollart("simulate", recipe, "--set", "faults.step_fails=1")
    assert failed.returncode == 1
    assert "RunError" in failed.stdout


def test_reproducing_prints_json_alone():
    result = rollart("reproduce", "transfer", "--json", "-")
    assert json.loads(result.stdout)["transfer"]["paper"][0] == [32.4, 32.4]


@pytest.mark.parametrize(("assignment", "parts"), [
    ("pipeline.stepz=3", ("pipeline.stepz", "did you mean 'steps'?")),
    ("pipelin.steps=3", ("pipelin", "did you mean 'pipeline'?")),
    ("rollout.episode_minutes=3", ("rollout.episode_minutes", "episode_seconds")),
    ("rollout.batch_trajectories=64", ("rollout.batch_trajectories", "batch_groups")),
    ("domains.frozen_lake.sise=3", ("sise", "did you mean 'size'?")),
    ("domains.frozen_lak.size=3", ("frozen_lak", "did you mean 'frozen_lake'?")),
    ("domains.frozen_lake.latency.mean_second=3", ("mean_second", "mean_seconds")),
    ("pipeline.steps=many", ("pipeline.steps", "integer", "many")),
    ("pipeline.steps=0", ("pipeline.steps must be at least 1; got 0",)),
    ("rollout.group_size=1", ("rollout.group_size", "at least 2", "got 1")),
    ("learner.minibatches=3", ("2 groups", "3 equal parts", "2 % 3")),
    ("schedule.name=fast", ("schedule.name", "rollart", "'fast'")),
    ("schedule.alpha=-1", ("schedule.alpha", "-1")),
    ("model.path=/nowhere/model", ("/nowhere/model", "model.path")),
    ("nonsense", ("key=value", "'nonsense'")),
])
def test_a_wrong_key_value_or_size_is_one_clear_line(tmp_path, assignment, parts):
    run = tmp_path / "run"
    sets = ["--set", assignment]
    if assignment.startswith("model.path"):
        sets += ["--set", "model.small.layers=4", "--set", "model.small.width=192"]
    recipe = tiny_recipe(tmp_path)
    if assignment.startswith("model.path"):
        recipe.write_text(re.sub(r"\[model.small\][^\[]*", "", recipe.read_text()))
        sets = ["--set", assignment]
    refused(rollart("train", recipe, "--run", run, *sets), *parts)
    assert not run.exists(), "a run that never began leaves nothing behind"


def test_sync_with_a_staleness_bound_of_its_own_is_refused(tmp_path):
    refused(rollart("train", tiny_recipe(tmp_path), "--dry-run", "--set", "schedule.name=sync", "--set",
                    "schedule.alpha=2"), "sync", "alpha = 0", "got 2")


def test_a_recipe_that_is_missing_or_no_toml_is_named(tmp_path):
    refused(rollart("train", tmp_path / "none.toml"), "none.toml", "does not exist")
    (tmp_path / "bad.toml").write_text("steps = = 3")
    refused(rollart("train", tmp_path / "bad.toml"), "bad.toml", "not valid TOML", "line 1")


def test_an_unsupported_model_folder_is_named_with_what_is_supported(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    recipe = tiny_recipe(tmp_path)
    recipe.write_text(re.sub(r"\[model.small\][^\[]*", "", recipe.read_text()))
    refused(rollart("train", recipe, "--run", tmp_path / "run", "--set", f"model.path={tmp_path / 'model'}"),
            "gpt2", "llama")


@pytest.mark.parametrize(("setting", "says"), [
    (["reward.where=serve"], "is on serve, which is on the run's Ray cluster: train with --ray ADDRESS"),
    (["algorithm.loss=nomod:foo"], "algorithm.loss = 'nomod:foo' cannot be imported: No module named 'nomod'"),
    (["weights.carrier=file", "weights.folder=/proc/no/folder"], "weights.folder = '/proc/no/folder' cannot be used")])
def test_a_dry_run_refuses_what_the_run_would_refuse(tmp_path, setting, says):
    sets = [part for one in setting for part in ("--set", one)]
    refused(rollart("train", tiny_recipe(tmp_path), "--dry-run", *sets), says)


@pytest.mark.parametrize(("setting", "says"), [
    (["weights.carrier=memory"], "weights.carrier = 'memory' stays inside one process"),
    (["weights.carrier=file", "lora.rank=4"], "[lora] is not there on a cluster yet"),
    (["weights.carrier=file", "environments.preopen=8"], "environments.preopen opens nothing ahead on a cluster yet")])
def test_a_dry_run_on_a_local_cluster_refuses_what_the_run_would_refuse(tmp_path, setting, says):
    """The check needs no Ray; without --ray the same recipe is well."""
    recipe = tiny_recipe(tmp_path, extra="\n[cluster.pools.h]\ncpus = 8\n")
    sets = [part for one in setting for part in ("--set", one)]
    assert rollart("train", recipe, "--dry-run", *sets).returncode == 0
    result = rollart("train", recipe, "--dry-run", "--ray", "local", *sets)
    assert result.returncode == 2
    assert says in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_a_dry_run_writes_nothing(tmp_path):
    result = rollart("train", tiny_recipe(tmp_path), "--run", tmp_path / "run", "--dry-run")
    assert result.returncode == 0
    assert "3 steps of 2 groups x 4 = 8 trajectories" in result.stdout
    assert not (tmp_path / "run").exists()


def test_the_written_config_makes_the_same_run(finished):
    from rollart.config.recipe import from_tables

    tables = json.loads((finished / "config.json").read_text())
    assert json.loads(json.dumps(from_tables(tables).to_json())) == tables


def test_a_finished_run_has_a_complete_summary_and_a_report(finished):
    summary = json.loads((finished / "summary.json").read_text())
    assert summary["steps"] == 2
    assert summary["wall_seconds"] > 0
    assert set(summary["domains"]) == {"frozen_lake", "calculator"}
    for figures in summary["domains"].values():
        assert figures["eval_tasks"] == 2
        assert figures["eval_before"] is not None
        assert figures["eval_after"] is not None
        for end in ("before", "after"):
            low, high = figures[f"eval_{end}_interval"]
            assert 0 <= low <= figures[f"eval_{end}"] <= high <= 1
        low, high = figures["eval_change_interval"]
        assert -1 <= low <= figures["eval_change"] == figures["eval_after"] - figures["eval_before"] <= high <= 1
    ledger = dict(summary["ledger"])
    assert ledger["trained"] + ledger["filtered"] == 16
    assert ledger.pop("dispatched") == sum(ledger.values())
    assert ledger["in_flight"] == 0
    assert summary["staleness"]["bound"] == 1
    assert summary["staleness"]["max"] <= 1
    assert 0 <= summary["trainer_idle_fraction"] <= 1
    tokens = summary["tokens"]
    assert tokens["generated"] == tokens["trained"] + tokens["wasted"]
    assert summary["logprob_gap_step0"] < GAP
    page = (finished / "report.html").read_text()
    assert "frozen_lake" in page
    assert not re.search(r"(src|href)=[\"']https?:", page)


@pytest.mark.parametrize(("schedule", "alpha", "bound"), [("rollart", 0, 0), ("rollart", 2, 2), ("sync", None, 0),
                                                          ("one_off", None, 1)])
def test_no_trained_trajectory_exceeds_the_bound_in_a_real_run(tmp_path, schedule, alpha, bound):
    sets = ["--set", f"schedule.name={schedule}", *([] if alpha is None else ["--set", f"schedule.alpha={alpha}"])]
    result = rollart("train", tiny_recipe(tmp_path, steps=4), "--run", tmp_path / "run", *sets)
    assert result.returncode == 0, result.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["staleness"]["bound"] == bound
    assert summary["staleness"]["max"] <= bound
    assert summary["ledger"]["trained"] + summary["ledger"]["filtered"] == 4 * 8
    assert summary["logprob_gap_step0"] < GAP


def test_the_checkpoint_is_a_hugging_face_folder_that_transformers_loads(finished):
    transformers = pytest.importorskip("transformers")
    checkpoint = next((finished / "checkpoints").iterdir())
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    assert model.config.vocab_size >= len(tokenizer)


def test_two_runs_in_one_folder_are_refused(finished, tmp_path):
    refused(rollart("train", tiny_recipe(tmp_path), "--run", finished), "--resume", str(finished))


def test_a_resume_while_the_run_lives_is_refused(tmp_path):
    run = tmp_path / "run"
    process = subprocess.Popen(command("train", tiny_recipe(tmp_path, steps=1000), "--run", run),
                               stdout=subprocess.PIPE, text=True, env=environment())
    try:
        assert process.stdout.readline()
        refused(rollart("train", "--resume", run), str(process.pid), str(run))
        shown = rollart("status", run)
        assert shown.returncode == 0
        assert f"running (process {process.pid})" in shown.stdout
    finally:
        process.kill()
        process.communicate()


def test_a_database_of_another_version_is_refused_with_what_to_do(finished, tmp_path):
    import shutil

    other = tmp_path / "other"
    shutil.copytree(finished, other)
    with sqlite3.connect(other / "run.db") as db:
        db.execute("UPDATE meta SET value = '99' WHERE key = 'schema'")
    refused(rollart("train", "--resume", other), "99", "start a new one")


def test_resume_and_eval_of_what_is_not_there_are_refused(tmp_path):
    refused(rollart("train", "--resume", tmp_path / "none"), "none", "holds no run")
    refused(rollart("train"), "RECIPE", "--resume")
    refused(rollart("eval", tmp_path / "none"), "none", "--recipe")
    refused(rollart("status", tmp_path / "none"), "none")


def test_eval_plays_a_runs_newest_checkpoint(finished):
    result = rollart("eval", finished, "--tasks", "3", "--samples", "2", "--json")
    assert result.returncode == 0, result.stderr
    figures = json.loads(result.stdout)
    assert {name: f["tasks"] for name, f in figures.items()} == {"frozen_lake": 3, "calculator": 3}
    assert all(f["success"] == pytest.approx(f["pass_at"][0]) and f["pass_at"][0] <= f["pass_at"][1]
               for f in figures.values())
    refused(rollart("eval", finished, "--samples", "2", "--set", "evaluation.sampling.temperature=0"), "samples = 2",
            "temperature")


def test_eval_plays_a_checkpoint_with_its_runs_recipe_and_a_bare_one_with_the_recipe_that_is_named(finished, tmp_path):
    inside = next((finished / "checkpoints").iterdir())
    assert rollart("eval", inside, "--tasks", "2").returncode == 0
    checkpoint = shutil.copytree(inside, tmp_path / "copy")
    result = rollart("eval", checkpoint, "--recipe", tiny_recipe(tmp_path), "--tasks", "2", "--json")
    assert result.returncode == 0, result.stderr
    assert set(json.loads(result.stdout)) == {"frozen_lake", "calculator"}
    refused(rollart("eval", checkpoint), "--recipe")
    refused(rollart("eval", finished, "--recipe", tiny_recipe(tmp_path)), "leave --recipe out")


def test_a_resume_cannot_change_what_the_run_is_made_of_and_remembers_what_it_changed(finished, tmp_path):
    import shutil

    other = tmp_path / "other"
    shutil.copytree(finished, other)
    refused(rollart("train", "--resume", other, "--set", "domains.frozen_lake.ice=0.9"), "domains")
    refused(rollart("train", "--resume", other, "--set", "pipeline.steps=1"), "pipeline.steps = 1", "2 steps")
    more = rollart("train", "--resume", other, "--set", "pipeline.steps=3")
    assert more.returncode == 0, more.stderr
    assert json.loads((other / "config.json").read_text())["pipeline"]["steps"] == 3
    assert json.loads((other / "summary.json").read_text())["steps"] == 3


def test_two_interrupts_end_at_once_and_the_run_can_go_on(tmp_path):
    import signal
    import time

    run = tmp_path / "run"
    slow = '\n[domains.calculator.latency]\nmean_seconds = 30.0\n[domains.frozen_lake.latency]\nmean_seconds = 30.0\n'
    process = subprocess.Popen(command("train", tiny_recipe(tmp_path, steps=5, extra=slow), "--run", run),
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment())
    while not (run / "status.json").exists() and process.poll() is None:
        time.sleep(0.05)
    time.sleep(1.0)
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert errors.strip() == f"interrupted; continue with: rollart train --resume {run}"
    assert "interrupted" in rollart("status", run).stdout


def test_a_domain_of_ones_own_trains_under_its_own_name(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from rollart.envs.calculator import Calculator\n\n\nclass Sums(Calculator):\n    reward = 'calculator'\n")
    recipe = tiny_recipe(tmp_path, steps=1, extra='\n[domains."mine:Sums"]\nsmallest = 2\nlargest = 2\nmax_turns = 2\n')
    env = {**environment(), "PYTHONPATH": str(tmp_path)}
    result = subprocess.run(command("train", recipe, "--run", tmp_path / "run",
                                    "--set", 'domains."mine:Sums".weight=9.0', "--set", "rollout.max_failed_groups=1"),
                            capture_output=True, text=True, timeout=120, check=False, env=env)
    assert result.returncode == 0, result.stderr
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["domains"]["mine:Sums"]["trained"] > 0


def test_a_report_port_in_use_is_one_clear_line(finished):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        refused(rollart("report", finished, "--serve", port), str(port), "free port")


def test_a_report_whose_page_cannot_be_written_is_printed_all_the_same(finished, tmp_path):
    run = shutil.copytree(finished, tmp_path / "run")
    (run / "report.html").unlink()
    (run / "report.html").mkdir()  # root can write anywhere, but not over a folder
    result = rollart("report", run)
    assert result.returncode == 1
    assert "trajectories" in result.stdout
    assert result.stderr.startswith("error: the page could not be written: "), result.stderr


def test_a_full_disk_ends_the_run_with_one_clear_line_that_says_how_to_go_on(tmp_path):
    """A file-size limit stands in for the full disk: SQLite and the checkpoint meet the same kind of error."""
    run = tmp_path / "run"
    start = " ".join(command("train", tiny_recipe(tmp_path, steps=400), "--run", run))
    limited = subprocess.run(
        ["bash", "-c", f"ulimit -f 200; exec {start}"],
        capture_output=True, text=True, timeout=240, check=False, env=environment())
    assert limited.returncode == 1, (limited.returncode, limited.stderr)
    assert len(limited.stderr.strip().splitlines()) == 1, limited.stderr
    assert f"--resume {run}" in limited.stderr
    after = rollart("train", "--resume", run, "--set", "pipeline.steps=3")
    assert after.returncode == 0, after.stderr


def test_scripted_and_random_players_play_in_the_terminal():
    solved = rollart("envs", "play", "calculator", "--who", "script")
    assert solved.returncode == 0
    assert solved.stdout.splitlines()[-1].startswith("solved in ")
    listed = rollart("envs", "list")
    assert all(name in listed.stdout for name in ("frozen_lake", "guess", "calculator"))
    refused(rollart("envs", "play", "gess"), "guess")


def test_algorithms_lists_formulas_and_gives_one_as_a_block_of_a_recipe():
    listed = rollart("algorithms")
    assert listed.returncode == 0
    assert "gspo" in listed.stdout
    assert "exp(mean of log R over its action tokens)" in listed.stdout
    one = rollart("algorithms", "ppo")
    assert 'advantage = "gae"' in one.stdout
    wrong = rollart("algorithms", "gppo")
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("error: algorithm.name must be one of grpo")


def test_doctor_says_what_is_installed():
    result = rollart("doctor")
    assert result.returncode == 0
    assert "torch" in result.stdout
    assert "ready" in result.stdout


def test_loading_a_recipe_imports_nothing_heavy(tmp_path):
    code = ("import sys; from pathlib import Path; from rollart.config.recipe import load_recipe; "
            f"load_recipe(Path({str(tiny_recipe(tmp_path))!r})); "
            "assert not {'torch', 'transformers', 'ray', 'vllm'} & set(sys.modules), sorted(sys.modules)")
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_a_mistake_that_shows_late_leaves_the_run_as_it_is(tmp_path):
    """Its class is that of an error before the beginning; what the folder holds decides."""
    (tmp_path / "ends.py").write_text(
        "from pathlib import Path\n"
        "from rollart.core.errors import ConfigError\nfrom rollart.envs.calculator import Calculator\n\n\n"
        "class Ends(Calculator):\n    reward = 'calculator'\n\n    def task(self, index, split):\n"
        "        if split == 'train' and index >= int(Path(__file__).with_name('most').read_text()):\n"
        "            raise ConfigError(f'the file of problems has none of number {index}: make it longer')\n"
        "        return super().task(index, split)\n")
    (tmp_path / "most").write_text("12")
    recipe = tiny_recipe(tmp_path, steps=9, extra='\n[domains."ends:Ends"]\nsmallest = 2\nlargest = 2\n'
                         'max_turns = 2\n')
    recipe.write_text(re.sub(r"\[domains.(calculator|frozen_lake)\][^\[]*", "", recipe.read_text()))
    run, env = tmp_path / "run", environment()
    env["PYTHONPATH"] = f"{tmp_path}:{env.get('PYTHONPATH', '')}"

    def train(*arguments):
        return subprocess.run(command("train", *arguments), capture_output=True, text=True, timeout=120, check=False,
                              env=env)

    late = train(recipe, "--run", run)
    assert late.returncode == 2
    assert late.stderr.splitlines()[-2:] == [f"the run is kept; once this is mended: rollart train --resume {run}",
                                             "error: the file of problems has none of number 12: make it longer"]
    with LedgerView(run / "run.db") as ledger:
        trained = ledger.counts()["trained"]
    assert trained >= 8
    assert (run / "report.html").exists()
    (tmp_path / "most").write_text("1000")
    last = train("--resume", run, "--set", "pipeline.steps=7")
    assert last.returncode == 0, last.stderr
    assert json.loads((run / "summary.json").read_text())["ledger"]["trained"] == 7 * 8


def test_a_mistake_is_told_as_such_where_the_runs_folder_stays(tmp_path):
    """A link, a mount point or the current folder cannot be removed, and is not ours to remove."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    recipe = tiny_recipe(tmp_path)
    recipe.write_text(re.sub(r"\[model.small\][^\[]*", "", recipe.read_text()))
    refused(rollart("train", recipe, "--run", tmp_path / "link", "--set", f"model.path={tmp_path / 'none'}"),
            "none does not exist")
    assert not any((tmp_path / "real").iterdir())
