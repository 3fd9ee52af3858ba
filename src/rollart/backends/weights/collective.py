"""Carrier `collective`: buckets broadcast from the learner to the engines' processes, over gloo or NCCL.

Keeps true: the learner never waits for a reader: `put` copies to memory, and a thread of its own serves rounds. Readers
ask by the store at `settings.address` (a TCPStore in the learner's process) and are gathered into a round; the group of
the last one is used again if its members are the same. A member that dies breaks the round within the deadline: the
others ask again and the group is made anew. One that comes late has a round of its own.
Waits for: readers that took part before (until they missed three rounds), `GATHER_SECONDS` at most; each broadcast.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

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


class _Group:
    """The processes of a round; the learner is rank 0. Any failure is a RuntimeError."""

    def __init__(self, settings: WeightsSettings, store: dist.TCPStore, number: int, rank: int, size: int) -> None:
        self.number, prefix = number, dist.PrefixStore(f"group/{number}", store)
        self._options = dist.BroadcastOptions()
        self._options.rootRank = self._options.rootTensor = 0
        self._options.timeout = timedelta(seconds=settings.deadline_seconds)
        if settings.backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = self._options.timeout
            self._group = dist.ProcessGroupNCCL(prefix, rank, size, options)
        else:
            self._group = dist.ProcessGroupGloo(prefix, rank, size, timedelta(seconds=JOIN_SECONDS))

    def broadcast(self, data: Tensor) -> None:
        self._group.broadcast([data], self._options).wait()


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
        self._puts, self._groups, self._asks = itertools.count(), itertools.count(1), 0
        self._group: _Group | None = None
        self._members: list[int] = []  # of the group
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
                asks = self._gather()
                for location in sorted({ask["location"] for ask in asks.values()}):
                    self._round(location, {id: ask for id, ask in asks.items() if ask["location"] == location})

    def _gather(self) -> dict[int, dict[str, Any]]:
        """What readers ask for, by reader: all that are known, or those that came within the time."""
        asks: dict[int, dict[str, Any]] = {}
        until = float("inf")
        while not self._closing.is_set() and time.monotonic() < until and not (
                self._missed and self._missed.keys() <= asks.keys()):
            for number in range(self._asks + 1, self._store.add("asks", 0) + 1):
                self._asks = number
                with suppress(dist.DistStoreError):  # it died between its two words
                    ask = json.loads(self._store.get(f"ask/{number}"))
                    asks[ask["reader"]] = ask
                    until = min(until, time.monotonic() + GATHER_SECONDS)
            time.sleep(_POLL_SECONDS)
        missed = {**self._missed, **dict.fromkeys(asks, -1)}
        self._missed = {reader: times + 1 for reader, times in missed.items() if times < 2}
        return asks

    def _round(self, location: str, asks: dict[int, dict[str, Any]]) -> None:
        held, readers = self._held.get(location), sorted(asks)
        if self._group and (readers != self._members or {a["group"] for a in asks.values()} != {self._group.number}):
            self._group = None
        number = self._group.number if self._group else next(self._groups)
        for rank, reader in enumerate(readers, 1):
            self._store.set(f"header/{asks[reader]['number']}", held[1].raw if held else b"")
            self._store.set(f"answer/{asks[reader]['number']}", json.dumps([number, rank, len(readers) + 1]))
        if not held:
            return
        self._members = readers
        try:
            self._group = self._group or _Group(self._settings, self._store, number, 0, len(readers) + 1)
            for start, end in held[1].buckets:
                self._group.broadcast(held[2][start:end])
        except RuntimeError:  # a reader died: the others see it too, and ask again
            self._group = None


class CollectiveReader:
    """Asks the learner that a manifest names; again, while the deadline lasts, when a round breaks."""

    def __init__(self, settings: WeightsSettings) -> None:
        self._settings, self._lock, self._address = settings, threading.Lock(), ""
        self._group: _Group | None = None

    def get(self, manifest: Manifest) -> Mapping[str, Tensor]:
        address = manifest.location.removeprefix("collective://").partition("/")[0]
        with self._lock:
            until = time.monotonic() + self._settings.deadline_seconds
            while True:
                try:
                    if self._address != address:
                        self._store = _store(address, min(JOIN_SECONDS, self._settings.deadline_seconds))
                        self._reader, self._address, self._group = self._store.add("readers", 1), address, None
                    return self._round(manifest, until)
                except RuntimeError as error:
                    self._group = None
                    if isinstance(error, dist.DistNetworkError):
                        self._address = ""
                    if time.monotonic() > until:
                        raise EngineLost(f"weights of version {manifest.version} did not come from {address} in "
                                         f"{self._settings.deadline_seconds:g} s: {str(error).splitlines()[0]:.160}") \
                            from None

    def _round(self, manifest: Manifest, until: float) -> Mapping[str, Tensor]:
        number = self._store.add("asks", 1)
        self._store.set(f"ask/{number}", json.dumps({"number": number, "reader": self._reader, "group":
                        self._group.number if self._group else 0, "location": manifest.location}))
        while not self._store.check([f"answer/{number}"]):
            if time.monotonic() > until:
                raise RuntimeError("the learner does not answer")
            time.sleep(_POLL_SECONDS)
        place, raw = json.loads(self._store.get(f"answer/{number}")), self._store.get(f"header/{number}")
        for key in ("ask", "answer", "header"):
            self._store.delete_key(f"{key}/{number}")
        if not raw:
            raise EngineLost(f"weights of version {manifest.version} are not held at {manifest.location}")
        if self._group is None or self._group.number != place[0]:
            self._group = _Group(self._settings, self._store, *place)
        data, group = _memory(self._settings, manifest.nbytes), self._group
        return read(raw, manifest, data, lambda _, part: group.broadcast(part))

    def close(self) -> None:
        with self._lock:
            self._group, self._address = None, ""
