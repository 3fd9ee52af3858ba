"""Groups of trajectories to the batch of one optimizer step.

Keeps true: the trained ids are the prompt, the sampled ids and the replies joined as they are, never encoded again;
mask, logprobs and versions are aligned with them; where the chat template rewrote history the trajectory forks into
samples that each keep an exact prefix and share the weight of one; each member of the groups is in the batch or in
`filtered`, with the reason; filters look at whole groups and at raw rewards and outcomes, before anything changes them.

    prompt   action      reply    action
    [s u a]  [x y e]     [u o a]  [z e]
    0 0 0    1 1 1       0 0 0    1 1        mask
    0 0 0   -.2 -1 -.1   0 0 0   -.3 -.1     logprobs
    -1 .. -1 7 7 8      -1 .. -1  8 8        versions
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rollart.algo.advantages import Member, all_equal, overlong_penalty, whitened
from rollart.algo.catalogue import function, parts
from rollart.algo.settings import AlgoSettings
from rollart.core.errors import ConfigError
from rollart.core.tokens import Counted, Tokens, floats, ids, join
from rollart.core.types import Group, Outcome, Sample, TrainBatch, Trajectory, TrajectoryId, Turn, Version


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
    kept: list[tuple[Trajectory, Member, tuple[float, ...]]] = []
    filtered: list[tuple[TrajectoryId, str]] = []
    for group in groups:
        raw, members, advantages = _compared(group, settings)
        left_out = _left_out(group, raw, settings)
        for trajectory, reward, member, own in zip(group.members, raw, members, advantages, strict=True):
            reason = ("no reward" if reward is None else left_out or _unusable(trajectory, settings))
            if reason:
                filtered.append((trajectory.id, reason))
            else:
                kept.append((trajectory, member, own))
    if settings.whiten != "none" and not settings.critic:
        white = whitened([own for _, _, own in kept], [t.task.domain for t, _, _ in kept], settings)
        kept = [(t, member, own) for (t, member, _), own in zip(kept, white, strict=True)]
    samples = [sample for trajectory, member, own in kept for sample in make_samples(trajectory, member, own)]
    return MadeBatch(TrainBatch(version, tuple(samples)), tuple(filtered))


def unusable(group: Group, settings: AlgoSettings) -> str:
    """Why the algorithm can make no advantages of the group's rewards, or ''. The piece may be somebody's own."""
    try:
        _, members, advantages = _compared(group, settings)
        fits = [len(own) for own in advantages] == [len(member.turns) for member in members]
        if fits and all(math.isfinite(value) for own in advantages for value in own):
            return ""
        problem = f"{advantages!r:.120} is not one finite number for each turn"
    except (ArithmeticError, ConfigError, LookupError, TypeError, ValueError) as error:
        problem = f"{type(error).__name__}: {error}"
    return f"advantage {settings.advantage!r} cannot use the group's rewards: {problem}"


def _compared(group: Group, settings: AlgoSettings,
              ) -> tuple[list[float | None], list[Member], Sequence[tuple[float, ...]]]:
    """Raw rewards, what advantages are made of, and the advantages of each member's turns."""
    raw = [_raw(member, settings) for member in group.members]
    members = [_member(m, reward, settings) for m, reward in zip(group.members, raw, strict=True)]
    if settings.critic:
        return raw, members, [(0.0,) * len(m.turns) for m in members]
    return raw, members, function("advantage", settings.advantage)(members, settings)


def _raw(trajectory: Trajectory, settings: AlgoSettings) -> float | None:
    """The outcome's reward and its turns' share of it, before any shaping."""
    if not trajectory.good or trajectory.score is None:
        return None
    return trajectory.score.value + sum(_turn_rewards(trajectory, settings))


def _turn_rewards(trajectory: Trajectory, settings: AlgoSettings) -> tuple[float, ...]:
    weight = settings.turn_reward_weight
    return tuple(weight * turn.observation.reward if weight else 0.0 for turn in trajectory.turns)


def _member(trajectory: Trajectory, raw: float | None, settings: AlgoSettings) -> Member:
    """What the advantages are made of: rewards per turn, the (shaped) outcome with the last of them."""
    if raw is None:
        return Member(None, (0.0,) * len(trajectory.turns), (None,) * len(trajectory.turns))
    shaped = raw + overlong_penalty(trajectory.sampled, settings.overlong_tokens, settings.overlong_cache)
    rewards = list(_turn_rewards(trajectory, settings))
    if rewards:
        rewards[-1] += shaped - sum(rewards)
    seen = [trajectory.start, *(turn.observation for turn in trajectory.turns[:-1])]
    return Member(shaped, tuple(rewards), tuple(observation.messages for observation in seen))


def _left_out(group: Group, raw: Sequence[float | None], settings: AlgoSettings) -> str:
    """Why a group filter takes the whole group, or ''."""
    names = parts(settings.filter)
    if "zero_variance" in names and all_equal(raw):
        return "zero variance"
    good = [member for member in group.members if member.good]
    cut = sum(member.outcome is Outcome.TRUNCATED for member in good)
    return "overlong" if "overlong" in names and cut > settings.overlong_share * len(good) else ""


def _unusable(trajectory: Trajectory, settings: AlgoSettings) -> str:
    """Why one trajectory of a group that stays is not trained on, or ''."""
    if not trajectory.sampled:
        return trajectory.error or "no sampled token"
    return "truncated" if settings.truncated == "mask" and trajectory.outcome is Outcome.TRUNCATED else ""


def make_samples(trajectory: Trajectory, member: Member, advantages: Sequence[float]) -> list[Sample]:
    """A trajectory as training sequences, one unless its history was rewritten: each from a context that was really
    used to the turn before the next rewriting. `advantages`: one per turn."""
    pieces: list[tuple[Tokens, list[int]]] = [(trajectory.prompt, [])]
    for number, turn in enumerate(trajectory.turns):
        pieces[-1][1].append(number)
        if turn.fork is not None and number + 1 < len(trajectory.turns):
            pieces.append((turn.fork, []))
    pieces = [(prompt, own) for prompt, own in pieces if any(len(trajectory.turns[i].completion.tokens) for i in own)]
    reward = trajectory.score.value if trajectory.score else 0.0
    samples = []
    for number, (prompt, own) in enumerate(pieces):
        sample = make_sample(trajectory, prompt, own, reward)
        values = tuple(advantages[i] for i in own)
        same = all_equal(values)
        last = number + 1 == len(pieces)
        samples.append(replace(
            sample, advantage=values[0] if same else sum(values) / len(values), weight=1 / len(pieces),
            turn_advantages=() if same else values, turn_rewards=tuple(member.turns[i] for i in own),
            truncated=not last or trajectory.outcome is Outcome.TRUNCATED))
    return samples


def make_sample(trajectory: Trajectory, prompt: Tokens, numbers: Sequence[int], reward: float) -> Sample:
    """The turns of these numbers behind `prompt` as one training sequence, with advantage 0; ids [T], the other arrays
    [T], or empty under simulation."""
    turns = [trajectory.turns[number] for number in numbers]
    sequence: list[Tokens] = [prompt]
    for turn in turns:
        sequence += [turn.completion.tokens, turn.reply]
    tokens = join(*sequence)
    mask, logprobs, versions = ids(), floats(), ids()
    if not isinstance(tokens, Counted):
        if not len(prompt):
            raise ValueError(f"{trajectory.id}: an empty prompt leaves its first sampled token without a score")
        _outside(len(prompt), mask, logprobs, versions)
        for number, turn in zip(numbers, turns, strict=True):
            _action(trajectory.id, number, turn, mask, logprobs, versions)
        if not len(mask) == len(logprobs) == len(versions) == len(tokens):
            raise ValueError(f"{trajectory.id}: version segments do not cover its {len(tokens)} tokens")
    return Sample(trajectory.id, trajectory.task.domain, tokens, mask, logprobs, versions, 0.0, reward,
                  turn_tokens=tuple(len(turn.completion.tokens) for turn in turns), routes=turns[-1].completion.routes)


def _action(id: TrajectoryId, number: int, turn: Turn, mask: array[int], logprobs: array[float],
            versions: array[int]) -> None:
    """Append a turn's sampled tokens and its reply."""
    completion = turn.completion
    count = len(completion.tokens)
    if len(completion.logprobs) != count:
        raise ValueError(f"{id} turn {number}: {count} sampled tokens but {len(completion.logprobs)} log-probabilities")
    mask.extend([1] * count)
    logprobs.extend(completion.logprobs)
    versions.extend(completion.versions())
    _outside(len(turn.reply), mask, logprobs, versions)


def _outside(count: int, mask: array[int], logprobs: array[float], versions: array[int]) -> None:
    """Append `count` positions that the policy did not sample."""
    mask.extend([0] * count)
    logprobs.extend([0.0] * count)
    versions.extend([-1] * count)
