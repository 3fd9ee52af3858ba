"""Rewards of one group to advantages. Pure arithmetic on one group, so batch order cannot matter.

Keeps true: a member without a reward (lost to infrastructure) takes no part, neither as reward 0 nor in the count;
a group whose rewards are all equal, or with one member, gives exactly 0, decided by max == min and not by a standard
deviation that rounding makes a little more than 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from rollart.algo.settings import Normalisation
from rollart.core.errors import ConfigError


def group_advantages(rewards: Sequence[float | None], *, normalisation: Normalisation = "sample_std",
                     eps: float = 1e-6) -> list[float]:
    """One advantage per member, [len(rewards)]; 0.0 where the reward is None. With n rewards r of mean m:

        sample_std      (r - m) / (s + eps), s with n - 1   GRPO, arXiv 2402.03300
        population_std  (r - m) / (s + eps), s with n
        mean_only       r - m                               Dr. GRPO, arXiv 2503.20783
        leave_one_out   (r - m) * n / (n - 1)               RLOO, arXiv 2402.14740
        mean_ratio      (r - m) / m                         MaxRL; needs r >= 0

    Raises ValueError for a reward that is not finite, ConfigError for mean_ratio with a negative reward.
    """
    present = [reward for reward in rewards if reward is not None]
    for reward in present:
        if not math.isfinite(reward):
            raise ValueError(f"a reward must be a finite number; got {reward!r} in {list(rewards)}")
    if all_equal(present):
        return [0.0] * len(rewards)
    count = len(present)
    mean = math.fsum(present) / count
    if normalisation == "mean_only":
        scale = 1.0
    elif normalisation == "leave_one_out":
        scale = count / (count - 1)
    elif normalisation == "mean_ratio":
        if min(present) < 0:
            raise ConfigError(f"normalisation 'mean_ratio' needs rewards >= 0; got {min(present):g}; set 'sample_std'")
        scale = 1.0 / mean
    else:
        freedom = count - 1 if normalisation == "sample_std" else count
        scale = 1.0 / (math.sqrt(math.fsum((reward - mean) ** 2 for reward in present) / freedom) + eps)
    return [0.0 if reward is None else (reward - mean) * scale for reward in rewards]


def all_equal(rewards: Sequence[float | None]) -> bool:
    """The group teaches nothing: fewer than two rewards, or all the same (None is not a reward)."""
    present = [reward for reward in rewards if reward is not None]
    return not present or max(present) == min(present)
