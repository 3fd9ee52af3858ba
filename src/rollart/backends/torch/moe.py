"""A layer's feed-forward part: plain, or a mixture of experts with a router, whose choices can be replayed.

Keeps true: replay fixes which experts a token takes, never their weights, so the gradient still reaches the router
(rollout routing replay, arXiv 2510.11370); where the engine recorded nothing the router chooses for itself. Shapes:
T tokens, E experts of which each token takes k.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rollart.backends.torch.shapes import ModelConfig

UNKNOWN = 255
"""An expert number that stands for: not recorded."""


class Routing:
    """Of one forward pass: `replay` [T, layers, k] uint8 says which experts to take (None: the router's choice);
    `chosen` [T, k] and `probabilities` [T, E] of every layer are noted there. Of dataclasses FSDP2 makes copies."""

    def __init__(self, replay: Tensor | None = None) -> None:
        self.replay = replay
        self.chosen: dict[int, Tensor] = {}
        self.probabilities: dict[int, Tensor] = {}


class MLP(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Experts(nn.Module):
    """Qwen3-MoE's sparse block: softmax over all experts in float32, the k largest, weighted."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.width, config.experts, bias=False)
        self.experts = nn.ModuleList(MLP(config.width, config.mlp) for _ in range(config.experts))
        self.per_token, self.norm_topk = config.experts_per_token, config.norm_topk

    def forward(self, x: Tensor, routing: Routing, number: int) -> Tensor:
        """x [T, D]; `number`: which layer this is."""
        probabilities = self.gate(x).softmax(-1, dtype=torch.float32)
        chosen = probabilities.topk(self.per_token, -1).indices
        if routing.replay is not None:
            recorded = routing.replay[:, number].long()
            chosen = torch.where(recorded == UNKNOWN, chosen, recorded)
        routing.chosen[number], routing.probabilities[number] = chosen, probabilities
        weights = probabilities.gather(-1, chosen)
        if self.norm_topk:
            weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(x)
        # With a gradient every expert takes part, if with no token: each has a gradient of 0 then, on every rank alike.
        for expert in range(len(self.experts)) if torch.is_grad_enabled() else chosen.unique().tolist():
            rows, slots = torch.where(chosen == expert)
            mixed = self.experts[expert](x[rows]) * weights[rows, slots, None]
            out = out.index_add(0, rows, mixed.to(out.dtype))
        return out


def balance_loss(routing: Routing, lengths: Sequence[int]) -> Tensor:
    """How unevenly each sequence loads the experts, mean over layers, [N]; 1 is even (DeepSeek-V3, arXiv 2412.19437,
    eq. 17-20): sum_e f_e P_e with f_e = E / (k T) * tokens that took e, P_e its mean probability.

    Per sequence, so that it is the same however a batch is split or packed.
    """
    layers = []
    for number, probabilities in routing.probabilities.items():
        chosen = routing.chosen[number]
        taken = torch.zeros_like(probabilities).scatter(-1, chosen, 1.0)
        parts = zip(taken.split(list(lengths)), probabilities.split(list(lengths)), strict=True)
        layers.append(torch.stack([(own.mean(0) * said.mean(0)).sum() for own, said in parts])
                      * (probabilities.shape[-1] / chosen.shape[-1]))
    return torch.stack(layers).mean(0)


def replayed(routes: Sequence[bytes], lengths: Sequence[int], layers: int, per_token: int) -> Tensor | None:
    """Recorded routes of each sequence as [T, layers, k] for its first `lengths` positions; None if there are none."""
    if not any(routes):
        return None
    parts = []
    for recorded, length in zip(routes, lengths, strict=True):
        part = torch.full((length, layers, per_token), UNKNOWN, dtype=torch.uint8)
        known = torch.frombuffer(bytearray(recorded), dtype=torch.uint8).view(-1, layers, per_token)[:length] if (
            recorded) else part[:0]
        part[:len(known)] = known
        parts.append(part)
    return torch.cat(parts)
