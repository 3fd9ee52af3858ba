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
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import wraps
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from rollart.algo.settings import AlgoSettings
from rollart.backends.torch.checkpoint import read_model
from rollart.backends.torch.fsdp import Sharded
from rollart.backends.torch.settings import LearnerSettings
from rollart.backends.torch.shapes import ModelConfig
from rollart.backends.torch.step import StepWork, check, check_finite
from rollart.backends.torch.threads import choose_device
from rollart.backends.torch.transformer import Transformer
from rollart.backends.weights import WeightsSettings, open_writer
from rollart.backends.weights.memory import load_into
from rollart.core.errors import InvariantViolated, RollArtError, TrainerLost
from rollart.core.types import Manifest, StepReport, TrainBatch, Version
from rollart.observe.run_folder import sync

Source = str | tuple[ModelConfig, Mapping[str, Tensor]]
"""A model: its Hugging Face folder, or its shape and tensors."""

TRIES = 2
"""Starts of all ranks before the learner is lost: now and then one aborts without a reason."""
DYING_SECONDS = 2.0
"""So long may a rank take to close its part, or to say what the first failure of another was about."""


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


def _in_turn(method: Callable[..., Any]) -> Callable[..., Any]:
    """Run it in the rank's one thread, behind what was called before."""

    @wraps(method)
    def call(self: RankWorker, *arguments: Any) -> Any:
        try:
            return self._thread.submit(method, self, *arguments).result()
        except (RuntimeError, OSError, ValueError, SafetensorError) as error:  # torch raises RuntimeError for all
            raise TrainerLost(f"{type(error).__name__}: {error}") from error

    return call


class RankWorker:
    """One rank. Plain methods that block; `publish` and `retire` (of rank 0 only) and `saved` may be called beside the
    others. Only rank 0's `step` has a result. Raises TrainerLost; a rank is of no use after that."""

    def __init__(self) -> None:
        self._thread, self._beside = ThreadPoolExecutor(1, "learner"), ThreadPoolExecutor(1, "checkpoint")
        self._store: dist.TCPStore | None = None
        self._writer: Any = None
        self._publishing = threading.Lock()
        self._copies: dict[Version, dict[str, Tensor]] = {}
        self._saving: list[Future[Any]] = []

    def listen(self, host: str = "127.0.0.1") -> str:
        """Of rank 0: host:port where the ranks meet. `host` is this machine as the others reach it."""
        self._store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
        return f"{host}:{self._store.port}"

    @_in_turn
    def start(self, rank: int, world: int, address: str, spec: RankSpec) -> None:
        """Join the others and load the first weights: version 0."""
        self.close()  # what it may have had before
        settings = spec.settings
        torch.set_num_threads(settings.threads or 1)
        host, _, port = address.rpartition(":")
        limit = timedelta(seconds=settings.rank_seconds)
        store = self._store if rank == 0 else dist.TCPStore(host, int(port), is_master=False, timeout=limit)
        self._rank, self._ranks = rank, Sharded(rank, world, store, choose_device(settings.device, rank), limit)
        given = [read_model(model) if isinstance(model, str) else model
                 for model in (spec.model, spec.reference) if model]
        with torch.device("meta"):
            models = [Transformer(config) for config, _ in given]
        self._work = StepWork(models[0], settings, spec.algo, spec.temperature, spec.seed, self._ranks,
                              reference=models[1] if spec.reference else None)
        for model, (_, tensors) in zip(models, given, strict=True):
            self._fill(model, tensors)
        if self._work.critic is not None:
            config, tensors = given[0]
            body = {f"body.{name}": tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
            self._fill(self._work.critic, {**body, "value.weight": torch.zeros(1, config.width),
                                           "value.bias": torch.zeros(1)})
        if rank == 0:
            self._writer = open_writer(spec.weights)
        self._stand(0)

    @_in_turn
    def step(self, batch: TrainBatch | bytes) -> StepReport | None:
        """Version `batch.version` to the next; every rank is given the whole batch, pickled or not."""
        batch = pickle.loads(batch) if isinstance(batch, bytes) else batch
        if batch.version != self._version:
            raise InvariantViolated(f"rank {self._rank} stands at version {self._version}, not {batch.version}")
        report = self._work.step(batch)
        self._stand(batch.version + 1, self._work.copy)
        return report if self._rank == 0 else None

    def publish(self, version: Version) -> Manifest:
        """Hand over what the end of the last step (or load) gathered; it may overlap the next step."""
        copy = self._copies[version]
        with self._publishing:
            manifest: Manifest = self._writer.put(version, copy)
        self._copies.pop(version - 1, None)
        return manifest

    def retire(self, manifest: Manifest) -> None:
        self._writer.drop(manifest)

    @_in_turn
    def save(self, folder: str) -> None:
        """Begin to write: the state is copied when this returns, and on disk when `saved` does."""
        self.saved()  # the one before
        if self._rank == 0:
            check_finite(self._copies[self._version], self._version)
        self._folder = Path(folder)
        self._saving = [self._ranks.write(self._work.tensors(self._version), self._folder)]
        if self._rank == 0:
            self._saving.append(self._beside.submit(save_file, self._copies[self._version],
                                                    self._folder / "model.safetensors", {"format": "pt"}))

    def saved(self) -> None:
        """Wait until the last `save` is whole and on disk."""
        for written in self._saving:
            if error := written.exception():  # not always an Exception
                raise TrainerLost(f"checkpoint: {type(error).__name__}: {error}")
        if len(self._saving) > 1:
            sync(*self._folder.rglob("*"), self._folder)

    @_in_turn
    def load(self, folder: str) -> Version:
        """Go on from what any number of ranks saved, or the learner of one process."""
        tensors = self._work.tensors(0)
        self._ranks.read(tensors, Path(folder))
        self._fill(self._work.model, load_file(Path(folder) / "model.safetensors"))
        self._work.skipped, self._copies = 0, {}
        self._stand(int(tensors["version"]))
        return self._version

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _fill(self, module: torch.nn.Module, tensors: Mapping[str, Tensor]) -> None:
        load_into(module, {name: self._ranks.part(whole) for name, whole in tensors.items()})

    def _stand(self, version: Version, copy: dict[str, Tensor] | None = None) -> None:
        """At `version`; the weights of the one before are kept for a publish under way."""
        before = self._copies.get(version - 1, {})
        self._copies = {version - 1: before, version: self._work.snapshot() if copy is None else copy}
        self._version = version


class Rank(Protocol):
    """A RankWorker somewhere. `call` raises TrainerLost once it is dead; the others never raise or wait."""

    async def call(self, method: str, *arguments: Any) -> Any: ...
    def close(self) -> None: ...
    def kill(self) -> None: ...


class ProcessRank:
    """A rank in a process of this machine, asked and answering in pickles (not those of multiprocessing, which hand
    tensors over as files). It ends when this one hangs up or is gone; Ctrl-C is not for it."""

    def __init__(self, number: int) -> None:
        self._pipe, theirs = Pipe()
        environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", "from rollart.backends.torch.ranks import serve; serve()", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, env=environment)
        self.pid, self._name, self._lost = self._process.pid, f"rank {number} (process {self._process.pid})", ""
        self._waiting: dict[int, Future[Any]] = {}
        self._numbers, self._sending = itertools.count(), threading.Lock()
        threading.Thread(target=self._read, name=self._name, daemon=True).start()

    async def call(self, method: str, *arguments: Any) -> Any:
        number, future = next(self._numbers), Future[Any]()
        future.set_running_or_notify_cancel()  # so that an answer may come after this was cancelled
        self._waiting[number] = future
        await asyncio.to_thread(self._send, (number, method, arguments))
        if self._lost:
            raise TrainerLost(self._lost)
        return await asyncio.wrap_future(future)

    def _send(self, request: Any) -> None:
        with self._sending, suppress(OSError):  # `_read` tells
            self._pipe.send_bytes(pickle.dumps(request))

    def _read(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                number, well, value = pickle.loads(self._pipe.recv_bytes())
                future = self._waiting.pop(number)
                future.set_result(value) if well else future.set_exception(value)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(DYING_SECONDS)
        self._process.kill()
        code = self._process.wait()
        self._lost = f"{self._name} ended " + (f"by signal {-code}" if code < 0 else f"with code {code}")
        for future in list(self._waiting.values()):
            future.set_exception(TrainerLost(self._lost))

    def close(self) -> None:
        self._send(None)

    def kill(self) -> None:
        self._process.kill()


def serve() -> None:
    """A rank's process: serve the pipe whose number is the argument, until the other side hangs up."""
    import torch.distributed.checkpoint
    import torch.distributed.fsdp  # noqa: F401  now, for they take seconds

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # are for the main process, which then ends us
        signal.signal(number, signal.SIG_IGN)
    pipe = Connection(int(sys.argv[1]))
    worker, threads, sending = RankWorker(), ThreadPoolExecutor(8), threading.Lock()

    def answer(number: int, method: str, arguments: Sequence[Any]) -> None:
        try:
            well, value = True, getattr(worker, method)(*arguments)
        except (RollArtError, InvariantViolated) as error:
            well, value = False, error
        except Exception as error:  # noqa: BLE001  the process's edge: whatever it was, the caller must hear of it
            well, value = False, TrainerLost(f"{type(error).__name__}: {error}")
        with sending, suppress(OSError):
            pipe.send_bytes(pickle.dumps((number, well, value)))

    with suppress(EOFError, OSError):
        while request := pickle.loads(pipe.recv_bytes()):
            threads.submit(answer, *request)
    threading.Timer(DYING_SECONDS, os._exit, (1,)).start()  # threads may hang in a collective
    worker.close()
    os._exit(0)


class RankedTrainer:
    """Implements the `Trainer` port over N ranks; `start` or `load` comes first. Raises TrainerLost, ConfigError.

    `launch` starts the process of a rank: on this machine, or elsewhere. `host`: the machine of rank 0 as the others
    reach it. `export` writes what a checkpoint folder needs beside the weights to be a Hugging Face folder.
    """

    def __init__(self, spec: RankSpec, launch: Callable[[int], Awaitable[Rank]] | None = None, *,
                 host: str = "127.0.0.1", export: Callable[[Path], None] = lambda folder: None) -> None:
        check(spec.settings, spec.algo, spec.temperature, reference=spec.reference is not None, adapters=False)
        self.version, self._lost = 0, "its ranks were not started"
        self.ranks: list[Rank] = []
        self._spec, self._launch, self._host, self._export = spec, launch, host, export
        self._turn = asyncio.Lock()

    async def start(self) -> None:
        """All ranks, at version 0."""
        await self.restart(None)

    async def restart(self, folder: Path | None) -> None:
        """End all ranks and start them again, from a checkpoint or (None) the first weights."""
        seconds = self._spec.settings.rank_seconds
        async with self._turn:
            for _ in range(TRIES):
                self._kill("it is started again")
                try:
                    async with asyncio.timeout(seconds):
                        await self._begin()
                        self.version = (await self._all("load", str(folder)))[0] if folder else 0
                        return
                except (TrainerLost, TimeoutError) as error:
                    self._kill(str(error) or f"not up within {seconds:g} s (learner.rank_seconds)")
            raise TrainerLost(self._lost)

    async def _begin(self) -> None:
        for number in range(self._spec.settings.ranks):
            self.ranks.append(await self._launch(number) if self._launch else ProcessRank(number))
        self._lost = ""
        address = await self.ranks[0].call("listen", self._host)
        await self._all("start", len(self.ranks), address, self._spec, numbered=True)

    async def step(self, batch: TrainBatch) -> StepReport:
        """Version `batch.version` to the next."""
        if batch.version != self.version:
            raise InvariantViolated(f"the learner stands at version {self.version}; the batch is for {batch.version}")
        body = await asyncio.to_thread(pickle.dumps, batch)
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
        for rank in self.ranks:
            rank.close()
        self.ranks, self._lost = [], "it was closed"

    def _kill(self, reason: str) -> None:
        for rank in self.ranks:
            rank.kill()
        self.ranks, self._lost = [], reason

    async def _all(self, method: str, *arguments: Any, numbered: bool = False, only_first: bool = False) -> list[Any]:
        """The answers of all ranks. When one fails, or this is given up, all are killed."""
        if self._lost:
            raise TrainerLost(f"the learner is lost: {self._lost}; load a checkpoint to go on")
        calls = [asyncio.ensure_future(rank.call(method, *((number,) if numbered else ()), *arguments))
                 for number, rank in enumerate(self.ranks[:1] if only_first else self.ranks)]
        try:
            _, rest = await asyncio.wait(calls, return_when=asyncio.FIRST_EXCEPTION)
            if rest:
                await asyncio.wait(rest, timeout=DYING_SECONDS)
            errors = [error for call in calls if call.done() and (error := call.exception())]
            if errors:  # a process that ended explains what the others say; our own mistakes come first
                first = min(errors, key=lambda e: (isinstance(e, TrainerLost), " ended " not in str(e)))
                raise TrainerLost(f"learner at version {self.version}, {method}: {first}") if isinstance(
                    first, TrainerLost) else first
            return [call.result() for call in calls]
        except BaseException as error:
            self._kill(str(error) or f"{method} was given up")
            raise
        finally:
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
