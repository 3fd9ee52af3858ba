"""KV rows: forward passes in pieces equal one pass over the whole, for every shape and whatever happens to the rows."""

import pytest
import torch

from rollart.backends.torch.runner import Runner
from rollart.backends.torch.shapes import ModelConfig
from rollart.backends.torch.transformer import Transformer


def shaped(**shape):
    return ModelConfig(**{"family": "llama", "vocabulary": 99, "width": 48, "mlp": 64, "layers": 2, "heads": 4,
                          "kv_heads": 2, "head_dim": 12, "context_tokens": 300, **shape})


@pytest.mark.parametrize("config", [
    shaped(), shaped(out_bias=True, qkv_bias=True, tied=True), shaped(family="qwen2", qkv_bias=True, kv_heads=4),
    shaped(family="qwen3", qk_norm=True, head_dim=16, kv_heads=1),
    shaped(family="qwen3_moe", qk_norm=True, mlp=24, experts=6, experts_per_token=2, norm_topk=True)],
    ids=["llama", "biases", "qwen2", "qwen3", "mixture"])
def test_prefill_in_chunks_and_decode_equal_one_pass(config):
    torch.manual_seed(0)
    model = Transformer(config)
    with torch.inference_mode():
        for parameter in model.parameters():
            parameter.normal_(0 if parameter.dim() > 1 else 1, .3)
        lengths = [200, 10, 120]
        ids = torch.randint(0, 99, (sum(lengths),))
        hidden = model(ids, torch.cat([torch.arange(n) for n in lengths]), lengths)
        expected = model.logits(hidden).split(lengths)
        parts = [part.tolist() for part in ids.split(lengths)]

        runner = Runner(config, 8, 300, torch.float32, torch.device("cpu"))
        runner.load(model.state_dict())
        runner.reserve(3, 60)
        runner.prefill([0, 1, 2], [0, 0, 0], [part[:end] for part, end in zip(parts, (50, 5, 55), strict=True)])
        runner.reserve(7, 250)  # grows, and keeps what it holds
        runner.move(0, 5, 50)
        kept = runner.take(5, 50)
        runner.prefill([0], [0], [parts[1][:9]])  # row 0 is someone else's meanwhile
        runner.put(0, kept, 50)
        runner.prefill([2, 0], [55, 50], [parts[2][55:110], parts[0][50:190]])
        filled = [190, 5, 110]
        for _ in range(5):
            tokens = torch.tensor([part[at] for part, at in zip(parts, filled, strict=True)])
            logits = runner.decode(tokens, torch.tensor(filled), max(filled) + 1, False)
            for row, at in enumerate(filled):
                assert torch.allclose(logits[row], expected[row][at], atol=1e-4)
            filled = [at + 1 for at in filled]
        assert expected[0].std() > .5
        alone = runner.decode(torch.tensor([parts[0][195]]), torch.tensor([195]), 196, True)
        assert torch.allclose(alone[0], expected[0][195], atol=1e-4)


def test_capacity_grows_by_doubling_up_to_its_limit_and_shrinks_by_clear():
    runner = Runner(shaped(), 10, 300, torch.float32, torch.device("cpu"))
    seen = []
    for rows, length in ((1, 10), (4, 127), (5, 128), (10, 300)):
        runner.reserve(rows, length)
        seen.append(runner.capacity)
    assert seen == [(4, 128), (4, 128), (8, 256), (10, 301)]
    runner.clear()
    assert runner.capacity == (0, 0)


def test_no_pass_copies_the_rows_that_are_not_its_own():
    """It did: half of the engine's time went into it."""
    runner = Runner(shaped(), 200, 300, torch.float32, torch.device("cpu"))
    runner.load(Transformer(runner.config).state_dict())
    runner.reserve(200, 300)
    with torch.inference_mode(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU],
                                                        profile_memory=True) as seen:
        runner.prefill([7, 190], [100, 40], [[1] * 12, [2] * 10])
        runner.decode(torch.tensor([3, 4]), torch.tensor([112, 50]), 113, False)
    most = max(event.cpu_memory_usage for event in seen.events())
    assert 0 < most < 0.05 * runner._kv[0].nbytes


def test_loading_fills_the_fused_weights():
    config = shaped()
    runner, other = Runner(config, 1, 300, torch.float32, torch.device("cpu")), Transformer(config)
    runner.load(other.state_dict())
    attention = other.model.layers[1].self_attn
    fused = torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight])
    assert torch.equal(runner._layers[1].qkv, fused)
    assert torch.equal(runner.model.state_dict()["lm_head.weight"], other.lm_head.weight)
