"""A reward made of others, with weights.

Keeps true: a part that has no score leaves the whole without one; nothing is filled in for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rollart.core.types import Score
from rollart.rewards.contract import RewardFunction, RewardRequest, call


@dataclass(frozen=True)
class Mix:
    """A reward function: the weighted sum of its parts' values.

    reward = Mix({"solved": (0.8, calculator), "judge": (0.2, Judge(...))}, success="solved")

    parts: weight and function by name. success: the part whose success counts (empty: all must succeed).
    Raises ValueError.
    """

    parts: Mapping[str, tuple[float, RewardFunction]]
    success: str = ""

    def __post_init__(self) -> None:
        if not self.parts:
            raise ValueError("a mix needs at least one part")
        if self.success and self.success not in self.parts:
            raise ValueError(f"success names a part; there are {', '.join(self.parts)}; got {self.success!r}")

    @property
    def executes_output(self) -> bool:
        """One part is enough for the whole to need a sandbox."""
        return any(getattr(function, "executes_output", False) for _, function in self.parts.values())

    def __call__(self, request: RewardRequest) -> Score:
        scores = {name: call(function, [request])[0] for name, (_, function) in self.parts.items()}
        named = [f"{name}: {score.reason}" for name, score in scores.items() if score.reason]
        success = scores[self.success].success if self.success else all(s.success for s in scores.values())
        return Score(sum(weight * scores[name].value for name, (weight, _) in self.parts.items()), success,
                     {name: score.value for name, score in scores.items()}, "; ".join(named))
