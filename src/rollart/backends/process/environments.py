"""Environments in worker processes, one at a time in each.

Keeps true: a hang, a crash, a memory blow-up or global state of one environment harms no other; a cancelled call
leaves no process behind; every error names the task, the domain, the stage and the seconds. What is opened ahead of
time is what the next tasks need, in processes beyond those of the running episodes; it is used once, by its own task,
and an opening that failed ahead of time is done again by whoever asks. It waits for a free process, for the opening and
for each step, each with its own deadline.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from rollart.backends.process.pool import NoFreeWorker, Worker, WorkerFailed, WorkerPool
from rollart.core.clock import now
from rollart.core.errors import EnvironmentFailed
from rollart.core.ranges import above, at_least
from rollart.core.types import Action, Observation, Task
from rollart.envs.domain import make_domain
from rollart.observe.payload import observation

_AHEAD_SECONDS = 300.0  # what was opened ahead of time and not asked for since is closed again


@dataclass(frozen=True, kw_only=True)
class ProcessSettings:
    """max_processes: environments open at a time; more wait (processes; 0: as many as the run can have open).

    memory_mb: how much a process may grow (10^6 bytes; enforced on Linux).
    message_mb: the largest answer of an environment (10^6 bytes).
    idle_processes: kept for the next opening (processes; about 3 MB each).
    preopen: environments of the next tasks opened while the present ones run (beyond max_processes; 0: none). For those
    whose opening takes long: a group's, or a batch's, opens then cost no waiting. Refused on a cluster.
    """

    max_processes: int = 0
    memory_mb: int = 1024
    message_mb: int = 16
    idle_processes: int = 256
    preopen: int = 0

    def __post_init__(self) -> None:
        above(self, 0, "memory_mb", "message_mb")
        at_least(self, 0, "max_processes", "idle_processes", "preopen")


@dataclass(frozen=True)
class ProcessStats:
    """Processes now (live, idle of them) and counts so far: environments opened, failed calls, processes killed.

    ahead: openings that found theirs begun ahead of time.
    """

    live: int
    idle: int
    opened: int
    failed: int
    killed: int
    ahead: int = 0


class ProcessEnvironments:
    """An EnvironmentPool over domains, given as settings by name. Raises ConfigError for what no domain knows.

    Deadlines in seconds: wait (a process is free), open (with the first observation), call (a step, a close).
    `upcoming` gives the tasks of the next openings, as often as each will be opened; set it where `preopen` is to work.
    """

    def __init__(self, domains: Mapping[str, Mapping[str, Any]], settings: ProcessSettings, *,
                 wait_seconds: float = 600.0, open_seconds: float = 60.0, call_seconds: float = 60.0) -> None:
        self._known = {make_domain(name, values).name for name, values in domains.items()}
        self._wait_seconds, self._open_seconds, self._call_seconds = wait_seconds, open_seconds, call_seconds
        self.upcoming: Callable[[], Iterator[Task]] = lambda: iter(())
        self._preopen = settings.preopen
        self._ahead: dict[str, list[tuple[asyncio.Task[_ProcessEnvironment], float]]] = {}  # by task id; and since when
        self._closed = False
        self._workers = WorkerPool(domains=domains, rewards={},
                                   processes=(settings.max_processes or 64) + settings.preopen,
                                   idle=settings.idle_processes, memory_mb=settings.memory_mb,
                                   message_mb=settings.message_mb)
        self._opened = self._failed = self._found = 0

    def stats(self) -> ProcessStats:
        workers = self._workers
        return ProcessStats(workers.live, workers.idle, self._opened, self._failed, workers.killed, self._found)

    async def open(self, task: Task) -> _ProcessEnvironment:
        """Open in a process of its own. Raises EnvironmentFailed; whoever asked decides whether to try again."""
        if task.domain not in self._known:
            raise EnvironmentFailed(f"{task.id}: no domain {task.domain!r} in this pool")
        try:
            return await self._opened_ahead(task) or await self._open(task, self._wait_seconds)
        except NoFreeWorker as full:
            raise EnvironmentFailed(f"{_where(task, 'open')}: {full} (max_processes)") from None
        except WorkerFailed as failure:
            self._failed += 1
            raise EnvironmentFailed(f"{_where(task, 'open')}: {failure}") from None
        finally:
            self._open_ahead()

    async def close(self) -> None:
        """Kill every process, open or idle, and wait until they are gone."""
        self._closed = True
        for opening, _ in [ahead for waiting in self._ahead.values() for ahead in waiting]:
            opening.cancel()
        await self._workers.close()

    async def _opened_ahead(self, task: Task) -> _ProcessEnvironment | None:
        """The environment that was opened for this task, or is being opened; None: there is none, or it failed."""
        waiting = self._ahead.get(task.id, [])
        while waiting:
            try:
                environment = await waiting.pop(0)[0]
            except (WorkerFailed, NoFreeWorker) as failure:
                self._failed += isinstance(failure, WorkerFailed)
                continue
            if environment.alive:
                self._found += 1
                return environment
        return None

    def _open_ahead(self) -> None:
        """Let as many openings as `preopen` be under way or ready, for the next tasks."""
        time, wanted = now(), [] if self._closed else list(islice(self.upcoming(), self._preopen))
        count = {task.id: 0 for task in wanted}
        for task in wanted:
            count[task.id] += 1
            waiting = self._ahead.setdefault(task.id, [])
            if len(waiting) < count[task.id] and sum(map(len, self._ahead.values())) < self._preopen:
                opening = asyncio.create_task(self._open(task, 0.0), name=f"open ahead {task.id}")
                opening.add_done_callback(lambda done: done.cancelled() or done.exception())  # whoever asks opens anew
                waiting.append((opening, time))
        for id, waiting in list(self._ahead.items()):
            for ahead in [ahead for ahead in waiting if id not in count and time - ahead[1] > _AHEAD_SECONDS]:
                waiting.remove(ahead)
                ahead[0].add_done_callback(_discard)
                ahead[0].cancel()
            if not waiting:
                del self._ahead[id]

    async def _open(self, task: Task, wait_seconds: float) -> _ProcessEnvironment:
        worker = await self._workers.take(wait_seconds)
        try:
            first = await worker.call("open", task, seconds=self._open_seconds)
        except BaseException:
            self._workers.kill(worker)
            raise
        self._opened += 1
        return _ProcessEnvironment(self, self._workers, task, worker, observation(first))


def _discard(opening: asyncio.Task[_ProcessEnvironment]) -> None:
    if not opening.cancelled() and not opening.exception():
        opening.result().kill()


class _ProcessEnvironment:
    """One episode in its process. `_worker` is None once the process is no longer ours."""

    def __init__(self, pool: ProcessEnvironments, workers: WorkerPool, task: Task, worker: Worker,
                 first: Observation) -> None:
        self._pool, self._workers, self._task, self._first = pool, workers, task, first
        self._worker: Worker | None = worker
        self._busy = False

    @property
    def alive(self) -> bool:
        return self._worker is not None and not self._worker.ended.done()

    def kill(self) -> None:
        """End its process, whatever it does."""
        if self._worker is not None:
            self._workers.kill(self._worker)
        self._worker = None

    async def first(self) -> Observation:
        return self._first

    async def step(self, action: Action) -> Observation:
        return observation(await self._call("step", str(action.text), action.truncated))

    async def close(self) -> None:
        if self._busy:  # a step of somebody else is still under way: it ends here
            self.kill()
        worker = self._worker
        if worker is None:
            return
        try:
            await self._call("close")
        except EnvironmentFailed:
            return
        self._worker = None
        self._workers.give_back(worker)

    async def _call(self, *parts: Any) -> Any:
        """Whatever goes wrong, its process is killed."""
        worker = self._worker
        if worker is None:
            raise EnvironmentFailed(f"{_where(self._task, parts[0])}: it is closed or has failed before")
        self._busy = True
        try:
            return await worker.call(*parts, seconds=self._pool._call_seconds)
        except BaseException as error:
            self.kill()
            if not isinstance(error, WorkerFailed):
                raise
            self._pool._failed += 1
            raise EnvironmentFailed(f"{_where(self._task, parts[0])}: {error}") from None
        finally:
            self._busy = False


def _where(task: Task, stage: str) -> str:
    return f"{task.id}: {stage} in domain {task.domain}"
