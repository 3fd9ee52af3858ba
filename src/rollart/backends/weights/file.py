"""Carrier `file`: a safetensors file a version, in shared memory of one host or on a shared file system.

Keeps true: a version's folder is complete or absent (renamed when whole); what a writer that died left behind is
removed once another has published. Readers map the file, so engines of one host share its memory; a version that is
dropped stays readable for who has it mapped. Waits for nothing but the file system.
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

from rollart.backends.weights.image import Header, Plan
from rollart.backends.weights.settings import WeightsSettings
from rollart.core.errors import ConfigError, EngineLost, TrainerLost
from rollart.core.types import Manifest, Version

FILE = "model.safetensors"


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One process at a time makes or removes writers' folders."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


class FileWriter:
    """A folder `w...` of its own in `settings.folder`, locked for as long as its process lives."""

    def __init__(self, settings: WeightsSettings) -> None:
        self._folder, self._bucket_mb, self._reaped = Path(settings.folder), settings.bucket_mb, False
        self._held: dict[Version, Manifest] = {}
        self._number = itertools.count()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with _locked(self._folder):
                self._own = Path(tempfile.mkdtemp(prefix="w", dir=self._folder))
                self._lock = os.open(self._own, os.O_RDONLY)
                fcntl.flock(self._lock, fcntl.LOCK_EX)
        except OSError as error:
            raise ConfigError(f"weights.folder = '{settings.folder}' cannot be used ({error.strerror}): set another") \
                from None

    def put(self, version: Version, tensors: Mapping[str, Tensor]) -> Manifest:
        plan, number = Plan(version, tensors, self._bucket_mb), next(self._number)
        partial, final = self._own / f".v{version}-{number}", self._own / f"v{version}-{number}"
        start = len(plan.header())
        try:
            partial.mkdir()
            with (partial / FILE).open("w+b") as file:
                os.posix_fallocate(file.fileno(), 0, start + plan.nbytes)  # a full disk is an error here, not SIGBUS
                image = torch.from_file(str(partial / FILE), shared=True, size=start + plan.nbytes, dtype=torch.uint8)
                digests = [plan.fill(i, image[start + low:start + high]) for i, (low, high) in enumerate(plan.buckets)]
                header = plan.header(digests)
                file.write(header)
                file.flush()
                os.fsync(file.fileno())
            partial.rename(final)
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise TrainerLost(f"weights of version {version} ({(start + plan.nbytes) / 1e6:.0f} MB) cannot be written "
                              f"to {self._own}: {error.strerror}") from None
        if before := self._held.get(version):
            self.drop(before)
        self._held[version] = manifest = plan.manifest(str(final), header)
        if not self._reaped:
            self._reaped = True
            self._reap()
        return manifest

    def _reap(self) -> None:
        """Remove the folders of writers that no longer live: nobody holds their lock."""
        with _locked(self._folder):
            for other in self._folder.glob("w*"):
                with suppress(OSError):  # it is locked, or gone meanwhile
                    handle = os.open(other, os.O_RDONLY)
                    try:
                        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        shutil.rmtree(other, ignore_errors=True)
                    finally:
                        os.close(handle)

    def drop(self, manifest: Manifest) -> None:
        path = Path(manifest.location)
        if path.parent.parent == self._folder:  # also one that this learner published before it was restarted
            shutil.rmtree(path, ignore_errors=True)

    def close(self) -> None:
        shutil.rmtree(self._own, ignore_errors=True)
        with suppress(OSError):
            os.close(self._lock)


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
                header = Header.parse(raw, manifest)
                size, whole = os.fstat(file.fileno()).st_size, len(raw) + header.nbytes
            if size != whole:
                raise EngineLost(f"weights at {path} have {size} bytes where version {manifest.version} has {whole}")
            data = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)[len(raw):]
        except (OSError, RuntimeError) as error:  # torch raises RuntimeError for a file that has gone
            raise EngineLost(f"weights of version {manifest.version} are gone from {path}: {error}") from None
        for number, (start, end) in enumerate(header.buckets):
            header.check(number, data[start:end], manifest)
        return header.views(data)

    def close(self) -> None:
        """Nothing is held."""
