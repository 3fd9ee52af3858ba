"""Layouts: what one function does, its partner takes back, for any shape that divides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.backends.torch.settings import SmallModel
from rollart.backends.torch.shapes import ModelConfig
from rollart.backends.torch.transformer import Transformer, small_model
from rollart.backends.weights import layout
from rollart.backends.weights.layout import Heads, fuse, shard, untie


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def split(tensors: Mapping[str, torch.Tensor], heads: Heads) -> dict[str, torch.Tensor]:
    """What `fuse` was given."""
    out: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        stem, module, kind = layout._module(name)
        parts = layout.FUSED.get(module, ())
        shares = [heads.heads, heads.kv_heads, heads.kv_heads] if module == "qkv_proj" else [1] * len(parts)
        sizes = [len(tensor) * share // sum(shares) for share in shares]
        out |= {f"{stem}{part}{kind}": piece for part, piece in zip(parts, tensor.split(sizes), strict=True)} if parts \
            else {name: tensor}
    return out


def gather(shards: Sequence[Mapping[str, torch.Tensor]], heads: Heads) -> dict[str, torch.Tensor]:
    """What `shard` was given, from all ranks in order."""
    out: dict[str, torch.Tensor] = {}
    for name, first in shards[0].items():
        _, module, kind = layout._module(name)
        step = max(1, len(shards) // heads.kv_heads) if module in layout.KV_ROWS else 1
        rows, columns = module in layout.ROWS | layout.KV_ROWS, module in layout.COLUMNS and kind == ".weight"
        dim = 0 if rows else 1 if columns else None
        out[name] = first if dim is None else torch.cat([part[name] for part in shards[::step]], dim)
    return out


@st.composite
def models(draw: st.DrawFn) -> tuple[dict[str, torch.Tensor], Heads, int]:
    """Any family's state, dense or mixture, tied or not, with biases or not; and ranks that divide it."""
    ranks = draw(st.sampled_from([1, 2, 4]))
    kv_heads, share = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2]))
    heads = max(kv_heads * share, ranks)
    experts = draw(st.sampled_from([0, 2]))
    config = ModelConfig(family="llama", vocabulary=8 * ranks, width=8, mlp=4 * ranks, layers=1, heads=heads,
                         kv_heads=kv_heads, head_dim=draw(st.sampled_from([2, 4])), context_tokens=8,
                         tied=draw(st.booleans()), qkv_bias=draw(st.booleans()), out_bias=draw(st.booleans()),
                         qk_norm=draw(st.booleans()), experts=experts, experts_per_token=min(experts, 1))
    model = Transformer(config)
    for number, parameter in enumerate(model.parameters()):
        parameter.data.normal_(generator=torch.Generator().manual_seed(number))
    return model.state_dict(), Heads(heads, kv_heads, config.head_dim), ranks


@settings(max_examples=60, deadline=None)
@given(models())
def test_every_layout_has_its_way_back_also_fused_slices_of_an_untied_model(drawn):
    state, heads, ranks = drawn
    assert equal(split(fuse(state), heads), state)
    shards = [shard(state, rank, ranks, heads) for rank in range(ranks)]
    assert equal(gather(shards, heads), state)
    local = Heads(heads.heads // ranks, max(1, heads.kv_heads // ranks), heads.head_dim)
    assert equal(gather([split(fuse(part), local) for part in shards], heads), state)
    if "lm_head.weight" not in state:
        assert equal(untie(state), {**state, "lm_head.weight": state["model.embed_tokens.weight"]})


def test_slices_compute_what_the_whole_computes():
    state = small_model(SmallModel(layers=1, width=16, heads=4, kv_heads=2, mlp=8, vocabulary=32), 0).state_dict()
    heads, x = Heads(4, 2, 4), torch.randn(5, 16)

    def mlp(part: dict[str, torch.Tensor]) -> torch.Tensor:
        gate, up = (x @ fuse(part)["model.layers.0.mlp.gate_up_proj.weight"].T).chunk(2, -1)
        return (torch.nn.functional.silu(gate) * up) @ part["model.layers.0.mlp.down_proj.weight"].T

    whole = mlp(state)
    assert torch.allclose(sum(mlp(shard(state, rank, 4, heads)) for rank in range(4)), whole, atol=1e-6)
    first, second = (shard(state, rank, 4, heads)["model.layers.0.self_attn.k_proj.weight"] for rank in (0, 1))
    assert torch.equal(first, second)  # four ranks share two key-value heads


def test_what_does_not_fit_is_named():
    state = small_model(SmallModel(layers=1, width=16, heads=4, kv_heads=2, mlp=9, vocabulary=32), 0).state_dict()
    with pytest.raises(ValueError, match="3 ranks must divide 4 heads"):
        shard(state, 0, 3, Heads(4, 2, 4))
    with pytest.raises(ValueError, match=r"2 ranks must divide dimension 0 of model\.layers\.0\.mlp\.gate_proj"):
        shard(state, 0, 2, Heads(4, 2, 4))
    del state["model.layers.0.self_attn.k_proj.weight"]
    with pytest.raises(ValueError, match=r"missing tensors: model\.layers\.0\.self_attn\.k_proj\.weight"):
        fuse(state)
