"""What every step reports about its tokens: how far they were off-policy, and what the loss made of it.

Keeps true: figures are over all action tokens of the step, whatever the split into micro-batches; each is also given by
staleness, as NAME_age0, NAME_age1, NAME_age2, NAME_age3 (three and more versions), where such tokens exist.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rollart.backends.torch.losses import ActionTokens, TokenLoss

OLDEST = 3


def effective_sample_size(weights: Tensor) -> Tensor:
    """(sum w)^2 / sum w^2, a count between 1 and len(weights)."""
    return weights.sum() ** 2 / (weights ** 2).sum()


@dataclass(slots=True)
class TokenStats:
    """Collects micro-batches; all tensors [A], on the learner's device until `metrics`."""

    rows: dict[str, list[Tensor]] = field(default_factory=dict)

    def add(self, tokens: ActionTokens, made: TokenLoss, entropy: Tensor) -> None:
        for name, values in (("importance", made.importance), ("weight", made.weight), ("clipped", made.clipped),
                             ("gap", tokens.proximal - tokens.behaviour), ("entropy", entropy), ("age", tokens.age)):
            self.rows.setdefault(name, []).append(values.detach())

    def joined(self) -> dict[str, Tensor]:
        """All that was added, on the host: what one rank tells another."""
        return {name: torch.cat(parts).cpu() for name, parts in self.rows.items()}

    @classmethod
    def of(cls, ranks: Sequence[Mapping[str, Tensor]]) -> TokenStats:
        """Of several ranks together; some may have none."""
        told = [own for own in ranks if own]
        return cls({name: [own[name] for own in told] for name in (told[0] if told else ())})

    def metrics(self, cap: float) -> dict[str, float]:
        """Of all tokens that were added; nothing without any. `importance_capped`: share of tokens above `cap`.

        importance_pN: percentiles of w = proximal / behaviour probability; importance_mean: mean weight after
        corrections; importance_ess: effective sample size of w as a share of the tokens; mismatch_kl estimates
        KL(behaviour || proximal) by w - 1 - log w. logprob_gap: mean |log w| of tokens of the newest weights, where
        only numerics differ; logprob_gap_all: of all. masked: share of tokens with weight 0.
        """
        if not self.rows:
            return {}
        seen = {name: torch.cat(parts).double().cpu() for name, parts in self.rows.items()}
        importance, gap = seen["importance"], seen["gap"]
        seen |= {"ess": importance, "kl": importance - 1 - importance.log(), "masked": seen["weight"] == 0}
        out = {"entropy": seen["entropy"].mean(), "importance_mean": seen["weight"].mean(),
               "importance_capped": (importance > cap).double().mean(), "logprob_gap_all": gap.abs().mean()}
        if (seen["age"] == 0).any():
            out["logprob_gap"] = gap[seen["age"] == 0].abs().mean()
        groups = {"": torch.ones_like(gap, dtype=torch.bool)} | {
            f"_age{age}": (seen["age"] == age) if age < OLDEST else (seen["age"] >= age) for age in range(OLDEST + 1)}
        for suffix, at in groups.items():
            if at.any():
                ordered = importance[at].sort().values
                out |= {f"importance_p{percent}{suffix}": ordered[round(percent / 100 * (len(ordered) - 1))]
                        for percent in (1, 50, 99, 100)}
                out |= {f"importance_ess{suffix}": effective_sample_size(importance[at]) / at.sum(),
                        f"mismatch_kl{suffix}": seen["kl"][at].mean(),
                        f"clip_fraction{suffix}": seen["clipped"][at].mean(),
                        f"masked{suffix}": seen["masked"][at].double().mean()}
                if suffix:
                    out[f"tokens{suffix}"] = at.sum()
        return {"action_tokens": float(len(gap)), **{name: float(value) for name, value in out.items()}}
