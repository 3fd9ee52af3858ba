"""The owner's side of a sandbox, and those that wait ready.

Keeps true: a sandbox serves one user and is never used again; it ends with the process that opened it, also when that
is killed. What it answers is data: lengths are checked and nothing in it is run. Every call has a deadline; past it the
sandbox is ended and SandboxFailed raised. Not for several threads at once.
"""

from __future__ import annotations

import atexit
import json
import math
import os
import shutil
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

from rollart.core.errors import SandboxFailed
from rollart.sandbox.launch import HOME, SandboxSettings, choose, start

OPEN_SECONDS = 60.0
GRACE_SECONDS = 15.0
"""An answer may come so long after a command's deadline, before the sandbox is taken for lost."""
_MANY = 8  # templates whose sandboxes wait ready in one process
_READ = '[ -e "$1" ] || exit 44; [ -f "$1" ] || { echo no file >&2; exit 1; }; exec cat -- "$1"'
_WRITE = ('d=$(dirname -- "$1") && mkdir -p -- "$d" && t=$(mktemp -p "$d") && cat > "$t" && chmod 644 -- "$t" && '
          'mv -fT -- "$t" "$1" || { rm -f -- "$t"; exit 1; }')
_SNAPSHOT = "find . -mindepth 1 -maxdepth 1 -print0 | tar -cf - --null -T -"
_RESTORE = "chmod -R u+rwX . 2>/dev/null; find . -mindepth 1 -delete && exec tar -xf -"
Snapshot = bytes
"""The work folder's content as a tar file; of use in any sandbox."""


@dataclass(frozen=True, slots=True)
class Ran:
    """How a command ended. code: its exit code, minus the signal's number, or 127 where it could not be started.

    truncated: the middle of an output was left out. seconds: on the clock.
    """

    stdout: str
    stderr: str
    code: int
    timed_out: bool
    truncated: bool
    seconds: float


class Sandbox:
    """Made by `open_sandbox`; a context manager. `work`: the work folder's path inside."""

    def __init__(self, settings: SandboxSettings, kind: str, template: Path | None) -> None:
        self.settings, self.kind, self._template = settings, kind, template
        self._process, self._socket, self._name, self.work = start(kind, settings, template)
        self._answers = self._socket.makefile("rb")
        self._ready, self._started = False, monotonic()
        _open.add(self)

    def run(self, command: str | Sequence[str], *, seconds: float | None = None, stdin: str | bytes = "",
            env: Mapping[str, str] | None = None, cwd: str = "") -> Ran:
        """Run a program with arguments, or a text with the shell; what it started ends with it. Raises SandboxFailed.

        seconds: deadline (default: the settings'). stdin: what of a text cannot be encoded is replaced. env: beside
        PATH, HOME and LANG. cwd: in the work folder. Raises ValueError for arguments that cannot be.
        """
        if not isinstance(command, str) and not (command and all(isinstance(part, str) for part in command)):
            raise ValueError(f"a command is a text, or a program with its arguments; got {command!r:.80}")
        given = stdin.encode(errors="replace") if isinstance(stdin, str) else stdin
        answer, out, err = self._call(command, seconds, given, self.settings.output_bytes, env or {}, cwd)
        return Ran(out.decode(errors="replace"), err.decode(errors="replace"), answer["code"], answer["timed_out"],
                   answer["truncated"], answer["seconds"])

    def read(self, path: str) -> bytes:
        """A file's content, as a command inside would read it. Raises FileNotFoundError, OSError, SandboxFailed."""
        return self._plain(_READ, path)

    def write(self, path: str, data: bytes | str) -> None:
        """Make or replace a file and its folders; a link is replaced, not followed; what of a text cannot be
        encoded is replaced. Raises OSError, SandboxFailed."""
        self._plain(_WRITE, path, data.encode(errors="replace") if isinstance(data, str) else data)

    def snapshot(self) -> Snapshot:
        """The work folder as it is now. Raises OSError, SandboxFailed."""
        return self._plain(_SNAPSHOT, "")

    def restore(self, snapshot: Snapshot) -> None:
        """Make the work folder what it was; whatever else is in it goes. Raises OSError, SandboxFailed."""
        self._plain(_RESTORE, "", snapshot)

    def close(self) -> None:
        """End it with all that runs in it, and start the next of its kind. May be called again."""
        served, self._ready = self._ready, False
        self._end()
        with _lock:
            waiting = _warm.setdefault((self.settings, self._template), [])
            while served and len(waiting) < self.settings.warm:
                waiting.append(Sandbox(self.settings, self.kind, self._template))
            while len(_warm) > _MANY:
                for old in _warm.pop(next(iter(_warm))):
                    old._end()

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _end(self) -> str:
        """Everything in its namespace goes with the agent. What it said last, to its errors."""
        if self not in _open:
            return ""
        _open.discard(self)
        self._answers.close()
        self._socket.close()
        try:
            if self.kind != "bubblewrap":  # it kills what runs, and ends
                self._process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            if self.kind != "trust":
                subprocess.run([self.kind, "rm", "-f", self._name], capture_output=True, timeout=GRACE_SECONDS)
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        if self.kind == "trust":
            shutil.rmtree(self.work, ignore_errors=True)
        return self._process.communicate()[1].decode(errors="replace").strip().rpartition("\n")[2]

    def _plain(self, script: str, path: str, given: bytes = b"") -> bytes:
        """A script of ours, with the path as its argument."""
        limit = int(self.settings.disk_mb * 2e6) + (1 << 20)
        answer, out, err = self._call(["/bin/sh", "-c", script, "sh", path], None, given, limit, {}, "")
        if answer["code"] == 44:
            raise FileNotFoundError(2, "no such file in the sandbox", path)
        if answer["code"] or answer["truncated"]:
            why = err.decode(errors="replace").strip()[-200:] or "too large or too slow"
            raise OSError(f"{path or 'the work folder'} in the sandbox: {why}")
        return out

    def _call(self, command: str | Sequence[str], seconds: float | None, given: bytes, output: int,
              env: Mapping[str, str], cwd: str) -> tuple[dict[str, Any], bytes, bytes]:
        seconds = self.settings.seconds if seconds is None else seconds
        if self not in _open:
            raise SandboxFailed(f"sandbox {self.kind}: it is closed")
        if not 0 < seconds < math.inf or not all(isinstance(value, str) for value in env.values()):
            raise ValueError(f"needs seconds > 0 and texts in env; got {seconds}, {dict(env)!r:.80}")
        python = "" if self.kind in ("podman", "docker") else f"{sys.prefix}/bin:"
        own = {"PATH": f"{python}/usr/local/bin:/usr/bin:/bin", "HOME": self.work if self.kind == "trust" else HOME,
               "USER": "agent", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
        header = json.dumps({"command": command if isinstance(command, str) else list(command), "seconds": seconds,
                             "output": output, "cwd": cwd, "env": {**own, **env}}).encode()
        self._wait_ready()
        try:
            self._socket.settimeout(seconds + GRACE_SECONDS)
            self._socket.sendall(struct.pack(">II", len(header), len(given)) + header + given)
            lengths = struct.unpack(">III", self._take(12))
            if lengths[0] > 4096 or max(lengths[1:]) > output + 100:
                raise OSError(f"it sent an answer of {sum(lengths)} bytes")
            header, out, err = (self._take(length) for length in lengths)
        except OSError as error:
            raise self._lost(error) from None
        return json.loads(header), out, err

    def _wait_ready(self) -> None:
        try:
            self._socket.settimeout(OPEN_SECONDS)
            self._ready = self._ready or self._take(5) == b"ready"
        except OSError as error:
            raise self._lost(error) from None

    def _take(self, count: int) -> bytes:
        data = self._answers.read(count) if self in _open else b""
        if len(data) < count:
            raise OSError("it has ended")
        return data

    def _lost(self, error: OSError) -> SandboxFailed:
        self._ready, said = False, self._end()
        return SandboxFailed(f"sandbox {self.kind}: {error}{': ' if said else ''}{said}")


def open_sandbox(settings: SandboxSettings, template: Path | None = None) -> Sandbox:
    """A fresh sandbox, its work folder a copy of `template`: one that waits ready, if there is one.

    A template must stay as it is while this process lives. Raises SandboxFailed, and ConfigError where no kind works.
    """
    kind = choose(settings.kind)
    if template is not None and not (template := template.resolve()).is_dir():
        raise SandboxFailed(f"the template {template} is no folder")
    with _lock:
        waiting = _warm.pop((settings, template), [])
        while waiting and monotonic() - waiting[0]._started > settings.life_seconds / 2:
            waiting.pop(0)._end()
        sandbox = waiting.pop(0) if waiting else Sandbox(settings, kind, template)
        _warm[settings, template] = waiting  # the newest last
    sandbox._wait_ready()
    return sandbox


def close_warm() -> None:
    """End those that wait ready."""
    while _warm:
        for sandbox in _warm.popitem()[1]:
            sandbox._end()


def _forked() -> None:
    """A child process has none of its parent's: the end of their sockets must be the parent's end."""
    for sandbox in _open:
        sandbox._answers.close()
        sandbox._socket.close()
    _open.clear()
    _warm.clear()
    _lock.release()


_lock = threading.Lock()
_open: set[Sandbox] = set()
_warm: dict[tuple[SandboxSettings, Path | None], list[Sandbox]] = {}
atexit.register(close_warm)
os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_forked)
