"""The arithmetic of the learner: three log-probabilities of each action token, and its advantage, to a loss.

Three policies meet in one token. The BEHAVIOUR policy sampled it (an engine, with the weights of that token's own
version). The PROXIMAL policy is the learner's, with the weights at the start of the step. The CURRENT policy is the
one being changed: equal to the proximal one until the first optimizer step on the batch, then moving away from it.

    ratio = proximal     R = current / proximal: how far this step has moved. What lies between behaviour and proximal
    (decoupled form,     is the correction's: w = proximal / behaviour, without gradient
    arXiv 2505.24298)    loss  weight(w) * loss(R, A)
    ratio = behaviour    R = current / behaviour: the one ratio does both (plain PPO)

With one minibatch per batch R is exactly 1 in the decoupled form and nothing clips: the gradient is that of
-weight A log p. A: number of action tokens; all tensors are [A] unless said otherwise. The losses here are named in
`rollart.algo.catalogue`; each gives (loss, where its limit is active), and the gradient there is exactly 0 for `clip`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rollart.algo.catalogue import function
from rollart.algo.settings import AlgoSettings

LOG_RATIO_LIMIT = 20.0
"""Ratios beyond e^20 are as good as infinite; their token gives no gradient through the ratio any more."""


@dataclass(frozen=True, slots=True)
class ActionTokens:
    """Log-probabilities under the three policies, `current` with gradient; advantages; `age`: versions between sampling
    and this step; `counts` [N]: action tokens of each sequence, in order (they sum to A)."""

    current: Tensor
    proximal: Tensor
    behaviour: Tensor
    advantages: Tensor
    age: Tensor
    counts: Tensor

    def sequence_mean(self, values: Tensor) -> Tensor:
        """The mean of `values` over each token's sequence, at each of its tokens."""
        owner = torch.repeat_interleave(torch.arange(len(self.counts), device=values.device), self.counts)
        sums = torch.zeros(len(self.counts), dtype=values.dtype, device=values.device).index_add(0, owner, values)
        return (sums / self.counts)[owner]


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """The loss (with gradient) and, without: the importance ratio w, the weight that the corrections made of it (1
    without any), and whether the loss's limit is active."""

    loss: Tensor
    importance: Tensor
    weight: Tensor
    clipped: Tensor


def ratio_of(new: Tensor, old: Tensor) -> Tensor:
    """exp(new - old) of log-probabilities, kept finite."""
    return (new - old).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def policy_loss(tokens: ActionTokens, settings: AlgoSettings) -> TokenLoss:
    """The policy gradient loss of each action token; see the module's docstring."""
    proximal = tokens.proximal.detach()
    if settings.proximal == "approximated":
        proximal = approximated(tokens)
    tokens = replace(tokens, proximal=proximal)
    base = proximal if settings.ratio == "proximal" else tokens.behaviour
    loss, clipped = function("loss", settings.loss)(tokens, base, settings)
    weight = torch.ones_like(loss)
    with torch.no_grad():
        importance = ratio_of(proximal, tokens.behaviour)
        for number, name in enumerate(settings.corrections):
            own = function("correction", name)(tokens, importance, settings)
            weight = own if number == 0 else weight * own
    return TokenLoss(weight * loss if settings.corrections else loss, importance, weight, clipped)


def approximated(tokens: ActionTokens) -> Tensor:
    """Proximal log-probabilities without a forward pass: log-linear between behaviour and current by versions, at
    age / (age + 1) (AReaL's proximal approximation)."""
    share = tokens.age / (tokens.age + 1)
    return tokens.behaviour + share * (tokens.current.detach() - tokens.behaviour)


def clip(tokens: ActionTokens, base: Tensor, settings: AlgoSettings) -> tuple[Tensor, Tensor]:
    return _clipped(ratio_of(tokens.current, base), tokens.advantages, settings)


def gspo(tokens: ActionTokens, base: Tensor, settings: AlgoSettings) -> tuple[Tensor, Tensor]:
    """One ratio per sequence, at each of its tokens."""
    log_ratio = tokens.sequence_mean(tokens.current - base)
    return _clipped(log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp(), tokens.advantages, settings)


def cispo(tokens: ActionTokens, base: Tensor, settings: AlgoSettings) -> tuple[Tensor, Tensor]:
    """The capped ratio is a weight without gradient: no token is left out of the gradient."""
    ratio = ratio_of(tokens.current.detach(), base)
    cap = 1 + settings.clip_high
    return -ratio.clamp(max=cap) * tokens.advantages * tokens.current, ratio > cap


def reinforce(tokens: ActionTokens, base: Tensor, settings: AlgoSettings) -> tuple[Tensor, Tensor]:
    return -tokens.advantages * tokens.current, torch.zeros_like(tokens.current, dtype=torch.bool)


def _clipped(ratio: Tensor, advantages: Tensor, settings: AlgoSettings) -> tuple[Tensor, Tensor]:
    """PPO's clipped loss (arXiv 1707.06347) with its two bounds apart (arXiv 2503.14476), and an optional limit for
    negative advantages (dual clip, arXiv 1912.09729). Where a limit is active the gradient is exactly 0."""
    plain = -ratio * advantages
    limited = -ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high) * advantages
    loss = torch.where(limited > plain, limited, plain)
    active = limited > plain
    if settings.dual_clip:
        most = settings.dual_clip * advantages.abs()
        above = (advantages < 0) & (loss > most)
        loss, active = torch.where(above, most, loss), active | above
    return loss, active


def kl_estimates(policy: Tensor, reference: Tensor) -> dict[str, Tensor]:
    """k1, k2, k3 of KL(policy || reference) from log-probabilities of tokens that the policy sampled.

    As values: k1 and k3 are unbiased, k3 is never negative, k2 is biased with little variance (Schulman 2020).
    """
    difference = policy - reference
    return {"k1": difference, "k2": difference ** 2 / 2, "k3": ratio_of(reference, policy) - 1 + difference}


def kl_penalty(policy: Tensor, reference: Tensor, value: str = "k3", gradient: str = "k2") -> Tensor:
    """KL(policy || reference) as a loss term: the value of one estimator with the gradient of another.

    The expected gradient of k1 is 0, that of k3 is the gradient of KL(reference || policy); k2's is the true one.
    """
    estimates = kl_estimates(policy, reference)
    return estimates[value].detach() + estimates[gradient] - estimates[gradient].detach()
