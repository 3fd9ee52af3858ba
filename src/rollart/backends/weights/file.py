"""Carrier `file`: a safetensors file a version, in shared memory of one host or on a shared file system.

Keeps true: a version's folder is complete or absent (renamed when whole); what a writer that died left behind is
removed once another has published, and nothing else is: what a writer makes has a name and a marker of its own.
Readers map the file, so engines of one host share its memory; a version that is dropped stays readable for who has it
mapped. Waits for nothing but the file system.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch import Tensor

from rollart.backends.weights.image import Image, read
from rollart.backends.weights.settings import WeightsSettings
from rollart.core.errors import ConfigError, EngineLost, TrainerLost
from rollart.core.types import Manifest, Version

FILE = "model.safetensors"
PREFIX, MARKER = "rollart-weights-", ".made-by-rollart"
"""Of a writer's folder: how its name begins, and the file in it without which nobody removes it."""


@contextmanager
def _locked(folder: Path, how: int) -> Iterator[None]:
    """Raises OSError when it is gone, or (LOCK_NB) another process has it."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, how)
        yield
    finally:
        os.close(handle)


class FileWriter:
    """A marked folder of its own in `settings.folder`, locked for as long as its process lives."""

    def __init__(self, settings: WeightsSettings) -> None:
        self._folder = Path(settings.folder.replace("{uid}", str(os.geteuid())))
        self._bucket_mb, self._reaped = settings.bucket_mb, False
        self._held: dict[Version, Manifest] = {}
        self._number = itertools.count()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            owner = self._folder.stat().st_uid
            if os.geteuid() and owner not in (0, os.geteuid()):
                raise ConfigError(f"weights.folder = '{self._folder}' belongs to user {owner}, who could exchange what "
                                  "is in it: name a folder of your own")
            with _locked(self._folder, fcntl.LOCK_EX):
                self._own = Path(tempfile.mkdtemp(prefix=PREFIX, dir=self._folder))
                self._lock = _locked(self._own, fcntl.LOCK_EX)
                self._lock.__enter__()
                (self._own / MARKER).write_text("Weights on their way. Removed when the run's process has ended.\n")
        except OSError as error:
            raise ConfigError(f"weights.folder = '{self._folder}' cannot be used ({error.strerror}): set another") \
                from None

    def put(self, version: Version, tensors: Mapping[str, Tensor]) -> Manifest:
        image, name = Image(version, tensors, self._bucket_mb), f"v{version}-{next(self._number)}"
        partial, start = self._own / f".{name}", len(image.raw)
        try:
            partial.mkdir()
            with (partial / FILE).open("w+b") as file:
                os.posix_fallocate(file.fileno(), 0, start + image.nbytes)  # a full disk is an error here, not SIGBUS
                image.fill(torch.from_file(str(partial / FILE), shared=True, size=start + image.nbytes,
                                           dtype=torch.uint8)[start:])
                file.write(image.raw)
                file.flush()
                os.fsync(file.fileno())
            partial.rename(self._own / name)
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise TrainerLost(f"weights of version {version} ({image.nbytes / 1e6:.0f} MB) cannot be written to "
                              f"{self._own}: {error.strerror}") from None
        if before := self._held.get(version):
            self.drop(before)
        self._held[version] = manifest = image.manifest(str(self._own / name))
        if not self._reaped:
            self._reap()
        return manifest

    def _reap(self) -> None:
        """Remove the folders of writers that no longer live: nobody holds their lock."""
        self._reaped = True
        with _locked(self._folder, fcntl.LOCK_EX):
            for marker in self._folder.glob(f"{PREFIX}*/{MARKER}"):
                with suppress(OSError), _locked(marker.parent, fcntl.LOCK_EX | fcntl.LOCK_NB):  # else it lives
                    shutil.rmtree(marker.parent, ignore_errors=True)

    def drop(self, manifest: Manifest) -> None:
        path = Path(manifest.location)
        self._held.pop(manifest.version, None)
        # also one that this learner published before it was restarted
        if path.parent.parent == self._folder and (path.parent / MARKER).exists():
            shutil.rmtree(path, ignore_errors=True)

    def close(self) -> None:
        shutil.rmtree(self._own, ignore_errors=True)
        self._lock.__exit__(None, None, None)


class FileReader:
    """Maps what a manifest names, wherever that is."""

    def __init__(self, settings: WeightsSettings) -> None:
        pass

    def get(self, manifest: Manifest) -> Mapping[str, Tensor]:
        path = Path(manifest.location) / FILE
        try:
            with path.open("rb") as file:
                raw = file.read(8)
                raw += file.read(min(int.from_bytes(raw, "little"), 1 << 30))
            size, whole = path.stat().st_size, len(raw) + manifest.nbytes
            data = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8) if size == whole else None
        except (OSError, RuntimeError) as error:  # torch raises RuntimeError for a file that has gone
            raise EngineLost(f"weights of version {manifest.version} are gone from {path}: {error}") from None
        if data is None:
            raise EngineLost(f"weights at {path} are torn: {size} bytes where version {manifest.version} has {whole}")
        return read(raw, manifest, data[len(raw):], lambda *_: None)

    def close(self) -> None:
        """Nothing is held."""
