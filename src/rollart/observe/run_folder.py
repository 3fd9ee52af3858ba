"""One run, one folder: who may write in it, and which checkpoints in it are whole.

    config.json      the resolved settings, written once
    lock             held (flock) by the process that runs, with its pid inside
    run.db           the ledger          metrics.jsonl   a line a step       status.json   a moment ago
    summary.json     figures             report.html     for people
    model/               what it began with, for the nodes of a cluster
    checkpoints/000012/complete          the marker is written last, with size and CRC-32 of every file of the
                                         checkpoint; a folder without it does not count

Keeps true: one process at a time writes here, also after a crash; a reader sees a file as it was before or after a
change, and a damaged one is one line that names it. Waits at most LOCK_SECONDS for the lock.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import threading
import time
import zlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rollart.core.errors import ConfigError
from rollart.core.foreign import encodable
from rollart.core.types import Version
from rollart.observe.ledger_view import LedgerView

LOCK_SECONDS = 0.5
"""A reader that asks whether the run is alive holds the lock for an instant; a writer waits this long."""


def atomic_write(path: Path, data: str | bytes, *, durable: bool = True) -> None:
    """Replace `path` as a whole. `durable`: it also survives a power cut when this returns.

    Raises OSError that names `path`, and leaves nothing of it behind.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_native_id()}.part")
    try:
        with part.open("wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error
    if durable:
        sync(path.parent)


def read_object(path: Path) -> dict[str, Any]:
    """A file that holds one JSON object. Raises FileNotFoundError, and ConfigError where it holds anything else."""
    data = path.read_bytes()
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:  # ValueError: also of bytes that are not UTF-8
        raise ConfigError(f"{path} must hold JSON, but it is damaged ({error}): put it back from a copy") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path} must hold a JSON object, but it is {type(found).__name__}: put it back from a copy")
    return found


class RunFolder:
    """The paths of a run. `create` or `resume` also takes its lock, `close` (or `with`) gives it back."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config = self.path / "config.json"
        self.database = self.path / "run.db"
        self.metrics = self.path / "metrics.jsonl"
        self.status = self.path / "status.json"
        self.summary = self.path / "summary.json"
        self.report = self.path / "report.html"
        self.checkpoints = self.path / "checkpoints"
        self._lock: int | None = None
        self._made = False

    def create(self, config: Mapping[str, Any]) -> RunFolder:
        """Begin a run here: lock, and write config.json. Raises ConfigError if the folder has a run already."""
        if self.exists():
            raise ConfigError(f"--run {self.path} needs a folder without a run, but it holds one: "
                              f"continue it with --resume {self.path}, or name another folder")
        if self.path.is_dir() and any(self.path.iterdir()):
            raise ConfigError(f"--run {self.path} needs a new or empty folder, but it holds other files")
        if str(self.path) != encodable(str(self.path)):
            raise ConfigError(f"--run {self.path} needs a name in UTF-8, as checkpoints are written: name another")
        self._made = not self.path.exists()
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--run {self.path} needs a folder that can be written: {error.strerror}") from None
        self._take_lock()
        self.rewrite_config(config)
        return self

    def resume(self) -> dict[str, Any]:
        """Take up the run that is here: lock, and return its config. Raises ConfigError if there is none."""
        config = self.read_config()
        self._take_lock()
        for part in self.path.glob(".*.part"):  # of a process that was killed while it wrote
            part.unlink(missing_ok=True)
        return config

    def trajectories(self) -> int:
        """How many its ledger knows. Call it when no ledger is open in this process."""
        with LedgerView(self.database) as view:
            return view.counts()["dispatched"]

    def discard(self) -> None:
        """Take back a run that never began: what `create` and the ledger made is removed, nothing else, not even an
        empty folder that was there. One that has a trajectory in its ledger stays."""
        if self.trajectories():
            return
        for path in (self.config, self.status, self.metrics, self.path / "lock", *self.path.glob("run.db*")):
            path.unlink(missing_ok=True)
        _remove(self.path / "model")
        for folder in (self.checkpoints, *([self.path] if self._made else [])):
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()

    def rewrite_config(self, config: Mapping[str, Any]) -> None:
        """What a resume changed, so that the next resume and readers see it too."""
        atomic_write(self.config, json.dumps(config, indent=2) + "\n")

    def exists(self) -> bool:
        return self.config.exists() or self.database.exists()

    def read_config(self) -> dict[str, Any]:
        """The settings the run was started with. Raises ConfigError where there is no run."""
        try:
            config = read_object(self.config)
        except (FileNotFoundError, NotADirectoryError):
            raise ConfigError(f"{self.path} holds no run (it has no config.json): name the folder that --run was given"
                              f"{_newest_run(self.path, self.path.parent, Path('runs'))}, or start one with --run"
                              ) from None
        if "architectures" in config:
            raise ConfigError(f"{self.path} is a checkpoint, not a run: name the run's folder")
        return config

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- the lock

    def holder(self) -> int | None:
        """The pid written by the process that runs here, or None if nobody does."""
        try:
            lock = os.open(self.path / "lock", os.O_RDONLY)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return int(os.read(lock, 32) or 0)
        finally:
            os.close(lock)
        return None

    def _take_lock(self) -> None:
        lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        deadline = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    pid = os.read(lock, 32).decode().strip()
                    os.close(lock)
                    raise ConfigError(f"{self.path} needs to be free, but process {pid} runs in it (or left a child "
                                      "that does): wait for it or stop it, or name another folder") from None
                time.sleep(0.02)
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
        self._lock = lock

    # ---- checkpoints

    def checkpoint(self, version: Version) -> Path:
        return self.checkpoints / f"{version:06d}"

    def begin_checkpoint(self, version: Version) -> Path:
        """A new, empty folder for the checkpoint of `version`; what was there under that version is removed."""
        folder = self.checkpoint(version)
        _remove(folder)
        folder.mkdir(parents=True)
        return folder

    def complete_checkpoint(self, folder: Path, keep: int) -> None:
        """Mark it whole, once all its files are on disk (the ledger before: `Ledger.flush`); then keep the `keep`
        newest whole ones.

        Blocks on the disk: call it outside the event loop where the checkpoint is large.
        """
        sync(*folder.rglob("*"), folder)
        files = {str(f.relative_to(folder)): _size_and_sum(f) for f in sorted(folder.rglob("*")) if f.is_file()}
        atomic_write(folder / "complete", json.dumps(files, indent=1) + "\n")
        whole = self._whole()
        for version, old in sorted(self._versions().items()):
            if version not in whole[-keep:] and version <= whole[-1]:
                _remove(old)

    def newest_checkpoint(self) -> tuple[Version, Path] | None:
        """Version and folder of the newest whole checkpoint; None if there is none."""
        whole = self._whole()
        return (whole[-1], self.checkpoint(whole[-1])) if whole else None

    def check_checkpoint(self, version: Version) -> None:
        """Read all of a whole checkpoint. Raises ConfigError where it is not what was written; the message names the
        newest older one that can take its place."""
        folder = self.checkpoint(version)
        if not (folder / "complete").stat().st_size:
            return  # an older rollart wrote it
        for name, written in read_object(folder / "complete").items():
            file = folder / name
            found = _size_and_sum(file) if file.is_file() else None
            if found != written:
                what = "is missing" if found is None else f"has {found[0]} bytes of {written[0]}" \
                    if found[0] != written[0] else "has other bytes than were written"
                older = [self.checkpoint(v) for v in self._whole() if v < version]
                remedy = f"go on from the older whole one, {older[-1].name}, by removing the folder {folder.name}" \
                    if older else "there is no older one: put the file back from a copy, or start a new run"
                raise ConfigError(f"checkpoint {folder} is damaged ({name} {what}): {remedy}")

    def _versions(self) -> dict[Version, Path]:
        """Folders that `begin_checkpoint` made, by their names; a copy that someone made beside them is none."""
        if not self.checkpoints.exists():
            return {}
        return {int(path.name): path for path in self.checkpoints.iterdir()
                if path.name.isdecimal() and path == self.checkpoint(int(path.name)) and path.is_dir()}

    def _whole(self) -> list[Version]:
        return sorted(version for version, folder in self._versions().items() if (folder / "complete").exists())


def _newest_run(*folders: Path) -> str:
    """`, such as runs/quickstart-1`: the run in `folders` that was written last."""
    ages = {}
    for ledger in {ledger for folder in folders for ledger in folder.glob("*/run.db")}:
        with suppress(OSError):  # it has just gone
            ages[ledger.parent] = ledger.stat().st_mtime
    return f", such as {max(ages, key=ages.__getitem__)}" if ages else ""


def _remove(folder: Path) -> None:
    """The marker goes first, so that a removal cut short leaves nothing that looks whole. Of a folder that was moved
    away, and is linked to, the link only."""
    if folder.is_symlink():
        folder.unlink()
        return
    (folder / "complete").unlink(missing_ok=True)
    if folder.exists():
        shutil.rmtree(folder)


def _size_and_sum(file: Path) -> list[int]:
    total = 0
    with file.open("rb") as opened:
        while block := opened.read(1 << 22):
            total = zlib.crc32(block, total)
    return [file.stat().st_size, total]


def sync(*paths: Path) -> None:
    """fsync files and folders: what is in them survives a power cut. Never of an open database: see `Ledger`."""
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
