"""Every error the project raises on purpose.

    Exception
      RollArtError
        ConfigError        the user's mistake: what was required, what was got, what to set (exit code 2)
        RunError           the run cannot go on: what happened and how to resume (exit code 1)
          Stalled          a wait ran past its deadline; names what was waited for and the oldest items in flight
        PortError          a remote piece failed across a port; the control plane decides what follows
          EngineLost       the engine died; carries what was generated so far, so that the turn goes on elsewhere
          EnvironmentFailed   the environment crashed, hung past its limit or could not be opened
          SandboxFailed    the sandbox died, could not be opened or gave no answer in time
          ScorerFailed     the reward call failed; the trajectory stays unscored (never 0)
          TrainerLost      the learner died; the newest checkpoint is the way back
          NoCapacity       the cluster cannot start this role
    AssertionError
      InvariantViolated    our own logic is wrong; never caught: crash, and replay the seed
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollart.core.types import Completion


class RollArtError(Exception):
    """Base of all errors raised on purpose."""


class ConfigError(RollArtError):
    """A user's mistake. The message is one line: what was required, what was got, what to set."""


class RunError(RollArtError):
    """The run cannot go on. The message says what happened and what to do."""


class Stalled(RunError):
    """A wait ran past its deadline."""


class PortError(RollArtError):
    """A remote piece failed. The message says what was asked, of whom."""


class EngineLost(PortError):
    """The engine died or was preempted. `partial` holds the tokens of this turn that were already sampled, if any."""

    def __init__(self, message: str, partial: Completion | None = None) -> None:
        super().__init__(message)
        self.partial = partial


class EnvironmentFailed(PortError):
    """The environment crashed, hung past its limit, or could not be opened."""


class SandboxFailed(PortError):
    """The sandbox died, could not be opened, or gave no answer in time. What ran in it has no result."""


class ScorerFailed(PortError):
    """The reward call failed after its own retries. An unscored trajectory is failed, never 0."""


class TrainerLost(PortError):
    """The learner failed in a step, a publish or a save."""


class NoCapacity(PortError):
    """The cluster has no room to start this role."""


class InvariantViolated(AssertionError):
    """Our own logic is wrong. Names the invariant (I1-I8). Never caught."""


def first_error(error: BaseException) -> BaseException:
    """The error to tell: out of the groups that a TaskGroup raises, our own mistakes before others."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    leaves = [first_error(inner) for inner in error.exceptions]
    return next((leaf for leaf in leaves if isinstance(leaf, InvariantViolated)), leaves[0])
