"""Confidence intervals of shares."""

from __future__ import annotations

from math import sqrt

Z95 = 1.959964
"""Standard deviations that hold 95 % of a normal distribution."""


def wilson(mean: float, n: float) -> tuple[float, float]:
    """Wilson's 95 % interval (lower, upper) of a share `mean` (0 to 1) of `n` independent trials; (0, 1) of none."""
    if n <= 0:
        return 0.0, 1.0
    z2 = Z95 * Z95 / n
    centre = (mean + z2 / 2) / (1 + z2)
    half = Z95 * sqrt(mean * (1 - mean) / n + z2 / (4 * n)) / (1 + z2)
    return max(0.0, centre - half), min(1.0, centre + half)
