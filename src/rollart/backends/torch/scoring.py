"""Packed sequences to log-probabilities of their action tokens.

Keeps true: log-probabilities are float32 or wider, at the temperature that was sampled with (L9); only hidden states
that score an action token reach the vocabulary projection, and no more than `LOGIT_BYTES` of logits exist at a time,
however long the sequences. A: number of action tokens, T: packed tokens, V: vocabulary, D: width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rollart.backends.torch.moe import Routing
from rollart.backends.torch.transformer import Transformer

LOGIT_BYTES = 64_000_000
"""Of float32 logits in one piece; of more, each piece is computed twice: for the loss and for the gradient."""


@dataclass(frozen=True, slots=True)
class Packed:
    """Sequences one behind the other: ids, positions [T]; `scored` [A] points at hidden states, `targets` [A] at what
    they score. Sequences end before their last action token, for nothing scores what comes after it, unless they were
    packed `to_end`: then `ends` [N] points at the hidden state of each last action token."""

    ids: Tensor
    positions: Tensor
    lengths: list[int]
    scored: Tensor
    targets: Tensor
    counts: list[int]
    """Action tokens of each sequence; they sum to A."""
    ends: Tensor


def pack_sequences(sequences: Sequence[tuple[Sequence[int], Sequence[int]]], device: torch.device,
                   to_end: bool = False) -> Packed:
    """From (ids, mask) pairs, each [T_i]. The logit at i - 1 scores token i.

    Raises ValueError for a sequence whose first token is an action, or that has none.
    """
    inputs, positions, scored, targets, lengths, counts, ends, start = [], [], [], [], [], [], [], 0
    for tokens, mask in sequences:
        ids = np.asarray(tokens, dtype=np.int64)
        actions = np.flatnonzero(np.asarray(mask))
        if not len(actions) or actions[0] == 0:
            raise ValueError("a training sequence needs an action token, and context before the first one")
        length = int(actions[-1]) + to_end
        inputs.append(ids[:length])
        positions.append(np.arange(length))
        scored.append(actions + (start - 1))
        targets.append(ids[actions])
        lengths.append(length)
        counts.append(len(actions))
        start += length
        ends.append(start - 1)

    def tensor(parts: list[np.ndarray]) -> Tensor:
        return torch.from_numpy(np.concatenate(parts)).to(device)

    return Packed(tensor(inputs), tensor(positions), lengths, tensor(scored), tensor(targets), counts,
                  torch.tensor(ends, device=device))


def action_logprobs(model: Transformer, packed: Packed, temperature: float,
                    routing: Routing | None = None, entropy_gradient: bool = False) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the action tokens and the entropies of their distributions, both [A]. Without
    `entropy_gradient` the entropies are figures only."""
    hidden = model(packed.ids, packed.positions, packed.lengths, routing)[packed.scored]
    if 4 * len(hidden) * model.config.vocabulary <= LOGIT_BYTES:
        return chosen_logprobs(model.logits(hidden), packed.targets, temperature, entropy_gradient)
    return fused_logprobs(hidden, model.head, packed.targets, temperature)


def chosen_logprobs(logits: Tensor, targets: Tensor, temperature: float,
                    entropy_gradient: bool = False) -> tuple[Tensor, Tensor]:
    """Log-probability of each target [A] and entropy [A] of softmax(logits [A, V] / temperature)."""
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    logprobs = torch.log_softmax(logits / temperature if temperature != 1.0 else logits, dim=-1)
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        entropy = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(-1, targets[:, None]).squeeze(-1), entropy


def fused_logprobs(hidden: Tensor, head: Tensor, targets: Tensor, temperature: float,
                   logit_bytes: int = LOGIT_BYTES) -> tuple[Tensor, Tensor]:
    """`chosen_logprobs` of hidden [A, D] times head [V, D], in pieces of at most `logit_bytes` of logits."""
    rows = max(1, logit_bytes // (4 * len(head)))
    device = hidden.device.type
    half = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    return _Fused.apply(hidden, head, targets, temperature, rows, half)  # type: ignore[no-any-return]


class _Fused(torch.autograd.Function):
    """Forward keeps the normaliser and entropy of each row; backward computes the logits of each piece again.

    With p = softmax(z / t) and entropy H, the gradient on z of (g log p[target] + h H) is
    (g (onehot - p) - h p (log p + H)) / t.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor, temperature: float, rows: int,
                half: torch.dtype | None) -> tuple[Tensor, Tensor]:
        chosen, entropy, normaliser = [], [], []
        weights = head.to(half).t() if half else head.t()
        for part, target in zip(hidden.split(rows), targets.split(rows), strict=True):
            logits = _logits(part, weights, temperature)
            log_sum = logits.logsumexp(-1)
            chosen.append(logits.gather(-1, target[:, None])[:, 0] - log_sum)
            probabilities = (logits - log_sum[:, None]).exp_()
            entropy.append(log_sum - (probabilities.mul_(logits)).sum(-1))
            normaliser.append(log_sum)
        ctx.save_for_backward(hidden, head, targets, torch.cat(normaliser), torch.cat(entropy))
        ctx.temperature, ctx.rows, ctx.half = temperature, rows, half
        return torch.cat(chosen), torch.cat(entropy)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, head, targets, normaliser, entropy = ctx.saved_tensors
        weights = head.to(ctx.half) if ctx.half else head
        to_hidden = torch.empty_like(hidden)
        to_head = torch.zeros_like(head, dtype=torch.promote_types(head.dtype, torch.float32)) if (
            ctx.needs_input_grad[1]) else None
        with_entropy = bool(gradients[1].any())
        for at in range(0, len(hidden), ctx.rows):
            rows = slice(at, at + ctx.rows)
            logprobs = _logits(hidden[rows], weights.t(), ctx.temperature).sub_(normaliser[rows, None])
            probabilities = logprobs.exp()
            if with_entropy:
                change = logprobs.add_(entropy[rows, None]).mul_(gradients[1][rows, None]).add_(
                    gradients[0][rows, None]).mul_(probabilities).neg_()
            else:
                change = probabilities.mul_(-gradients[0][rows, None])
            change.scatter_add_(-1, targets[rows, None], gradients[0][rows, None].to(change.dtype))
            change = (change / ctx.temperature).to(weights.dtype)
            to_hidden[rows] = (change @ weights).to(hidden.dtype)
            if to_head is not None:
                to_head += change.t() @ hidden[rows].to(change.dtype)
        return to_hidden, None if to_head is None else to_head.to(head.dtype), None, None, None, None


def _logits(hidden: Tensor, weights: Tensor, temperature: float) -> Tensor:
    """[a, D] times [D, V] over the temperature, float32 or wider."""
    logits = hidden.to(weights.dtype) @ weights
    logits = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
    return logits.div_(temperature) if temperature != 1.0 else logits
