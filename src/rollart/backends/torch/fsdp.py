"""The learner's arithmetic over N processes, with torch's FSDP2: shards, global sums, distributed checkpoints.

Keeps true: what is summed over a batch is summed over all ranks, so figures and updates are those of one rank; ranks
join every collective in one order, so each does as many passes as the one with most (`Alone` is the same for one
process, and communicates nothing). Waits for: the other ranks, at most the process group's deadline.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rollart.backends.torch.optimizer import half_precision
from rollart.backends.torch.transformer import Layer

Value = TypeVar("Value")

OPTIMIZER, SHARDS = "optimizer.pt", "shards"
"""What a checkpoint holds beside the policy's weights (moments, critic, version), from one process and from several."""
BUCKET_BYTES = 256_000_000
"""Of whole tensors that rank 0 takes in at a time."""


class Alone:
    """One process: nothing is sharded."""

    rank, world = 0, 1
    files: dist.ProcessGroup | None = None
    """For what may run beside a step."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def place(self, module: nn.Module, precision: str) -> None:
        """Put it where it computes. Sharded, its tensors have no values yet, and its own precision."""
        module.to(self.device)

    def total(self, values: Sequence[float]) -> list[float]:
        """Each summed over the ranks, everywhere."""
        return [math.fsum(column) for column in zip(*self.gather(values, everywhere=True), strict=True)]

    def gather(self, value: Value, everywhere: bool = False) -> list[Value]:
        """The value of every rank, on rank 0 or everywhere; elsewhere nothing."""
        return [value]

    def backward(self, module: nn.Module, loss: Tensor, last: bool) -> None:
        """Add to the gradient; after the `last` of a minibatch it is the sum over all ranks."""
        loss.backward()

    def whole(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies of the whole tensors, on rank 0; elsewhere nothing."""
        return {name: tensor.detach().clone() for name, tensor in tensors.items()}

    def part(self, tensor: Tensor) -> Tensor:
        """A whole tensor as a parameter holds it."""
        return tensor.to(self.device)

    def read(self, state: dict[str, Any], folder: Path) -> None:
        """Fill the tensors of `state` from a checkpoint of any number of ranks. Raises ValueError where it is not
        whole, or not of this model and algorithm; OSError, RuntimeError."""
        if not (folder / SHARDS).is_dir():
            try:
                return self._assign(state, torch.load(folder / OPTIMIZER, weights_only=True))
            except UnpicklingError as error:
                raise ValueError(f"{folder} holds no whole checkpoint: {error}") from error
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.api import CheckpointException

        try:
            dcp.load(state, checkpoint_id=folder / SHARDS, process_group=self.files, no_dist=self.files is None)
        except CheckpointException as error:  # a BaseException with a page of traceback
            reason = next((str(inner) for inner, _ in error.failures.values()), "")
            raise ValueError(f"{folder / SHARDS} is not a whole checkpoint of this model: {reason}") from None

    def _assign(self, own: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
        for name, value in own.items():
            if name not in saved:
                raise ValueError(f"the checkpoint has no {name}: it was saved under another model or algorithm")
            if isinstance(value, Mapping):
                self._assign(value, saved[name])
            else:
                with torch.no_grad():
                    value.copy_(self.part(saved[name]))


class Sharded(Alone):
    """One of several ranks. Raises RuntimeError when the others are not there within `limit`.

    Parameters are float32 and split by rows; with precision bfloat16 they are gathered as such and gradients are
    summed in float32.
    """

    def __init__(self, rank: int, world: int, store: dist.Store, device: torch.device, limit: timedelta) -> None:
        super().__init__(device)
        self.rank, self.world = rank, world
        if dist.is_initialized():  # this process starts again
            dist.destroy_process_group()
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", store=store, rank=rank,
                                world_size=world, timeout=limit)
        self._mesh = dist.init_device_mesh(device.type, (world,))
        self.files = dist.new_group(backend="gloo", timeout=limit)

    def place(self, module: nn.Module, precision: str) -> None:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        half = torch.bfloat16 if half_precision(precision, self.device) else None
        policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32)
        for own in [*(layer for layer in module.modules() if isinstance(layer, Layer)), module]:
            fully_shard(own, mesh=self._mesh, mp_policy=policy)
        module.to_empty(device=self.device)

    def gather(self, value: Value, everywhere: bool = False) -> list[Value]:
        out: list[Any] = [None] * self.world
        if everywhere:
            dist.all_gather_object(out, value)
        else:
            dist.gather_object(value, out if self.rank == 0 else None)
        return out if everywhere or self.rank == 0 else []

    def backward(self, module: Any, loss: Tensor, last: bool) -> None:
        module.set_requires_gradient_sync(last)
        module.set_is_last_backward(last)
        (loss * self.world).backward()  # the reduction averages

    def whole(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        out: dict[str, Tensor] = {}
        bucket: dict[str, Any] = {}
        for name, tensor in tensors.items():
            bucket[name] = tensor
            if sum(own.nbytes for own in bucket.values()) >= BUCKET_BYTES:
                out |= self._bucket(bucket)
                bucket = {}
        return out | self._bucket(bucket) if bucket else out

    def _bucket(self, tensors: Mapping[str, Any]) -> dict[str, Tensor]:
        """One gather of all shards, each padded to the length of the first rank's."""
        own = [tensor.to_local().detach().flatten() for tensor in tensors.values()]
        sizes = [self._rows(tensor) * tensor[:1].numel() for tensor in tensors.values()]
        mine = torch.cat([nn.functional.pad(flat, (0, n - len(flat))) for flat, n in zip(own, sizes, strict=True)])
        parts = [torch.empty_like(mine) for _ in range(self.world)] if self.rank == 0 else None
        dist.gather(mine, parts)
        pieces = zip(*(part.cpu().split(sizes) for part in parts or ()), strict=True)
        return {name: torch.cat(found)[:tensor.numel()].view(tensor.shape)
                for (name, tensor), found in zip(tensors.items(), pieces, strict=False)}

    def _rows(self, tensor: Tensor) -> int:
        return -(-len(tensor) // self.world)

    def part(self, tensor: Tensor) -> Tensor:
        from torch.distributed.tensor import DTensor, Shard

        if not tensor.dim():
            return super().part(tensor)
        own = tensor.split(self._rows(tensor))[self.rank:][:1]
        return DTensor.from_local((own[0] if own else tensor[:0]).to(self.device), self._mesh, (Shard(0),),
                                  run_check=False, shape=tensor.shape, stride=tensor.stride())

    def write(self, state: dict[str, Any], folder: Path) -> Any:
        """Copy `state` to the host, and write it beside what comes next: a Future that ends when all ranks have."""
        import torch.distributed.checkpoint as dcp

        return dcp.async_save(state, checkpoint_id=folder / SHARDS, process_group=self.files)
