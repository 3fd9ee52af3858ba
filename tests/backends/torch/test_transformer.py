"""The decoder: packed equals alone (L8), and a small model that is made the same from the same seed."""

import pytest
import torch

from rollart.backends.torch.settings import SmallModel
from rollart.backends.torch.shapes import ModelConfig
from rollart.backends.torch.transformer import Transformer, packing, small_model
from rollart.core.errors import ConfigError

TINY = SmallModel(layers=2, width=32, heads=4, kv_heads=2, mlp=32, vocabulary=50)
LENGTHS = [9, 30, 1, 28, 12]


def loud(settings=TINY):
    """A model whose logits differ a lot, so that a mistake shows."""
    model = small_model(settings, 0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(10)
    return model


def positions_of(lengths):
    return torch.cat([torch.arange(length) for length in lengths])


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_packed_equals_alone_and_positions_matter(family):
    model = loud(SmallModel(family=family, layers=2, width=32, heads=4, kv_heads=2, mlp=32, vocabulary=50))
    ids = torch.randint(0, 50, (sum(LENGTHS),), generator=torch.Generator().manual_seed(0))
    positions = positions_of(LENGTHS)
    packed = model.logits(model(ids, positions, LENGTHS))
    alone = torch.cat([model.logits(model(part, torch.arange(len(part)), [len(part)])) for part in ids.split(LENGTHS)])
    assert packed.std() > .5
    assert torch.allclose(packed, alone, atol=1e-5)
    shifted = model.logits(model(ids, torch.arange(len(ids)) * 3, LENGTHS))
    assert not torch.allclose(packed, shifted, atol=1e-2)
    together = model.logits(model(ids, positions, [len(ids)]))
    assert not torch.allclose(packed, together, atol=1e-2)


def test_gradients_of_packed_sequences_are_the_sums_of_the_single_ones():
    model = loud()
    ids = torch.randint(0, 50, (sum(LENGTHS),), generator=torch.Generator().manual_seed(0))

    def gradient(parts):
        model.zero_grad()
        for part, lengths in parts:
            model.logits(model(part, positions_of(lengths), lengths)).square().sum().backward()
        return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])

    packed = gradient([(ids, LENGTHS)])
    single = gradient([(part, [len(part)]) for part in ids.split(LENGTHS)])
    assert (packed - single).norm() < 1e-5 * single.norm()


def test_a_token_sees_no_later_token():
    model = loud()
    ids = torch.randint(0, 50, (20,), generator=torch.Generator().manual_seed(0))
    before = model(ids, torch.arange(20), [20])
    ids[12] = (ids[12] + 1) % 50
    after = model(ids, torch.arange(20), [20])
    assert torch.equal(before[:12], after[:12])
    assert not torch.allclose(before[12:], after[12:])


def test_groups_pad_at_most_a_fifth_and_scatter_undoes_gather():
    lengths = [60, 300, 0, 90, 130, 250, 200, 170, 280]
    packed = packing(lengths, torch.device("cpu"))
    flat = torch.cat([gather.flatten() for gather in packed.gathers])
    assert torch.equal(flat[packed.scatter], torch.arange(sum(lengths)))
    assert len(flat) <= 1.25 * sum(lengths)


def test_lengths_that_do_not_sum_to_the_ids_are_an_error():
    with pytest.raises(ValueError, match="got 5, 4 ids"):
        small_model(TINY, 0)(torch.zeros(4, dtype=torch.int64), torch.arange(4), [2, 3])


def test_a_small_model_depends_on_its_seed_only_and_leaves_the_global_stream_alone():
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    first, again, other = small_model(TINY, 0), small_model(TINY, 0), small_model(TINY, 1)
    name = "model.layers.1.self_attn.q_proj.weight"
    assert torch.equal(first.state_dict()[name], again.state_dict()[name])
    assert not torch.equal(first.state_dict()[name], other.state_dict()[name])
    assert torch.equal(torch.rand(1), expected)


def test_the_default_small_model_has_one_to_two_million_parameters_and_knows_nothing():
    model = small_model(SmallModel(), 0)
    assert 1e6 < sum(parameter.numel() for parameter in model.parameters()) < 2e6
    logits = model.logits(model(torch.arange(100), torch.arange(100), [100]))
    entropy = torch.distributions.Categorical(logits=logits).entropy().mean()
    assert entropy > 0.95 * torch.log(torch.tensor(262.0))


@pytest.mark.parametrize(("change", "message"), [
    ({"family": "gpt2"}, "family must be"), ({"layers": 0}, "layers must be at least 1; got 0"),
    ({"heads": 4, "kv_heads": 3}, "multiple of kv_heads"), ({"width": 100, "heads": 8}, r"multiple of 2 \* heads")])
def test_a_small_model_that_cannot_be_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        SmallModel(**change)


@pytest.mark.parametrize(("change", "message"), [
    ({"model_type": "gpt2"}, "one of llama, qwen2, qwen3, qwen3_moe; config.json has 'gpt2'"),
    ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported"),
    ({"use_sliding_window": True}, "use_sliding_window = True is not supported"),
    ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ({"rope_scaling": {"rope_type": "yarn"}}, "'yarn'"),
    ({"rope_scaling": {"rope_type": "linear"}}, "'linear' needs 'factor'"),
    ({"vocab_size": None}, "'vocab_size'"),
    ({"model_type": ["llama"]}, "model_type must be one of"),
    ({"hidden_size": "8"}, "hidden_size in config.json must be a whole number from 1"),
    ({"hidden_size": -8}, "got -8"), ({"hidden_size": 8.0}, "got 8.0"), ({"num_attention_heads": 0}, "got 0"),
    ({"num_hidden_layers": True}, "got True"), ({"vocab_size": 10**15}, "below 1,000,000,000"),
    ({"max_position_embeddings": "64"}, "max_position_embeddings"), ({"rms_norm_eps": "a"}, "rms_norm_eps"),
    ({"head_dim": [4]}, "head_dim"), ({"num_key_value_heads": "2"}, "num_key_value_heads"),
    ({"rope_theta": float("nan")}, "rope_theta in config.json must be a number above 0; got nan"),
    ({"rope_scaling": "linear"}, "must be an object; got 'linear'"), ({"rope_scaling": [1]}, "must be an object"),
    ({"rope_scaling": {"rope_type": ["linear"]}}, "rope scaling must be"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "factor in config.json must be a number above 0"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 2, "low_freq_factor": 1, "high_freq_factor": 4,
                       "original_max_position_embeddings": "8"}}, "original_max_position_embeddings")])
def test_an_unsupported_config_is_one_clear_line(change, message):
    config = {key: value for key, value in {"model_type": "llama", "vocab_size": 9, "hidden_size": 8,
              "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
              "max_position_embeddings": 64, **change}.items() if value is not None}
    with pytest.raises(ConfigError, match=message) as raised:
        ModelConfig.from_hf(config)
    assert "\n" not in str(raised.value)


def test_an_older_config_keeps_rope_theta_and_scaling():
    config = ModelConfig.from_hf({
        "model_type": "llama", "vocab_size": 9, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
        "num_attention_heads": 2, "max_position_embeddings": 64, "rope_theta": 5e5,
        "rope_scaling": {"type": "linear", "factor": 2.0}})
    assert (config.rope.theta, config.rope.kind, config.rope.factor) == (5e5, "linear", 2.0)
    assert ModelConfig.from_hf(config.to_hf()) == config


def test_a_tied_head_is_no_tensor_of_its_own():
    tied = small_model(TINY, 0)
    assert "lm_head.weight" not in tied.state_dict()
    assert tied.head is tied.model.embed_tokens.weight
    untied = Transformer(ModelConfig.from_hf({**tied.config.to_hf(), "tie_word_embeddings": False}))
    assert "lm_head.weight" in untied.state_dict()
