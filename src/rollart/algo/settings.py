"""The choices of the learning rule. Plain numbers and names, checked once; every default is one that trains.

Keeps true: settings that contradict each other, or that no chosen piece reads, are refused with both keys named.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal

from rollart.algo.catalogue import ALGORITHMS, OWN, PIECES, find, parts, resolve
from rollart.core.ranges import between, literals

Truncated = Literal["train", "mask", "bootstrap"]
Whiten = Literal["none", "batch", "domain"]
Ratio = Literal["proximal", "behaviour"]
Proximal = Literal["recomputed", "approximated"]
Reference = Literal["none", "copy", "adapter_off"]
Kl = Literal["k1", "k2", "k3"]


@dataclass(frozen=True, kw_only=True)
class AlgoSettings:
    """The learning rule, composed of named pieces: `rollart algorithms` has their formulas. Raises ValueError.

    name: an algorithm; it stands for values of the keys below, and a key that is given here goes before it.
    advantage: grpo, grpo_population, mean_only, rloo, maxrl, reinforce, turns, gigpo or gae (with a critic).
    advantage_eps: added to standard deviations; a number in reward units. whiten: none, batch or domain.
    turn_reward_weight: weight of an environment's reward per turn, beside the outcome's. turn_discount: of later
        turns' rewards, per turn. step_weight: of gigpo's part per step.
    gae_lambda, token_discount: of gae, per action token. value_clip: the critic's value moves at most so far from the
        one before the step (0: off). critic_rate: the critic's learning rate (0: the learner's).
    loss: clip, gspo, cispo or reinforce. ratio: what its ratio is taken against: the proximal policy (the weights at
        the start of the step) or the behaviour policy (then no importance weight may be set as well).
    proximal: recomputed, or approximated from behaviour and current log-probabilities without a forward pass.
    clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high]; fractions.
    dual_clip: upper limit of the loss of a token with negative advantage, in multiples of |advantage|; 0 is off.
    correction: none, or one or several of tis, tis_sequence, icepop, geometric_mask, dppo_tv, staleness joined by +:
        their weights for tokens of older weights or of another numeric path are multiplied.
    importance_cap: of tis and tis_sequence; a ratio. band_low, band_high: of icepop; ratios. geometric_low,
        geometric_high: of geometric_mask; ratios. tv_limit: of dppo_tv; a probability. staleness_decay: weight per
        version of age.
    aggregation: token_mean, sequence_mean or constant_length (over aggregation_tokens tokens).
    entropy_coefficient: weight of the entropy bonus; 0 is off.
    kl_coefficient: weight of the KL divergence to `reference` in the loss; 0 is off. kl_value, kl_gradient: the
        estimators (k1, k2, k3) of its value and of its gradient. reference: none, copy (a frozen copy of the model
        that the run starts from) or adapter_off (the model without its LoRA adapter; needs no copy).
    router_coefficient: weight of the load-balancing loss of a mixture of experts; 0 is off.
    truncated: what a trajectory that ran into a limit does: train (with the reward it got), mask (it stays in its
        group's baseline, but is not trained on) or bootstrap (the critic's value stands for what it did not reach).
    overlong_tokens, overlong_cache: sampled tokens; from overlong_tokens - overlong_cache on the reward falls
        linearly by up to 1 (0: off; DAPO, arXiv 2503.14476).
    filter: which whole groups are left out: none, or zero_variance, overlong, joined by +, by raw rewards and
        outcomes. overlong_share: of truncated members, above which overlong leaves a group out.
    """

    name: str = "grpo"
    advantage: str = "grpo"
    advantage_eps: float = 1e-6
    whiten: Whiten = "none"
    turn_reward_weight: float = 0.0
    turn_discount: float = 1.0
    step_weight: float = 1.0
    gae_lambda: float = 0.95
    token_discount: float = 1.0
    value_clip: float = 0.0
    critic_rate: float = 0.0
    loss: str = "clip"
    ratio: Ratio = "proximal"
    proximal: Proximal = "recomputed"
    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float = 0.0
    correction: str = "tis"
    importance_cap: float = 2.0
    band_low: float = 0.5
    band_high: float = 5.0
    geometric_low: float = 0.99
    geometric_high: float = 1.01
    tv_limit: float = 0.2
    staleness_decay: float = 0.5
    aggregation: str = "token_mean"
    aggregation_tokens: int = 0
    entropy_coefficient: float = 0.0
    kl_coefficient: float = 0.0
    kl_value: Kl = "k3"
    kl_gradient: Kl = "k2"
    reference: Reference = "none"
    router_coefficient: float = 0.0
    truncated: Truncated = "train"
    overlong_tokens: int = 0
    overlong_cache: int = 0
    filter: str = "none"
    overlong_share: float = 0.5

    @classmethod
    def named(cls, name: str, **changes: Any) -> AlgoSettings:
        """An algorithm of the catalogue with changes. Raises ConfigError for an unknown name."""
        return cls(**resolve({"name": name, **changes}))

    @property
    def corrections(self) -> tuple[str, ...]:
        return parts(self.correction)

    @property
    def chosen(self) -> frozenset[tuple[str, str]]:
        """Kind and name of every piece that it is made of."""
        one = {"advantage": self.advantage, "loss": self.loss, "aggregation": self.aggregation, "whiten": self.whiten}
        kl = {self.kl_value, self.kl_gradient} if self.kl_coefficient else set()
        return frozenset([*one.items(), *(("correction", name) for name in self.corrections),
                          *(("filter", name) for name in parts(self.filter)), *(("kl", name) for name in kl)])

    @property
    def critic(self) -> bool:
        """The advantages need a critic."""
        return self.advantage == "gae"

    @property
    def grouped(self) -> bool:
        """The advantages compare the members of a group."""
        return self.advantage not in ("gae", "reinforce")

    def __post_init__(self) -> None:
        literals(self)
        for kind in ("advantage", "loss", "aggregation"):
            find(kind, getattr(self, kind))
        for kind in ("correction", "filter"):
            names = parts(getattr(self, kind))
            for name in names:
                find(kind, name)
            if len(set(names)) != len(names):
                raise ValueError(f"{kind} names a piece twice; got {getattr(self, kind)!r}")
        self._check_numbers()
        self._check_together()

    def _check_numbers(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, str) and not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{field.name} must be a finite number >= 0; got {value!r}")
        if self.clip_low >= 1:
            raise ValueError(f"clip_low must be below 1 (the ratio stays positive); got {self.clip_low!r}")
        if self.dual_clip and not self.dual_clip > 1:
            raise ValueError(f"dual_clip must be 0 (off) or above 1; got {self.dual_clip!r}")
        if self.importance_cap < 1:
            raise ValueError(f"importance_cap must be a ratio >= 1; got {self.importance_cap!r}: correction = 'none' "
                             "turns the weight off")
        between(self, 0, 1, "gae_lambda", "token_discount", "turn_discount", "staleness_decay", "overlong_share")

    def _check_together(self) -> None:
        """Settings that contradict each other, or that nothing reads."""
        def need(wrong: object, key: str, why: str, other: str) -> None:
            if wrong:
                raise ValueError(f"{key} = {getattr(self, key)!r} {why} {other} = {getattr(self, other)!r}")

        for low, high in (("band_low", "band_high"), ("geometric_low", "geometric_high")):
            need(getattr(self, low) > getattr(self, high), low, "must not be above", high)
        need(self.overlong_cache > self.overlong_tokens, "overlong_cache", "must not be above", "overlong_tokens")
        need(self.overlong_tokens and not self.overlong_cache, "overlong_tokens", "needs a length to fall over; got",
             "overlong_cache")
        need(self.kl_coefficient and self.reference == "none", "kl_coefficient", "needs a reference model; got",
             "reference")
        need(self.reference != "none" and not self.kl_coefficient, "reference", "is used by nothing with",
             "kl_coefficient")
        need(self.truncated == "bootstrap" and not self.critic, "truncated", "needs a critic (advantage = 'gae'); got",
             "advantage")
        need(self.aggregation == "constant_length" and not self.aggregation_tokens, "aggregation",
             "needs its length in tokens; got", "aggregation_tokens")
        weights = [name for name in self.corrections if not find("correction", name).mask]
        need(weights and self.ratio == "behaviour", "correction", "would correct twice what is in the ratio with",
             "ratio")
        need(self.proximal == "approximated" and self.ratio == "behaviour", "proximal", "is used by nothing with",
             "ratio")
        need(self.loss == "reinforce" and self.ratio == "behaviour", "ratio", "is used by nothing with", "loss")
        need(self.loss == "reinforce" and not self.corrections and self.proximal == "approximated", "proximal",
             "is used by nothing with", "loss")
        usual: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(self)}
        usual |= ALGORITHMS.get(self.name, {})
        for key in ("kl_value", "kl_gradient"):
            need(not self.kl_coefficient and getattr(self, key) != usual[key], key, "is used by nothing with",
                 "kl_coefficient")
        chosen = self.chosen
        own = {kind for kind, name in chosen if OWN.fullmatch(name)}  # they may read any key
        for key in sorted({key for piece in PIECES for key in piece.keys}):
            users = [piece for piece in PIECES if key in piece.keys]
            unused = not any((piece.kind, piece.name) in chosen or piece.kind in own for piece in users)
            need(unused and getattr(self, key) != usual[key], key,
                 f"is read by {users[0].kind} {' or '.join(piece.name for piece in users)} only; got", users[0].kind)
