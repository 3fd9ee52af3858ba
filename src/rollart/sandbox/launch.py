"""What a sandbox allows, how its first process is started in each kind, and which kinds work here.

Keeps true: inside there is no network, no environment and no file of this machine but the system's programs, the Python
in use and what the settings name, all read-only; what can be written is in memory and goes with the sandbox; its user
owns nothing else. What a dead owner left (of podman, docker and trust) is removed before the first one starts. Waits,
once a process, for the trial of a kind.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from pathlib import Path

from rollart.core.errors import ConfigError
from rollart.core.ranges import above, between

KINDS = ("auto", "bubblewrap", "podman", "docker", "trust")
WORK, HOME, AGENT = "/box", "/tmp", str(Path(__file__).with_name("agent.py"))
INSTALL = 'install bubblewrap (apt-get install bubblewrap), podman or docker, or set the sandbox to "trust"'
_NUMBERS = {  # architecture, clone, clone3, then what is refused
    "x86_64": (0xC000003E, 56, 435, (319, 447, 29, 272, 308, 248, 249, 250, 321, 298, 425, 323)),
    "aarch64": (0xC00000B7, 220, 435, (279, 447, 194, 97, 268, 217, 218, 219, 280, 241, 425, 282))}
"""memfd_create, memfd_secret, shmget (memory that no process holds), unshare, setns (new namespaces), add_key,
request_key, keyctl (the kernel's keys), bpf, perf_event_open, io_uring_setup, userfaultfd."""
_counter = count(1)


@dataclass(frozen=True, kw_only=True)
class SandboxSettings:
    """kind: auto (bubblewrap where it works, else podman, else docker), one of these, or trust: no isolation at all.

    seconds: deadline of a command that names none. life_seconds: the sandbox ends by itself after so long. memory_mb:
    of all processes together, and address space of each (10^6 bytes). pids: processes and threads. cpu_seconds: of one
    process. output_bytes: kept of a command's output, and as many of its errors. disk_mb: what the work folder holds,
    what /tmp holds, and the largest file (10^6 bytes; in memory). read_only: more folders of this machine, at their
    own path. image: of podman and docker, with python3 and tar. warm: sandboxes of a kind that a process holds ready.
    """

    kind: str = "auto"
    seconds: float = 30.0
    life_seconds: float = 3600.0
    memory_mb: int = 512
    pids: int = 64
    cpu_seconds: int = 60
    output_bytes: int = 65_536
    disk_mb: int = 64
    read_only: tuple[str, ...] = ()
    image: str = "docker.io/library/python:3.12-slim"
    warm: int = 1

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"a sandbox is one of {', '.join(KINDS)}; got {self.kind!r}")
        above(self, 0, "seconds", "life_seconds", "memory_mb", "pids", "cpu_seconds", "output_bytes", "disk_mb")
        between(self, 0, 16, "warm")


def start(kind: str, settings: SandboxSettings,
          template: Path | None) -> tuple[subprocess.Popen[bytes], socket.socket, str, str]:
    """The process, the socket to its agent, its name and the work folder. Waits for nothing."""
    s, number, trust = settings, next(_counter), kind == "trust"
    name, root = f"rollart-sandbox-{os.getpid()}-{number}", kind == "bubblewrap" and _as_root()
    work = tempfile.mkdtemp(prefix=name + "-") if trust else WORK
    spec = {"name": name, "uid": 1 << 30 | (os.getpid() & 0x3FFFFF) << 8 | number & 0xFF if root else 0, "work": work,
            "home": work if trust else HOME, "isolated": not trust, "own_user": kind == "bubblewrap",
            "life": s.life_seconds, "memory": s.memory_mb * 10**6, "cpu": s.cpu_seconds, "disk": s.disk_mb * 10**6,
            "pids": s.pids + 1, "template": "" if template is None else str(template) if trust else "/template"}
    agent = ["-I", "-S", AGENT if trust else "/agent.py", json.dumps(spec)]
    ours, theirs = socket.socketpair()
    read, write = os.pipe()
    os.write(write, _seccomp())
    os.close(write)
    if kind in ("podman", "docker"):
        command = [*_container(kind, s, template, name), "python3", *agent]
    else:
        python = str(getattr(sys, "_base_executable", sys.executable))
        command = [*([] if trust else _bubblewrap(root, s, template, read)), python, *agent]
    try:
        return subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=subprocess.PIPE, start_new_session=True,
                                pass_fds=[read], cwd="/"), ours, name, work
    finally:
        os.close(read)
        theirs.close()


def _bubblewrap(root: bool, settings: SandboxSettings, template: Path | None, seccomp: int | None) -> list[str]:
    out = ["bwrap", "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try",
           "--hostname", "sandbox", "--clearenv", "--as-pid-1", "--cap-drop", "ALL"]
    if root:  # the agent becomes a user of its own, whom nothing belongs to
        out += [part for cap in ("SETUID", "SETGID", "CHOWN") for part in ("--cap-add", f"CAP_{cap}")]
    else:
        out += ["--unshare-user", "--uid", "1000", "--gid", "1000"]
    for path in (f"/{name}" for name in ("bin", "sbin", "lib", "lib32", "lib64") if Path("/", name).is_dir()):
        out += ["--symlink", os.readlink(path), path] if os.path.islink(path) else ["--ro-bind", path, path]
    out += ["--ro-bind", "/usr", "/usr", "--proc", "/proc", "--dev", "/dev"]
    for path, size in ((WORK, settings.disk_mb * 10**6), (HOME, settings.disk_mb * 10**6), ("/dev/shm", 1 << 24)):
        out += ["--perms", "1777" if path == "/dev/shm" else "0755", "--size", str(size), "--tmpfs", path]
    shown = filter(os.path.exists, ("/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime", "/nix/store"))
    needed = [path for path in (sys.base_prefix, sys.prefix, *settings.read_only) if not f"{path}/".startswith("/usr/")]
    for path in dict.fromkeys([*shown, *needed]):
        for parent in reversed(Path(path).parents[:-1]):
            out += ["--perms", "0755", "--dir", str(parent)]
        out += ["--ro-bind", path, path]
    ours = Path(__file__).parents[1]  # it holds the answers of tasks that ship
    if any(ours.is_relative_to(path) for path in ("/usr", *needed)):
        out += ["--perms", "0555", "--size", "4096", "--tmpfs", str(ours)]
    out += [] if template is None else ["--ro-bind", str(template), "/template"]
    out += ["--ro-bind", AGENT, "/agent.py", "--remount-ro", "/dev", "--remount-ro", "/"]
    return [*out, *([] if seccomp is None or not _seccomp() else ["--seccomp", str(seccomp)]), "--"]


def _container(kind: str, settings: SandboxSettings, template: Path | None, name: str) -> list[str]:
    out = [kind, "run", "-i", "--rm", "--name", name, "--network", "none", "--read-only", "--cap-drop", "ALL", "--user",
           "1000:1000", "--security-opt", "no-new-privileges", "--memory", f"{settings.memory_mb}m",
           "--pids-limit", str(settings.pids + 1), "--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1024:1024"]
    for path in (WORK, HOME):
        out += ["--tmpfs", f"{path}:rw,exec,mode=1777,size={settings.disk_mb * 10**6}"]
    shown = {AGENT: "/agent.py", **{path: path for path in settings.read_only}}
    for path, inside in (shown if template is None else {**shown, str(template): "/template"}).items():
        out += ["-v", f"{path}:{inside}:ro"]
    return [*out, settings.image]


@lru_cache
def _seccomp() -> bytes:
    """The system call filter as classic BPF; none on a machine whose numbers are not known here."""
    if platform.machine() not in _NUMBERS:
        return b""
    arch, clone, clone3, refused = _NUMBERS[platform.machine()]
    load, equal, at_least, bits, answer = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, kill, eperm, enosys = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026
    code = [(load, 0, 0, 4), (equal, 1, 0, arch), (answer, 0, 0, kill), (load, 0, 0, 0),
            (at_least, 0, 1, 0x40000000), (answer, 0, 0, eperm), (equal, 0, 1, clone3), (answer, 0, 0, enosys)]
    for number in refused:
        code += [(equal, 0, 1, number), (answer, 0, 0, eperm)]
    code += [(equal, 0, 3, clone), (load, 0, 0, 16), (bits, 0, 1, 0x7E020000), (answer, 0, 0, eperm),
             (answer, 0, 0, allow)]
    return b"".join(struct.pack("=HBBI", *one) for one in code)


@lru_cache
def _as_root() -> bool:
    """Whether namespaces are made as root, without one for users: each sandbox then has a user number of its own."""
    return os.geteuid() == 0 and not _tried([*_bubblewrap(True, SandboxSettings(), None, None), "true"])


@lru_cache
def reason(kind: str) -> str:
    """Why a kind does not work here; empty if it does."""
    program = "bwrap" if kind == "bubblewrap" else kind
    if kind != "trust" and shutil.which(program) is None:
        return f"{program} is not installed"
    if kind == "bubblewrap":
        return "" if _as_root() else _tried([*_bubblewrap(False, SandboxSettings(), None, None), "true"])
    if kind == "trust":
        print('sandbox "trust": what the model writes runs here without isolation', file=sys.stderr, flush=True)
        for folder in Path(tempfile.gettempdir()).glob("rollart-sandbox-*"):
            if _dead(folder.name):
                shutil.rmtree(folder, ignore_errors=True)
        return ""
    if why := _tried([program, "info"]):
        return why
    listed = subprocess.run([program, "ps", "-a", "--format", "{{.Names}}"], capture_output=True, text=True, timeout=30)
    left = list(filter(_dead, listed.stdout.split()))
    return _tried([program, "rm", "-f", *left]) if left else ""


def choose(kind: str) -> str:
    """The kind that is used. Raises ConfigError, one line, where none works."""
    for one in ("bubblewrap", "podman", "docker") if kind == "auto" else (kind,):
        if not reason(one):
            return one
    why = reason("bubblewrap" if kind == "auto" else kind)
    raise ConfigError(f"code that a model wrote needs a sandbox, and {kind} does not work here ({why}): {INSTALL}")


def _dead(name: str) -> bool:
    """Whether it is the name of a sandbox whose owner is no more."""
    owner = re.match(r"rollart-sandbox-(\d+)-", name)
    return owner is not None and not os.path.exists(f"/proc/{owner[1]}") and os.path.exists("/proc/self")


def _tried(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)[:200]
    return "" if done.returncode == 0 else [f"exit code {done.returncode}", *done.stderr.strip().splitlines()][-1][:200]
