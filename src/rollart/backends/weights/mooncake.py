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
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as Late
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from rollart.backends.weights.image import Image, read
from rollart.backends.weights.settings import WeightsSettings
from rollart.core.errors import ConfigError, EngineLost, TrainerLost
from rollart.core.types import Manifest, Version

HEAL_SECONDS = 2.0
MOST_MB = 64  # of a bucket here: one that takes longer than the store's lease (10 s by default) cannot be read
_LEASED = -706
_LOCAL_BUFFER = 64 << 20
_MEANS = {-200: "the store is full, or has no memory yet", -704: "not in the store: dropped, evicted, or lost with it",
          -900: "the store's master does not answer"}


class StoreFailed(Exception):
    """An answer of the store below zero, or none."""


def _own_address(address: str) -> str:
    """This machine's address on the way to the master. Raises StoreFailed when nobody listens there: the library's
    `setup` would hold the interpreter's lock for 90 s then."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=5.0) as probe:
            return str(probe.getsockname()[0])
    except OSError as error:
        raise StoreFailed(f"{_MEANS[-900]} ({error.strerror or error})") from None


class _Store:
    """A client in a thread of its own, so that nothing waits for ever; in another one after an answer that did not
    come. The client finds a store that is back by itself."""

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
                raise StoreFailed(f"{_MEANS[-900]} ({answer})")
            self._client = client
        return self._client

    def ask(self, call: Callable[[Any], Any]) -> Any:
        """`call(client)`. It holds what it uses, for it may go on after the deadline. Raises StoreFailed."""
        thread = self._thread
        try:
            value = thread.submit(lambda: call(self._connected())).result(self._settings.deadline_seconds)
        except Late:
            self._thread = ThreadPoolExecutor(1, "mooncake")
            thread.shutdown(wait=False)
            raise StoreFailed(f"no answer within {self._settings.deadline_seconds:g} s") from None
        except RuntimeError as error:  # of an executor at the interpreter's end
            raise StoreFailed(str(error)) from None
        if value == b"" or (isinstance(value, int) and value < 0):
            raise StoreFailed(f"{_MEANS.get(value, 'the memory that held it does not answer')} ({value!r})")
        return value

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

    @contextmanager
    def registered(self, data: Tensor) -> Iterator[None]:
        """The store may read from and write to `data` within."""
        self.ask(lambda client: client.register_buffer(data.data_ptr(), len(data)))
        try:
            yield
        finally:
            with suppress(StoreFailed):
                self.ask(lambda client: client.unregister_buffer(data.data_ptr()))

    def close(self) -> None:
        with suppress(StoreFailed):
            if self._client is not None:
                self.ask(lambda client: client.close())
        self._thread.shutdown(wait=False, cancel_futures=True)


class MooncakeWriter:
    """Its keys begin with a word that no other writer has; what it leaves behind when it dies, the store evicts. It
    keeps a copy of the newest version, and pushes it again into a store that has lost it."""

    def __init__(self, settings: WeightsSettings) -> None:
        self._settings, self._store = settings, _Store(settings, settings.segment_mb)
        self._bucket_mb = min(settings.bucket_mb, MOST_MB)
        self._own, self._number = f"rollart-{secrets.token_hex(6)}", itertools.count()
        self._held: dict[Version, Manifest] = {}
        self._dropped: list[str] = []
        self._newest: tuple[str, Image, Tensor] | None = None
        self._lock, self._closing = threading.Lock(), threading.Event()
        threading.Thread(target=self._watch, name="weights", daemon=True).start()

    def put(self, version: Version, tensors: Mapping[str, Tensor]) -> Manifest:
        image = Image(version, tensors, self._bucket_mb)
        location = f"{self._own}/{version}-{next(self._number)}"
        with self._lock:
            image.fill(data := torch.empty(image.nbytes, dtype=torch.uint8))
            try:
                self._remove_dropped()
                self._store.persist(lambda: self._push(location, image, data))
            except StoreFailed as failed:
                raise TrainerLost(f"weights of version {version} cannot be put into the Mooncake store at "
                                  f"{self._settings.address}: {failed}") from None
            if before := self._held.get(version):
                self.drop(before)
            self._newest, self._held[version] = (location, image, data), image.manifest(location)
            return self._held[version]

    def _push(self, location: str, image: Image, data: Tensor) -> None:
        """What the store has already, it leaves as it is."""
        pin = self._store.library.ReplicateConfig()
        pin.soft_pin_action = self._store.library.SoftPinAction.ENABLE
        with self._store.registered(data):
            for i, (start, end) in enumerate(image.buckets):
                self._store.ask(lambda client, key=f"{location}/{i}", part=data[start:end]:
                                client.put_from(key, part.data_ptr(), len(part), pin))
            self._store.ask(lambda client: client.put(f"{location}/header", image.raw, pin))

    def _watch(self) -> None:
        while not self._closing.wait(HEAL_SECONDS):
            with self._lock, suppress(StoreFailed):
                if newest := self._newest:
                    keys = self._keys(newest[0], newest[1].nbytes)
                    if set(self._store.ask(lambda client, keys=keys: client.batch_is_exist(keys))) != {1}:
                        self._push(*newest)

    def _remove_dropped(self) -> None:
        """All that may go: the store keeps what was read within its lease."""
        keys = self._dropped[:]
        with suppress(StoreFailed):
            answers = self._store.ask(lambda client: client.batch_remove(keys)) if keys else []
            self._dropped[:len(keys)] = [key for key, answer in zip(keys, answers, strict=True) if answer == _LEASED]

    def _keys(self, location: str, nbytes: int) -> list[str]:
        buckets = -(-nbytes // (self._bucket_mb * 1_000_000))
        return [f"{location}/{part}" for part in ("header", *range(buckets))]

    def drop(self, manifest: Manifest) -> None:
        self._held.pop(manifest.version, None)
        self._dropped += self._keys(manifest.location, manifest.nbytes)

    def close(self) -> None:
        self._closing.set()
        with self._lock:
            self._remove_dropped()
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
        key = f"{manifest.location}/header"
        self._store.ask(lambda client: client.get_size(key))  # `get` does not say why it has nothing
        raw, data = self._store.ask(lambda client: client.get(key)), torch.empty(manifest.nbytes, dtype=torch.uint8)
        with self._store.registered(data):
            return read(raw, manifest, data, lambda number, part: self._store.ask(
                lambda client: client.get_into(f"{manifest.location}/{number}", part.data_ptr(), len(part))))

    def close(self) -> None:
        self._store.close()
