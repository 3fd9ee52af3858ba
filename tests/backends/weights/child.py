"""One half of a carrier in a process of its own: a JSON line in, a JSON line out."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from typing import Any

import torch

from rollart.backends.weights import open_reader, open_writer
from rollart.backends.weights.memory import checksum
from rollart.backends.weights.settings import WeightsSettings
from rollart.core.errors import RollArtError
from rollart.core.types import Manifest


def tensors(seed: int, mb: int = 4) -> dict[str, torch.Tensor]:
    """About `mb` megabytes: odd sizes, several types, one tensor larger than a bucket of one megabyte."""
    generator = torch.Generator().manual_seed(seed)
    out = {"embed": torch.randn(mb * 100_000 + 3, generator=generator), "empty": torch.zeros(0, 3),
           "scalar": torch.tensor(float(seed)), "flags": torch.ones(7, dtype=torch.bool)}
    return out | {f"layer.{i}": torch.randn(mb * 3_001, 7, generator=generator).to(torch.bfloat16).t()
                  for i in range(13)}


class Child:
    """The process, seen from the test. Every answer has a deadline, and an error comes back as {"error": text}."""

    def __init__(self, half: str, settings: WeightsSettings) -> None:
        self.process = subprocess.Popen([sys.executable, __file__, half, json.dumps(asdict(settings))], text=True,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=1)

    def send(self, **command: Any) -> None:
        assert self.process.stdin
        self.process.stdin.write(json.dumps(command) + "\n")

    def answer(self) -> Any:
        assert self.process.stdout
        while line := self.process.stdout.readline():
            if line.startswith("{"):  # libraries write to stdout too
                return json.loads(line)
        raise AssertionError(f"the child ended with {self.process.wait(10)}")

    def get(self, manifest: Manifest) -> Any:
        self.send(**asdict(manifest))
        return self.answer()

    def put(self, version: int, seed: int) -> Manifest:
        self.send(version=version, seed=seed)
        return Manifest(**self.answer())

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)


def main() -> None:
    torch.set_num_threads(1)
    settings = WeightsSettings(**json.loads(sys.argv[2]))
    half = open_writer(settings) if sys.argv[1] == "writer" else open_reader(settings)
    for line in sys.stdin:
        command = json.loads(line)
        try:
            if sys.argv[1] == "writer":
                answer = asdict(half.put(command["version"], tensors(command["seed"])))
            else:
                answer = {"checksum": checksum(half.get(Manifest(**command)))}
        except RollArtError as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)
    half.close()


if __name__ == "__main__":
    main()
