"""One half of a carrier in a process of its own."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection
from typing import Any

import torch

from rollart.backends.weights import open_reader, open_writer
from rollart.backends.weights.memory import checksum
from rollart.backends.weights.settings import WeightsSettings
from rollart.core.errors import RollArtError
from rollart.core.types import Manifest

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["torch", "torch.distributed", "rollart.backends.weights.memory"])


def tensors(seed: int) -> dict[str, torch.Tensor]:
    """About 4 megabytes: odd sizes, several types, one tensor larger than a bucket of one megabyte."""
    generator = torch.Generator().manual_seed(seed)
    out = {"embed": torch.randn(400_003, generator=generator), "empty": torch.zeros(0, 3),
           "scalar": torch.tensor(float(seed)), "flags": torch.ones(7, dtype=torch.bool)}
    return out | {f"layer.{i}": torch.randn(12_004, 7, generator=generator).to(torch.bfloat16).t() for i in range(13)}


class Child:
    """The process, seen from the test: `ask` has a deadline; an error comes back as text."""

    def __init__(self, half: str, settings: WeightsSettings) -> None:
        self._end, other = _SERVER.Pipe()
        self.process = _SERVER.Process(target=serve, args=(half, settings, other), daemon=True)
        self.process.start()

    def send(self, *command: Any) -> None:
        self._end.send(command)

    def answer(self, seconds: float = 60.0) -> Any:
        assert self._end.poll(seconds), f"no answer in {seconds:g} s"
        return self._end.recv()

    def ask(self, *command: Any) -> Any:
        self.send(*command)
        return self.answer()

    def kill(self) -> None:
        self.process.kill()
        self.process.join(10)


def serve(half: str, settings: WeightsSettings, end: Connection) -> None:
    torch.set_num_threads(1)
    side: Any = open_writer(settings) if half == "writer" else open_reader(settings)
    while True:
        command, = [end.recv()]
        try:
            if half == "writer":
                end.send(side.put(command[0], tensors(command[1])))
            else:
                end.send(checksum(side.get(*command)))
        except RollArtError as error:
            end.send(f"{type(error).__name__}: {error}")


def digest_of(seed: int) -> str:
    return checksum(tensors(seed))


__all__ = ["Child", "Manifest", "digest_of", "tensors"]
