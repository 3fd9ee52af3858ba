"""How long an engine stands still for new weights, how fast they travel, by carrier: overlapped against blocking.

`python benchmarks/weight_sync.py [--sizes 0.25 1 4] [--carriers file collective mooncake]`. The learner is this
process, the engine another one that decodes (small matrix products in a loop, on a thread) until it is suspended.
Blocking: it is suspended before the learner begins to push and resumed when the weights are copied in. Overlapped: it
decodes while the learner pushes and while it pulls and checks, and is suspended for the copy alone. `lost` is the
decode time that is missing over the whole sync: also what pushing and pulling took from decoding on shared cores.
Tensors have 16 MB, of which only 16 lie at different places on either side, so that 4 GB take about 12 GB of memory
with mooncake (store, the learner's copy, the engine's) and 4 GB with file. Exit status 1 when an overlapped sync
exposes more than a third.
"""

from __future__ import annotations

import argparse
import multiprocessing
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from rollart.backends.weights import open_reader, open_writer
from rollart.backends.weights.settings import WeightsSettings
from rollart.core.types import Manifest

PLACES, PIECE = 16, 16_000_000


def tensors(gb: float) -> dict[str, torch.Tensor]:
    """bfloat16 tensors of 16 MB, `gb` * 10^9 bytes in all."""
    places = [torch.full((PIECE // 2,), float(i), dtype=torch.bfloat16) for i in range(PLACES)]
    return {f"layer.{i}": places[i % PLACES] for i in range(max(1, round(gb * 1e9 / PIECE)))}


class Decoder:
    """Counts its steps; `running` is cleared while it is suspended."""

    def __init__(self) -> None:
        self.steps, self.running, self.idle = 0, threading.Event(), threading.Event()
        self.running.set()
        threading.Thread(target=self._decode, daemon=True).start()

    def _decode(self) -> None:
        torch.set_num_threads(1)
        x = torch.randn(256, 256)
        while True:
            if not self.running.is_set():
                self.idle.set()
                self.running.wait()
            x = torch.tanh(x @ x / 256)
            self.steps += 1

    def suspend(self) -> None:
        self.idle.clear()
        self.running.clear()
        self.idle.wait(10)

    def rate(self, seconds: float) -> float:
        """Steps per second, measured now."""
        before = self.steps
        time.sleep(seconds)
        return (self.steps - before) / seconds


def engine(settings: WeightsSettings, gb: float, end: Connection) -> None:
    """One sync: told to begin, given the manifest, it answers with its figures."""
    torch.set_num_threads(1)
    reader, model, decoder = open_reader(settings), tensors(gb), Decoder()
    end.send(None)
    blocking = end.recv()
    rate = decoder.rate(2.0)
    if blocking:
        decoder.suspend()
    steps, began = decoder.steps, time.perf_counter()
    end.send(None)
    manifest: Manifest = end.recv()
    pulling = time.perf_counter()
    got: Mapping[str, torch.Tensor] = reader.get(manifest)
    pulled = time.perf_counter()
    if not blocking:
        decoder.suspend()
    stopped = began if blocking else pulled
    with torch.no_grad():
        for name, tensor in model.items():
            tensor.copy_(got[name])
    copied = time.perf_counter()
    decoder.running.set()
    lost = copied - began - (decoder.steps - steps) / rate
    end.send({"pull": pulled - pulling, "copy": copied - pulled, "exposed": copied - stopped, "lost": lost})


def sync(settings: WeightsSettings, gb: float, blocking: bool) -> dict[str, Any]:
    """One sync between this process and a new one."""
    source, context = tensors(gb), multiprocessing.get_context("spawn")
    writer = open_writer(settings)
    end, other = context.Pipe()
    process = context.Process(target=engine, args=(settings, gb, other), daemon=True)
    process.start()
    try:
        end.recv()
        end.send(blocking)
        end.recv()
        began = time.perf_counter()
        manifest = writer.put(1, source)
        push = time.perf_counter() - began
        end.send(manifest)
        if not end.poll(600):
            raise TimeoutError("the engine did not answer in 600 s")
        return {**end.recv(), "push": push, "nbytes": manifest.nbytes}
    finally:
        process.kill()
        process.join()
        writer.close()


def start_master() -> tuple[subprocess.Popen[bytes], str]:
    import mooncake

    ports = []
    for _ in range(2):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            ports.append(probe.getsockname()[1])
    binary = Path(mooncake.__path__[0]) / "mooncake_master"
    process = subprocess.Popen([binary, f"--rpc_port={ports[0]}", f"--metrics_port={ports[1]}"],
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    time.sleep(2.0)
    return process, f"127.0.0.1:{ports[0]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=float, nargs="+", default=[0.25, 1.0, 4.0], help="GB (10^9 bytes)")
    parser.add_argument("--carriers", nargs="+", default=["file", "collective", "mooncake"])
    parser.add_argument("--folder", default="/dev/shm")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    folder = tempfile.mkdtemp(prefix="weight-sync-", dir=arguments.folder)
    print("| carrier | GB | push GB/s | pull GB/s | copy GB/s | blocking: exposed s | overlapped: exposed s | ratio "
          "| overlapped: lost s |\n|---|---|---|---|---|---|---|---|---|")
    worst = 0.0
    try:
        for carrier in arguments.carriers:
            for gb in arguments.sizes:
                master, address = start_master() if carrier == "mooncake" else (None, "127.0.0.1:0")
                settings = WeightsSettings(carrier=carrier, folder=folder, address=address, deadline_seconds=300.0,
                                           segment_mb=round(gb * 1250) + 64 if master else 0)  # it evicts from 90 % on
                try:
                    blocking, overlapped = (sync(settings, gb, blocking) for blocking in (True, False))
                finally:
                    if master:
                        master.kill()
                        master.wait()
                ratio = overlapped["exposed"] / blocking["exposed"]
                worst = max(worst, ratio)
                speeds = " | ".join(f"{overlapped['nbytes'] / overlapped[part] / 1e9:.2f}"
                                    for part in ("push", "pull", "copy"))
                print(f"| {carrier} | {gb:g} | {speeds} | {blocking['exposed']:.2f} | {overlapped['exposed']:.2f} | "
                      f"{ratio:.2f} | {overlapped['lost']:.2f} |", flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"\nlargest ratio {worst:.2f}; at most 1/3 was asked for")
    return int(worst > 1 / 3)


if __name__ == "__main__":
    sys.exit(main())
