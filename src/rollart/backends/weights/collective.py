"""Carrier `collective`: buckets broadcast from the learner to the engines' processes, over gloo or NCCL.

Keeps true: the learner never waits for a reader: `put` copies to memory, and a thread of its own serves rounds. Readers
ask by the store at `settings.address` (a TCPStore in the learner's process) and are gathered into a round, which has a
process group of its own; a member that dies breaks it, and the others ask again. One that comes late has its own round.
Waits for: readers that took part before (until they missed three rounds), `GATHER_SECONDS` at most; each broadcast.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from rollart.backends.weights.image import Image, read
from rollart.backends.weights.settings import WeightsSettings
from rollart.core.errors import ConfigError, EngineLost
from rollart.core.types import Manifest, Version

GATHER_SECONDS, JOIN_SECONDS, _POLL_SECONDS = 0.5, 10.0, 0.01


def _store(address: str, seconds: float, master: bool = False) -> dist.TCPStore:
    host, _, port = address.rpartition(":")
    return dist.TCPStore(host, int(port), is_master=master, wait_for_workers=False, timeout=timedelta(seconds=seconds))


def _memory(settings: WeightsSettings, nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device="cuda" if settings.backend == "nccl" else "cpu")


def _join(settings: WeightsSettings, store: dist.TCPStore, number: int, rank: int, size: int,
          ) -> Callable[[Tensor], None]:
    """Meet the other processes of a round, the learner as rank 0; returns what broadcasts a bucket from it, or into it
    elsewhere. Any failure of either is a RuntimeError."""
    prefix, options = dist.PrefixStore(f"round/{number}", store), dist.BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    options.timeout = timedelta(seconds=settings.deadline_seconds)
    if settings.backend == "nccl":
        nccl = dist.ProcessGroupNCCL.Options()
        nccl._timeout = options.timeout
        group = dist.ProcessGroupNCCL(prefix, rank, size, nccl)
    else:
        group = dist.ProcessGroupGloo(prefix, rank, size, timedelta(seconds=JOIN_SECONDS))
    return lambda data: group.broadcast([data], options).wait()


class CollectiveWriter:
    """Holds a copy of each version until `drop`, and serves it."""

    def __init__(self, settings: WeightsSettings) -> None:
        self._settings, host = settings, settings.address.rpartition(":")[0]
        try:
            self._server = _store(settings.address, JOIN_SECONDS, master=True)
            self._address = f"{host}:{self._server.port}"
            self._store = _store(self._address, JOIN_SECONDS)  # the thread's own
        except RuntimeError as error:
            raise ConfigError(f"weights.address = '{settings.address}' cannot be listened on: "
                              f"{str(error).splitlines()[0]:.120}") from None
        self._held: dict[str, tuple[Version, Image, Tensor]] = {}
        self._puts, self._rounds, self._asks = itertools.count(), itertools.count(), 0
        self._missed: dict[int, int] = {}  # readers that are waited for: how often each did not come
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="weights", daemon=True)
        self._thread.start()

    def put(self, version: Version, tensors: Mapping[str, Tensor]) -> Manifest:
        image = Image(version, tensors, self._settings.bucket_mb)
        image.fill(data := _memory(self._settings, image.nbytes))
        manifest = image.manifest(f"collective://{self._address}/{version}-{next(self._puts)}")
        self._held = {place: held for place, held in self._held.items() if held[0] != version}
        self._held[manifest.location] = version, image, data
        return manifest

    def drop(self, manifest: Manifest) -> None:
        self._held.pop(manifest.location, None)

    def close(self) -> None:
        self._closing.set()
        self._thread.join(self._settings.deadline_seconds)
        self._held.clear()

    def _serve(self) -> None:
        torch.set_num_threads(1)
        with suppress(RuntimeError):  # the store ends with this process
            while not self._closing.is_set():
                asks = self._gather().values()
                for location in sorted({ask[1] for ask in asks}):
                    self._round(location, [ask[2] for ask in asks if ask[1] == location])

    def _gather(self) -> dict[int, tuple[int, str, int]]:
        """(reader, location, number of its ask) by reader: all that are known, or those that came within the time."""
        asks: dict[int, tuple[int, str, int]] = {}
        until = float("inf")
        while not self._closing.is_set() and time.monotonic() < until and not (
                self._missed and self._missed.keys() <= asks.keys()):
            for number in range(self._asks + 1, self._store.add("asks", 0) + 1):
                self._asks = number
                with suppress(dist.DistStoreError):  # it died between its two words
                    reader, location = json.loads(self._store.get(f"ask/{number}"))
                    asks[reader] = reader, location, number
                    until = min(until, time.monotonic() + GATHER_SECONDS)
            time.sleep(_POLL_SECONDS)
        missed = {**self._missed, **dict.fromkeys(asks, -1)}
        self._missed = {reader: times + 1 for reader, times in missed.items() if times < 2}
        return asks

    def _round(self, location: str, asks: list[int]) -> None:
        held, number = self._held.get(location), next(self._rounds)
        for rank, ask in enumerate(asks, 1):
            self._store.set(f"header/{ask}", held[1].raw if held else b"")
            self._store.set(f"answer/{ask}", json.dumps([number, rank, len(asks) + 1]))
        if held:
            with suppress(RuntimeError):  # a reader died: the others see it too, and ask again
                broadcast = _join(self._settings, self._store, number, 0, len(asks) + 1)
                for start, end in held[1].buckets:
                    broadcast(held[2][start:end])


class CollectiveReader:
    """Asks the learner that a manifest names; again, while the deadline lasts, when a round breaks."""

    def __init__(self, settings: WeightsSettings) -> None:
        self._settings, self._lock, self._address = settings, threading.Lock(), ""

    def get(self, manifest: Manifest) -> Mapping[str, Tensor]:
        address = manifest.location.removeprefix("collective://").partition("/")[0]
        with self._lock:
            until = time.monotonic() + self._settings.deadline_seconds
            while True:
                try:
                    if self._address != address:
                        self._store = _store(address, min(JOIN_SECONDS, self._settings.deadline_seconds))
                        self._reader, self._address = self._store.add("readers", 1), address
                    return self._round(manifest, until)
                except RuntimeError as error:
                    if isinstance(error, dist.DistNetworkError):
                        self._address = ""
                    if time.monotonic() > until:
                        raise EngineLost(f"weights of version {manifest.version} did not come from {address} in "
                                         f"{self._settings.deadline_seconds:g} s: {str(error).splitlines()[0]:.160}") \
                            from None

    def _round(self, manifest: Manifest, until: float) -> Mapping[str, Tensor]:
        number = self._store.add("asks", 1)
        self._store.set(f"ask/{number}", json.dumps([self._reader, manifest.location]))
        while not self._store.check([f"answer/{number}"]):
            if time.monotonic() > until:
                raise RuntimeError("the learner does not answer")
            time.sleep(_POLL_SECONDS)
        place, raw = json.loads(self._store.get(f"answer/{number}")), self._store.get(f"header/{number}")
        for key in ("ask", "answer", "header"):
            self._store.delete_key(f"{key}/{number}")
        if not raw:
            raise EngineLost(f"weights of version {manifest.version} are not held at {manifest.location}")
        broadcast, data = _join(self._settings, self._store, *place), _memory(self._settings, manifest.nbytes)
        return read(raw, manifest, data, lambda _, part: broadcast(part))

    def close(self) -> None:
        """Nothing is held between rounds."""
