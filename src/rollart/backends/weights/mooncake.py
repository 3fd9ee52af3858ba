"""Carrier `mooncake`: buckets in a Mooncake store, pushed once by the learner and pulled by engines on demand.

Keeps true: keys are never used twice (a second put of a key would be ignored by the store); the header comes last, so
a version is complete or absent; what is dropped is removed later, when its leases have run out, never on the hot path.
A store that is restarted has forgotten everything: the newest version is pushed into it again, under the same keys.
Waits for: the store, `deadline_seconds` for each answer and for it to come back.
"""

from __future__ import annotations

import itertools
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as Late
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from rollart.backends.weights.image import Header, Plan
from rollart.backends.weights.settings import WeightsSettings
from rollart.core.errors import ConfigError, EngineLost, TrainerLost
from rollart.core.types import Manifest, Version

HEAL_SECONDS = 2.0
_LOCAL_BUFFER = 64 << 20
_MEANS = {-200: "the store is full, or has no memory yet", -704: "not in the store: dropped, evicted, or lost with it",
          -900: "the store's master does not answer"}


def _own_address(address: str) -> str:
    """This machine's address on the way to the master."""
    host, _, port = address.rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, int(port)))  # sends nothing
        return str(probe.getsockname()[0])


class StoreFailed(Exception):
    """An answer of the store below zero, or none."""


class _Store:
    """A client in a thread of its own, so that nothing waits for ever; made anew after an answer that did not come."""

    def __init__(self, settings: WeightsSettings, segment_mb: int) -> None:
        try:
            import mooncake.store
        except ImportError as error:
            raise ConfigError(f"weights.carrier = 'mooncake' needs its library and libibverbs: pip install "
                              f"'rollart[mooncake]', apt install libibverbs1 ({error})") from None
        self.library, self._settings, self._segment = mooncake.store, settings, segment_mb * 1_000_000
        self._client: Any = None
        self._thread = ThreadPoolExecutor(1, "mooncake")

    def _connected(self) -> Any:
        if self._client is None:
            s, client = self._settings, self.library.MooncakeDistributedStore()
            if answer := client.setup(_own_address(s.address), "P2PHANDSHAKE", self._segment, _LOCAL_BUFFER,
                                      s.protocol, s.devices, s.address):
                raise StoreFailed(_MEANS[-900] + f" ({answer})")
            self._client = client
        return self._client

    def start(self, call: Callable[[Any], Any]) -> Callable[[], Any]:
        """Begin `call(client)`; what is returned waits for it. Raises StoreFailed."""
        future, thread = self._thread.submit(lambda: call(self._connected())), self._thread

        def answer() -> Any:
            try:
                value = future.result(self._settings.deadline_seconds)
            except Late:
                if self._thread is thread:
                    self._client, self._thread = None, ThreadPoolExecutor(1, "mooncake")
                raise StoreFailed(f"no answer within {self._settings.deadline_seconds:g} s") from None
            if isinstance(value, int) and value < 0:
                raise StoreFailed(f"{_MEANS.get(value, 'the store refused')} ({value})")
            return value
        return answer

    def persist(self, work: Callable[[], Any]) -> Any:
        """Do `work`, again while the store fails and the deadline lasts. Raises StoreFailed."""
        until = time.monotonic() + self._settings.deadline_seconds
        while True:
            try:
                return work()
            except StoreFailed:
                if time.monotonic() > until:
                    raise
                time.sleep(0.5)

    def close(self) -> None:
        with suppress(StoreFailed):
            if self._client is not None:
                self.start(lambda client: client.close() and None)()
        self._thread.shutdown(wait=False, cancel_futures=True)


class MooncakeWriter:
    """Its keys begin with a word that no other writer has; what it leaves behind when it dies, the store evicts. It
    keeps a copy of the newest version, and pushes it again into a store that has lost it."""

    def __init__(self, settings: WeightsSettings) -> None:
        self._settings, self._store = settings, _Store(settings, settings.segment_mb)
        self._own, self._number = f"rollart-{secrets.token_hex(6)}", itertools.count()
        self._held: dict[str, tuple[Version, int]] = {}  # by location: its number of buckets
        self._dropped: list[str] = []
        self._newest: tuple[str, Header, Tensor] | None = None
        self._lock, self._closing = threading.Lock(), threading.Event()
        threading.Thread(target=self._watch, name="weights", daemon=True).start()

    def put(self, version: Version, tensors: Mapping[str, Tensor]) -> Manifest:
        plan, location = Plan(version, tensors, self._settings.bucket_mb), f"{self._own}/{version}-{next(self._number)}"
        with self._lock:
            data = torch.empty(plan.nbytes, dtype=torch.uint8)
            raw = plan.header([plan.fill(i, data[low:high]) for i, (low, high) in enumerate(plan.buckets)])
            manifest = plan.manifest(location, raw)
            newest = location, Header.parse(raw, manifest), data
            try:
                self._dropped = [key for key in self._dropped if not self._removed(key)]
                self._store.persist(lambda: self._push(*newest))
            except StoreFailed as failed:
                raise TrainerLost(f"weights of version {version} cannot be put into the Mooncake store at "
                                  f"{self._settings.address}: {failed}") from None
            for place in [place for place, held in self._held.items() if held[0] == version]:
                self._forget(place)
            self._held[location], self._newest = (version, len(plan.buckets)), newest
        return manifest

    def _push(self, location: str, header: Header, data: Tensor) -> None:
        """What the store has already, it leaves as it is."""
        pin = self._store.library.ReplicateConfig()
        pin.soft_pin_action = self._store.library.SoftPinAction.ENABLE
        self._store.start(lambda client: client.register_buffer(data.data_ptr(), len(data)))()
        try:
            for i, (start, end) in enumerate(header.buckets):
                self._store.start(lambda client, key=f"{location}/{i}", part=data[start:end]:
                                  client.put_from(key, part.data_ptr(), len(part), pin))()
            self._store.start(lambda client: client.put(f"{location}/header", header.raw, pin))()
        finally:
            with suppress(StoreFailed):
                self._store.start(lambda client: client.unregister_buffer(data.data_ptr()))()

    def _watch(self) -> None:
        while not self._closing.wait(HEAL_SECONDS):
            with self._lock, suppress(StoreFailed):
                if self._newest and not self._store.start(
                        lambda client: client.is_exist(f"{self._newest[0]}/header"))():
                    self._push(*self._newest)

    def _removed(self, key: str) -> bool:
        """Whether the store has forgotten it: it keeps what was read within its lease."""
        try:
            self._store.start(lambda client: client.remove(key))()
        except StoreFailed as failed:
            return "-704" in str(failed)
        return True

    def _forget(self, location: str) -> None:
        if held := self._held.pop(location, None):
            self._dropped += [f"{location}/{part}" for part in ("header", *range(held[1]))]

    def drop(self, manifest: Manifest) -> None:
        self._forget(manifest.location)

    def close(self) -> None:
        self._closing.set()
        with self._lock:
            for location in list(self._held):
                self._forget(location)
            for key in self._dropped:
                self._removed(key)
        self._store.close()


class MooncakeReader:
    def __init__(self, settings: WeightsSettings) -> None:
        self._settings, self._store, self._lock = settings, _Store(settings, 0), threading.Lock()

    def get(self, manifest: Manifest) -> Mapping[str, Tensor]:
        with self._lock:
            try:
                return self._store.persist(lambda: self._get(manifest))
            except StoreFailed as failed:
                raise EngineLost(f"weights of version {manifest.version} cannot be read from the Mooncake store at "
                                 f"{self._settings.address}: {failed}") from None

    def _get(self, manifest: Manifest) -> Mapping[str, Tensor]:
        location = manifest.location
        self._store.start(lambda client: client.get_size(f"{location}/header"))()  # `get` does not say why it failed
        raw = self._store.start(lambda client: client.get(f"{location}/header"))()
        header = Header.parse(raw, manifest)
        data = torch.empty(header.nbytes, dtype=torch.uint8)

        def start(number: int, part: Tensor) -> Callable[[], object]:
            return self._store.start(  # the call holds `part`, so that a late answer still finds its memory
                lambda client: client.get_into(f"{location}/{number}", part.data_ptr(), len(part)))

        self._store.start(lambda client: client.register_buffer(data.data_ptr(), header.nbytes))()
        try:
            return header.pull(data, start, manifest)
        finally:
            with suppress(StoreFailed):
                self._store.start(lambda client: client.unregister_buffer(data.data_ptr()))()

    def close(self) -> None:
        self._store.close()

