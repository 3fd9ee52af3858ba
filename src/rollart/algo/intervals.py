"""How sure a held-out success is: 95 % intervals of a share, and of the change of a share.

Held-out tasks are a sample of all tasks; attempts at one task are alike, so what counts as independent are tasks, and
as many attempts as tell something new. No interval knows of what changes with the training's seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from statistics import StatisticsError, correlation, fmean, pvariance

Interval = tuple[float, float]

Z95 = 1.959964
"""Standard deviations that hold 95 % of a normal distribution."""


def wilson(mean: float, n: float) -> Interval:
    """95 % interval (low, high) of a share `mean` (0 to 1) of `n` independent trials; (0, 1) of none.

    Wilson's score interval (1927), method 3 of Newcombe, Statistics in Medicine 17 (1998) 857-872.
    """
    if n <= 0:
        return 0.0, 1.0
    z2 = Z95 * Z95 / n
    centre = (mean + z2 / 2) / (1 + z2)
    half = Z95 * sqrt(mean * (1 - mean) / n + z2 / (4 * n)) / (1 + z2)
    return max(0.0, min(mean, centre - half)), min(1.0, max(mean, centre + half))


def success_interval(rates: Sequence[float], attempts: int) -> Interval:
    """Of the mean of `rates`: the share solved of each task [tasks], of as many `attempts` at each.

    Wilson's with the effective number of trials of a cluster sample (Korn and Graubard, Survey Methodology 24 (1998)
    193-201): the variance of independent trials over that seen between tasks. It lies between the number of tasks
    (attempts at a task all end alike; always so with one attempt) and that of attempts (tasks are all as hard).
    """
    if not rates:
        return 0.0, 1.0
    tasks, mean, between = len(rates), fmean(rates), pvariance(rates)
    trials = tasks * mean * (1 - mean) / between if between else tasks * attempts if 0 < mean < 1 < tasks else tasks
    return wilson(mean, min(max(trials, tasks), tasks * attempts))


def change_interval(before: Sequence[float], after: Sequence[float], attempts: int) -> Interval:
    """Of mean(after) - mean(before), rates of the same tasks in the same order [tasks].

    The tasks being the same, what makes one hard counts on both sides; intervals of two samples apart would be too
    wide. Both intervals squared and added with their correlation: Newcombe's for paired proportions, Statistics in
    Medicine 17 (1998) 2635-2650, with the plain correlation; for any rates Zou and Donner, ibid. 27 (2008) 1693-1702.
    """
    if not before:
        return -1.0, 1.0
    p, q = fmean(before), fmean(after)
    (p_low, p_high), (q_low, q_high) = success_interval(before, attempts), success_interval(after, attempts)
    try:
        together = correlation(before, after)
    except StatisticsError:  # of one task, or where all tasks are alike
        together = 0.0

    def added(a: float, b: float) -> float:
        return sqrt(max(0.0, a * a - 2 * together * a * b + b * b))

    return max(-1.0, q - p - added(q - q_low, p_high - p)), min(1.0, q - p + added(q_high - q, p - p_low))
