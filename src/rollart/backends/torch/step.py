"""What the learner does within one step: rows of packed samples, their loss, one optimizer step per minibatch.

Keeps true: a minibatch's loss and gradient are the same for every order of its samples and every split into
micro-batches and over ranks, for each row adds its share of sums over the whole minibatch (L7); an update that is not
finite changes nothing. Every rank is given the whole batch, so each knows all shares, and what the others do. A: action
tokens of a row.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rollart.algo.packing import deal
from rollart.algo.settings import AlgoSettings
from rollart.backends.torch.critic import Critic, Estimate, explained
from rollart.backends.torch.diagnostics import TokenStats
from rollart.backends.torch.fsdp import Alone
from rollart.backends.torch.lora import adapter_state, adapters_off
from rollart.backends.torch.losses import ActionTokens, kl_penalty, policy_loss
from rollart.backends.torch.moe import Routing, balance_loss, replayed
from rollart.backends.torch.optimizer import apply_gradient, autocast, make_optimizer, moments, rate_at
from rollart.backends.torch.scoring import Packed, action_logprobs, pack_sequences
from rollart.backends.torch.settings import LearnerSettings
from rollart.backends.torch.transformer import Transformer
from rollart.core.clock import stream
from rollart.core.errors import ConfigError, TrainerLost
from rollart.core.tokens import floats, ids
from rollart.core.types import Sample, StepReport, TrainBatch, TrajectoryId, Version

OWN = ("kl", "router_balance", "critic_loss", "critic_error")
"""Figures that each rank sums over its own rows."""
SKIPS_IN_A_ROW = 5
"""So many updates without a finite gradient, one after the other, and the learner is lost."""


@dataclass(slots=True)
class Row:
    """One micro-batch: packed sequences and, per action token [A], what its loss needs beside the model. `scale`: the
    token's weight in the sum that, over the minibatch's share, is the loss. `idle`: a pass of a rank that has less to
    do than another, which adds 0."""

    samples: list[Sample]
    packed: Packed
    behaviour: Tensor
    age: Tensor
    advantages: Tensor
    scale: Tensor
    weights: Tensor  # [N], of the sequences
    idle: bool = False
    replay: Tensor | None = None
    proximal: Tensor | None = None  # None: the gradient pass itself has the weights of the step's start


@dataclass(frozen=True, slots=True)
class Rows:
    """One minibatch's rows of this rank. `share` divides the summed loss, `sequences` what is summed over sequences."""

    rows: list[Row]
    share: float
    sequences: float


IDLE = Sample(TrajectoryId(0, 0), "", ids([0, 0]), ids([0, 1]), floats([0, 0]), ids([-1, 0]), 0.0, 0.0, weight=0.0,
              turn_tokens=(1,), turn_rewards=(0.0,))


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
    """What a minibatch's summed loss, over all ranks, is divided by."""
    if algo.aggregation == "token_mean":
        return math.fsum(sample.weight * sum(sample.mask) for sample in samples)
    whole = math.fsum(sample.weight for sample in samples)
    return whole * algo.aggregation_tokens if algo.aggregation == "constant_length" else whole


def check(settings: LearnerSettings, algo: AlgoSettings, temperature: float, *, reference: bool,
          adapters: bool) -> None:
    """Whether a learner can be made of these. Raises ConfigError."""
    if settings.schedule != "constant" and not settings.total_steps:
        raise ConfigError(f"schedule {settings.schedule} needs total_steps, its length; got 0")
    if not temperature > 0:
        raise ConfigError(f"training needs a sampling temperature above 0; got {temperature:g}")
    if (algo.reference == "copy") != reference:
        given = "a" if reference else "no"
        raise ConfigError(f"algorithm.reference = {algo.reference!r} and the reference model go together; got "
                          f"{given} reference model: set both or neither")
    if algo.reference == "adapter_off" and not adapters:
        raise ConfigError("algorithm.reference = 'adapter_off' needs an adapter: set [lora], or reference = 'copy'")


def check_finite(weights: Mapping[str, Tensor], version: Version) -> None:
    """Before a checkpoint takes the place of an older one. Raises TrainerLost."""
    if bad := [name for name, tensor in weights.items() if not bool(tensor.isfinite().all())]:
        raise TrainerLost(f"weights of version {version} are not finite ({len(bad)} tensors, as {bad[0]}): no "
                          "checkpoint is made of them, those before stay; lower learner.learning_rate")


class StepWork:
    """The policy, its optimizer, the critic and the reference. `change` alters the policy once the critic has its copy
    (adapters). `check_stop` is called before each micro-batch and may raise."""

    def __init__(self, model: Transformer, settings: LearnerSettings, algo: AlgoSettings, temperature: float, seed: int,
                 ranks: Alone, check_stop: Callable[[], None] = lambda: None, reference: Transformer | None = None,
                 change: Callable[[], None] = lambda: None) -> None:
        self.model, self._settings, self._algo, self._temperature = model, settings, algo, temperature
        self._seed, self.ranks, self._device, self._check_stop = seed, ranks, ranks.device, check_stop
        self._reference = reference
        self._dtype = next(model.parameters()).dtype
        self.critic = Critic(model) if algo.critic else None
        change()
        model.checkpointing = settings.gradient_checkpointing
        ranks.place(model, settings.precision)
        self.optimizer = self._optimizer(model)
        if reference is not None:
            ranks.place(reference.requires_grad_(False), settings.precision)
        self._critic_optimizer = None
        if self.critic is not None:
            self.critic.body.checkpointing = settings.gradient_checkpointing
            ranks.place(self.critic, settings.precision)
            self._critic_optimizer = self._optimizer(self.critic)
        self.skipped = 0  # in a row

    def _optimizer(self, module: torch.nn.Module) -> torch.optim.AdamW:
        own = self._settings
        return make_optimizer(module, betas=(own.beta1, own.beta2), eps=own.eps, weight_decay=own.weight_decay)

    def step(self, batch: TrainBatch) -> StepReport:
        """Train on a batch: one update per minibatch; `copy` is then what the step made. The report is rank 0's."""
        started = time.perf_counter()
        settings = self._settings
        self.begin(batch, rate_at(batch.version, settings.schedule, settings.warmup_steps, settings.total_steps))
        parts = [self.rows(part, batch.version) for part in self._minibatches(batch)]
        if self._algo.proximal == "recomputed":  # under the weights at the step's start, for what comes after an update
            for row in (row for part in parts[1:] for row in part.rows):
                self._check_stop()
                row.proximal = self.score(row)
        for part in parts:
            self.update(part)
        self.copy = self.snapshot()
        metrics = self._metrics(batch)
        seconds, tokens = time.perf_counter() - started, sum(len(sample.ids) for sample in batch.samples)
        return StepReport(batch.version, seconds, tokens, metrics | {"tokens_per_second": tokens / seconds})

    def _minibatches(self, batch: TrainBatch) -> Iterator[list[Sample]]:
        """Samples in an order drawn from seed and version, dealt out; none is empty."""
        samples = list(batch.samples)
        stream(self._seed, "minibatches", batch.version).shuffle(samples)
        count = min(self._settings.minibatches, len(samples))
        return (samples[i::count] for i in range(count))

    def begin(self, batch: TrainBatch, share: float) -> None:
        """Forget the last step's figures; `share` of the learning rates. The critic looks at the whole batch."""
        for optimizer in (self.optimizer, self._critic_optimizer):
            if optimizer is not None:  # a step that was cut short may have left a gradient
                optimizer.zero_grad(set_to_none=True)
        self._sums: Counter[str] = Counter()
        self._own: Counter[str] = Counter()  # of this rank's rows
        self._stats = TokenStats()
        self._rate = self._settings.learning_rate * share
        self._critic_rate = (self._algo.critic_rate or self._settings.learning_rate) * share
        self._estimates: dict[int, Estimate] = {}
        if self.critic is not None and batch.samples:
            made = self.critic.estimate(batch.samples, self._algo, self.ranks, self._bins(batch.samples),
                                        self._precision)
            self._estimates = {id(sample): own for sample, own in zip(batch.samples, made, strict=True)}
            none = torch.zeros(1, device=self._device)
            self._estimates[id(IDLE)] = Estimate(none, none, none)

    def _precision(self) -> Any:
        alone = self.ranks.world == 1  # else `place` did it
        return autocast(self._settings.precision, self._device) if alone else nullcontext()

    def _bins(self, samples: Sequence[Sample]) -> list[list[int]]:
        """This rank's micro-batches, by index; empty ones at the end where another rank has more."""
        bins = deal([len(sample.ids) for sample in samples], self.ranks.world, self._settings.micro_batch_tokens)
        mine = bins[self.ranks.rank]
        return mine + [[]] * (max(map(len, bins)) - len(mine))

    def rows(self, samples: list[Sample], version: Version) -> Rows:
        """A minibatch of at least one sample in micro-batches."""
        rows = [make_row([samples[i] for i in members] or [IDLE], version, self._algo, self._device, self._dtype)
                for members in self._bins(samples)]
        for row in rows:
            row.idle = row.samples[0] is IDLE
            if self._estimates:
                own = [self._estimates[id(sample)].advantages for sample in row.samples]
                row.advantages = torch.cat(own).to(self._dtype)
            config = self.model.config
            if config.experts and self._settings.routing_replay:
                replay = replayed([s.routes for s in row.samples], row.packed.lengths, config.layers,
                                  config.experts_per_token)
                row.replay = None if replay is None else replay.to(self._device)
        return Rows(rows, share_of(samples, self._algo), math.fsum(sample.weight for sample in samples))

    def score(self, row: Row) -> Tensor:
        """Log-probabilities of the action tokens under the weights as they are, without gradient."""
        with torch.no_grad(), self._precision():
            return action_logprobs(self.model, row.packed, self._temperature, Routing(row.replay))[0]

    def update(self, part: Rows) -> None:
        """One optimizer step on the aggregated loss of a minibatch, and one of the critic's."""
        total = 0.0
        for row in part.rows:
            self._check_stop()
            loss = self._loss(row, part)
            self.ranks.backward(self.model, loss, row is part.rows[-1])
            total += float(loss.detach())
        total, norm = self.ranks.total([total])[0], math.nan
        if math.isfinite(total):
            norm = apply_gradient(self.model, self.optimizer, self._rate, self._settings.max_grad_norm)
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
        if self.critic is not None:
            self._update_critic(self.critic, part)

    def _loss(self, row: Row, part: Rows) -> Tensor:
        """One micro-batch's part of the minibatch's loss; adds what the report needs.

        The KL term has the importance weight too: its gradient is right for tokens of the policy's own.
        """
        algo, routing = self._algo, Routing(row.replay)
        with self._precision():
            current, entropy = action_logprobs(self.model, row.packed, self._temperature, routing,
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
            self._own["kl"] += 0.0 if row.idle else float(kl.detach().sum())
        if not row.idle:
            self._stats.add(tokens, made, entropy)
        summed = (row.scale * loss).sum() / part.share
        if self.model.config.experts:
            balance = (row.weights * balance_loss(routing, row.packed.lengths)).sum() / part.sequences
            self._own["router_balance"] += float(balance.detach())
            summed = summed + algo.router_coefficient * balance
        return summed

    def _referenced(self, row: Row) -> Tensor:
        """The reference's log-probabilities: of a model of its own, or of this one without its adapters."""
        if self._reference is None:
            with adapters_off(self.model):
                return self.score(row)
        with torch.no_grad(), self._precision():
            return action_logprobs(self._reference, row.packed, self._temperature)[0]

    def _update_critic(self, critic: Critic, part: Rows) -> None:
        for row in part.rows:
            self._check_stop()
            estimates = [self._estimates[id(sample)] for sample in row.samples]
            with self._precision():
                loss, missed = critic.loss(row.samples, estimates, self._algo, row.scale, self._device)
            self.ranks.backward(critic, loss / part.share, row is part.rows[-1])
            self._own["critic_loss"] += float(loss.detach())
            self._own["critic_error"] += 0.0 if row.idle else float(missed)
        norm = apply_gradient(critic, self._critic_optimizer, self._critic_rate, self._settings.max_grad_norm)
        self._sums["critic_grad_norm"] += norm

    def _metrics(self, batch: TrainBatch) -> dict[str, float]:
        """The step's figures by name; those that are not finite are left out. On rank 0; elsewhere nothing."""
        summed = self.ranks.total([self._own[name] for name in OWN])
        stats = self.ranks.gather(self._stats.joined())
        if not stats:
            return {}
        sums = Counter({**self._sums, **dict(zip(OWN, summed, strict=True))})
        self._stats = TokenStats.of(stats)
        out = {"lr": self._rate, "updates": float(sums["updates"]), "skipped": float(sums["skipped"])}
        if batch.samples:
            out |= self._stats.metrics(self._algo.importance_cap)
            out["reward"] = sum(sample.reward for sample in batch.samples) / len(batch.samples)
            if self._algo.kl_coefficient:
                out["kl"] = sums["kl"] / out["action_tokens"]
        if sums["updates"]:
            updates = sums["updates"]
            out |= {"loss": sums["loss"] / sums["share"], "grad_norm": sums["grad_norm"] / updates}
            if self.model.config.experts:
                out["router_balance"] = sums["router_balance"] / updates
            if self.critic is not None:
                out |= {"critic_loss": sums["critic_loss"] / sums["share"],
                        "critic_rmse": math.sqrt(sums["critic_error"] / out["action_tokens"]),
                        "critic_grad_norm": sums["critic_grad_norm"] / updates,
                        "critic_explained": explained([self._estimates[id(sample)] for sample in batch.samples])}
        return {name: value for name, value in out.items() if math.isfinite(value)}

    def snapshot(self) -> dict[str, Tensor]:
        """A copy of what is published: the adapters if there are any, else everything. On rank 0, elsewhere nothing."""
        return self.ranks.whole(adapter_state(self.model) or self.model.state_dict())

    def tensors(self, version: Version) -> dict[str, Any]:
        """All that a checkpoint holds beside the policy's weights, in place: what `Alone.read` fills."""
        out = {"version": torch.tensor(version), "policy": moments(self.model, self.optimizer)}
        if self.critic is not None:
            out["critic"] = {"weights": self.critic.state_dict(), **moments(self.critic, self._critic_optimizer)}
        return out
