"""The learner over N ranks: what one rank does, a process for it, and the `Trainer` that drives them all.

Keeps true: every rank is given the same calls in the same order, one at a time in one thread (`publish`, `retire` and
the writing of a checkpoint run beside them), so all stand at one version; after a failure, or a call that was given up,
no rank is left running, and `load` starts all of them again from a folder. Waits for: the ranks; for a start and for
one another at most `rank_seconds`, for everything else under the caller's deadline.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import pickle
import signal
import socket
import struct
import sys
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from rollart.algo.settings import AlgoSettings
from rollart.backends.torch.checkpoint import read_model, sync_folder
from rollart.backends.torch.fsdp import SHARDS, Sharded
from rollart.backends.torch.settings import LearnerSettings
from rollart.backends.torch.shapes import ModelConfig
from rollart.backends.torch.step import StepWork, check
from rollart.backends.torch.threads import choose_device
from rollart.backends.torch.transformer import Transformer
from rollart.backends.weights import WeightsSettings, open_writer
from rollart.backends.weights.memory import load_into
from rollart.core.errors import InvariantViolated, RollArtError, TrainerLost
from rollart.core.types import Manifest, StepReport, TrainBatch, Version

Result = TypeVar("Result")
Source = str | tuple[ModelConfig, Mapping[str, Tensor]]
"""A model: its Hugging Face folder, or its shape and tensors."""

TRIES = 2
"""Starts of all ranks before the learner is lost: now and then one aborts without a reason."""
DYING_SECONDS = 2.0
"""So long the other ranks may take to say what the first failure of one was about."""
_HEADER = struct.Struct("!Q")


@dataclass(frozen=True, kw_only=True)
class RankSpec:
    """All that a rank needs beside its number. `temperature`, `reference`: as TorchTrainer's."""

    model: Source
    settings: LearnerSettings
    algo: AlgoSettings
    weights: WeightsSettings
    temperature: float = 1.0
    seed: int = 0
    reference: Source | None = None


class RankWorker:
    """One rank. Plain methods that block; `publish`, `retire` and `saved` may be called beside the others.

    On rank 0 `step` and `publish` have a result. Raises TrainerLost; a rank is of no use after that.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "learner")
        self._beside = ThreadPoolExecutor(1, "checkpoint")
        self._store: dist.TCPStore | None = None
        self._publishing = threading.Lock()
        self._copies: dict[Version, dict[str, Tensor]] = {}
        self._handed: set[Version] = set()
        self._saving: list[Future[Any]] = []

    def listen(self, host: str = "127.0.0.1") -> str:
        """Of rank 0: host:port where the ranks meet. `host` is this machine as the others reach it."""
        self._store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
        return f"{host}:{self._store.port}"

    def start(self, rank: int, world: int, address: str, spec: RankSpec) -> None:
        """Join the others and load the first weights: version 0."""
        self._run(self._start, rank, world, address, spec)

    def step(self, batch: TrainBatch | bytes) -> StepReport | None:
        """Version `batch.version` to the next; every rank is given the whole batch (pickled or not)."""
        return self._run(self._step, pickle.loads(batch) if isinstance(batch, bytes) else batch)

    def publish(self, version: Version) -> Manifest | None:
        """Hand over what the end of the last step (or load) gathered; it may overlap the next step."""
        if self._rank:
            return None
        with self._publishing:
            if version not in self._copies:
                raise InvariantViolated(f"version {version} was to be published; the learner has {set(self._copies)}")
            manifest = self._writer.put(version, self._copies[version])
            self._handed.add(version)
            return manifest

    def retire(self, manifest: Manifest) -> None:
        if not self._rank:
            self._writer.drop(manifest)

    def save(self, folder: str) -> None:
        """Begin to write: the state is copied when this returns, and on disk when `saved` does."""
        self._run(self._save, Path(folder))

    def saved(self) -> None:
        """Wait until the last `save` is whole and fsynced."""
        try:
            for written in self._saving:
                written.result()
        except (RuntimeError, OSError, ValueError, SafetensorError) as error:
            raise TrainerLost(f"checkpoint of rank {self._rank}: {error}") from error

    def load(self, folder: str) -> Version:
        """Go on from what any number of ranks saved, or the learner of one process."""
        return self._run(self._load, Path(folder))

    def close(self) -> None:
        if self._store is not None and hasattr(self, "_ranks"):
            self._writer.close()
        self._thread.shutdown(cancel_futures=True)

    def _run(self, call: Callable[..., Result], *arguments: Any) -> Result:
        try:
            return self._thread.submit(call, *arguments).result()
        except (RuntimeError, OSError, ValueError, SafetensorError) as error:  # torch raises RuntimeError for all
            raise TrainerLost(f"{type(error).__name__}: {error}") from error

    def _start(self, rank: int, world: int, address: str, spec: RankSpec) -> None:
        settings = spec.settings
        torch.set_num_threads(settings.threads or 1)
        device = choose_device(settings.device)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", rank % torch.cuda.device_count())
        host, _, port = address.rpartition(":")
        store = self._store or dist.TCPStore(host, int(port), is_master=False,
                                             timeout=timedelta(seconds=settings.rank_seconds))
        self._rank, self._ranks = rank, Sharded(rank, world, store, device, settings.rank_seconds)
        config, tensors = _source(spec.model)
        reference, frozen = _source(spec.reference) if spec.reference else (None, {})
        models = []
        with torch.device("meta"):
            for shape in (config, reference):
                models.append(Transformer(shape) if shape else None)
        self._work = StepWork(models[0], settings, spec.algo, spec.temperature, spec.seed, self._ranks,
                              reference=models[1])
        self._fill(models[0], tensors)
        if models[1] is not None:
            self._fill(models[1], frozen)
        if self._work.critic is not None:
            own = {f"body.{name}": tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
            self._fill(self._work.critic, {**own, "value.weight": torch.zeros(1, config.width),
                                           "value.bias": torch.zeros(1)})
        if rank == 0:
            self._writer = open_writer(spec.weights)
        self._stand(0, self._work.snapshot())

    def _fill(self, module: torch.nn.Module | None, tensors: Mapping[str, Tensor]) -> None:
        assert module is not None
        load_into(module, {name: self._ranks.part(whole) for name, whole in tensors.items()})

    def _stand(self, version: Version, copy: dict[str, Tensor]) -> None:
        """At `version`, whose weights are kept until the next one's are here and these were published."""
        with self._publishing:
            self._copies = {v: kept for v, kept in self._copies.items() if v == version - 1 and v not in self._handed}
            self._copies[version] = copy
            self._version, self._handed = version, set()

    def _step(self, batch: TrainBatch) -> StepReport | None:
        if batch.version != self._version:
            raise InvariantViolated(f"rank {self._rank} stands at version {self._version}, not {batch.version}")
        report = self._work.step(batch)
        self._stand(batch.version + 1, self._work.copy)
        return report if self._rank == 0 else None

    def _save(self, folder: Path) -> None:
        self.saved()  # the one before
        self._saving = [self._ranks.write(self._work.tensors(self._version), folder)]
        if self._rank == 0:
            self._saving.append(self._beside.submit(self._finish, self._saving[0], self._copies[self._version], folder))

    @staticmethod
    def _finish(shards: Future[Any], copy: Mapping[str, Tensor], folder: Path) -> None:
        save_file(dict(copy), folder / "model.safetensors", metadata={"format": "pt"})
        shards.result()
        sync_folder(folder)

    def _load(self, folder: Path) -> Version:
        work = self._work
        if (folder / SHARDS).is_dir():
            tensors = work.tensors(0)
            self._ranks.read(tensors, folder)
            version = int(tensors["version"])
        else:
            self._fill(work.model, load_file(folder / "model.safetensors"))
            saved = torch.load(folder / "optimizer.pt", weights_only=True)
            work.restore(saved)
            version = saved["version"]
        work.skipped, self._copies = 0, {}
        self._stand(version, work.snapshot())
        return version


def _source(model: Source) -> tuple[ModelConfig, Mapping[str, Tensor]]:
    return read_model(model) if isinstance(model, str) else model


class Rank(Protocol):
    """A RankWorker somewhere. `call` raises TrainerLost once it is dead; `kill` ends it at once and never raises."""

    async def call(self, method: str, *arguments: Any) -> Any: ...
    def kill(self) -> None: ...


class ProcessRank:
    """A rank in a process of this machine. Requests and answers are pickles with their length before them.

    The process ends when this one hangs up; Ctrl-C is not for it.
    """

    @classmethod
    async def start(cls, number: int) -> ProcessRank:
        self = cls()
        ours, theirs = socket.socketpair()
        environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        with theirs:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-c", "from rollart.backends.torch.ranks import serve; serve()", str(theirs.fileno()),
                pass_fds=(theirs.fileno(),), stdin=asyncio.subprocess.DEVNULL, env=environment)
        self._name, self.pid = f"rank {number} (process {self._process.pid})", self._process.pid
        reader, self._writer = await asyncio.open_connection(sock=ours)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._numbers, self._lost = itertools.count(), ""
        self._reading = asyncio.create_task(self._read(reader), name=self._name)
        return self

    async def call(self, method: str, *arguments: Any) -> Any:
        if self._lost:
            raise TrainerLost(self._lost)
        number = next(self._numbers)
        body = pickle.dumps((number, method, arguments), protocol=pickle.HIGHEST_PROTOCOL)
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            with suppress(ConnectionError):  # `_read` tells
                self._writer.writelines((_HEADER.pack(len(body)), body))
                await self._writer.drain()
            return await future
        finally:
            self._waiting.pop(number, None)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                size, = _HEADER.unpack(await reader.readexactly(_HEADER.size))
                number, well, value = pickle.loads(await reader.readexactly(size))
                future = self._waiting.pop(number, None)
                if future is not None and not future.done():
                    future.set_result(value) if well else future.set_exception(value)
        self.kill()
        code = await self._process.wait()
        self._lost = f"{self._name} ended " + (f"by signal {-code}" if code < 0 else f"with code {code}")
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(TrainerLost(self._lost))

    def kill(self) -> None:
        self._writer.close()
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.kill()


def serve() -> None:
    """A rank's process: serve the socket whose number is the argument, until the other side hangs up."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    file = socket.socket(fileno=int(sys.argv[1])).makefile("rwb")
    worker, threads, sending = RankWorker(), ThreadPoolExecutor(8), threading.Lock()

    def answer(number: int, method: str, arguments: Sequence[Any]) -> None:
        try:
            well, value = True, getattr(worker, method)(*arguments)
        except (RollArtError, InvariantViolated) as error:
            well, value = False, error
        except Exception as error:  # noqa: BLE001  the process's edge: whatever it was, the caller must hear of it
            well, value = False, TrainerLost(f"{method}: {type(error).__name__}: {error}")
        body = pickle.dumps((number, well, value), protocol=pickle.HIGHEST_PROTOCOL)
        with sending, suppress(OSError):
            file.write(_HEADER.pack(len(body)) + body)
            file.flush()

    while len(header := file.read(_HEADER.size)) == _HEADER.size:
        threads.submit(answer, *pickle.loads(file.read(_HEADER.unpack(header)[0])))
    os._exit(0)  # threads may hang in a collective


class RankedTrainer:
    """Implements the `Trainer` port over N ranks; `start` or `load` before anything else. Raises TrainerLost.

    `launch` starts the process of a rank: one on this machine, or another's. `host`: the machine of rank 0 as the
    others reach it. `export` writes what a checkpoint folder needs beside the weights to be a Hugging Face folder.
    Raises ConfigError.
    """

    def __init__(self, spec: RankSpec, launch: Callable[[int], Awaitable[Rank]] = ProcessRank.start, *,
                 host: str = "127.0.0.1", export: Callable[[Path], None] = lambda folder: None) -> None:
        check(spec.settings, spec.algo, spec.temperature, reference=spec.reference is not None, adapters=False)
        self.version, self.ranks = 0, []
        self._spec, self._launch, self._host, self._export = spec, launch, host, export
        self._lost = "its ranks were not started"
        self._turn = asyncio.Lock()

    async def start(self) -> None:
        """All ranks, at version 0."""
        await self.restart(None)

    async def restart(self, folder: Path | None) -> None:
        """End all ranks and start them again, from a checkpoint or (None) the first weights."""
        async with self._turn:
            for attempt in range(TRIES):
                self._kill("it is started again")
                try:
                    async with asyncio.timeout(self._spec.settings.rank_seconds):
                        await self._begin()
                        self.version = (await self._all("load", str(folder)))[0] if folder else 0
                    return
                except (TrainerLost, TimeoutError) as error:
                    self._kill(str(error) or f"no start within {self._spec.settings.rank_seconds:g} s (rank_seconds)")
                    if attempt + 1 == TRIES:
                        raise TrainerLost(self._lost) from None

    async def _begin(self) -> None:
        world = self._spec.settings.ranks
        for number in range(world):
            self.ranks.append(await self._launch(number))
        self._lost = ""
        address = await self.ranks[0].call("listen", self._host)
        await self._all("start", world, address, self._spec, numbered=True)

    async def step(self, batch: TrainBatch) -> StepReport:
        """Version `batch.version` to the next."""
        if batch.version != self.version:
            raise InvariantViolated(f"the learner stands at version {self.version}; the batch is for {batch.version}")
        body = await asyncio.to_thread(pickle.dumps, batch, pickle.HIGHEST_PROTOCOL)
        async with self._turn:
            report: StepReport = (await self._all("step", body))[0]
            self.version = batch.version + 1
        return report

    async def publish(self, version: Version) -> Manifest:
        """Hand over the copy that the end of the last step (or load) took; it may overlap the next step."""
        if version != self.version:
            raise InvariantViolated(f"version {version} was to be published; the learner stands at {self.version}")
        return (await self._all("publish", version, only_first=True))[0]  # type: ignore[no-any-return]

    async def retire(self, manifest: Manifest) -> None:
        await self._all("retire", manifest, only_first=True)

    async def save(self, folder: Path) -> None:
        """Write the state as it is when this is called; steps may go on while it is written."""
        async with self._turn:
            await self._all("save", str(folder))
        await asyncio.to_thread(self._export, folder)
        await self._all("saved")

    async def load(self, folder: Path) -> None:
        """Go on from `folder` as if never stopped, with new processes if the ranks are lost."""
        if self._lost:
            return await self.restart(folder)
        async with self._turn:
            self.version = (await self._all("load", str(folder)))[0]

    def close(self) -> None:
        self._kill("it was closed")

    def _kill(self, reason: str) -> None:
        self._lost = reason
        for rank in self.ranks:
            rank.kill()
        self.ranks = []

    async def _all(self, method: str, *arguments: Any, numbered: bool = False, only_first: bool = False) -> list[Any]:
        """The answers of all ranks. When one fails, or this is given up, all are killed."""
        if self._lost:
            raise TrainerLost(f"the learner is lost: {self._lost}; load a checkpoint to go on")
        calls = [asyncio.ensure_future(rank.call(method, *((number,) if numbered else ()), *arguments))
                 for number, rank in enumerate(self.ranks[:1] if only_first else self.ranks)]
        try:
            done, rest = await asyncio.wait(calls, return_when=asyncio.FIRST_EXCEPTION)
            if rest or any(call.exception() for call in done):
                if rest:
                    await asyncio.wait(rest, timeout=DYING_SECONDS)
                raise self._failure(method, calls)
        except BaseException as error:
            self._kill(str(error) or f"{method} was given up")
            raise
        finally:
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
        return [call.result() for call in calls]

    def _failure(self, method: str, calls: Sequence[asyncio.Future[Any]]) -> BaseException:
        """A process that ended explains what the others say; our own mistakes come first."""
        errors = [call.exception() for call in calls if call.done() and call.exception()]
        errors.sort(key=lambda e: (not isinstance(e, InvariantViolated), " ended " not in str(e)))
        first = errors[0]
        if isinstance(first, TrainerLost):
            return TrainerLost(f"learner at version {self.version}, {method}: {first}")
        return first  # type: ignore[return-value]
