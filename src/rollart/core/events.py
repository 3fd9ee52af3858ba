"""What happened, as frozen data. The journal takes these; ledger, metrics, checks, traces and digest read them.

Life of a training trajectory in events (evaluation has its own: `EvalStarted`, `EvalTrajectory`, `EvalEnded`):

    GroupOpened > TrajectoryStarted > EnvironmentOpened > TurnEnded* > EnvironmentClosed > TrajectoryEnded
      TrajectoryEnded says the fate of a trajectory that will not be trained; otherwise it stays in flight until
    Settled (trained, filtered, stale, cancelled, failed), which its group's end or its batch brings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rollart.core.types import (
    EvalResult,
    Fate,
    Group,
    Manifest,
    StepReport,
    Task,
    Trajectory,
    TrajectoryId,
    Version,
)


@dataclass(frozen=True, slots=True)
class Event:
    """Base of all events. The journal adds the time."""


@dataclass(frozen=True, slots=True)
class RunStarted(Event):
    version: Version
    steps: int
    resumed: bool


@dataclass(frozen=True, slots=True)
class RunEnded(Event):
    version: Version
    reason: str  # finished | interrupted | failed: ...


@dataclass(frozen=True, slots=True)
class GroupOpened(Event):
    """`source` is the task source's state after this task was drawn: recorded with the group, so none is lost."""

    group: int
    task: Task
    born: Version
    source: Mapping[str, Any]
    restored: int = 0  # finished members taken over from before a crash


@dataclass(frozen=True, slots=True)
class GroupEnded(Event):
    """`kept`: its members went to the buffer. Otherwise `reason` says why not; `source` as in GroupOpened."""

    group: int
    kept: bool
    reason: str
    source: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class GroupReady(Event):
    group: Group


@dataclass(frozen=True, slots=True)
class TrajectoryStarted(Event):
    id: TrajectoryId
    domain: str


@dataclass(frozen=True, slots=True)
class EnvironmentOpened(Event):
    id: TrajectoryId
    seconds: float
    attempts: int


@dataclass(frozen=True, slots=True)
class EnvironmentClosed(Event):
    """`calls`: seconds of each answer to an action."""

    id: TrajectoryId
    calls: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class TurnEnded(Event):
    id: TrajectoryId
    turn: int
    engine: str
    sampled: int
    oldest: Version
    newest: Version


@dataclass(frozen=True, slots=True)
class TurnMoved(Event):
    """An engine was lost in the middle of a turn; it goes on elsewhere with `kept` sampled tokens."""

    id: TrajectoryId
    turn: int
    engine: str
    kept: int


@dataclass(frozen=True, slots=True)
class TrajectoryEnded(Event):
    """`fate`: IN_FLIGHT (finished, waits to be trained), FAILED, CANCELLED (spare, end of run) or STALE."""

    trajectory: Trajectory
    fate: Fate


@dataclass(frozen=True, slots=True)
class Settled(Event):
    """These trajectories have their final fate. `step`: the version whose step consumed them, or None."""

    ids: tuple[TrajectoryId, ...]
    fate: Fate
    reason: str = ""
    step: Version | None = None


@dataclass(frozen=True, slots=True)
class BatchTaken(Event):
    """`staleness`: version minus oldest token version, of each trained trajectory. `waited`: seconds for a batch."""

    version: Version
    groups: tuple[int, ...]
    staleness: tuple[int, ...]
    waited: float


@dataclass(frozen=True, slots=True)
class StepEnded(Event):
    """The trainer now stands at `version`. `rewards`, `successes`: batch mean by domain; `slots`: open, ready, ..."""

    version: Version
    report: StepReport
    rewards: Mapping[str, float] = field(default_factory=dict)
    successes: Mapping[str, float] = field(default_factory=dict)
    slots: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Noted(Event):
    """Something that a person should know now, in words: the run goes on, but not as it should."""

    version: Version
    text: str


@dataclass(frozen=True, slots=True)
class PublishStarted(Event):
    version: Version


@dataclass(frozen=True, slots=True)
class WeightsPublished(Event):
    manifest: Manifest
    seconds: float


@dataclass(frozen=True, slots=True)
class WeightsFetched(Event):
    """`engines` hold the weights of `version` beside those that they serve. `seconds`: no one stood still in them."""

    version: Version
    seconds: float
    engines: int


@dataclass(frozen=True, slots=True)
class WeightsLoaded(Event):
    engine: str
    version: Version
    seconds: float


@dataclass(frozen=True, slots=True)
class WeightsLive(Event):
    """Every live engine serves `version`. `seconds`: generation stood still; `engines`: how many loaded it."""

    version: Version
    seconds: float
    engines: int


@dataclass(frozen=True, slots=True)
class SlotsFreed(Event):
    """The slots of the groups trained by the step that made `version` are free."""

    version: Version
    groups: int


@dataclass(frozen=True, slots=True)
class EngineDown(Event):
    engine: str
    reason: str


@dataclass(frozen=True, slots=True)
class EngineUp(Event):
    engine: str
    version: Version


@dataclass(frozen=True, slots=True)
class EvalStarted(Event):
    number: int
    version: Version
    tasks: int


@dataclass(frozen=True, slots=True)
class EvalTrajectory(Event):
    number: int
    version: Version
    trajectory: Trajectory


@dataclass(frozen=True, slots=True)
class EvalEnded(Event):
    number: int
    version: Version
    results: tuple[EvalResult, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class RewardsSampled(Event):
    """What the rewards did since this process began, by name: counts, and seconds where the name says so."""

    figures: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class CheckpointSaved(Event):
    version: Version
    path: str
    seconds: float
