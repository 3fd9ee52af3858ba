"""Adapters: nothing changes at first, only they train and travel, merged equals applied, peft reads what is saved."""

import asyncio
from dataclasses import replace

import pytest
import torch
from test_pieces import CPU, LEARNER, SHAPE, samples

from rollart.algo.settings import AlgoSettings
from rollart.backends.torch.chat import ByteChat
from rollart.backends.torch.checkpoint import load_model, save_model
from rollart.backends.torch.learner import TorchTrainer
from rollart.backends.torch.lora import AdapterWeights, adapter_state, adapters_off, add_adapter, plain_state
from rollart.backends.torch.runner import Runner
from rollart.backends.torch.scoring import action_logprobs, pack_sequences
from rollart.backends.torch.settings import LoraSettings
from rollart.backends.torch.transformer import small_model
from rollart.core.errors import ConfigError, TrainerLost
from rollart.core.types import TrainBatch

pytest.importorskip("peft")
LORA = LoraSettings(rank=4, alpha=8.0)
PACKED = pack_sequences([([3, 4, 5, 6, 7], [0, 0, 1, 1, 1])], CPU)
SETTINGS = replace(LEARNER, eps=1e-8, learning_rate=1e-2)


def fresh():
    return small_model(replace(SHAPE, vocabulary=300), 0)


def said(model):
    with torch.no_grad():
        return action_logprobs(model, PACKED, 1.0)[0]


def trained(steps=3, **changes):
    model = fresh()
    weights = AdapterWeights(model.state_dict(), LORA)
    algo = changes.pop("algo", AlgoSettings())
    trainer = TorchTrainer(model, SETTINGS, algo, weights, lora=LORA, base="start", **changes)

    async def story():
        for version in range(steps):
            report = await trainer.step(TrainBatch(version, tuple(samples(8, version))))
        return report, await trainer.publish(steps)

    report, manifest = asyncio.run(story())
    trainer.close()
    return model, trainer, weights, manifest, report


def test_a_new_adapter_changes_nothing_and_everything_else_is_frozen():
    model = fresh()
    before = said(model)
    add_adapter(model, LORA, 1)
    assert torch.equal(said(model), before)
    moving = {name for name, p in model.named_parameters() if p.requires_grad}
    assert moving
    assert all(".lora_" in name for name in moving)
    base = fresh().state_dict()
    assert all(torch.equal(tensor, base[name]) for name, tensor in plain_state(model).items())


def test_only_adapters_are_trained_and_published_and_what_an_engine_loads_is_the_learners_model():
    model, _, weights, manifest, _ = trained()
    base = fresh().state_dict()
    with adapters_off(model):
        assert torch.equal(said(model), said(fresh()))
    assert (said(model) - said(fresh())).abs().max() > 1e-3
    assert manifest.nbytes == sum(t.nbytes for t in adapter_state(model).values())
    assert manifest.nbytes < 0.5 * sum(t.nbytes for t in base.values())
    got = weights.get(manifest)
    assert got.keys() == base.keys()
    runner = Runner(model.config, 1, 32, torch.float32, CPU)
    runner.load(got)
    assert torch.allclose(said(runner.model), said(model), atol=1e-6)
    assert torch.allclose(got["model.layers.0.mlp.up_proj.weight"],
                          plain_state(model)["model.layers.0.mlp.up_proj.weight"], atol=1e-7)


def test_a_reference_without_adapters_needs_no_copy_and_equals_one():
    rule = AlgoSettings(kl_coefficient=0.5, reference="adapter_off")
    *_, own = trained(algo=rule)
    *_, copied = trained(algo=replace(rule, reference="copy"), reference=fresh())
    assert own.metrics["kl"] > 0
    assert own.metrics["kl"] == pytest.approx(copied.metrics["kl"], rel=1e-4)
    assert own.metrics["grad_norm"] == pytest.approx(copied.metrics["grad_norm"], rel=1e-4)
    with pytest.raises(ConfigError, match=r"adapter_off' needs an adapter: set \[lora\]"):
        TorchTrainer(fresh(), SETTINGS, rule, AdapterWeights({}, LORA))


def test_a_checkpoint_is_a_merged_model_and_an_adapter_that_peft_reads_and_resume_is_bit_exact(tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = fresh()
    save_model(model, tmp_path / "base", ByteChat())
    folder = tmp_path / "saved"
    folder.mkdir()
    trainer = TorchTrainer(model, SETTINGS, AlgoSettings(), AdapterWeights(model.state_dict(), LORA), lora=LORA,
                           base=str(tmp_path / "base"), export=lambda at: save_model(model, at, ByteChat()))

    async def story():
        for version in range(2):
            await trainer.step(TrainBatch(version, tuple(samples(8, version))))
        await trainer.save(folder)
        other = TorchTrainer(load_model(tmp_path / "base"), SETTINGS, AlgoSettings(),
                             AdapterWeights({}, LORA), lora=LORA)
        await other.load(folder)
        for one in (trainer, other):
            await one.step(TrainBatch(2, tuple(samples(8, 2))))
        mine, theirs = adapter_state(model), adapter_state(other._model)
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
        narrow = TorchTrainer(load_model(tmp_path / "base"), SETTINGS, AlgoSettings(), AdapterWeights({}, LORA),
                              lora=replace(LORA, rank=2))
        with pytest.raises(TrainerLost, match="another model or rank"):
            await narrow.load(folder)
        elsewhere = TorchTrainer(small_model(replace(SHAPE, vocabulary=300), 1), SETTINGS, AlgoSettings(),
                                 AdapterWeights({}, LORA), lora=LORA)
        with pytest.raises(TrainerLost, match="another base model"):
            await elsewhere.load(folder)
        for one in (trainer, other, narrow, elsewhere):
            one.close()

    logits = torch.tensor([[3, 4, 5, 6]])
    asyncio.run(story())
    merged = AutoModelForCausalLM.from_pretrained(folder)
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), folder / "adapter")
    with torch.no_grad():
        assert torch.allclose(merged(logits).logits, adapted(logits).logits, atol=1e-5)


@pytest.mark.parametrize("bad", [{"rank": 0}, {"alpha": 0.0}, {"targets": ("head",)}, {"targets": ()}])
def test_settings_name_the_field_that_is_wrong(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        LoraSettings(**bad)
