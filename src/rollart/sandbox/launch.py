"""How the first process of a sandbox is started, for each kind, and which kinds work here.

Keeps true: inside there is no network, no environment and no file of this machine but the system's programs, the Python
in use and what the settings name, all read-only; what can be written is in memory and goes with the sandbox; the
sandbox's user is nobody's. Waits, once a process, for the trial of a kind.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import lru_cache
from itertools import count
from pathlib import Path

from rollart.core.errors import ConfigError
from rollart.sandbox.settings import SandboxSettings

WORK, HOME = "/box", "/tmp"
"""Where the work folder and the home are, but for kind trust."""
AGENT = str(Path(__file__).with_name("agent.py"))
INSTALL = 'install bubblewrap (apt-get install bubblewrap), podman or docker, or set sandbox = "trust"'

_NUMBERS = {  # architecture, clone, clone3, and the calls that are refused
    "x86_64": (0xC000003E, 56, 435, (319, 447, 29, 272, 308, 248, 249, 250, 321, 298, 425, 323)),
    "aarch64": (0xC00000B7, 220, 435, (279, 447, 194, 97, 268, 217, 218, 219, 280, 241, 425, 282))}
"""memfd_create, memfd_secret, shmget (memory that no process holds), unshare, setns (new namespaces), add_key,
request_key, keyctl (the kernel's keys), bpf, perf_event_open, io_uring_setup, userfaultfd."""
_counter = count(1)


def seccomp() -> bytes:
    """The system call filter as classic BPF; empty on a machine whose numbers are not known here."""
    if platform.machine() not in _NUMBERS:
        return b""
    arch, clone, clone3, refused = _NUMBERS[platform.machine()]
    load, equal, at_least, bits, answer = 0x20, 0x15, 0x35, 0x45, 0x06
    kill, allow, eperm, enosys = 0x80000000, 0x7FFF0000, 0x00050001, 0x00050026
    code = [(load, 0, 0, 4), (equal, 1, 0, arch), (answer, 0, 0, kill), (load, 0, 0, 0),
            (at_least, 0, 1, 0x40000000), (answer, 0, 0, eperm), (equal, 0, 1, clone3), (answer, 0, 0, enosys)]
    for number in refused:
        code += [(equal, 0, 1, number), (answer, 0, 0, eperm)]
    code += [(equal, 0, 3, clone), (load, 0, 0, 16), (bits, 0, 1, 0x7E020000), (answer, 0, 0, eperm),
             (answer, 0, 0, allow)]
    return b"".join(struct.pack("=HBBI", *one) for one in code)


def start(kind: str, settings: SandboxSettings, template: Path | None) -> tuple[subprocess.Popen[bytes], str]:
    """The process at whose standard input and output the agent is, and its work folder. Waits for nothing."""
    number = next(_counter)
    root = kind == "bubblewrap" and bubblewrap_as_root()
    work = tempfile.mkdtemp(prefix=f"rollart-sandbox-{os.getpid()}-") if kind == "trust" else WORK
    disk = int(settings.disk_mb * 1e6)
    spec = {"uid": 1 << 30 | (os.getpid() & 0x3FFFFF) << 8 | number & 0xFF if root else 0, "work": work,
            "home": work if kind == "trust" else HOME, "isolated": kind != "trust", "life": settings.life_seconds,
            "memory": int(settings.memory_mb * 1e6), "cpu": settings.cpu_seconds, "disk": disk, "pids": settings.pids + 1,
            "template": "" if template is None else str(template) if kind == "trust" else "/template"}
    agent = [getattr(sys, "_base_executable", sys.executable), "-I", "-S", AGENT if kind == "trust" else "/agent.py",
             json.dumps(spec)]
    fds: list[int] = []
    if kind == "bubblewrap":
        if program := seccomp():
            read, write = os.pipe()
            os.write(write, program)
            os.close(write)
            fds.append(read)
        agent = [*_bubblewrap(root, settings, template, fds), *agent]
    elif kind in ("podman", "docker"):
        agent = [*_container(kind, settings, template, number), "python3", *agent[1:]]
    try:
        return subprocess.Popen(agent, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0,
                                start_new_session=True, pass_fds=fds, cwd="/"), work
    finally:
        for fd in fds:
            os.close(fd)


def environment(kind: str, work: str, extra: Mapping[str, str]) -> dict[str, str]:
    """What a command's environment holds: nothing of ours."""
    path = "" if kind in ("podman", "docker") else f"{sys.prefix}/bin:"
    return {"PATH": f"{path}/usr/local/bin:/usr/bin:/bin", "HOME": work if kind == "trust" else HOME, "USER": "agent",
            "LANG": "C.UTF-8", "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", **extra}


def _bubblewrap(root: bool, settings: SandboxSettings, template: Path | None, fds: list[int]) -> list[str]:
    out = ["bwrap", "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try",
           "--hostname", "sandbox", "--clearenv", "--as-pid-1", "--cap-drop", "ALL"]
    if root:  # the agent becomes a user of its own, whom nothing belongs to
        out += [part for cap in ("SETUID", "SETGID", "CHOWN") for part in ("--cap-add", f"CAP_{cap}")]
    else:
        out += ["--unshare-user", "--uid", "1000", "--gid", "1000"]
    for name in ("bin", "lib", "lib64", "lib32", "sbin"):
        if Path("/", name).is_symlink():
            out += ["--symlink", os.readlink(f"/{name}"), f"/{name}"]
        elif Path("/", name).is_dir():
            out += ["--ro-bind", f"/{name}", f"/{name}"]
    out += ["--ro-bind", "/usr", "/usr", "--proc", "/proc", "--dev", "/dev", "--size", str(1 << 24), "--tmpfs", "/dev/shm"]
    out += ["--perms", "0755", "--dir", "/etc"]
    for path in ("/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime", "/nix/store"):
        out += ["--ro-bind-try", path, path]
    for path in dict.fromkeys((sys.base_prefix, sys.prefix, *settings.read_only)):
        if not path.startswith("/usr/") and path != "/usr":
            for parent in reversed(Path(path).parents[:-1]):
                out += ["--perms", "0755", "--dir", str(parent)]
            out += ["--ro-bind", path, path]
    for path in (WORK, HOME):
        out += ["--perms", "0755", "--size", str(int(settings.disk_mb * 1e6)), "--tmpfs", path]
    if template is not None:
        out += ["--ro-bind", str(template), "/template"]
    out += ["--ro-bind", AGENT, "/agent.py", "--remount-ro", "/dev", "--remount-ro", "/"]
    return out + [part for fd in fds for part in ("--seccomp", str(fd))] + ["--"]


def _container(kind: str, settings: SandboxSettings, template: Path | None, number: int) -> list[str]:
    out = [kind, "run", "-i", "--rm", "--name", f"rollart-{os.getpid()}-{number}", "--label", f"rollart={os.getpid()}",
           "--network", "none", "--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges",
           "--user", "1000:1000", "--memory", f"{settings.memory_mb}m", "--pids-limit", str(settings.pids + 8)]
    for path in (WORK, HOME):
        out += ["--tmpfs", f"{path}:rw,exec,mode=1777,size={int(settings.disk_mb * 1e6)}"]
    for path in settings.read_only:
        out += ["-v", f"{path}:{path}:ro"]
    return out + ([] if template is None else ["-v", f"{template}:/template:ro"]) + [settings.image]


@lru_cache
def bubblewrap_as_root() -> bool:
    """Namespaces made as root, without one for users: then each sandbox has a user number of its own."""
    return os.geteuid() == 0 and not _tried(_bubblewrap(True, SandboxSettings(), None, []))


@lru_cache
def reason(kind: str) -> str:
    """Why a kind does not work here; empty if it does."""
    program = "bwrap" if kind == "bubblewrap" else kind
    if kind == "trust":
        return ""
    if shutil.which(program) is None:
        return f"{program} is not installed"
    if kind != "bubblewrap":
        return _tried([program, "info"])
    return "" if bubblewrap_as_root() else _tried(_bubblewrap(False, SandboxSettings(), None, []))


def choose(kind: str) -> str:
    """The kind that is used. Raises ConfigError, one line, where none works."""
    if kind != "auto":
        if why := reason(kind):
            raise ConfigError(f"sandbox {kind} does not work here ({why}): {INSTALL}")
        return kind
    for one in ("bubblewrap", "podman", "docker"):
        if not reason(one):
            return one
    raise ConfigError(f"code of a model runs in a sandbox only, and none works here (bubblewrap: "
                      f"{reason('bubblewrap')}): {INSTALL}")


def _tried(command: list[str]) -> str:
    try:
        done = subprocess.run([*command, *(["/bin/true"] if command[-1] == "--" else [])], capture_output=True, text=True,
                              timeout=20, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)[:200]
    return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1][:200]
