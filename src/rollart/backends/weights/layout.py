"""Names and layouts from learner to engine: pure functions of tensors under their Hugging Face names.

Keeps true: nothing is lost: each has an inverse (in its tests). An engine with fused matrices over several ranks takes
`fuse(shard(t, rank, ranks, heads))`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
ROWS = {"q_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head"}
KV_ROWS = {"k_proj", "v_proj"}
COLUMNS = {"o_proj", "down_proj"}
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@dataclass(frozen=True)
class Heads:
    """Of attention: counts, and the width of one."""

    heads: int
    kv_heads: int
    head_dim: int


def _module(name: str) -> tuple[str, str, str]:
    """`a.b.q_proj.weight` -> (`a.b.`, `q_proj`, `.weight`)."""
    path, _, kind = name.rpartition(".")
    stem, dot, module = path.rpartition(".")
    return stem + dot, module, f".{kind}"


def fuse(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Query, key and value in one matrix, gate and up in one, rows after rows. Raises ValueError for a missing part."""
    whole = {part: fused for fused, parts in FUSED.items() for part in parts}
    out: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        stem, module, kind = _module(name)
        fused = whole.get(module)
        if fused is None:
            out[name] = tensor
        elif f"{stem}{fused}{kind}" not in out:
            names = [f"{stem}{part}{kind}" for part in FUSED[fused]]
            if missing := [part for part in names if part not in tensors]:
                raise ValueError(f"missing tensors: {', '.join(missing)}, which belong into {stem}{fused}{kind}")
            out[f"{stem}{fused}{kind}"] = torch.cat([tensors[part] for part in names])
    return out


def untie(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """With an output head of its own name, for an engine that has one although the model ties it."""
    return {**tensors, _HEAD: tensors[_EMBEDDING]}


def shard(tensors: Mapping[str, Tensor], rank: int, ranks: int, heads: Heads) -> dict[str, Tensor]:
    """The part of tensor-parallel rank `rank`: heads, inner widths and vocabulary in `ranks` equal parts; where there
    are fewer key-value heads than ranks, several ranks hold one. Raises ValueError when ranks do not divide them."""
    if heads.heads % ranks or (heads.kv_heads % ranks and ranks % heads.kv_heads):
        raise ValueError(f"{ranks} ranks must divide {heads.heads} heads, and divide or be a multiple of "
                         f"{heads.kv_heads} key-value heads")
    out: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        _, module, kind = _module(name)
        parts = min(ranks, heads.kv_heads) if module in KV_ROWS else ranks
        dim = 0 if module in ROWS | KV_ROWS else 1 if module in COLUMNS and kind == ".weight" else None
        if dim is not None and tensor.shape[dim] % parts:
            raise ValueError(f"{ranks} ranks must divide dimension {dim} of {name} {list(tensor.shape)}")
        out[name] = tensor if dim is None else tensor.chunk(parts, dim)[rank * parts // ranks]
    return out
