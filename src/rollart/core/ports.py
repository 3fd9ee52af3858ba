"""The verbs: everything the control plane asks of the outside world, and nothing more.

Cancelling a call is how it is given up; an implementation then stops the work and frees what it held. Every port
raises the PortError named here and nothing else for failures of the remote side.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from rollart.core.events import Event
from rollart.core.tokens import Text, Tokens
from rollart.core.types import (
    Action,
    Completion,
    GenerateRequest,
    Manifest,
    Message,
    Observation,
    Score,
    StepReport,
    Task,
    TrainBatch,
    Trajectory,
    TrajectoryId,
    Version,
)


class Engine(Protocol):
    """One inference replica. Raises EngineLost (with the partial completion where it has one).

    Cancelling `generate` is the abort. `suspend` pauses between two decode steps and keeps what is in flight;
    `load_weights` swaps the weights and drops every KV entry of older ones; `resume` recomputes the KV of what is in
    flight and goes on. A token sampled after `load_weights` carries the new version.
    """

    @property
    def id(self) -> str: ...
    @property
    def pool(self) -> str: ...

    async def generate(self, request: GenerateRequest) -> Completion: ...
    async def suspend(self) -> None: ...
    async def load_weights(self, manifest: Manifest) -> None: ...
    async def resume(self) -> None: ...
    def release(self, trajectory: TrajectoryId) -> None:
        """The trajectory has ended: its KV may go. Never raises, never waits."""
        ...


@runtime_checkable
class Prefetching(Protocol):
    """An Engine that can fetch weights beside those it serves: `load_weights` of them is then no more than a copy."""

    async def prefetch(self, manifest: Manifest) -> None: ...


class Environment(Protocol):
    """One episode, used once and thrown away: there is no reset. Raises EnvironmentFailed.

    `close` is called exactly once, whatever happened; it never raises.
    """

    async def first(self) -> Observation: ...
    async def step(self, action: Action) -> Observation: ...
    async def close(self) -> None: ...


class EnvironmentPool(Protocol):
    """`open` may take minutes. Raises EnvironmentFailed. A cancelled `open` leaves nothing behind."""

    async def open(self, task: Task) -> Environment: ...


class Renderer(Protocol):
    """Chat messages to tokens, in pieces, so that the context only ever grows (T1). Raises ConfigError or ValueError
    for what it cannot say; that costs the trajectory, not the run."""

    @property
    def stop(self) -> tuple[int, ...]:
        """Token ids that end an action."""
        ...

    def prompt(self, messages: Sequence[Message]) -> Tokens:
        """The whole prompt of the first turn, up to where the assistant begins to speak."""
        ...

    def reply(self, completion: Completion, messages: Sequence[Message]) -> Tokens:
        """What follows the sampled tokens: the template's glue, the new messages, the next assistant header."""
        ...

    def fork(self, history: Sequence[Message], context: Tokens) -> Tokens | None:
        """The next turn's context where the template rewrites `history` (all messages so far, the agent's too), else
        None: it is `context`, which only grew."""
        ...

    def text(self, completion: Completion) -> Text:
        """The action as text, without its stop token."""
        ...


class Scorer(Protocol):
    """Stateless, so a call may be repeated. Raises ScorerFailed."""

    async def score(self, trajectory: Trajectory) -> Score: ...


class Trainer(Protocol):
    """The learner. Calls do not overlap, except `publish` and `save` with `step`. Raises TrainerLost."""

    async def step(self, batch: TrainBatch) -> StepReport: ...
    async def publish(self, version: Version) -> Manifest:
        """Make the weights of `version` readable by every engine; returns when they are."""
        ...

    async def retire(self, manifest: Manifest) -> None:
        """No engine will read these weights again."""
        ...

    async def save(self, folder: Path) -> None:
        """Write all that `load` needs to go on bit by bit into an existing folder: the state at this call, whatever
        steps are asked for while it is written."""
        ...

    async def load(self, folder: Path) -> None: ...


class Cluster(Protocol):
    """Who starts engines again. `wait_lost` returns the id of an engine that died."""

    async def wait_lost(self) -> str: ...
    async def restart(self, engine: str) -> None:
        """Start the engine again in place, with no weights loaded. Raises NoCapacity."""
        ...


class TaskSource(Protocol):
    """An endless, seeded, resumable stream of tasks."""

    def next(self) -> Task: ...
    def put_back(self, task: Task) -> None:
        """The task was not trained: it comes again, before new ones."""
        ...

    def state(self) -> Mapping[str, Any]: ...
    def restore(self, state: Mapping[str, Any]) -> None: ...


class Journal(Protocol):
    """The one place events go: ledger, metrics, traces, invariant checks and the replay digest all read it."""

    def emit(self, event: Event) -> None: ...
