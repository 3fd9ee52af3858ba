"""Hugging Face folders: the same logits as transformers, both ways, and clear refusals."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from rollart.backends.torch.chat import ByteChat, load_chat
from rollart.backends.torch.checkpoint import load_model, save_model
from rollart.backends.torch.settings import SmallModel
from rollart.backends.torch.transformer import small_model
from rollart.core.errors import ConfigError
from rollart.core.types import Message

LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64, "rope_theta": 5000.0}
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
TINY = SmallModel(layers=2, width=32, heads=4, kv_heads=2, mlp=32)


@pytest.mark.parametrize(("family", "tied", "rope", "extra"), [
    ("llama", False, PLAIN, {}), ("llama", True, LLAMA3, {}), ("llama", False, LINEAR, {"attention_bias": True}),
    ("qwen2", False, PLAIN, {}), ("qwen2", True, LINEAR, {"num_key_value_heads": 1}),
    ("qwen3_moe", False, PLAIN, {"head_dim": 16, "num_experts": 5, "num_experts_per_tok": 2,
                                 "moe_intermediate_size": 24, "norm_topk_prob": True}),
    ("qwen3_moe", True, PLAIN, {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 3,
                                "moe_intermediate_size": 24}),
    ("qwen3", False, PLAIN, {"head_dim": 16}), ("qwen3", True, LLAMA3, {"head_dim": 10, "attention_bias": True})])
def test_logits_equal_those_of_transformers_both_ways(family, tied, rope, extra, tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM
    config = AutoConfig.for_model(family, **{
        "vocab_size": 270, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "rope_parameters": rope,
        "tie_word_embeddings": tied, **extra})
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(0 if parameter.dim() > 1 else 1, .2)
        theirs.save_pretrained(tmp_path / "theirs")
        ours = load_model(tmp_path / "theirs")
        lengths = [90, 10, 77]
        ids = torch.randint(0, 270, (sum(lengths),))
        logits = ours.logits(ours(ids, torch.cat([torch.arange(n) for n in lengths]), lengths))
        expected = torch.cat([theirs(part[None]).logits[0] for part in ids.split(lengths)])
        assert expected.std() > .5
        assert torch.allclose(logits, expected, atol=1e-4)
        save_model(ours, tmp_path / "ours", ByteChat())
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
        assert torch.equal(torch.cat([again(part[None]).logits[0] for part in ids.split(lengths)]), expected)
    assert load_model(tmp_path / "ours").config == ours.config


def test_a_saved_folder_generates_with_its_own_tokenizer_and_ends(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer
    save_model(small_model(TINY, 0), tmp_path, ByteChat())
    tokenizer, model = AutoTokenizer.from_pretrained(tmp_path), AutoModelForCausalLM.from_pretrained(tmp_path)
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], add_generation_prompt=True,
                                           return_tensors="pt", return_dict=True)
    assert prompt["input_ids"][0].tolist() == list(load_chat(tmp_path).prompt([Message("user", "hi")]))
    assert model.generate(**prompt, max_new_tokens=3).shape == (1, prompt["input_ids"].shape[1] + 3)
    assert model.generation_config.eos_token_id == list(ByteChat.stop)


def test_bfloat16_weights_come_back_as_they_were(tmp_path):
    model = small_model(TINY, 0).to(torch.bfloat16)
    save_model(model, tmp_path, ByteChat())
    again = load_model(tmp_path, dtype=torch.bfloat16)
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in model.state_dict().items())


def test_shards_are_read_together(tmp_path):
    model = small_model(TINY, 0)
    save_model(model, tmp_path, ByteChat())
    tensors = load_file(tmp_path / "model.safetensors")
    files = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(tensors)}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in tensors if files[name] == file}, tmp_path / file)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    again = load_model(tmp_path)
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in model.state_dict().items())


def test_what_is_no_whole_model_is_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match="is not a folder"):
        load_model(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        load_model(tmp_path)
    save_model(small_model(TINY, 0), tmp_path, ByteChat())
    whole = load_file(tmp_path / "model.safetensors")
    for change, message in (
            ({"model.norm.weight": None}, r"missing tensors: model\.norm\.weight"),
            ({"model.extra": torch.zeros(1)}, r"unknown tensors: model\.extra"),
            ({"model.norm.weight": torch.zeros(5)}, r"model\.norm\.weight is \[5\] where the model has \[32\]")):
        save_file({name: tensor for name, tensor in (whole | change).items() if tensor is not None},
                  tmp_path / "model.safetensors")
        with pytest.raises(ConfigError, match=message) as raised:
            load_model(tmp_path)
        assert "\n" not in str(raised.value)
    (tmp_path / "model.safetensors").write_bytes(b"cut off")
    with pytest.raises(ConfigError, match="not a whole safetensors file"):
        load_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"has no model\.safetensors"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="is not JSON"):
        load_model(tmp_path)
