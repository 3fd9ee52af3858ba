"""The learner's arithmetic over N processes, with torch's FSDP2: shards, global sums, distributed checkpoints.

Keeps true: what is summed over a batch is summed over all ranks, so figures and updates are those of one rank; ranks
join every collective in one order, so each does as many passes as the one with most (`Alone` is the same for one
process, and communicates nothing). Waits for: the other ranks, at most the process group's deadline.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rollart.backends.torch.optimizer import autocast, half_precision
from rollart.backends.torch.transformer import Layer

Value = TypeVar("Value")

SHARDS = "shards"
"""The folder of a checkpoint that holds the distributed part: weights, moments, critic."""
BUCKET_BYTES = 256_000_000
"""Of whole tensors that rank 0 takes in at a time."""


class Alone:
    """One process: nothing is sharded."""

    rank, world = 0, 1

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def place(self, module: nn.Module, precision: str) -> None:
        """Put it where it computes. Sharded, its tensors have no values yet."""
        module.to(self.device)

    def precision(self, precision: str) -> AbstractContextManager[Any]:
        """The context of a forward pass."""
        return autocast(precision, self.device)

    def total(self, values: Sequence[float]) -> list[float]:
        """Each summed over the ranks, everywhere."""
        return list(values)

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
        """Fill the tensors of `state` from a distributed checkpoint of any number of ranks."""
        _read(state, folder, no_dist=True)


class Sharded(Alone):
    """One of several ranks. Raises RuntimeError when the others are not there within `seconds`.

    Parameters are float32 and split by rows; with precision bfloat16 they are gathered as such and gradients are
    summed in float32. Collectives of files have a process group of their own, so that they may run beside a step.
    """

    def __init__(self, rank: int, world: int, store: dist.Store, device: torch.device, seconds: float) -> None:
        super().__init__(device)
        self.rank, self.world = rank, world
        limit = timedelta(seconds=seconds)
        if dist.is_initialized():  # this process starts again
            dist.destroy_process_group()
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", store=store, rank=rank,
                                world_size=world, timeout=limit)
        self._mesh = dist.init_device_mesh(device.type, (world,))
        self._files = dist.new_group(backend="gloo", timeout=limit)

    def place(self, module: nn.Module, precision: str) -> None:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        half = torch.bfloat16 if half_precision(precision, self.device) else None
        policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32)
        for layer in [own for own in module.modules() if isinstance(own, Layer)]:
            fully_shard(layer, mesh=self._mesh, mp_policy=policy)
        fully_shard(module, mesh=self._mesh, mp_policy=policy)
        module.to_empty(device=self.device)

    def precision(self, precision: str) -> AbstractContextManager[Any]:
        return nullcontext()  # the policy of `place` has it

    def total(self, values: Sequence[float]) -> list[float]:
        sums = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(sums)
        return sums.tolist()  # type: ignore[no-any-return]

    def gather(self, value: Value, everywhere: bool = False) -> list[Value]:
        out: list[Any] = [None] * self.world
        if everywhere:
            dist.all_gather_object(out, value)
        else:
            dist.gather_object(value, out if self.rank == 0 else None)
        return out if everywhere or self.rank == 0 else []

    def backward(self, module: nn.Module, loss: Tensor, last: bool) -> None:
        module.set_requires_gradient_sync(last)  # type: ignore[operator]
        module.set_is_last_backward(last)  # type: ignore[operator]
        (loss * self.world).backward()  # the reduction averages

    def whole(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        out: dict[str, Tensor] = {}
        bucket: dict[str, Any] = {}
        for name, tensor in tensors.items():
            bucket[name] = tensor
            if sum(own.nbytes for own in bucket.values()) >= BUCKET_BYTES:
                out |= self._bucket(bucket)
                bucket = {}
        return out | self._bucket(bucket)

    def _bucket(self, tensors: Mapping[str, Any]) -> dict[str, Tensor]:
        """One gather of all shards, each padded to the length of the first rank's."""
        flat = []
        for tensor in tensors.values():
            own = tensor.to_local().detach().flatten()
            flat.append(nn.functional.pad(own, (0, self._rows(tensor) * tensor[:1].numel() - own.numel())))
        if not flat:
            return {}
        mine = torch.cat(flat)
        parts = [torch.empty_like(mine) for _ in range(self.world)] if self.rank == 0 else None
        dist.gather(mine, parts)
        if parts is None:
            return {}
        split = [part.cpu().split([len(own) for own in flat]) for part in parts]
        return {name: torch.cat(pieces)[:tensor.numel()].view(tensor.shape)
                for (name, tensor), pieces in zip(tensors.items(), zip(*split, strict=True), strict=True)}

    def _rows(self, tensor: Tensor) -> int:
        return math.ceil(len(tensor) / self.world)

    def part(self, tensor: Tensor) -> Tensor:
        from torch.distributed.tensor import DTensor, Shard

        if not tensor.dim():
            return tensor.to(self.device)
        rows = self._rows(tensor)
        own = tensor[min(self.rank * rows, len(tensor)):(self.rank + 1) * rows].to(self.device)
        return DTensor.from_local(own, self._mesh, (Shard(0),), run_check=False, shape=tensor.shape,
                                  stride=tensor.stride())

    def read(self, state: dict[str, Any], folder: Path) -> None:
        _read(state, folder, process_group=self._files)

    def write(self, state: dict[str, Any], folder: Path) -> Future[Any]:
        """Copy `state` to the host, and write it beside what comes next; the future ends when all ranks have."""
        import torch.distributed.checkpoint as dcp

        return dcp.async_save(state, checkpoint_id=folder / SHARDS, process_group=self._files)  # type: ignore[return-value]

    def close(self) -> None:
        """End the process group. Waits for what it still does."""
        dist.destroy_process_group()


def _read(state: dict[str, Any], folder: Path, **how: Any) -> None:
    """Raises ValueError where the checkpoint is not whole, or not of this model and algorithm."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        dcp.load(state, checkpoint_id=folder / SHARDS, **how)
    except CheckpointException as error:  # a BaseException with a page of traceback
        reason = next((str(inner) for inner, _ in error.failures.values()), "")
        raise ValueError(f"{folder / SHARDS} is not a whole checkpoint of this model: {reason}") from None
