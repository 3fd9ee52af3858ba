"""The arithmetic of the learner: packed sequences to log-probabilities of their action tokens, and those to a loss.

Three policies meet in one token. The BEHAVIOUR policy sampled it (an engine, with the weights of that token's own
version). The PROXIMAL policy is the learner's, with the weights at the start of the step. The CURRENT policy is the
one being changed: equal to the proximal one until the first optimizer step on the batch, then moving away from it.

    importance_cap > 0   weight  w = min(proximal / behaviour, cap), without gradient: how far the data is off-policy
    (decoupled form,     ratio   r = current / proximal: how far this step has moved
    arXiv 2505.24298)    loss    -w * min(r A, clip(r) A)
    importance_cap = 0   w = 1 and r = current / behaviour: the one ratio does both (plain PPO)

With one minibatch per batch r is exactly 1 in the decoupled form and nothing clips: the gradient is that of
-w A log p, truncated importance sampling. Either way the correction from behaviour to learner is there.

Keeps true: log-probabilities are float32 or wider, at the temperature that was sampled with (L9); only hidden states
that score an action token reach the vocabulary projection. A: number of action tokens, T: packed tokens, V: vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rollart.algo.settings import AlgoSettings
from rollart.backends.torch.transformer import Transformer

LOG_RATIO_LIMIT = 20.0
"""Ratios beyond e^20 are as good as infinite; their token gives no gradient through the ratio any more."""


@dataclass(frozen=True, slots=True)
class Packed:
    """Sequences one behind the other: ids, positions [T]; `scored` [A] points at hidden states, `targets` [A] at what
    they score. Sequences end before their last action token, for nothing scores what comes after it."""

    ids: Tensor
    positions: Tensor
    lengths: list[int]
    scored: Tensor
    targets: Tensor
    counts: list[int]
    """Action tokens of each sequence; they sum to A."""


def pack_sequences(sequences: Sequence[tuple[Sequence[int], Sequence[int]]], device: torch.device) -> Packed:
    """From (ids, mask) pairs, each [T_i]. The logit at i - 1 scores token i.

    Raises ValueError for a sequence whose first token is an action, or that has none.
    """
    inputs, positions, scored, targets, lengths, counts, start = [], [], [], [], [], [], 0
    for tokens, mask in sequences:
        ids = np.asarray(tokens, dtype=np.int64)
        actions = np.flatnonzero(np.asarray(mask))
        if not len(actions) or actions[0] == 0:
            raise ValueError("a training sequence needs an action token, and context before the first one")
        length = int(actions[-1])
        inputs.append(ids[:length])
        positions.append(np.arange(length))
        scored.append(actions + (start - 1))
        targets.append(ids[actions])
        lengths.append(length)
        counts.append(len(actions))
        start += length

    def tensor(parts: list[np.ndarray]) -> Tensor:
        return torch.from_numpy(np.concatenate(parts)).to(device)

    return Packed(tensor(inputs), tensor(positions), lengths, tensor(scored), tensor(targets), counts)


def action_logprobs(model: Transformer, packed: Packed, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the action tokens and the entropies of their distributions, both [A]."""
    hidden = model(packed.ids, packed.positions, packed.lengths)
    return chosen_logprobs(model.logits(hidden[packed.scored]), packed.targets, temperature)


def chosen_logprobs(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probability of each target [A] and entropy [A] (no gradient) of softmax(logits [A, V] / temperature)."""
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    logprobs = torch.log_softmax(logits / temperature if temperature != 1.0 else logits, dim=-1)
    with torch.no_grad():
        entropy = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(-1, targets[:, None]).squeeze(-1), entropy


def ratio_of(new: Tensor, old: Tensor) -> Tensor:
    """exp(new - old) of log-probabilities, kept finite."""
    return (new - old).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """Per action token, all [A]: the loss (with gradient), the importance ratio before and its weight after the cap
    (both 1 where the cap is off), and whether the clipped branch is active. Without gradient but for the loss."""

    loss: Tensor
    importance: Tensor
    weight: Tensor
    clipped: Tensor


def policy_loss(current: Tensor, proximal: Tensor, behaviour: Tensor, advantages: Tensor,
                settings: AlgoSettings) -> TokenLoss:
    """The policy gradient loss of each action token from its three log-probabilities; see the module's docstring."""
    proximal = proximal.detach()
    if settings.importance_cap:
        importance = ratio_of(proximal, behaviour)
        loss, clipped = clip_loss(ratio_of(current, proximal), advantages, settings)
        weight = importance.clamp(max=settings.importance_cap)
        return TokenLoss(weight * loss, importance, weight, clipped)
    loss, clipped = clip_loss(ratio_of(current, behaviour), advantages, settings)
    one = torch.ones_like(loss)
    return TokenLoss(loss, one, one, clipped)


def clip_loss(ratio: Tensor, advantages: Tensor, settings: AlgoSettings) -> tuple[Tensor, Tensor]:
    """PPO's clipped loss (arXiv 1707.06347) with its two bounds apart (arXiv 2503.14476), and an optional limit for
    negative advantages (dual clip, arXiv 1912.09729). [A] each; where a limit is active the gradient is exactly 0."""
    plain = -ratio * advantages
    limited = -ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high) * advantages
    loss = torch.where(limited > plain, limited, plain)
    active = limited > plain
    if settings.dual_clip:
        most = settings.dual_clip * advantages.abs()
        above = (advantages < 0) & (loss > most)
        loss, active = torch.where(above, most, loss), active | above
    return loss, active


def effective_sample_size(weights: Tensor) -> Tensor:
    """(sum w)^2 / sum w^2, a count between 1 and len(weights)."""
    return weights.sum() ** 2 / (weights ** 2).sum()


def kl_estimates(policy: Tensor, reference: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """k1, k2, k3 of KL(policy || reference) from log-probabilities of tokens that the policy sampled, [A] each.

    As values: k1 and k3 are unbiased, k3 is never negative, k2 is biased with little variance (Schulman 2020).
    """
    difference = policy - reference
    return difference, difference ** 2 / 2, ratio_of(reference, policy) - 1 + difference


def kl_penalty(policy: Tensor, reference: Tensor) -> Tensor:
    """KL(policy || reference) as a loss term, [A]: the value of k3 with the gradient of k2.

    The expected gradient of k1 is 0, that of k3 is the gradient of KL(reference || policy); k2's is the true one.
    """
    _, k2, k3 = kl_estimates(policy, reference)
    return k3.detach() + k2 - k2.detach()
