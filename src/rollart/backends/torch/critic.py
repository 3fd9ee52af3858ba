"""The critic of PPO: a second model that says what an action token's context is worth, and learns from returns.

Keeps true: values and advantages of a step are those of the critic at the step's start; the observation tokens between
actions are skipped (L3); a trajectory that forked is one row of action tokens; the loss is invariant to the split into
micro-batches. A: action tokens of a sequence.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rollart.algo.advantages import gae
from rollart.algo.settings import AlgoSettings
from rollart.backends.torch.fsdp import Alone
from rollart.backends.torch.scoring import pack_sequences
from rollart.backends.torch.transformer import Transformer
from rollart.core.types import Sample


@dataclass(frozen=True, slots=True)
class Estimate:
    """Of one sample: the critic's values before the step, advantages, and the returns to learn, [A] each."""

    values: Tensor
    advantages: Tensor
    returns: Tensor


class Critic(nn.Module):
    """A copy of the policy's body with one number at each position; it begins by saying 0."""

    def __init__(self, policy: Transformer) -> None:
        super().__init__()
        self.body = copy.deepcopy(policy).requires_grad_(True)
        if not policy.config.tied:
            del self.body.lm_head
        self.value = nn.Linear(policy.config.width, 1, dtype=policy.head.dtype)
        nn.init.zeros_(self.value.weight)
        nn.init.zeros_(self.value.bias)

    def forward(self, samples: Sequence[Sample], device: torch.device) -> tuple[Tensor, Tensor, list[int]]:
        """Values before each action token [sum of A], values behind each sequence's last [N], and the A of each."""
        packed = pack_sequences([(sample.ids, sample.mask) for sample in samples], device, to_end=True)
        values = self.value(self.body(packed.ids, packed.positions, packed.lengths)).squeeze(-1)
        values = values.float() if values.dtype is torch.bfloat16 else values
        return values[packed.scored], values[packed.ends], packed.counts

    def estimate(self, samples: Sequence[Sample], algo: AlgoSettings, ranks: Alone, bins: Sequence[Sequence[int]],
                 precision: Callable[[], AbstractContextManager[Any]]) -> list[Estimate]:
        """Of each sample, in order; whitened over the action tokens of the batch or of each domain if so set. `bins`:
        this rank's micro-batches, by index; an empty one is a pass that only joins the others'."""
        device, mine = ranks.device, []
        for members in bins:
            with torch.no_grad(), precision():
                said, after, counts = self([samples[i] for i in members or (0,)], device)
            mine += list(zip(members, said.cpu().split(counts), after.tolist(), strict=False))
        seen = {i: (own, end) for told in ranks.gather(mine, everywhere=True) for i, own, end in told}
        values, ends = [seen[i][0] for i in range(len(samples))], [seen[i][1] for i in range(len(samples))]
        advantages = _advantages(samples, values, ends, algo)
        returns = [own + value.double() for own, value in zip(advantages, values, strict=True)]
        if algo.whiten != "none":
            _whiten(advantages, [s.domain if algo.whiten == "domain" else "" for s in samples], algo.advantage_eps)
        return [Estimate(value.to(device), own.to(device, value.dtype), goal.to(device, value.dtype))
                for value, own, goal in zip(values, advantages, returns, strict=True)]

    def loss(self, samples: Sequence[Sample], estimates: Sequence[Estimate], algo: AlgoSettings,
             scale: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        """Half the squared error, summed with the weights `scale` of the tokens, and (a figure) the summed square of
        what it missed. With value_clip the larger of the errors of the value and of the value clipped to its old one
        +- value_clip counts (as in OpenAI's baselines)."""
        values, _, _ = self(samples, device)
        goal = torch.cat([estimate.returns for estimate in estimates])
        error = (values - goal) ** 2
        if algo.value_clip:
            old = torch.cat([estimate.values for estimate in estimates])
            near = old + (values - old).clamp(-algo.value_clip, algo.value_clip)
            error = torch.maximum(error, (near - goal) ** 2)
        return (scale * error).sum() / 2, error.detach().sum()


def _advantages(samples: Sequence[Sample], values: Sequence[Tensor], ends: Sequence[float],
                algo: AlgoSettings) -> list[Tensor]:
    """Generalised advantages of each sample's action tokens; the samples of a forked trajectory follow one another."""
    out: list[Tensor] = [torch.empty(0)] * len(samples)
    rows: dict[object, list[int]] = {}
    for i, sample in enumerate(samples):
        rows.setdefault(sample.trajectory, []).append(i)
    for row in rows.values():
        rewards: list[float] = []
        for i in row:
            for tokens, reward in zip(samples[i].turn_tokens, samples[i].turn_rewards, strict=True):
                rewards += [0.0] * tokens
                rewards[-1:] = [value + reward for value in rewards[-1:]]
        last = row[-1]
        bootstrap = ends[last] if samples[last].truncated and algo.truncated == "bootstrap" else 0.0
        flat = gae(rewards, torch.cat([values[i] for i in row]).tolist(), bootstrap, algo.token_discount,
                   algo.gae_lambda)
        for i, own in zip(row, torch.tensor(flat, dtype=torch.float64).split([len(values[i]) for i in row]),
                          strict=True):
            out[i] = own
    return out


def _whiten(advantages: list[Tensor], domains: Sequence[str], eps: float) -> None:
    """In place: (A - mean) / (deviation + eps) over the action tokens of each domain."""
    for domain in dict.fromkeys(domains):
        rows = [i for i, own in enumerate(domains) if own == domain]
        flat = torch.cat([advantages[i] for i in rows])
        deviation = flat.std(correction=0)
        for i in rows:
            advantages[i] = (advantages[i] - flat.mean()) / (deviation + eps)


def explained(estimates: Sequence[Estimate]) -> float:
    """The share of the returns' variance that the values explained before the step; below 0 if worse than none."""
    goal = torch.cat([estimate.returns for estimate in estimates])
    left = goal - torch.cat([estimate.values for estimate in estimates])
    spread = float(goal.var(correction=0))
    return 1 - float(left.var(correction=0)) / spread if spread > 0 else math.nan
