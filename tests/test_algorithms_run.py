"""Whole runs of other algorithms and models than the default: real engine, learner and environments, a few steps."""

import json

import pytest

from helpers import GAP, rollart, tiny_recipe

CASES = {
    "ppo": '[algorithm]\nname = "ppo"\ntruncated = "bootstrap"\n',
    "gigpo": '[algorithm]\nname = "gigpo"\n',
    "decoupled": '[algorithm]\nname = "decoupled_ppo"\nproximal = "approximated"\nkl_coefficient = 0.01\n'
                 'reference = "copy"\n'
                 "[learner]\nminibatches = 2\ngradient_checkpointing = true\n",
    "lora": '[algorithm]\nkl_coefficient = 0.01\nreference = "adapter_off"\n[lora]\nrank = 2\n',
    "mixture": '[algorithm]\nname = "gspo"\nrouter_coefficient = 0.01\n',
}


def steps_of(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["metrics"] for line in lines if line["kind"] == "step"]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_run_ends_with_the_engines_log_probabilities_and_every_figure(case, tmp_path):
    recipe = tiny_recipe(tmp_path, steps=2, extra=CASES[case])
    if case == "mixture":
        recipe.write_text(recipe.read_text().replace("mlp = 64", "mlp = 32\nexperts = 4\nexperts_per_token = 2"))
    done = rollart("train", recipe, "--run", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    steps = steps_of(tmp_path / "run")
    assert len(steps) == 2
    assert steps[0]["logprob_gap"] < GAP
    figures = {"ppo": "critic_loss", "decoupled": "kl", "lora": "kl", "mixture": "router_balance"}
    assert figures.get(case, "loss") in steps[-1]


@pytest.mark.slow
def test_a_run_with_adapters_goes_on_from_its_checkpoint_and_that_is_a_whole_model(tmp_path):
    recipe = tiny_recipe(tmp_path, steps=2, extra=CASES["lora"])
    run = tmp_path / "run"
    assert rollart("train", recipe, "--run", run).returncode == 0
    again = rollart("train", "--resume", run, "--set", "pipeline.steps=3")
    assert again.returncode == 0, again.stderr
    assert len(steps_of(run)) == 3
    refused = rollart("train", "--resume", run, "--set", "lora.rank=3")
    assert refused.returncode == 2
    assert "--resume goes on with the same lora" in refused.stderr
    newest = max((run / "checkpoints").iterdir())
    assert (newest / "adapter" / "adapter_model.safetensors").exists()
    from transformers import AutoModelForCausalLM
    assert AutoModelForCausalLM.from_pretrained(newest).num_parameters() > 0
    assert rollart("eval", newest, "--recipe", recipe, "--tasks", "2").returncode == 0
