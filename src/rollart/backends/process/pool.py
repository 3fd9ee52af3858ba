"""Worker processes as the main process sees them: take one, call it, give it back or kill it.

Keeps true: at most `processes` workers are taken at a time, each by one user; a worker that failed, was late or whose
call was cancelled is killed and never used again; after `close` no process is left. It waits for a free worker and for
answers, both with a deadline that the caller states. There are no threads: sockets on the running event loop.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Mapping
from typing import Any

from rollart.backends.process import wire
from rollart.backends.process.forkserver import COMMAND
from rollart.core.foreign import read_json

_END_SECONDS = 5.0  # for the fork server to end at close
_REPORT_SECONDS = 1.0  # for the fork server to say how a worker ended


class WorkerFailed(Exception):
    """A worker died, was late, or its code raised. The caller turns it into the error of its port."""


class CodeRaised(WorkerFailed):
    """The code in the worker raised; the text begins with the exception's name."""


class NoFreeWorker(Exception):
    """No worker became free in time, or the pool is closed."""


class Worker:
    """One process. `ended` holds how it ended, once it has."""

    def __init__(self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter,
                 message_bytes: int) -> None:
        self.number, self.writer = number, writer
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._reader, self._message_bytes = reader, message_bytes

    async def call(self, *parts: Any, seconds: float) -> Any:
        """Send a request and return the answer's value. Raises WorkerFailed; then, or if cancelled, kill the worker."""
        request = wire.request(*parts)
        try:
            async with asyncio.timeout(seconds):
                self.writer.write(request)
                await self.writer.drain()
                size = wire.HEADER.unpack(await self._reader.readexactly(wire.HEADER.size))[0]
                if size > self._message_bytes:
                    raise WorkerFailed(f"its answer has {size} bytes, above the limit of {self._message_bytes}")
                body = await self._reader.readexactly(size)
        except TimeoutError:
            raise WorkerFailed(f"no answer within {seconds:g} s, its process was killed") from None
        except (asyncio.IncompleteReadError, ConnectionError):
            await asyncio.wait([self.ended], timeout=_REPORT_SECONDS)
            raise WorkerFailed(f"its process {self.ended.result() if self.ended.done() else 'hung up'}") from None
        try:
            ok, value = read_json(body)
        except (ValueError, TypeError) as error:
            raise WorkerFailed(f"its answer cannot be read: {error}") from None
        if not ok:
            raise CodeRaised(value)
        return value


class WorkerPool:
    """Workers forked from one fork server, which starts with the first of them.

    domains: settings by domain name; rewards: reward name by domain name; processes: workers at most;
    idle: of them kept alive while nobody uses them; memory_mb: growth of each (10^6 bytes, Linux only);
    message_mb: the largest answer (10^6 bytes).
    """

    def __init__(self, *, domains: Mapping[str, Mapping[str, Any]], rewards: Mapping[str, str], processes: int,
                 idle: int, memory_mb: int, message_mb: int) -> None:
        self._spec = {"domains": {name: dict(settings) for name, settings in domains.items()},
                      "rewards": dict(rewards), "memory_mb": memory_mb}
        self._processes, self._idle_limit, self._message_bytes = processes, idle, message_mb * 1_000_000
        self._slots = asyncio.Semaphore(processes)
        self._workers: dict[int, Worker] = {}  # alive, as far as is known
        self._taken: set[int] = set()
        self._idle: list[Worker] = []
        self._numbers = 0
        self._server: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._orders: deque[tuple[bytes, socket.socket | None]] = deque()  # to the fork server; one per live worker
        self._reports = b""
        self._closed = False
        self.killed = 0

    @property
    def live(self) -> int:
        """Processes that have not ended."""
        return len(self._workers)

    @property
    def idle(self) -> int:
        return len(self._idle)

    async def take(self, seconds: float) -> Worker:
        """A worker for one user. Raises NoFreeWorker after `seconds`, WorkerFailed if it cannot be started."""
        try:
            async with asyncio.timeout(seconds):
                await self._slots.acquire()
        except TimeoutError:
            full = f"none of {self._processes} processes was free within {seconds:g} s: allow more"
            raise NoFreeWorker(full) from None
        worker = None
        try:
            if self._closed:
                raise NoFreeWorker("the pool is closed")
            worker = self._idle.pop() if self._idle else await self._spawn()
            self._taken.add(worker.number)
            return worker
        finally:
            if worker is None:
                self._slots.release()

    def give_back(self, worker: Worker) -> None:
        """It answered its last call, so it may serve the next user."""
        self._untake(worker)
        if worker.number in self._workers and len(self._idle) < self._idle_limit:
            self._idle.append(worker)
        else:
            worker.writer.close()  # end of file: it ends by itself

    def kill(self, worker: Worker) -> None:
        """End it now, whatever it does."""
        if worker.number in self._workers:
            self.killed += 1
            self._send(wire.KILL, worker.number)
        worker.writer.transport.abort()
        self._untake(worker)

    async def close(self) -> None:
        """Kill all workers and the fork server, and wait until they are gone."""
        self._closed = True
        self._idle.clear()
        for worker in list(self._workers.values()):
            self.kill(worker)
        server = self._server
        self._server_gone()
        if server is None:
            return
        deadline = asyncio.get_running_loop().time() + _END_SECONDS
        while server.poll() is None:
            if asyncio.get_running_loop().time() > deadline:
                server.kill()
            await asyncio.sleep(0.005)

    def _untake(self, worker: Worker) -> None:
        if worker.number in self._taken:
            self._taken.remove(worker.number)
            self._slots.release()

    async def _spawn(self) -> Worker:
        if self._server is None:
            self._start_server()
        self._numbers += 1
        number = self._numbers
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:
            raise WorkerFailed(f"no socket for a new process: {error} (raise ulimit -n)") from None
        ours.setblocking(False)
        try:
            reader, writer = await asyncio.open_unix_connection(sock=ours)
        except BaseException:
            ours.close()
            theirs.close()
            raise
        worker = Worker(number, reader, writer, self._message_bytes)
        self._workers[number] = worker
        self._send(wire.SPAWN, number, theirs)
        return worker

    def _start_server(self) -> None:
        self._control, theirs = socket.socketpair()
        spec = json.dumps({**self._spec, "path": sys.path, "fd": theirs.fileno()}).encode()
        one_thread = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        with theirs:
            self._server = subprocess.Popen([sys.executable, "-c", COMMAND], stdin=subprocess.PIPE,
                                            pass_fds=[theirs.fileno()], env={**os.environ, **one_thread})
        with self._server.stdin as pipe:
            pipe.write(spec)
        self._control.setblocking(False)
        asyncio.get_running_loop().add_reader(self._control, self._read_reports)

    def _send(self, kind: bytes, number: int, connection: socket.socket | None = None) -> None:
        """Order a spawn, whose `connection` is closed here once the fork server has it, or a kill."""
        self._orders.append((wire.CONTROL.pack(kind, number), connection))
        self._flush()

    def _flush(self) -> None:
        control, loop = self._control, asyncio.get_running_loop()
        if control is None:  # it went while a worker was being connected
            self._server_gone()
            return
        try:
            while self._orders:
                record, connection = self._orders[0]
                socket.send_fds(control, [record], [] if connection is None else [connection.fileno()])
                self._orders.popleft()
                if connection is not None:
                    connection.close()
        except BlockingIOError:  # a burst: the rest follows when there is room
            loop.add_writer(control, self._flush)
        except ConnectionError:
            self._server_gone()
        else:
            loop.remove_writer(control)

    def _read_reports(self) -> None:
        """How workers ended, one JSON line each: [number, text]."""
        try:
            data = self._control.recv(65536)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        if not data:
            self._server_gone()
            return
        *lines, self._reports = (self._reports + data).split(b"\n")
        for line in lines:
            self._ended(*json.loads(line))

    def _ended(self, number: int, how: str) -> None:
        worker = self._workers.pop(number, None)
        if worker is None:
            return
        if not worker.ended.done():
            worker.ended.set_result(how)
        if worker in self._idle:
            self._idle.remove(worker)
            worker.writer.close()

    def _server_gone(self) -> None:
        control, self._control, self._server, self._reports = self._control, None, None, b""
        if control is not None:
            asyncio.get_running_loop().remove_reader(control)
            asyncio.get_running_loop().remove_writer(control)
            control.close()
        for _, connection in self._orders:
            if connection is not None:
                connection.close()
        self._orders.clear()
        for number in list(self._workers):
            self._ended(number, "ended with its fork server")
