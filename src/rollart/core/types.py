"""The nouns. Frozen data that crosses a port; no behaviour beyond arithmetic on itself.

One trajectory as tokens, with masks and versions (`|` are turn borders):

    prompt           action      reply        action
    [s u u u a]      [x y e]     [u o o a]    [z e]        e: a sampled stop token, part of the action
    mask 0 0 0 0 0   1 1 1       0 0 0 0      1 1
    version          7 7 8                    8 8          weights changed inside the first action: segments (7,0) (8,2)

The context only grows: the prompt of turn n+1 is prompt + action + reply of turn n, as exact ids. Sampled ids are
never decoded and encoded again.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from rollart.core.tokens import Text, Tokens

Version = int
"""Policy version: the number of optimizer steps behind the weights."""


class Outcome(StrEnum):
    """How an episode ended."""

    FINISHED = "finished"
    TRUNCATED = "truncated"  # a limit on turns, tokens or context; from the finish reason, never from widths
    FAILED = "failed"  # an environment, engine or scorer gave up; never trained on
    ABORTED = "aborted"  # the scheduler no longer wanted it (stale, or its group was already full)


class Fate(StrEnum):
    """What became of a dispatched trajectory; each has exactly one at any instant (I2)."""

    IN_FLIGHT = "in_flight"  # running, or finished and waiting to be trained
    TRAINED = "trained"
    FILTERED = "filtered"  # a group filter took it out of its batch
    STALE = "stale"  # could no longer meet the staleness bound
    FAILED = "failed"
    CANCELLED = "cancelled"  # a spare that was not needed, a given-up group, the end of the run


class Finish(StrEnum):
    """Why a completion ended."""

    STOP = "stop"  # a stop token was sampled; it is the completion's last token
    LENGTH = "length"  # max_tokens or the engine's context ran out; no stop token, and none is added


class StalePolicy(StrEnum):
    """What happens to a group that would miss the staleness bound."""

    ABORT = "abort"  # give it up and put its task back (the paper)
    WAIT = "wait"  # the trainer waits for it; nothing is wasted


@dataclass(frozen=True, slots=True)
class Task:
    """One problem of a domain. `payload` is JSON: all that the environment needs to open it anywhere."""

    id: str
    domain: str
    payload: Mapping[str, Any] = field(default_factory=dict)
    max_turns: int = 16
    max_tokens: int = 64
    """Sampled tokens per turn."""


@dataclass(frozen=True, slots=True, order=True)
class TrajectoryId:
    """`g12.3` is member 3 of training group 12; `e2.40` is episode 40 of evaluation 2."""

    group: int
    member: int
    kind: str = "g"

    def __str__(self) -> str:
        return f"{self.kind}{self.group}.{self.member}"


@dataclass(frozen=True, slots=True)
class Sampling:
    """The distribution to sample from. temperature 0 is greedy; top_k 0 and top_p 1 are off."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0

    def __post_init__(self) -> None:
        if self.temperature < 0 or not 0 < self.top_p <= 1 or self.top_k < 0:
            raise ValueError(f"sampling needs temperature >= 0, 0 < top_p <= 1, top_k >= 0; got {self}")


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One turn to sample. `context` is everything before it; `seed` makes its draws independent of batching."""

    trajectory: TrajectoryId
    turn: int
    domain: str
    context: Tokens
    max_tokens: int
    sampling: Sampling = Sampling()
    stop: tuple[int, ...] = ()
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Completion:
    """Sampled tokens. Every token has one version: `segments` are (version, start) runs, the first starting at 0.

    `logprobs` [len(tokens)] are those of the distribution that was sampled (after temperature, top-p and top-k);
    empty under simulation.
    """

    tokens: Tokens
    logprobs: array[float]
    segments: tuple[tuple[Version, int], ...]
    finish: Finish
    engine: str = ""
    routes: bytes = b""
    """Of a mixture of experts: the experts of every position of context and completion but the last, one byte each
    [positions * layers * experts per token]; else empty."""

    @property
    def oldest(self) -> Version:
        """Version of the oldest sampled token."""
        return min(version for version, _ in self.segments)

    @property
    def newest(self) -> Version:
        return max(version for version, _ in self.segments)

    def versions(self) -> array[int]:
        """One version per token, [len(tokens)]."""
        out = array("i")
        for i, (version, start) in enumerate(self.segments):
            end = self.segments[i + 1][1] if i + 1 < len(self.segments) else len(self.tokens)
            out.extend([version] * (end - start))
        return out


ROLES = ("system", "user", "assistant", "tool")
"""Who may speak in a message."""


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message: role is `system`, `user`, `assistant` or `tool`."""

    role: str
    content: Text


@dataclass(frozen=True, slots=True)
class Observation:
    """What an environment says. `facts` are JSON for the reward (e.g. success), never shown to the agent."""

    messages: tuple[Message, ...] = ()
    done: bool = False
    truncated: bool = False
    """The environment's own limit ended the episode (with `done`)."""
    reward: float = 0.0
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Action:
    """What the agent says, as text. `truncated`: it ran into the token limit."""

    text: Text
    truncated: bool = False


@dataclass(frozen=True, slots=True)
class Turn:
    """One sampled completion, its text, the environment's answer and that answer as tokens (empty after the last).

    `fork`: the whole context of the next turn where the chat template rewrote history (`reply` is then empty); None
    where the context only grew.
    """

    completion: Completion
    text: Text
    observation: Observation
    reply: Tokens
    fork: Tokens | None = None


@dataclass(frozen=True, slots=True)
class Score:
    """A reward: the value that is trained on, whether the task was solved, and its parts for the report."""

    value: float
    success: bool = False
    parts: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One episode. `seconds` is where its time went, by stage: open, generate, environment, score."""

    id: TrajectoryId
    task: Task
    prompt: Tokens
    start: Observation
    turns: tuple[Turn, ...]
    outcome: Outcome
    score: Score | None = None
    error: str = ""
    seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def oldest(self) -> Version | None:
        """Version of its oldest sampled token; None before the first."""
        return min((turn.completion.oldest for turn in self.turns), default=None)

    @property
    def newest(self) -> Version | None:
        return max((turn.completion.newest for turn in self.turns), default=None)

    @property
    def sampled(self) -> int:
        """Tokens that the policy sampled."""
        return sum(len(turn.completion.tokens) for turn in self.turns)

    @property
    def length(self) -> int:
        """Tokens in all."""
        return len(self.prompt) + self.sampled + sum(len(turn.reply) + len(turn.fork or ()) for turn in self.turns)

    @property
    def good(self) -> bool:
        """Ended by itself and has a score, so it may be trained on."""
        return self.outcome in (Outcome.FINISHED, Outcome.TRUNCATED) and self.score is not None


@dataclass(frozen=True, slots=True)
class Group:
    """The training unit: trajectories of one task. `born` is the version that was served when it was admitted."""

    id: int
    task: Task
    born: Version
    members: tuple[Trajectory, ...]

    @property
    def oldest(self) -> Version:
        return min((m.oldest for m in self.members if m.oldest is not None), default=self.born)


@dataclass(frozen=True, slots=True)
class Sample:
    """One training sequence: all arrays [T]. Under simulation `ids` is Counted and the others are empty.

    mask is 1 where the policy sampled the token at that position; logprobs and versions are defined there (0 and -1
    elsewhere). `advantage` is that of all its action tokens, unless `turn_advantages` has one for each turn (a
    critic's are made by the learner). `turn_tokens`: sampled tokens of each turn, `turn_rewards`: the rewards that add
    up to what the advantages are made of. `truncated`: the episode went on beyond its end. `weight` scales its share of
    the loss (a trajectory that forks into several samples keeps the weight of one). `routes`: as a Completion's,
    [T - 1] or more positions, or empty.
    """

    trajectory: TrajectoryId
    domain: str
    ids: Tokens
    mask: array[int]
    logprobs: array[float]
    versions: array[int]
    advantage: float
    reward: float
    weight: float = 1.0
    turn_tokens: tuple[int, ...] = ()
    turn_rewards: tuple[float, ...] = ()
    turn_advantages: tuple[float, ...] = ()
    truncated: bool = False
    routes: bytes = b""


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """What one optimizer step consumes; it turns version `version` into `version + 1`."""

    version: Version
    samples: tuple[Sample, ...]


@dataclass(frozen=True, slots=True)
class StepReport:
    """What a step did. `metrics` hold loss, grad_norm, lr, entropy, logprob_gap, clip_fraction, ... by name."""

    version: Version
    seconds: float
    tokens: int
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Manifest:
    """Where one version's weights can be read, and how to know that they are whole. Opaque to the control plane."""

    version: Version
    location: str
    nbytes: int = 0
    checksum: str = ""


@dataclass(frozen=True, slots=True)
class EvalResult:
    """Held-out success of one domain at one pinned version. `pass_at[k - 1]`: the chance that one of k attempts at a
    task succeeds, for k up to the attempts made; `failed`: attempts that failed; `interval`: 95 % of
    `success` (algo/intervals.py), (0, 1) where it is not known."""

    domain: str
    version: Version
    tasks: int
    success: float
    reward: float
    failed: int = 0
    pass_at: tuple[float, ...] = ()
    interval: tuple[float, float] = (0.0, 1.0)


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A group that a crash cut off: what it had, and how many members it had started (ids go on from there)."""

    id: int
    task: Task
    born: Version
    finished: tuple[Trajectory, ...]
    started: int


@dataclass(frozen=True, slots=True)
class Restored:
    """What the ledger hands back on resume: every group that is not trained in the checkpoint's past.

    `source` is the task source's newest recorded state, `next_group` the first group id never used.
    """

    groups: tuple[Unfinished, ...]
    source: Mapping[str, Any] | None
    next_group: int
