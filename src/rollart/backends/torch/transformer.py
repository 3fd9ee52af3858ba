"""The one decoder of the embedded engine and learner: Llama, Qwen2, Qwen3 and Qwen3-MoE shapes.

Keeps true: parameter names are the Hugging Face names of the same model, so that no mapping exists anywhere; sequences
packed into one row never see each other (L8). Shapes: T tokens in all, D width, H heads, K key-value heads, Dh head
width, N sequences of a group, L their padded length.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rollart.backends.torch.moe import MLP, Experts, Routing
from rollart.backends.torch.settings import SmallModel
from rollart.backends.torch.shapes import ModelConfig, small_config


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [..., Dh] with cos and signed sin [..., Dh], see `rotary`."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


def rotary(positions: Tensor, frequencies: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin [*positions, Dh]; the first half of sin is negative, so that `rotate` needs no second negation."""
    angles = positions[..., None].float() * frequencies
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([cos, cos], -1).to(dtype), torch.cat([-sin, sin], -1).to(dtype)


@dataclass(frozen=True, slots=True)
class Packing:
    """Sequences of like lengths, padded together. `gather` [N, L] indexes packed tokens; `scatter` undoes it.

    Padding stands on the right and attention is causal, so that no token sees it and no mask is needed.
    """

    gathers: tuple[Tensor, ...]
    scatter: Tensor  # [T], into the concatenated flat groups


def packing(lengths: Sequence[int], device: torch.device, waste: float = 0.8) -> Packing:
    """Groups such that within each the shortest sequence has at least `waste` of the longest's length."""
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    order = sorted((i for i, length in enumerate(lengths) if length), key=lambda i: -lengths[i])
    groups: list[list[int]] = []
    for i in order:
        if not groups or lengths[i] < waste * lengths[groups[-1][0]]:
            groups.append([])
        groups[-1].append(i)
    scatter, gathers, offset = torch.empty(starts[-1], dtype=torch.int64), [], 0
    for group in groups:
        longest = lengths[group[0]]
        gather = torch.zeros(len(group), longest, dtype=torch.int64)
        for row, i in enumerate(group):
            gather[row, :lengths[i]] = torch.arange(starts[i], starts[i + 1])
            scatter[starts[i]:starts[i + 1]] = torch.arange(lengths[i]) + offset + row * longest
        gathers.append(gather.to(device))
        offset += len(group) * longest
    return Packing(tuple(gathers), scatter.to(device))


class Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        self.q_proj = nn.Linear(config.width, config.heads * config.head_dim, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.width, config.kv_heads * config.head_dim, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.width, config.kv_heads * config.head_dim, bias=config.qkv_bias)
        self.o_proj = nn.Linear(config.heads * config.head_dim, config.width, bias=config.out_bias)
        if config.qk_norm:
            self.q_norm = nn.RMSNorm(config.head_dim, config.norm_eps)
            self.k_norm = nn.RMSNorm(config.head_dim, config.norm_eps)
        self.qk_norm = config.qk_norm

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, packed: Packing) -> Tensor:
        """x [T, D], cos and sin [T, 1, Dh]."""
        q = self.q_proj(x).view(-1, self.heads, self.head_dim)
        k = self.k_proj(x).view(-1, self.kv_heads, self.head_dim)
        v = self.v_proj(x).view(-1, self.kv_heads, self.head_dim)
        if self.qk_norm:
            wide = self.q_norm.weight.dtype  # under autocast q and k are bfloat16, which a float32 norm does not fuse
            q, k = self.q_norm(q.to(wide)), self.k_norm(k.to(wide))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        outs = []
        for gather in packed.gathers:
            attended = F.scaled_dot_product_attention(  # [N, H, L, Dh]
                q[gather].transpose(1, 2), k[gather].transpose(1, 2), v[gather].transpose(1, 2), is_causal=True,
                enable_gqa=self.heads != self.kv_heads)
            outs.append(attended.transpose(1, 2).reshape(-1, self.heads * self.head_dim))
        return self.o_proj(torch.cat(outs)[packed.scatter])


class Layer(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = Experts(config) if config.experts else MLP(config.width, config.mlp)
        self.input_layernorm = nn.RMSNorm(config.width, config.norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.width, config.norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, packed: Packing, routing: Routing, number: int) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, packed)
        hidden = self.post_attention_layernorm(x)
        return x + (self.mlp(hidden, routing, number) if isinstance(self.mlp, Experts) else self.mlp(hidden))


class Decoder(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocabulary, config.width)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, config.norm_eps)


class Transformer(nn.Module):
    """A causal language model over packed sequences. `state_dict` has the Hugging Face names, without a tied head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        if not config.tied:
            self.lm_head = nn.Linear(config.width, config.vocabulary, bias=False)
        self._frequencies = config.rope.frequencies(config.head_dim)
        self.checkpointing = False
        """Compute each layer again in the backward pass instead of keeping what is inside it."""

    def forward(self, ids: Tensor, positions: Tensor, lengths: Sequence[int],
                routing: Routing | None = None) -> Tensor:
        """Hidden states [T, D] of packed sequences. `ids`, `positions` [T] int64; `lengths` sum to T; `routing`: which
        experts to take, and what the routers said (mixtures of experts).

        Positions start again with each sequence. Raises ValueError when the lengths do not sum to T.
        """
        if sum(lengths) != len(ids) or len(positions) != len(ids):
            raise ValueError(f"lengths must sum to the number of ids; got {sum(lengths)}, {len(ids)} ids and "
                             f"{len(positions)} positions")
        x = self.model.embed_tokens(ids)
        cos, sin = rotary(positions[:, None], self._frequencies.to(x.device), x.dtype)
        packed, routing = packing(lengths, x.device), routing or Routing()
        for number, layer in enumerate(self.model.layers):
            if self.checkpointing and torch.is_grad_enabled():
                x = checkpoint(layer, x, cos, sin, packed, routing, number, use_reentrant=False)
            else:
                x = layer(x, cos, sin, packed, routing, number)
        return self.model.norm(x)

    @property
    def head(self) -> Tensor:
        """The output projection [V, D]: the embedding's own weight when tied."""
        return self.model.embed_tokens.weight if self.config.tied else self.lm_head.weight

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., D] to [..., V]."""
        return F.linear(hidden, self.head)


def small_model(settings: SmallModel, seed: int) -> Transformer:
    """A fresh model, float32 on the CPU: normal weights of deviation 0.02, residual projections / sqrt(2 * layers)
    (Radford et al. 2019), norms 1. The same for the same seed; the global random state is left alone."""
    with torch.device("meta"):
        model = Transformer(small_config(settings))
    model = model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:  # norms; a small model has no biases
                parameter.fill_(1.0)
                continue
            residual = name.endswith(("o_proj.weight", "down_proj.weight"))
            parameter.normal_(0.0, 0.02 / math.sqrt(2 * settings.layers) if residual else 0.02, generator=generator)
    return model
