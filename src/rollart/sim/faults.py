"""Seeded misfortune: which simulated parts fail, and how often. Every draw comes from a named stream."""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields


@dataclass(frozen=True, kw_only=True)
class Faults:
    """What goes wrong. 0 is never; probabilities are per call.

    engine_mtbf: mean virtual seconds between crashes of one engine.
    engine_repair: mean virtual seconds until a restarted engine is up, without weights.
    no_capacity: probability that a restart finds no room.
    open_fails, open_hangs: probability that opening an environment fails, or never returns.
    step_fails, step_hangs: the same of one environment step (and of the first observation).
    score_fails, score_hangs: the same of one reward call.
    trainer_fails: probability that an optimizer step loses the learner.
    """

    engine_mtbf: float = 0.0
    engine_repair: float = 60.0
    no_capacity: float = 0.0
    open_fails: float = 0.0
    open_hangs: float = 0.0
    step_fails: float = 0.0
    step_hangs: float = 0.0
    score_fails: float = 0.0
    score_hangs: float = 0.0
    trainer_fails: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            limit = sys.float_info.max if field.name.startswith("engine_") else 1.0
            if not 0.0 <= value <= limit:
                raise ValueError(f"{field.name} needs 0 <= value <= {limit:g}; got {value:g}")

    @property
    def any_step(self) -> bool:
        """Whether a step's luck matters at all."""
        return bool(self.step_fails or self.step_hangs)


CALM = Faults()
