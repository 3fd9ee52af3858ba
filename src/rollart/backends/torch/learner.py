"""The learner: one batch in, one version on. Implements the `Trainer` port with torch in one process.

Keeps true: all training runs in one thread of its own, one call at a time, and the event loop is never blocked.
`version` counts steps, also those that had nothing to train on. The weights of a version are copied at the end of the
step that made it, before the next step can begin; `publish` hands over that copy, so a step that runs meanwhile cannot
leak into it. Resume is bit-exact: apart from weights and optimizer state, everything (learning rate, order of samples)
is a function of version and seed, so there is no random state to save.

Log-probabilities under the weights at the start of the step are the proximal policy's: with one minibatch per batch
they are those of the gradient pass itself, with more they are computed for the later minibatches before the first
update. `rollart.backends.torch.losses` says where they enter. What one minibatch does is in `step.py`.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from rollart.algo.settings import AlgoSettings
from rollart.backends.torch.fsdp import OPTIMIZER, Alone
from rollart.backends.torch.lora import add_adapter, base_checksum, load_adapter, save_adapter
from rollart.backends.torch.settings import LearnerSettings, LoraSettings
from rollart.backends.torch.step import StepWork, check, check_finite
from rollart.backends.torch.threads import choose_device, claim
from rollart.backends.torch.transformer import Transformer
from rollart.backends.weights import Writer
from rollart.backends.weights.memory import load_into
from rollart.core.clock import draw
from rollart.core.errors import InvariantViolated, TrainerLost
from rollart.core.types import Manifest, StepReport, TrainBatch, Version
from rollart.observe.run_folder import sync

Result = TypeVar("Result")


class TorchTrainer:
    """Trains `model` in place: nobody else may use it meanwhile.

    `temperature` is the one that engines sample with; top-p and top-k must be off, for their cut is not recomputed.
    `export` writes the model as a Hugging Face folder when the learner saves (None: its bare weights are written).
    `reference` is the frozen model of the KL term where the algorithm wants a copy. `lora`: train adapters only, which
    are then what `publish` hands over; `base` names the model that they belong to. Raises ConfigError.
    """

    def __init__(self, model: Transformer, settings: LearnerSettings, algo: AlgoSettings, weights: Writer, *,
                 temperature: float = 1.0, seed: int = 0, export: Callable[[Path], None] | None = None,
                 reference: Transformer | None = None, lora: LoraSettings | None = None, base: str = "",
                 cores: Sequence[int] = ()) -> None:
        check(settings, algo, temperature, reference=reference is not None, adapters=lora is not None)
        self.settings, self.algo, self.version = settings, algo, 0
        self._weights, self._export, self._lora, self._base = weights, export, lora, base
        self._device = choose_device(settings.device)
        self._model = model.to(self._device)
        if next(model.parameters()).dtype in (torch.bfloat16, torch.float16):  # small updates would round away
            self._model = model.float()
        self._work = StepWork(
            self._model, settings, algo, temperature, seed, Alone(self._device), self._check_stop, reference,
            partial(add_adapter, self._model, lora, draw(seed, "lora")) if lora is not None else lambda: None)
        self._stop = threading.Event()
        self._thread = ThreadPoolExecutor(1, "learner", claim, (settings.threads, cores))
        self._publisher = ThreadPoolExecutor(1, "publish", torch.set_num_threads, (1,))  # copies and sums, no more
        self._copy = self._work.snapshot()

    async def step(self, batch: TrainBatch) -> StepReport:
        """Version `batch.version` to the next. Raises TrainerLost; `load` is the way on then, and after a cancel."""
        if batch.version != self.version:
            raise InvariantViolated(f"the learner stands at version {self.version}; the batch is for {batch.version}")
        report = await self._run(self._work.step, batch)
        self.version, self._copy = batch.version + 1, self._work.copy
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
        self._work.skipped = 0
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

    def _check_stop(self) -> None:
        if self._stop.is_set():
            raise TrainerLost("the learner was stopped in the middle of a step; load a checkpoint to go on")

    def _save(self, folder: Path, version: Version) -> None:
        self._check_stop()
        check_finite(self._copy, version)
        if self._export is not None:
            self._export(folder)
        elif self._lora is None:
            save_file({name: tensor.cpu() for name, tensor in self._copy.items()}, folder / "model.safetensors")
        if self._lora is not None:
            save_adapter(self._model, folder, self._lora, self._base)
        base = {"base": base_checksum(self._model)} if self._lora is not None else {}
        torch.save(self._work.tensors(version) | base, folder / OPTIMIZER)
        sync(*folder.rglob("*"), folder)

    def _load(self, folder: Path) -> tuple[Version, dict[str, Tensor]]:
        tensors = self._work.tensors(0)
        if self._lora is not None:
            if torch.load(folder / OPTIMIZER, weights_only=True).get("base") != base_checksum(self._model):
                raise TrainerLost(f"the adapter in {folder} was trained on another base model than this one: the "
                                  "model folder or the warm start has changed since")
            load_adapter(self._model, folder)
        self._work.ranks.read(tensors, folder)
        try:
            if self._lora is None:
                load_into(self._model, load_file(folder / "model.safetensors"))
        except SafetensorError as error:
            raise TrainerLost(f"{folder} holds no whole checkpoint: {error}") from error
        return int(tensors["version"]), self._work.snapshot()
