"""The owner's side of a sandbox, and those that wait ready.

Keeps true: a sandbox serves one user and is never used again; it ends with the process that opened it, also when that
is killed; nothing of it is left on this machine. What it answers is data: lengths are checked and nothing in it is run.
Every call has a deadline; past it the sandbox is ended and SandboxFailed raised. Not for several threads at once.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

from rollart.core.errors import SandboxFailed
from rollart.sandbox.launch import choose, environment, start
from rollart.sandbox.settings import SandboxSettings

OPEN_SECONDS = 60.0
GRACE_SECONDS = 15.0
"""An answer may come so long after a command's deadline, before the sandbox is taken for lost."""
_MANY = 8  # templates whose sandboxes are kept warm in one process


@dataclass(frozen=True, slots=True)
class Ran:
    """How a command ended. code: its exit code, negative for a signal, 127 where it could not be started.

    truncated: more was written than is kept. seconds: on the clock.
    """

    stdout: str
    stderr: str
    code: int
    timed_out: bool
    truncated: bool
    seconds: float


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The work folder's content, as a tar file; of use in any sandbox."""

    data: bytes


class Sandbox:
    """Made by `open_sandbox`; a context manager. `work`: the work folder's path inside."""

    def __init__(self, settings: SandboxSettings, kind: str, template: Path | None) -> None:
        self.settings, self.kind = settings, kind
        self._key = (settings, template)
        self._process, self.work = start(kind, settings, template)
        self._ready = False
        _open.add(self)
        for pipe in (self._process.stdin, self._process.stdout):
            os.set_blocking(pipe.fileno(), False)  # type: ignore[union-attr]

    def run(self, command: str | Sequence[str], *, seconds: float | None = None, stdin: str | bytes = "",
            env: Mapping[str, str] | None = None, cwd: str = "") -> Ran:
        """Run a program with arguments, or a text with the shell; what it started ends with it. Raises SandboxFailed.

        seconds: deadline (default: the settings'). env: beside PATH, HOME and LANG. cwd: in the work folder.
        """
        given = stdin.encode() if isinstance(stdin, str) else stdin
        answer, out, err = self._call(command, seconds, given, self.settings.output_bytes, env or {}, cwd)
        return Ran(out.decode(errors="replace"), err.decode(errors="replace"), answer["code"], answer["timed_out"],
                   answer["truncated"], answer["seconds"])

    def read(self, path: str) -> bytes:
        """A file's content, as a command inside would read it. Raises FileNotFoundError, OSError, SandboxFailed."""
        return self._plain('[ -e "$1" ] || exit 44; [ -f "$1" ] || { echo no file >&2; exit 1; }; exec cat -- "$1"', path)

    def write(self, path: str, data: bytes | str) -> None:
        """Make or replace a file and its folders; a link is replaced, not followed. Raises OSError, SandboxFailed."""
        self._plain('mkdir -p -- "$(dirname -- "$1")" && t=$(mktemp -p "$(dirname -- "$1")") && cat > "$t" && '
                    'chmod 644 -- "$t" && mv -fT -- "$t" "$1" || { rm -f -- "$t"; exit 1; }',
                    path, data.encode() if isinstance(data, str) else data)

    def snapshot(self) -> Snapshot:
        """The work folder as it is now. Raises OSError, SandboxFailed."""
        return Snapshot(self._plain("exec tar -cf - .", ""))

    def restore(self, snapshot: Snapshot) -> None:
        """Make the work folder what it was; whatever else is in it goes. Raises OSError, SandboxFailed."""
        self._plain("chmod -R u+rwX . && find . -mindepth 1 -delete && exec tar -xf -", "", snapshot.data)

    def close(self) -> None:
        """End it with all that runs in it. May be called again."""
        if self._process.returncode is not None:
            return
        _open.discard(self)
        self._process.stdin.close()  # type: ignore[union-attr]
        try:
            if self.kind != "bubblewrap":
                self._process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            pass
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait()
        for pipe in (self._process.stdout, self._process.stderr):
            pipe.close()  # type: ignore[union-attr]
        if self.kind == "trust":
            shutil.rmtree(self.work, ignore_errors=True)

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _plain(self, script: str, path: str, given: bytes = b"") -> bytes:
        """A script of ours, with the path as its argument."""
        limit = int(self.settings.disk_mb * 2e6) + (1 << 20)
        answer, out, err = self._call(["/bin/sh", "-c", script, "sh", path], None, given, limit, {}, "")
        if answer["code"] == 44:
            raise FileNotFoundError(2, "no such file in the sandbox", path)
        if answer["code"] or answer["truncated"]:
            raise OSError(f"{path or 'the work folder'} in the sandbox: "
                          f"{err.decode(errors='replace').strip()[-200:] or 'too large or too slow'}")
        return out

    def _call(self, command: str | Sequence[str], seconds: float | None, given: bytes, output: int,
              env: Mapping[str, str], cwd: str) -> tuple[dict[str, Any], bytes, bytes]:
        seconds = self.settings.seconds if seconds is None else seconds
        header = json.dumps({"command": command if isinstance(command, str) else list(command), "seconds": seconds,
                             "output": output, "cwd": cwd, "env": environment(self.kind, self.work, env)}).encode()
        self._wait_ready()
        deadline = monotonic() + seconds + GRACE_SECONDS
        self._send(struct.pack(">II", len(header), len(given)) + header + given, deadline)
        lengths = struct.unpack(">III", self._receive(12, deadline))
        if lengths[0] > 4096 or max(lengths[1:]) > output + 100:
            raise self._lost(f"it sent an answer of {sum(lengths)} bytes")
        header, out, err = (self._receive(length, deadline) for length in lengths)
        return json.loads(header), out, err

    def _wait_ready(self) -> None:
        if not self._ready and self._receive(5, monotonic() + OPEN_SECONDS) != b"ready":
            raise self._lost("it did not start")
        self._ready = True

    def _send(self, data: bytes, deadline: float) -> None:
        view, fd = memoryview(data), self._process.stdin.fileno()  # type: ignore[union-attr]
        while view:
            self._poll(fd, select.POLLOUT, deadline)
            try:
                view = view[os.write(fd, view[:1 << 20]):]
            except BlockingIOError:
                continue
            except OSError as error:
                raise self._lost(str(error)) from None

    def _receive(self, count: int, deadline: float) -> bytes:
        parts, fd = bytearray(), self._process.stdout.fileno()  # type: ignore[union-attr]
        while len(parts) < count:
            self._poll(fd, select.POLLIN, deadline)
            data = os.read(fd, min(count - len(parts), 1 << 20))
            if not data:
                raise self._lost("it ended")
            parts += data
        return bytes(parts)

    def _poll(self, fd: int, event: int, deadline: float) -> None:
        poll = select.poll()
        poll.register(fd, event)
        if not poll.poll(max(0.0, deadline - monotonic()) * 1000):
            raise self._lost("it gave no answer in time")

    def _lost(self, why: str) -> SandboxFailed:
        os.killpg(self._process.pid, signal.SIGKILL)
        said = self._process.stderr.read(1000).decode(errors="replace").strip()  # type: ignore[union-attr]
        self.close()
        return SandboxFailed(f"sandbox {self.kind}: {why}{': ' + said.splitlines()[-1] if said else ''}")


def open_sandbox(settings: SandboxSettings, template: Path | None = None) -> Sandbox:
    """A fresh sandbox, its work folder a copy of `template`. Raises SandboxFailed, and ConfigError where no kind works.

    Takes one that waits ready if there is one, and starts the next of its kind, without waiting for it.
    """
    kind = choose(settings.kind)
    if kind == "trust" and "trust" not in _said:
        _said.add("trust")
        print("sandbox = \"trust\": what the model writes runs here without isolation", file=sys.stderr, flush=True)
    key = (settings, template)
    waiting = _warm.pop(key, [])
    sandbox = waiting.pop(0) if waiting else Sandbox(settings, kind, template)
    _warm[key] = waiting
    while len(waiting) < settings.warm:
        waiting.append(Sandbox(settings, kind, template))
    while len(_warm) > _MANY:
        for old in _warm.pop(next(iter(_warm))):
            old.close()
    sandbox._wait_ready()
    return sandbox


def close_warm() -> None:
    """End those that wait ready."""
    while _warm:
        for sandbox in _warm.popitem()[1]:
            sandbox.close()


def _forked() -> None:
    """A child process has none of its parent's: it lets go of their pipes, whose end must be the parent's end."""
    for sandbox in _open:
        for pipe in (sandbox._process.stdin, sandbox._process.stdout, sandbox._process.stderr):
            pipe.close()  # type: ignore[union-attr]
    _open.clear()
    _warm.clear()


_open: set[Sandbox] = set()
_warm: dict[tuple[SandboxSettings, Path | None], list[Sandbox]] = {}
_said: set[str] = set()
atexit.register(close_warm)
os.register_at_fork(after_in_child=_forked)
