"""Whole runs through the composition root: two vLLM engines as pools, real learner and environments."""

import sqlite3
import subprocess

import pytest

pytest.importorskip("vllm")
pytest.importorskip("gymnasium")

from helpers import command, environment, rollart
from rollart.observe.payload import decode
from test_algorithms_run import steps_of

RECIPE = """
name = "vllm"
[pipeline]
steps = 3
checkpoint_every = 3
[rollout]
batch_groups = 2
group_size = 4
context_tokens = 384
[model.small]
family = "{family}"
layers = 1
width = 64
heads = 2
kv_heads = 1
mlp = 64
{model}
[learner]
precision = "float32"
[evaluation]
tasks = 0
[pools.a]
engine = "vllm"
domains = ["frozen_lake"]
[pools.b]
engine = "vllm"
domains = ["calculator"]
[vllm]
dtype = "float32"
threads = 1
kv_gb = 0.05
max_concurrent = 16
context_tokens = 384
handover_folder = "{folder}"
[domains.frozen_lake]
size = 2
max_turns = 3
[domains.calculator]
smallest = 2
largest = 2
max_turns = 2
max_tokens = 6
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_with_two_vllm_pools_trains_on_the_engines_log_probabilities(tmp_path):
    recipe = tmp_path / "vllm.toml"
    recipe.write_text(RECIPE.format(family="qwen3", model="", folder=tmp_path / "handover"))
    done = subprocess.run(command("train", recipe, "--run", tmp_path / "run"), capture_output=True, text=True,
                          timeout=580, check=False, env=environment())  # vLLM's imports alone take long beside others
    assert done.returncode == 0, done.stderr[-2000:]
    steps = steps_of(tmp_path / "run")
    assert len(steps) == 3
    assert max(step["logprob_gap"] for step in steps if "logprob_gap" in step) < 1e-4, "tokens of the newest version"
    with sqlite3.connect(tmp_path / "run" / "run.db") as ledger:
        trained = ledger.execute("SELECT count(*), max(step - oldest) FROM trajectories "
                                 "WHERE fate = 'trained'").fetchone()
        kept = [decode(body) for (body,) in ledger.execute("SELECT body FROM payloads")]
    assert trained in ((24, 1), (24, 0)), "count, and the largest staleness"
    served = {(trajectory.task.domain, turn.completion.engine) for trajectory in kept for turn in trajectory.turns}
    assert served == {("frozen_lake", "a-0"), ("calculator", "b-0")}
    assert not list((tmp_path / "handover").glob("w*")), "nothing is left of the hand-over"


def test_bad_settings_are_one_line_before_anything_starts(tmp_path):
    recipe = tmp_path / "vllm.toml"
    recipe.write_text(RECIPE.format(family="qwen3", model="", folder=tmp_path))
    for assignment, line in (("vllm.tensor_parallel=4", "tensor_parallel = 4 must divide the model's 2 heads"),
                             ("vllm.context_tokens=100", "must be at most vllm.context_tokens = 100"),
                             ("vllm.dtype=int8", "vllm.dtype")):
        refused = rollart("train", recipe, "--run", tmp_path / "run", "--set", assignment)
        assert refused.returncode == 2
        assert line in " ".join(refused.stderr.split()), refused.stderr
        assert "Traceback" not in refused.stderr
