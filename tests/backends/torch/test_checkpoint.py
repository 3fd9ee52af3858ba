"""Hugging Face folders: the same logits as transformers, both ways, and clear refusals."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from rollart.backends.torch.chat import ByteChat, load_chat
from rollart.backends.torch.checkpoint import load_model, save_model
from rollart.backends.torch.settings import SmallModel
from rollart.backends.torch.shapes import ModelConfig, Rope
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
        "rope_theta": rope["rope_theta"], "rope_scaling": None if rope is PLAIN else rope,  # for transformers 4
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
    for content, message in ((b"{", "is not JSON"), (b"\xff", "is not JSON"), (b"[]", "must hold a JSON object")):
        (tmp_path / "config.json").write_bytes(content)
        with pytest.raises(ConfigError, match=message):
            load_model(tmp_path)


@pytest.mark.parametrize("rope", [PLAIN, LINEAR, LLAMA3])
def test_a_saved_shape_says_its_rotary_embedding_in_the_old_words_and_in_the_new(rope):
    """transformers 4 reads `rope_theta` and `rope_scaling`, 5 reads `rope_parameters`."""
    config = ModelConfig(family="llama", vocabulary=270, width=48, mlp=64, layers=1, heads=4, kv_heads=2, head_dim=12,
                         context_tokens=256, rope=Rope.from_hf({"rope_parameters": rope}))
    new = config.to_hf()
    old = {key: value for key, value in new.items() if key != "rope_parameters"}
    assert new["rope_parameters"] == rope
    assert old["rope_theta"] == rope["rope_theta"]
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    assert old["rope_scaling"] == (None if rope is PLAIN else scaling)
    assert ModelConfig.from_hf(old) == ModelConfig.from_hf(new) == config


def test_weights_come_from_the_file_that_transformers_reads(tmp_path):
    """A single file goes before an index, which may be of older shards; an index alone must name its files."""
    from transformers import AutoModelForCausalLM
    model = small_model(TINY, 0)
    save_model(model, tmp_path, ByteChat())
    index = tmp_path / "model.safetensors.index.json"
    whole = load_file(tmp_path / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in whole.items()}, tmp_path / "old.safetensors")
    for stale in ({"weight_map": dict.fromkeys(whole, "old.safetensors")}, {}):
        index.write_text(json.dumps(stale))
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
        for name, tensor in load_model(tmp_path).state_dict().items():
            assert torch.equal(tensor, whole[name])
            assert torch.equal(tensor, theirs[name])
    (tmp_path / "model.safetensors").unlink()
    for broken in ({}, {"weight_map": {}}, {"weight_map": 3}, {"weight_map": {"model.norm.weight": None}}):
        index.write_text(json.dumps(broken))
        with pytest.raises(ConfigError, match="must say in weight_map which file holds each tensor"):
            load_model(tmp_path)


def test_a_head_of_its_own_is_never_dropped_in_silence(tmp_path):
    """Where the config says that it is the embedding, transformers 4 drops it and 5 keeps it: the user must say."""
    from transformers import AutoModelForCausalLM
    model = small_model(TINY, 0)
    save_model(model, tmp_path, ByteChat())
    whole, ids = load_file(tmp_path / "model.safetensors"), torch.arange(20)
    embedding = whole["model.embed_tokens.weight"]
    config = json.loads((tmp_path / "config.json").read_text())

    def logits(**tied):
        (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k[:3] != "tie"} | tied))
        ours = load_model(tmp_path)
        with torch.no_grad():
            found = ours.logits(ours(ids, ids, [20]))
            theirs = AutoModelForCausalLM.from_pretrained(tmp_path)(ids[None]).logits[0]
        assert torch.allclose(found, theirs, atol=1e-5)
        return found

    tied = logits(tie_word_embeddings=True)
    save_file({**whole, "lm_head.weight": embedding.clone()}, tmp_path / "model.safetensors", {"format": "pt"})
    assert torch.equal(logits(tie_word_embeddings=True), tied)
    save_file({**whole, "lm_head.weight": -embedding}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"tie_word_embeddings = true, but an lm_head.weight that differs"):
        logits(tie_word_embeddings=True)
    assert torch.equal(logits(), logits(tie_word_embeddings=False))
    assert torch.allclose(logits(), -tied, atol=1e-5)
    save_file(whole, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"missing tensors: lm_head\.weight"):
        logits()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_are_not_finite_are_refused_by_name(value, dtype, tmp_path):
    model = small_model(TINY, 0).to(dtype)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 5] = value
    save_model(model, tmp_path, ByteChat())
    with pytest.raises(ConfigError, match=r"must be finite; .*1\.mlp\.up_proj\.weight holds others") as raised:
        load_model(tmp_path)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_weights_that_are_no_plain_floats_are_refused_by_name(dtype, tmp_path):
    """As numbers they would be loaded, and mean something else."""
    save_model(small_model(TINY, 0), tmp_path, ByteChat())
    tensors, name = load_file(tmp_path / "model.safetensors"), "model.layers.1.mlp.up_proj.weight"
    save_file({**tensors, name: tensors[name].to(dtype)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=rf"floats of 16 to 64 bits; {name} has {dtype}") as raised:
        load_model(tmp_path)
    assert "\n" not in str(raised.value)


def test_weights_that_are_finite_in_64_bits_only_are_refused(tmp_path):
    save_model(small_model(TINY, 0), tmp_path, ByteChat())
    tensors, name = load_file(tmp_path / "model.safetensors"), "model.norm.weight"
    for factor, refused in ((1.0, False), (1e300, True)):
        save_file({**tensors, name: tensors[name].double() * factor}, tmp_path / "model.safetensors",
                  metadata={"format": "pt"})
        if refused:
            with pytest.raises(ConfigError, match=f"must be finite; {name} holds others"):
                load_model(tmp_path)
        else:
            assert load_model(tmp_path).model.norm.weight.dtype == torch.float32


@pytest.mark.parametrize("name", ["\ud83d", "a\0b", "folder", "/proc/1/mem", "../" * 40 + "proc/version"])
def test_a_shard_that_is_no_readable_file_is_refused_by_name(name, tmp_path):
    save_model(small_model(TINY, 0), tmp_path, ByteChat())
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "folder").mkdir()
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"lm_head.weight": name}}))
    with pytest.raises(ConfigError) as raised:
        load_model(tmp_path)
    assert str(tmp_path) in str(raised.value)
    assert "\n" not in str(raised.value)
