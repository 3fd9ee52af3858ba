"""Groups of trajectories to the batch of one optimizer step.

Keeps true: the trained ids are the prompt, the sampled ids and the replies joined as they are, never encoded again;
mask, logprobs and versions are aligned with them; each member of the groups is in the batch or in `filtered`, with
the reason; filters look at whole groups and at raw rewards, before truncation or normalisation changes anything.

    prompt   action      reply    action
    [s u a]  [x y e]     [u o a]  [z e]
    0 0 0    1 1 1       0 0 0    1 1        mask
    0 0 0   -.2 -1 -.1   0 0 0   -.3 -.1     logprobs
    -1 .. -1 7 7 8      -1 .. -1  8 8        versions
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from rollart.algo.advantages import all_equal, group_advantages
from rollart.algo.settings import AlgoSettings
from rollart.core.tokens import Counted, Tokens, floats, ids, join
from rollart.core.types import Group, Outcome, Sample, TrainBatch, Trajectory, TrajectoryId, Version


@dataclass(frozen=True, slots=True)
class MadeBatch:
    """The batch, and every member that is not in it, with the reason."""

    batch: TrainBatch
    filtered: tuple[tuple[TrajectoryId, str], ...]


def make_batch(version: Version, groups: Sequence[Group], settings: AlgoSettings) -> MadeBatch:
    """Train `groups` at `version`. Order is kept: groups as given, members as in their group.

    Raises ValueError when a trajectory contradicts itself (log-probs that do not match its tokens, a reward that is
    not finite), TypeError when it mixes real and simulated tokens.
    """
    samples: list[Sample] = []
    filtered: list[tuple[TrajectoryId, str]] = []
    for group in groups:
        rewards = [member.score.value if member.good and member.score else None for member in group.members]
        advantages = group_advantages(rewards, normalisation=settings.normalisation, eps=settings.normalisation_eps)
        dropped = settings.filter == "zero_variance" and all_equal(rewards)
        for member, reward, advantage in zip(group.members, rewards, advantages, strict=True):
            if reward is None:
                filtered.append((member.id, "no reward"))
            elif dropped:
                filtered.append((member.id, "zero variance"))
            elif not member.sampled:
                filtered.append((member.id, "no sampled token"))
            elif settings.truncated == "mask" and member.outcome is Outcome.TRUNCATED:
                filtered.append((member.id, "truncated"))
            else:
                samples.append(make_sample(member, advantage, reward))
    return MadeBatch(TrainBatch(version, tuple(samples)), tuple(filtered))


def make_sample(trajectory: Trajectory, advantage: float, reward: float) -> Sample:
    """One trajectory as one training sequence; ids [T], the other arrays [T], or empty under simulation."""
    parts: list[Tokens] = [trajectory.prompt]
    for turn in trajectory.turns:
        parts += [turn.completion.tokens, turn.reply]
    tokens = join(*parts)
    mask, logprobs, versions = ids(), floats(), ids()
    if not isinstance(tokens, Counted):
        if not len(trajectory.prompt):
            raise ValueError(f"{trajectory.id}: an empty prompt leaves its first sampled token without a score")
        _outside(len(trajectory.prompt), mask, logprobs, versions)
        for number, turn in enumerate(trajectory.turns):
            completion = turn.completion
            count = len(completion.tokens)
            if len(completion.logprobs) != count:
                raise ValueError(f"{trajectory.id} turn {number}: {count} sampled tokens but "
                                 f"{len(completion.logprobs)} log-probabilities")
            mask.extend([1] * count)
            logprobs.extend(completion.logprobs)
            versions.extend(completion.versions())
            _outside(len(turn.reply), mask, logprobs, versions)
        if not len(mask) == len(logprobs) == len(versions) == len(tokens):
            raise ValueError(f"{trajectory.id}: version segments do not cover its {len(tokens)} tokens")
    return Sample(trajectory.id, trajectory.task.domain, tokens, mask, logprobs, versions, advantage, reward)


def _outside(count: int, mask: array[int], logprobs: array[float], versions: array[int]) -> None:
    """Append `count` positions that the policy did not sample."""
    mask.extend([0] * count)
    logprobs.extend([0.0] * count)
    versions.extend([-1] * count)
