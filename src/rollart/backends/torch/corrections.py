"""Weights for tokens that another policy sampled: older weights, or the same ones on another numeric path.

`importance` is w = proximal / behaviour probability, [A]; each function gives a weight [A] without gradient. They are
named, with formulas and sources, in `rollart.algo.catalogue`; several are multiplied.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rollart.algo.settings import AlgoSettings
from rollart.backends.torch.losses import LOG_RATIO_LIMIT, ActionTokens


def tis(tokens: ActionTokens, importance: Tensor, settings: AlgoSettings) -> Tensor:
    return importance.clamp(max=settings.importance_cap)


def tis_sequence(tokens: ActionTokens, importance: Tensor, settings: AlgoSettings) -> Tensor:
    counts = torch.repeat_interleave(tokens.counts, tokens.counts)
    product = tokens.sequence_mean(tokens.proximal - tokens.behaviour) * counts
    return product.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp().clamp(max=settings.importance_cap)


def icepop(tokens: ActionTokens, importance: Tensor, settings: AlgoSettings) -> Tensor:
    kept = (importance >= settings.band_low) & (importance <= settings.band_high)
    return torch.where(kept, importance, torch.zeros_like(importance))


def geometric_mask(tokens: ActionTokens, importance: Tensor, settings: AlgoSettings) -> Tensor:
    mean = tokens.sequence_mean(tokens.proximal - tokens.behaviour).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    return ((mean >= settings.geometric_low) & (mean <= settings.geometric_high)).to(importance.dtype)


def dppo_tv(tokens: ActionTokens, importance: Tensor, settings: AlgoSettings) -> Tensor:
    """The total variation between the two policies, each taken as (this token, any other)."""
    moved = tokens.current.detach().exp() - tokens.behaviour.exp()
    away = torch.where(tokens.advantages > 0, moved, -moved)
    return (away <= settings.tv_limit).to(importance.dtype)


def staleness(tokens: ActionTokens, importance: Tensor, settings: AlgoSettings) -> Tensor:
    return settings.staleness_decay ** tokens.age.to(importance.dtype)
