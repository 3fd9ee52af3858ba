"""The learner: one batch in, one version on. Implements the `Trainer` port with torch in one process.

Keeps true: all training runs in one thread of its own, one call at a time, and the event loop is never blocked.
`version` counts steps, also those that had nothing to train on. The weights of a version are copied at the end of the
step that made it, before the next step can begin; `publish` hands over that copy, so a step that runs meanwhile cannot
leak into it. Resume is bit-exact: apart from weights and optimizer state, everything (learning rate, order of samples)
is a function of version and seed, so there is no random state to save.

Log-probabilities under the weights at the start of the step are the proximal policy's: with one minibatch per batch
they are those of the gradient pass itself, with more they are computed for the later minibatches before the first
update. `rollart.backends.torch.losses` says where they enter.
"""

from __future__ import annotations

import asyncio
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, TypeVar

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from rollart.algo.packing import pack
from rollart.algo.settings import AlgoSettings
from rollart.backends.torch.losses import (
    Packed,
    action_logprobs,
    kl_penalty,
    pack_sequences,
    policy_loss,
)
from rollart.backends.torch.settings import LearnerSettings
from rollart.backends.torch.threads import choose_device, claim
from rollart.backends.torch.transformer import Transformer
from rollart.backends.torch.weights import MemoryWeights, load_into
from rollart.core.clock import stream
from rollart.core.errors import ConfigError, InvariantViolated, TrainerLost
from rollart.core.types import Manifest, Sample, StepReport, TrainBatch, Version

SKIPS_IN_A_ROW = 5
"""So many updates without a finite gradient, one after the other, and the learner is lost."""

Result = TypeVar("Result")


def rate_at(step: int, schedule: str, warmup_steps: int, total_steps: int) -> float:
    """The share of the learning rate that step 0, 1, 2, ... uses; 0 from `total_steps` on."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if schedule == "constant":
        return 1.0
    done = min(1.0, (step - warmup_steps) / (total_steps - warmup_steps))
    return 1.0 - done if schedule == "linear" else (1.0 + math.cos(math.pi * done)) / 2


def autocast(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    """The context of a forward pass; `auto` takes bfloat16 where the hardware multiplies it natively."""
    if precision == "auto":
        if device.type == "cuda":
            native = torch.cuda.is_bf16_supported()
        else:
            found = getattr(torch.cpu, "get_capabilities", dict)()
            native = bool(found.get("avx512_bf16") or found.get("amx_bf16"))
        precision = "bfloat16" if native else "float32"
    return torch.autocast(device.type, torch.bfloat16) if precision == "bfloat16" else nullcontext()


def make_optimizer(model: torch.nn.Module, *, betas: tuple[float, float], eps: float,
                   weight_decay: float) -> torch.optim.AdamW:
    """AdamW, decaying matrices and not vectors. The learning rate is set before each step."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
              {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0}]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=0.0, betas=betas, eps=eps, fused=True)


def apply_gradient(model: torch.nn.Module, optimizer: torch.optim.Optimizer, rate: float, max_norm: float) -> float:
    """One optimizer step at learning rate `rate`; returns the gradient's norm before clipping. Clears the gradient.

    A norm that is not finite changes nothing.
    """
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm or math.inf))
    if math.isfinite(norm):
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm


@dataclass(slots=True)
class Row:
    """One micro-batch: packed sequences and, per action token [A], what its loss needs beside the model."""

    packed: Packed
    behaviour: Tensor
    fresh: Tensor  # bool: sampled with the weights that this step starts from
    advantages: Tensor
    weights: Tensor
    proximal: Tensor | None = None  # None: the gradient pass itself has the weights of the step's start


def make_row(samples: Sequence[Sample], version: Version, device: torch.device, dtype: torch.dtype) -> Row:
    packed = pack_sequences([(sample.ids, sample.mask) for sample in samples], device)
    chosen = [np.flatnonzero(np.asarray(sample.mask)) for sample in samples]
    behaviour = np.concatenate([np.asarray(s.logprobs)[at] for s, at in zip(samples, chosen, strict=True)])
    versions = np.concatenate([np.asarray(s.versions)[at] for s, at in zip(samples, chosen, strict=True)])
    counts = torch.tensor(packed.counts)

    def spread(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=dtype).repeat_interleave(counts).to(device)

    return Row(packed, torch.from_numpy(behaviour).to(device, dtype), torch.from_numpy(versions == version).to(device),
               spread([s.advantage for s in samples]), spread([s.weight for s in samples]))


class TorchTrainer:
    """Trains `model` in place: nobody else may use it meanwhile.

    `temperature` is the one that engines sample with; top-p and top-k must be off, for their cut is not recomputed.
    `export` writes the model as a Hugging Face folder when the learner saves (None: its bare weights are written).
    `reference` is the frozen model of the KL term. Raises ConfigError.
    """

    def __init__(self, model: Transformer, settings: LearnerSettings, algo: AlgoSettings, weights: MemoryWeights, *,
                 temperature: float = 1.0, seed: int = 0, export: Callable[[Path], None] | None = None,
                 reference: Transformer | None = None, cores: Sequence[int] = ()) -> None:
        if settings.schedule != "constant" and not settings.total_steps:
            raise ConfigError(f"schedule {settings.schedule} needs total_steps, its length; got 0")
        if not temperature > 0:
            raise ConfigError(f"training needs a sampling temperature above 0; got {temperature:g}")
        if bool(algo.kl_coefficient) != (reference is not None):
            given = "a" if reference is not None else "no"
            raise ConfigError("kl_coefficient and reference model go together; got "
                              f"{algo.kl_coefficient:g} and {given} reference: set both or neither")
        self.settings, self.algo, self.version = settings, algo, 0
        self._weights, self._temperature, self._seed, self._export = weights, temperature, seed, export
        self._device = choose_device(settings.device)
        self._model = model.to(self._device)
        self._dtype = next(model.parameters()).dtype
        if self._dtype in (torch.bfloat16, torch.float16):  # small updates would round away
            self._model, self._dtype = model.float(), torch.float32
        self._reference = reference.to(self._device).requires_grad_(False) if reference is not None else None
        self._optimizer = make_optimizer(self._model, betas=(settings.beta1, settings.beta2), eps=settings.eps,
                                         weight_decay=settings.weight_decay)
        self._skipped = 0  # in a row
        self._stop = threading.Event()
        self._thread = ThreadPoolExecutor(1, "learner", claim, (settings.threads, cores))
        self._publisher = ThreadPoolExecutor(1, "publish", torch.set_num_threads, (1,))  # copies and sums, no more
        self._copy = self._snapshot()

    async def step(self, batch: TrainBatch) -> StepReport:
        """Version `batch.version` to the next. Raises TrainerLost; `load` is the way on then, and after a cancel."""
        if batch.version != self.version:
            raise InvariantViolated(f"the learner stands at version {self.version}; the batch is for {batch.version}")
        report, copy = await self._run(self._step, batch)
        self.version, self._copy = batch.version + 1, copy
        return report

    async def publish(self, version: Version) -> Manifest:
        """Hand over the copy that the end of the last step (or load) took; it may overlap the next step."""
        if version != self.version:
            raise InvariantViolated(f"version {version} was to be published; the learner stands at {self.version}")
        return await asyncio.wrap_future(self._publisher.submit(self._weights.put, version, self._copy))

    async def retire(self, manifest: Manifest) -> None:
        self._weights.drop(manifest)

    async def save(self, folder: Path) -> None:
        """Write the model (as a Hugging Face folder if there is an `export`) and optimizer.pt, fsynced."""
        await self._run(self._save, folder, self.version)

    async def load(self, folder: Path) -> None:
        """Go on from `folder` as if never stopped. Raises TrainerLost when it is not whole or of another model."""
        self._stop.clear()
        self._skipped = 0
        self.version, self._copy = await self._run(self._load, folder)

    def close(self) -> None:
        """End the threads. Waits for the call under way to notice."""
        self._stop.set()
        self._thread.shutdown(cancel_futures=True)
        self._publisher.shutdown(cancel_futures=True)

    async def _run(self, call: Callable[..., Result], *args: object) -> Result:
        """`call(*args)` in the learner's thread. When cancelled, the thread stops at its next micro-batch."""
        future = asyncio.wrap_future(self._thread.submit(call, *args))
        try:
            return await future
        except asyncio.CancelledError:
            self._stop.set()
            raise
        except (RuntimeError, OSError, ValueError, SafetensorError) as error:  # torch raises RuntimeError for all
            raise TrainerLost(f"learner at version {self.version}: {error}") from error

    def _step(self, batch: TrainBatch) -> tuple[StepReport, dict[str, Tensor]]:
        started = time.perf_counter()
        sums: Counter[str] = Counter()
        rate = self.settings.learning_rate * rate_at(batch.version, self.settings.schedule, self.settings.warmup_steps,
                                                     self.settings.total_steps)
        parts = [self._rows(part, batch.version) for part in self._minibatches(batch)]
        with torch.no_grad():
            for row in (row for part in parts[1:] for row in part):
                self._check_stop()
                with autocast(self.settings.precision, self._device):
                    row.proximal, _ = action_logprobs(self._model, row.packed, self._temperature)
        for part in parts:
            self._update(part, rate, sums)
        copy = self._snapshot()
        seconds = time.perf_counter() - started
        tokens = sum(len(sample.ids) for sample in batch.samples)
        metrics = self._metrics(sums, batch, rate) | {"tokens_per_second": tokens / seconds}
        return StepReport(batch.version, seconds, tokens, metrics), copy

    def _minibatches(self, batch: TrainBatch) -> Iterator[list[Sample]]:
        """Samples in an order drawn from seed and version, dealt out; none is empty."""
        samples = list(batch.samples)
        stream(self._seed, "minibatches", batch.version).shuffle(samples)
        count = min(self.settings.minibatches, len(samples))
        return (samples[i::count] for i in range(count))

    def _rows(self, samples: list[Sample], version: Version) -> list[Row]:
        bins = pack([len(sample.ids) for sample in samples], self.settings.micro_batch_tokens)
        return [make_row([samples[i] for i in members], version, self._device, self._dtype) for members in bins]

    def _update(self, rows: list[Row], rate: float, sums: Counter[str]) -> None:
        """One optimizer step on the token mean over `rows`, however they are split (L7)."""
        share = sum(float(row.weights.sum()) for row in rows)
        total = 0.0
        for row in rows:
            self._check_stop()
            loss = self._row_loss(row, sums)
            (loss / share).backward()
            total += float(loss.detach())
        norm = math.nan
        if math.isfinite(total):
            norm = apply_gradient(self._model, self._optimizer, rate, self.settings.max_grad_norm)
        if not math.isfinite(norm):
            self._optimizer.zero_grad(set_to_none=True)
            self._skipped += 1
            sums["skipped"] += 1
            if self._skipped >= SKIPS_IN_A_ROW:
                raise TrainerLost(f"{self._skipped} updates in a row had a loss or gradient that is not finite; "
                                  "lower the learning rate")
            return
        self._skipped = 0
        sums["updates"] += 1
        sums["grad_norm"] += norm
        sums["loss"] += total
        sums["share"] += share

    def _row_loss(self, row: Row, sums: Counter[str]) -> Tensor:
        """The summed loss of one micro-batch; adds what the report needs to `sums`.

        The KL term has the importance weight too: its gradient is right for tokens of the policy's own.
        """
        with autocast(self.settings.precision, self._device):
            current, entropy = action_logprobs(self._model, row.packed, self._temperature)
        proximal = current.detach() if row.proximal is None else row.proximal
        made = policy_loss(current, proximal, row.behaviour, row.advantages, self.algo)
        loss = made.loss
        if self._reference is not None:
            with torch.no_grad(), autocast(self.settings.precision, self._device):
                reference, _ = action_logprobs(self._reference, row.packed, self._temperature)
            kl = kl_penalty(current, reference)
            loss = loss + self.algo.kl_coefficient * made.weight * kl
            sums["kl"] += float(kl.detach().sum())
        gap = (proximal - row.behaviour).abs()
        sums["actions"] += len(gap)
        sums["fresh"] += int(row.fresh.sum())
        for name, values in (("entropy", entropy), ("clipped", made.clipped), ("weight", made.weight), ("gap", gap),
                             ("capped", made.importance > made.weight), ("importance", made.importance),
                             ("importance2", made.importance ** 2), ("fresh_gap", gap[row.fresh])):
            sums[name] += float(values.sum())
        return (row.weights * loss).sum()

    def _metrics(self, sums: Counter[str], batch: TrainBatch, rate: float) -> dict[str, float]:
        metrics = {"lr": rate, "updates": float(sums["updates"]), "skipped": float(sums["skipped"])}
        if not batch.samples:
            return metrics
        count = sums["actions"]
        metrics |= {
            "entropy": sums["entropy"] / count, "clip_fraction": sums["clipped"] / count,
            "importance_mean": sums["weight"] / count, "importance_capped": sums["capped"] / count,
            "importance_ess": sums["importance"] ** 2 / sums["importance2"] / count,
            "logprob_gap_all": sums["gap"] / count, "action_tokens": float(count),
            "reward": sum(sample.reward for sample in batch.samples) / len(batch.samples),
        }
        if sums["fresh"]:
            metrics["logprob_gap"] = sums["fresh_gap"] / sums["fresh"]
        if self._reference is not None:
            metrics["kl"] = sums["kl"] / count
        if sums["updates"]:
            metrics |= {"loss": sums["loss"] / sums["share"], "grad_norm": sums["grad_norm"] / sums["updates"]}
        return {name: value for name, value in metrics.items() if math.isfinite(value)}

    def _snapshot(self) -> dict[str, Tensor]:
        return {name: tensor.detach().clone() for name, tensor in self._model.state_dict().items()}

    def _check_stop(self) -> None:
        if self._stop.is_set():
            raise TrainerLost("the learner was stopped in the middle of a step; load a checkpoint to go on")

    def _save(self, folder: Path, version: Version) -> None:
        self._check_stop()
        if self._export is not None:
            self._export(folder)
        else:
            save_file({name: tensor.cpu() for name, tensor in self._snapshot().items()}, folder / "model.safetensors")
        torch.save({"version": version, "state": self._optimizer.state_dict()["state"]}, folder / "optimizer.pt")
        sync_folder(folder)

    def _load(self, folder: Path) -> tuple[Version, dict[str, Tensor]]:
        try:
            saved = torch.load(folder / "optimizer.pt", map_location=self._device, weights_only=True)
            tensors = load_file(folder / "model.safetensors")
        except (UnpicklingError, SafetensorError) as error:
            raise TrainerLost(f"{folder} holds no whole checkpoint: {error}") from error
        load_into(self._model, tensors)
        groups = self._optimizer.state_dict()["param_groups"]  # rates and decay are the settings', not the file's
        self._optimizer.load_state_dict({"state": saved["state"], "param_groups": groups})
        self._optimizer.zero_grad(set_to_none=True)
        return saved["version"], self._snapshot()


def sync_folder(folder: Path) -> None:
    """fsync every file below `folder`, and the folders themselves: what is there survives a power cut."""
    for path in [*sorted(folder.rglob("*")), folder]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
