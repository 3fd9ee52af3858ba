"""The choices of the learning rule. Plain numbers and names, checked once; every default is one that trains."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

Normalisation = Literal["sample_std", "population_std", "mean_only", "leave_one_out", "mean_ratio"]
Truncated = Literal["train", "mask"]
Filter = Literal["none", "zero_variance"]


@dataclass(frozen=True, kw_only=True)
class AlgoSettings:
    """The learning rule: group-relative advantages and a clipped policy gradient. Raises ValueError.

    normalisation: how a group's rewards become advantages (`rollart.algo.advantages` has the formulas): sample_std
        (GRPO), population_std, mean_only (Dr. GRPO), leave_one_out (RLOO), mean_ratio (MaxRL; rewards must be >= 0).
    normalisation_eps: added to the standard deviation; a number in reward units.
    clip_low, clip_high: the ratio of new to old probability is clipped to [1 - clip_low, 1 + clip_high]; fractions.
    dual_clip: upper limit of the loss of a token with negative advantage, in multiples of |advantage|; 0 is off.
    importance_cap: upper limit of the truncated importance weight that corrects for tokens of older weights or of
        another numeric path; a ratio. 0 turns the weight off, and the clipped ratio is then taken against the
        behaviour log-probabilities themselves, so that the correction is never lost.
    kl_coefficient: weight of the KL divergence to a frozen reference model in the loss; 0 is off.
    truncated: what a trajectory that ran into a limit does: train (with the reward it got) or mask (it stays in its
        group's baseline, but is not trained on).
    filter: which whole groups are left out: none, or zero_variance (all members have the same raw reward).
    """

    normalisation: Normalisation = "sample_std"
    normalisation_eps: float = 1e-6
    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float = 0.0
    importance_cap: float = 2.0
    kl_coefficient: float = 0.0
    truncated: Truncated = "train"
    filter: Filter = "none"

    def __post_init__(self) -> None:
        for name, kind in (("normalisation", Normalisation), ("truncated", Truncated), ("filter", Filter)):
            value = getattr(self, name)
            if value not in get_args(kind):
                raise ValueError(f"{name} must be one of {', '.join(get_args(kind))}; got {value!r}")
        for name in ("normalisation_eps", "clip_low", "clip_high", "kl_coefficient"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} must be a finite number >= 0; got {value!r}")
        if self.clip_low >= 1:
            raise ValueError(f"clip_low must be below 1 (the ratio stays positive); got {self.clip_low!r}")
        if self.dual_clip and not self.dual_clip > 1:
            raise ValueError(f"dual_clip must be 0 (off) or above 1; got {self.dual_clip!r}")
        if self.importance_cap and not (math.isfinite(self.importance_cap) and self.importance_cap >= 1):
            raise ValueError(f"importance_cap must be 0 (off) or a finite ratio >= 1; got {self.importance_cap!r}")
