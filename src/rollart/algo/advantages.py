"""Rewards to advantages. Pure arithmetic on one group (whitening: on one batch), so batch order cannot matter.

Keeps true: a member without a reward (lost to infrastructure) takes no part, neither as reward 0 nor in the count;
a group whose rewards are all equal, or with one member, gives exactly 0, decided by max == min and not by a standard
deviation that rounding makes a little more than 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from rollart.algo.settings import AlgoSettings
from rollart.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Member:
    """One member of a group. `reward`: outcome with its turns' rewards, None where it was lost. `turns`: the reward of
    each sampled turn, the outcome's with the last; they sum to `reward`. `anchors`: what each turn answered to."""

    reward: float | None
    turns: tuple[float, ...] = ()
    anchors: tuple[Hashable, ...] = ()


def group_advantages(rewards: Sequence[float | None], kind: str = "grpo", eps: float = 1e-6) -> list[float]:
    """One advantage per member, [len(rewards)]; 0.0 where the reward is None. With n rewards r of mean m:

        grpo             (r - m) / (s + eps), s with n - 1   GRPO, arXiv 2402.03300
        grpo_population  (r - m) / (s + eps), s with n
        mean_only        r - m                               Dr. GRPO, arXiv 2503.20783
        rloo             (r - m) * n / (n - 1)               RLOO, arXiv 2402.14740
        maxrl            (r - m) / m                         MaxRL; needs r >= 0

    Raises ValueError for a reward that is not finite, ConfigError for maxrl with a negative reward.
    """
    present = [reward for reward in rewards if reward is not None]
    for reward in present:
        if not math.isfinite(reward):
            raise ValueError(f"a reward must be a finite number; got {reward!r} in {list(rewards)}")
    if all_equal(present):
        return [0.0] * len(rewards)
    count = len(present)
    mean = math.fsum(present) / count
    if kind == "mean_only":
        scale = 1.0
    elif kind == "rloo":
        scale = count / (count - 1)
    elif kind == "maxrl":
        if min(present) < 0:
            raise ConfigError(f"advantage 'maxrl' needs rewards >= 0; got {min(present):g}; set 'grpo'")
        scale = 1.0 / mean
    else:
        freedom = count - 1 if kind == "grpo" else count
        scale = 1.0 / (math.sqrt(math.fsum((reward - mean) ** 2 for reward in present) / freedom) + eps)
    return [0.0 if reward is None else (reward - mean) * scale for reward in rewards]


def all_equal(rewards: Sequence[float | None]) -> bool:
    """The group teaches nothing: fewer than two rewards, or all the same (None is not a reward)."""
    present = [reward for reward in rewards if reward is not None]
    return not present or max(present) == min(present)


# The catalogue's functions: members of one group to the advantages of each member's turns.

Advantages = list[tuple[float, ...]]


def grouped(members: Sequence[Member], settings: AlgoSettings) -> Advantages:
    """The same advantage for all turns of a member."""
    values = group_advantages([m.reward for m in members], settings.advantage, settings.advantage_eps)
    return [(value,) * len(m.turns) for value, m in zip(values, members, strict=True)]


def plain(members: Sequence[Member], settings: AlgoSettings) -> Advantages:
    """The reward itself; whitening gives it a baseline."""
    for m in members:
        if m.reward is not None and not math.isfinite(m.reward):
            raise ValueError(f"a reward must be a finite number; got {m.reward!r}")
    return [(m.reward or 0.0,) * len(m.turns) for m in members]


def returns(rewards: Sequence[float], discount: float) -> tuple[float, ...]:
    """G_k = r_k + discount * G_k+1."""
    out, later = [], 0.0
    for reward in reversed(rewards):
        later = reward + discount * later
        out.append(later)
    return tuple(reversed(out))


def turns(members: Sequence[Member], settings: AlgoSettings) -> Advantages:
    """Each turn's return against those of the same turn number in the group."""
    return _per_turn(members, settings, lambda m, k: k)


def gigpo(members: Sequence[Member], settings: AlgoSettings) -> Advantages:
    """The episode's advantage, and `step_weight` times that of the turn's return among the turns of the group that
    answered the same observation (arXiv 2505.10978); a state that was met once has only the episode's."""
    episodes = group_advantages([m.reward for m in members], "grpo", settings.advantage_eps)
    steps = _per_turn(members, settings, lambda m, k: m.anchors[k])
    return [tuple(episode + settings.step_weight * step for step in of_turns)
            for episode, of_turns in zip(episodes, steps, strict=True)]


def _per_turn(members: Sequence[Member], settings: AlgoSettings, key: Callable[[Member, int], Hashable]) -> Advantages:
    """Returns of all turns, normalised (sample deviation) among those with the same `key(member, turn)`."""
    met: dict[Hashable, list[tuple[int, int, float]]] = {}
    for i, m in enumerate(members):
        if m.reward is not None:
            for k, value in enumerate(returns(m.turns, settings.turn_discount)):
                met.setdefault(key(m, k), []).append((i, k, value))
    out = [[0.0] * len(m.turns) for m in members]
    for places in met.values():
        values = group_advantages([value for _, _, value in places], "grpo", settings.advantage_eps)
        for (i, k, _), value in zip(places, values, strict=True):
            out[i][k] = value
    return [tuple(values) for values in out]


def gae(rewards: Sequence[float], values: Sequence[float], bootstrap: float, discount: float,
        decay: float) -> list[float]:
    """Generalised advantages of the action tokens of one trajectory (arXiv 1506.02438), [len(rewards)]. What lies
    between them (observations) is skipped: the next state is that of the next action token. `bootstrap`: the value
    after the last one, 0 where the episode ended by itself."""
    out, later, after = [], 0.0, bootstrap
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        later = reward + discount * after - value + discount * decay * later
        out.append(later)
        after = value
    return out[::-1]


def whitened(advantages: Sequence[tuple[float, ...]], domains: Sequence[str], settings: AlgoSettings) -> Advantages:
    """(A - mean) / (deviation + eps) over the trajectories of the batch, or of each domain; a trajectory counts once,
    however many turns it has. Equal advantages give exactly 0."""
    out = list(advantages)
    keys = domains if settings.whiten == "domain" else [""] * len(domains)
    for key in dict.fromkeys(keys):
        rows = [i for i, own in enumerate(keys) if own == key and advantages[i]]
        spread = [(value, 1.0 / len(advantages[i])) for i in rows for value in advantages[i]]
        if not spread:
            continue
        mean = math.fsum(value * share for value, share in spread) / len(rows)
        deviation = math.sqrt(math.fsum((value - mean) ** 2 * share for value, share in spread) / len(rows))
        flat = all_equal([value for value, _ in spread])
        for i in rows:
            out[i] = tuple(0.0 if flat else (value - mean) / (deviation + settings.advantage_eps)
                           for value in advantages[i])
    return out


def overlong_penalty(tokens: int, most: int, cache: int) -> float:
    """0 up to most - cache sampled tokens, then linear to -1 at `most` (DAPO, arXiv 2503.14476)."""
    return -min(1.0, max(0.0, (tokens - (most - cache)) / cache)) if most else 0.0


def pass_at_k(n: int, c: int, k: int) -> float:
    """Chance that one of k draws from n attempts with c successes is a success (Chen et al., arXiv 2107.03374)."""
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)
