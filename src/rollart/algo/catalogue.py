"""The named pieces of the learning rule, and the algorithms that are composed of them.

Keeps true: every name that a recipe may use stands here once, with its formula, its source and the function that
computes it, so `rollart algorithms`, the checks of a recipe and the learner read the same table. A new piece is one
function and one line here; one of your own needs no line: the recipe names it as `module:function`.

r_i: reward of member i of a group of n, m their mean, s their standard deviation. w = proximal / behaviour probability
of a token, R = current / proximal (or / behaviour, by `ratio`). A: advantage. Weights and masks carry no gradient.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rollart.core.errors import ConfigError

OWN = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


@dataclass(frozen=True, slots=True)
class Piece:
    """One choice for one key of [algorithm]. `keys`: settings that only such pieces read. `mask`: its weights
    do not estimate w, so it may stand beside ratio = behaviour."""

    kind: str
    name: str
    formula: str
    source: str
    where: str = ""
    keys: tuple[str, ...] = ()
    mask: bool = False


_ADV, _LOSS = "rollart.algo.advantages:", "rollart.backends.torch.losses:"
_COR = "rollart.backends.torch.corrections:"

PIECES: tuple[Piece, ...] = (
    Piece("advantage", "grpo", "(r - m) / (s + eps), s with n - 1", "GRPO, arXiv 2402.03300", _ADV + "grouped",
          ("advantage_eps",)),
    Piece("advantage", "grpo_population", "(r - m) / (s + eps), s with n", "GRPO with torch's biased deviation",
          _ADV + "grouped", ("advantage_eps",)),
    Piece("advantage", "mean_only", "r - m", "Dr. GRPO, arXiv 2503.20783", _ADV + "grouped"),
    Piece("advantage", "rloo", "r - mean of the others = (r - m) n / (n - 1)", "RLOO, arXiv 2402.14740",
          _ADV + "grouped"),
    Piece("advantage", "maxrl", "(r - m) / m; rewards >= 0", "MaxRL (maximum likelihood RL)", _ADV + "grouped"),
    Piece("advantage", "reinforce", "r", "REINFORCE; whitened over the batch: REINFORCE++, arXiv 2501.03262",
          _ADV + "plain"),
    Piece("advantage", "turns", "G_k - mean of G_k over the group, over their deviation; "
          "G_k = sum_j>=k turn_discount^(j-k) r_j, per turn k", "REINFORCE with returns per turn", _ADV + "turns",
          ("turn_discount", "advantage_eps")),
    Piece("advantage", "gigpo", "(r - m)/(s + eps) + step_weight * the same of G_k over turns of the group that answer "
          "the same observation", "GiGPO, arXiv 2505.10978", _ADV + "gigpo",
          ("turn_discount", "step_weight", "advantage_eps")),
    Piece("advantage", "gae", "sum_l (token_discount gae_lambda)^l delta_t+l, "
          "delta_t = r_t + token_discount V_t+1 - V_t over action tokens, with a critic", "GAE, arXiv 1506.02438",
          _ADV + "gae", ("gae_lambda", "token_discount", "value_clip", "critic_rate")),
    Piece("loss", "clip", "-min(R A, clip(R, 1 - clip_low, 1 + clip_high) A); for A < 0 at most dual_clip |A|",
          "PPO, arXiv 1707.06347; clip-higher, 2503.14476; dual clip, 1912.09729", _LOSS + "clip",
          ("clip_low", "clip_high", "dual_clip")),
    Piece("loss", "gspo", "clip with R of the sequence: exp(mean of log R over its action tokens)",
          "GSPO, arXiv 2507.18071", _LOSS + "gspo", ("clip_low", "clip_high", "dual_clip")),
    Piece("loss", "cispo", "-min(R, 1 + clip_high) A log p, the weight without gradient", "CISPO, arXiv 2506.13585",
          _LOSS + "cispo", ("clip_high",)),
    Piece("loss", "reinforce", "-A log p", "Williams 1992", _LOSS + "reinforce"),
    Piece("correction", "tis", "min(w, importance_cap)", "truncated importance sampling", _COR + "tis",
          ("importance_cap",)),
    Piece("correction", "tis_sequence", "min(product of w over the sequence, importance_cap)",
          "truncated importance sampling per sequence", _COR + "tis_sequence", ("importance_cap",)),
    Piece("correction", "icepop", "w where band_low <= w <= band_high, else 0", "IcePop, arXiv 2510.18855",
          _COR + "icepop", ("band_low", "band_high")),
    Piece("correction", "geometric_mask", "1 where geometric_low <= exp(mean of log w over the sequence) <= "
          "geometric_high, else 0", "geometric sequence masking of off-policy sequences", _COR + "geometric_mask",
          ("geometric_low", "geometric_high"), mask=True),
    Piece("correction", "dppo_tv", "0 where |p - behaviour p| > tv_limit and the step would lead further away, else 1",
          "DPPO with binary total variation, arXiv 2602.04879", _COR + "dppo_tv", ("tv_limit",), mask=True),
    Piece("correction", "staleness", "staleness_decay ^ (versions between sampling and this step)",
          "staleness-aware weights, after arXiv 1511.05950", _COR + "staleness", ("staleness_decay",), mask=True),
    Piece("aggregation", "token_mean", "sum over tokens / number of tokens of the batch", "DAPO, arXiv 2503.14476"),
    Piece("aggregation", "sequence_mean", "mean over sequences of their token means", "GRPO, arXiv 2402.03300"),
    Piece("aggregation", "constant_length", "sum over tokens / (sequences * aggregation_tokens)",
          "Dr. GRPO, arXiv 2503.20783", "", ("aggregation_tokens",)),
    Piece("whiten", "batch", "(A - mean) / (deviation + eps) over all trajectories of the batch",
          "REINFORCE++, arXiv 2501.03262", "", ("advantage_eps",)),
    Piece("whiten", "domain", "the same over the trajectories of each domain, so that no domain outweighs another", "",
          "", ("advantage_eps",)),
    Piece("filter", "zero_variance", "leaves out groups whose raw rewards are all equal", "DAPO, arXiv 2503.14476"),
    Piece("filter", "overlong", "leaves out groups of which more than overlong_share was truncated", "", "",
          ("overlong_share",)),
    Piece("kl", "k1", "log(p / reference p); as a gradient its expectation is 0", "Schulman 2020"),
    Piece("kl", "k2", "log(p / reference p)^2 / 2; its gradient is that of KL(p || reference)", "Schulman 2020"),
    Piece("kl", "k3", "reference p / p - 1 + log(p / reference p); its gradient is that of KL(reference || p)",
          "Schulman 2020"),
)

ALGORITHMS: Mapping[str, Mapping[str, Any]] = {
    "grpo": {},
    "dr_grpo": {"advantage": "mean_only", "aggregation": "constant_length", "aggregation_tokens": 512,
                "clip_high": 0.2},
    "rloo": {"advantage": "rloo", "loss": "reinforce"},
    "maxrl": {"advantage": "maxrl"},
    "reinforce++": {"advantage": "reinforce", "whiten": "batch", "clip_high": 0.2},
    "reinforce++_baseline": {"advantage": "mean_only", "whiten": "batch", "clip_high": 0.2},
    "gigpo": {"advantage": "gigpo", "turn_discount": 0.95, "clip_high": 0.2},
    "ppo": {"advantage": "gae", "whiten": "batch", "clip_high": 0.2, "value_clip": 0.2},
    "gspo": {"loss": "gspo", "aggregation": "sequence_mean", "clip_low": 3e-4, "clip_high": 4e-4},
    "cispo": {"loss": "cispo", "ratio": "behaviour", "correction": "none"},
    "decoupled_ppo": {"importance_cap": 5.0, "clip_high": 0.2},
    "dppo": {"loss": "cispo", "ratio": "behaviour", "correction": "dppo_tv", "clip_high": 19.0},
}
"""What each algorithm changes of the defaults; keys of the recipe's [algorithm] change it further."""


def parts(names: str) -> tuple[str, ...]:
    """The names in `a+b`; none in `none`."""
    return () if names == "none" else tuple(name.strip() for name in names.split("+"))


def pieces(kind: str) -> Iterator[Piece]:
    return (piece for piece in PIECES if piece.kind == kind)


def find(kind: str, name: str) -> Piece:
    """The piece, or one of the user's own as `module:function`. Raises ValueError for an unknown name."""
    known = {piece.name: piece for piece in pieces(kind)}
    if name in known:
        return known[name]
    if OWN.fullmatch(name) and kind in ("advantage", "loss", "correction"):
        return Piece(kind, name, "your own", "", name)
    own = ", or a function of your own as module:function" if kind in ("advantage", "loss", "correction") else ""
    raise ValueError(f"{kind} must be one of {', '.join(known)}{own}; got {name!r}")


def function(kind: str, name: str) -> Any:
    """The function behind a piece. Raises ConfigError where it cannot be imported."""
    module, _, attribute = find(kind, name).where.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"algorithm.{kind} = {name!r} cannot be imported: {error}") from None


def resolve(table: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe's [algorithm] with what its `name` stands for filled in. Raises ConfigError for an unknown name."""
    name = table.get("name", "grpo")
    if name not in ALGORITHMS:
        raise ConfigError(f"algorithm.name must be one of {', '.join(ALGORITHMS)}; got {name!r}")
    return {**ALGORITHMS[name], **table}
