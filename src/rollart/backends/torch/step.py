"""What the learner does within one step: rows of packed samples, their loss, one optimizer step per minibatch.

Keeps true: a minibatch's loss and gradient are the same for every order of its samples and every split into
micro-batches, for each row adds its share of sums over the whole minibatch (L7); an update that is not finite changes
nothing. A: action tokens of a row.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rollart.algo.packing import pack
from rollart.algo.settings import AlgoSettings
from rollart.backends.torch.critic import Critic, Estimate, explained
from rollart.backends.torch.diagnostics import TokenStats
from rollart.backends.torch.lora import adapters_off
from rollart.backends.torch.losses import ActionTokens, kl_penalty, policy_loss
from rollart.backends.torch.moe import Routing, balance_loss, replayed
from rollart.backends.torch.optimizer import apply_gradient, autocast, make_optimizer
from rollart.backends.torch.scoring import Packed, action_logprobs, pack_sequences
from rollart.backends.torch.settings import LearnerSettings
from rollart.backends.torch.transformer import Transformer
from rollart.core.errors import TrainerLost
from rollart.core.types import Sample, TrainBatch, Version

SKIPS_IN_A_ROW = 5
"""So many updates without a finite gradient, one after the other, and the learner is lost."""


@dataclass(slots=True)
class Row:
    """One micro-batch: packed sequences and, per action token [A], what its loss needs beside the model. `scale`: the
    token's weight in the sum that, over the minibatch's share, is the loss."""

    samples: list[Sample]
    packed: Packed
    behaviour: Tensor
    age: Tensor
    advantages: Tensor
    scale: Tensor
    weights: Tensor  # [N], of the sequences
    replay: Tensor | None = None
    proximal: Tensor | None = None  # None: the gradient pass itself has the weights of the step's start


@dataclass(frozen=True, slots=True)
class Rows:
    """One minibatch. `share` divides the summed loss, `sequences` what is summed over sequences."""

    rows: list[Row]
    share: float
    sequences: float


def make_row(samples: Sequence[Sample], version: Version, algo: AlgoSettings, device: torch.device,
             dtype: torch.dtype) -> Row:
    packed = pack_sequences([(sample.ids, sample.mask) for sample in samples], device)
    chosen = [np.flatnonzero(np.asarray(sample.mask)) for sample in samples]
    behaviour = np.concatenate([np.asarray(s.logprobs)[at] for s, at in zip(samples, chosen, strict=True)])
    versions = np.concatenate([np.asarray(s.versions)[at] for s, at in zip(samples, chosen, strict=True)])
    counts = torch.tensor(packed.counts)
    weights = torch.tensor([sample.weight for sample in samples], dtype=dtype)
    scale = (weights / counts if algo.aggregation == "sequence_mean" else weights).repeat_interleave(counts)
    advantages = [np.repeat(s.turn_advantages, s.turn_tokens) if s.turn_advantages else np.full(len(at), s.advantage)
                  for s, at in zip(samples, chosen, strict=True)]
    return Row(list(samples), packed, torch.from_numpy(behaviour).to(device, dtype),
               torch.from_numpy(version - versions).to(device), torch.from_numpy(np.concatenate(advantages)).to(
                   device, dtype), scale.to(device), weights.to(device))


def share_of(samples: Sequence[Sample], algo: AlgoSettings) -> float:
    """What a minibatch's (or, over all ranks, a batch's) summed loss is divided by."""
    if algo.aggregation == "token_mean":
        return math.fsum(sample.weight * sum(sample.mask) for sample in samples)
    whole = math.fsum(sample.weight for sample in samples)
    return whole * algo.aggregation_tokens if algo.aggregation == "constant_length" else whole


class StepWork:
    """The policy, its optimizer, the critic and the reference; `begin` starts a step's figures. `check_stop` is called
    before each micro-batch and may raise."""

    optimizer: torch.optim.AdamW

    def __init__(self, model: Transformer, settings: LearnerSettings, algo: AlgoSettings, temperature: float,
                 device: torch.device, check_stop: Callable[[], None], reference: Transformer | None) -> None:
        self._model, self._settings, self._algo, self._temperature = model, settings, algo, temperature
        self._device, self._check_stop, self._reference = device, check_stop, reference
        self._dtype = next(model.parameters()).dtype
        self._critic = Critic(model).to(device) if algo.critic else None
        if self._critic is not None:
            self._critic.body.checkpointing = settings.gradient_checkpointing
            self._critic_optimizer = make_optimizer(self._critic, betas=(settings.beta1, settings.beta2),
                                                    eps=settings.eps, weight_decay=settings.weight_decay)
        self.skipped = 0  # in a row

    def begin(self, batch: TrainBatch, share: float) -> None:
        """Forget the last step's figures; `share` of the learning rates. The critic looks at the whole batch."""
        self._sums: Counter[str] = Counter()
        self._stats = TokenStats()
        self._rate = self._settings.learning_rate * share
        self._critic_rate = (self._algo.critic_rate or self._settings.learning_rate) * share
        self._estimates: dict[int, Estimate] = {}
        if self._critic is not None and batch.samples:
            made = self._critic.estimate(batch.samples, self._algo, self._settings.micro_batch_tokens, self._device,
                                         self._precision)
            self._estimates = {id(sample): own for sample, own in zip(batch.samples, made, strict=True)}

    def _precision(self) -> Any:
        return autocast(self._settings.precision, self._device)

    def rows(self, samples: list[Sample], version: Version) -> Rows:
        """A minibatch of at least one sample in micro-batches."""
        bins = pack([len(sample.ids) for sample in samples], self._settings.micro_batch_tokens)
        rows = [make_row([samples[i] for i in members], version, self._algo, self._device, self._dtype)
                for members in bins]
        for row in rows:
            if self._estimates:
                own = [self._estimates[id(sample)].advantages for sample in row.samples]
                row.advantages = torch.cat(own).to(self._dtype)
            config = self._model.config
            if config.experts and self._settings.routing_replay:
                replay = replayed([s.routes for s in row.samples], row.packed.lengths, config.layers,
                                  config.experts_per_token)
                row.replay = None if replay is None else replay.to(self._device)
        return Rows(rows, share_of(samples, self._algo), math.fsum(sample.weight for sample in samples))

    def score(self, row: Row) -> Tensor:
        """Log-probabilities of the action tokens under the weights as they are, without gradient."""
        with torch.no_grad(), self._precision():
            return action_logprobs(self._model, row.packed, self._temperature, Routing(row.replay))[0]

    def update(self, part: Rows) -> None:
        """One optimizer step on the aggregated loss of a minibatch, and one of the critic's."""
        total = 0.0
        for row in part.rows:
            self._check_stop()
            loss = self._loss(row, part)
            loss.backward()
            total += float(loss.detach())
        norm = math.nan
        if math.isfinite(total):
            norm = apply_gradient(self._model, self.optimizer, self._rate, self._settings.max_grad_norm)
        if not math.isfinite(norm):
            self.optimizer.zero_grad(set_to_none=True)
            self.skipped += 1
            self._sums["skipped"] += 1
            if self.skipped >= SKIPS_IN_A_ROW:
                raise TrainerLost(f"{self.skipped} updates in a row had a loss or gradient that is not finite; "
                                  "lower the learning rate")
            return
        self.skipped = 0
        self._sums["updates"] += 1
        self._sums["grad_norm"] += norm
        self._sums["loss"] += total * part.share
        self._sums["share"] += part.share
        if self._critic is not None:
            self._update_critic(self._critic, part)

    def _loss(self, row: Row, part: Rows) -> Tensor:
        """One micro-batch's part of the minibatch's loss; adds what the report needs.

        The KL term has the importance weight too: its gradient is right for tokens of the policy's own.
        """
        algo, routing = self._algo, Routing(row.replay)
        with self._precision():
            current, entropy = action_logprobs(self._model, row.packed, self._temperature, routing,
                                               bool(algo.entropy_coefficient))
        counts = torch.tensor(row.packed.counts, device=self._device)
        tokens = ActionTokens(current, current.detach() if row.proximal is None else row.proximal, row.behaviour,
                              row.advantages, row.age, counts)
        made = policy_loss(tokens, algo)
        loss = made.loss
        if algo.entropy_coefficient:
            loss = loss - algo.entropy_coefficient * entropy
        if algo.kl_coefficient:
            kl = kl_penalty(current, self._referenced(row), algo.kl_value, algo.kl_gradient)
            loss = loss + algo.kl_coefficient * made.weight * kl
            self._sums["kl"] += float(kl.detach().sum())
        self._stats.add(tokens, made, entropy)
        summed = (row.scale * loss).sum() / part.share
        if self._model.config.experts:
            balance = (row.weights * balance_loss(routing, row.packed.lengths)).sum() / part.sequences
            self._sums["router_balance"] += float(balance.detach())
            summed = summed + algo.router_coefficient * balance
        return summed

    def _referenced(self, row: Row) -> Tensor:
        """The reference's log-probabilities: of a model of its own, or of this one without its adapters."""
        if self._reference is None:
            with adapters_off(self._model):
                return self.score(row)
        with torch.no_grad(), self._precision():
            return action_logprobs(self._reference, row.packed, self._temperature)[0]

    def _update_critic(self, critic: Critic, part: Rows) -> None:
        for row in part.rows:
            self._check_stop()
            estimates = [self._estimates[id(sample)] for sample in row.samples]
            with self._precision():
                loss, missed = critic.loss(row.samples, estimates, self._algo, row.scale, self._device)
            (loss / part.share).backward()
            self._sums["critic_loss"] += float(loss.detach())
            self._sums["critic_error"] += float(missed)
        norm = apply_gradient(critic, self._critic_optimizer, self._critic_rate, self._settings.max_grad_norm)
        self._sums["critic_grad_norm"] += norm

    def metrics(self, batch: TrainBatch) -> dict[str, float]:
        """The step's figures by name; those that are not finite are left out."""
        sums = self._sums
        out = {"lr": self._rate, "updates": float(sums["updates"]), "skipped": float(sums["skipped"])}
        if batch.samples:
            out |= self._stats.metrics(self._algo.importance_cap)
            out["reward"] = sum(sample.reward for sample in batch.samples) / len(batch.samples)
            if self._algo.kl_coefficient:
                out["kl"] = sums["kl"] / out["action_tokens"]
        if sums["updates"]:
            updates = sums["updates"]
            out |= {"loss": sums["loss"] / sums["share"], "grad_norm": sums["grad_norm"] / updates}
            if self._model.config.experts:
                out["router_balance"] = sums["router_balance"] / updates
            if self._critic is not None:
                out |= {"critic_loss": sums["critic_loss"] / sums["share"],
                        "critic_rmse": math.sqrt(sums["critic_error"] / out["action_tokens"]),
                        "critic_grad_norm": sums["critic_grad_norm"] / updates,
                        "critic_explained": explained(list(self._estimates.values()))}
        return {name: value for name, value in out.items() if math.isfinite(value)}

    def state(self) -> dict[str, Any]:
        """What `restore` needs beside the policy's weights."""
        out: dict[str, Any] = {"state": self.optimizer.state_dict()["state"]}
        if self._critic is not None:
            out |= {"critic": self._critic.state_dict(), "critic_state": self._critic_optimizer.state_dict()["state"]}
        return out

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Raises ValueError for a checkpoint without the critic that this algorithm has."""
        if self._critic is not None:
            if "critic" not in saved:
                raise ValueError("the checkpoint has no critic: it was saved under another algorithm.advantage")
            self._critic.load_state_dict(saved["critic"])
            _restore(self._critic_optimizer, saved["critic_state"])
        _restore(self.optimizer, saved["state"])


def _restore(optimizer: torch.optim.Optimizer, state: Mapping[Any, Any]) -> None:
    """Moments from the file; rates and decay are the settings', not the file's."""
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    optimizer.zero_grad(set_to_none=True)
