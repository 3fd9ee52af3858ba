"""A small process that has imported the domains once and forks a worker on each order, in about a millisecond.

Keeps true: no worker outlives it, and it does not outlive the main process (end of file on the control socket): it
kills what it forked, with whatever that started, by process group. It alone kills and reaps, so a process id is never
used after it went to somebody else. It holds no thread and none of the main process's memory.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import select
import signal
import socket
import sys
from typing import Any

from rollart.backends.process import wire, worker
from rollart.envs.domain import make_domain
from rollart.rewards.domains import reward_function

COMMAND = ("import json, sys; spec = json.load(sys.stdin); sys.path[:] = spec['path']; "
           "from rollart.backends.process.forkserver import main; main(spec)")
"""What `python -c` runs; it reads the specification from standard input."""

_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of <linux/prctl.h>


def main(spec: dict[str, Any]) -> None:
    """Serve until the main process hangs up. `spec`: path, fd, domains, rewards, memory_mb (see WorkerPool)."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # are for the main process, which then ends us
        signal.signal(number, signal.SIG_IGN)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    _Server(spec).run()


class _Server:
    def __init__(self, spec: dict[str, Any]) -> None:
        self._control = socket.socket(fileno=spec["fd"])
        self._memory_mb: int = spec["memory_mb"]
        self._domains = {(domain := make_domain(name, settings)).name: domain
                         for name, settings in spec["domains"].items()}
        self._rewards = {domain: reward_function(name) for domain, name in spec["rewards"].items()}
        self._prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None
        self._pids: dict[int, int] = {}  # worker's number -> process id
        self._woken, self._wake = os.pipe()
        for end in (self._woken, self._wake):
            os.set_blocking(end, False)
        gc.collect()
        gc.freeze()  # the collector then leaves the shared pages alone

    def run(self) -> None:
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake)
        while True:
            ready, _, _ = select.select([self._control, self._woken], [], [])
            if self._woken in ready:
                os.read(self._woken, 4096)
                self._reap()
            if self._control in ready and not self._order():
                break
        for pid in self._pids.values():
            _kill_group(pid)
        for pid in self._pids.values():
            os.waitpid(pid, 0)

    def _order(self) -> bool:
        """Take one order; False at end of file."""
        try:
            data, fds, _, _ = socket.recv_fds(self._control, wire.CONTROL.size, 1)
        except ConnectionResetError:  # it hung up with reports unread
            return False
        if len(data) < wire.CONTROL.size:
            return False
        kind, number = wire.CONTROL.unpack(data)
        if kind == wire.KILL:
            if number in self._pids:
                _kill_group(self._pids[number])
        else:
            with socket.socket(fileno=fds[0]) as connection:
                self._fork(number, connection)
        return True

    def _fork(self, number: int, connection: socket.socket) -> None:
        try:
            pid = os.fork()
        except OSError as error:
            self._report(number, f"could not be forked: {error}")
            return
        if pid == 0:
            try:
                self._become_worker(connection)
            finally:
                os._exit(1)  # whatever happened, never go on as a second fork server
        self._pids[number] = pid
        _own_group(pid)

    def _become_worker(self, connection: socket.socket) -> None:
        if self._prctl is not None:
            self._prctl(_DIE_WITH_PARENT, signal.SIGKILL)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        _own_group(0)
        self._control.close()
        os.close(self._woken)
        os.close(self._wake)
        worker.limit_memory(self._memory_mb)
        worker.serve(connection, self._domains, self._rewards)
        os._exit(0)

    def _reap(self) -> None:
        while self._pids:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            number = next((n for n, p in self._pids.items() if p == pid), None)
            if number is None:
                continue
            del self._pids[number]
            _kill_group(pid)  # what it started and left behind
            code = os.waitstatus_to_exitcode(status)
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
            self._report(number, how)

    def _report(self, number: int, end: str) -> None:
        try:
            self._control.sendall(json.dumps([number, end]).encode() + b"\n")
        except (BrokenPipeError, ConnectionResetError):
            pass  # the main process has gone: the next order is the end of file


def _own_group(pid: int) -> None:
    """Both sides of a fork call it, so that the group exists whoever runs first."""
    try:
        os.setpgid(pid, pid)
    except (PermissionError, ProcessLookupError):
        pass


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except (PermissionError, ProcessLookupError):
        pass
