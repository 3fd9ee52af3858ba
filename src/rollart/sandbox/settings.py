"""What a sandbox allows."""

from __future__ import annotations

from dataclasses import dataclass

KINDS = ("auto", "bubblewrap", "podman", "docker", "trust")


@dataclass(frozen=True, kw_only=True)
class SandboxSettings:
    """kind: auto (bubblewrap where it works, else podman, else docker), or one of these, or trust: no isolation at all.

    seconds: deadline of a command that names none. life_seconds: the sandbox ends by itself after so long.
    memory_mb: of all processes together, and address space of each (10^6 bytes). pids: processes and threads.
    cpu_seconds: of one process. output_bytes: kept of a command's output and as many of its errors, the first and the
    last half. disk_mb: what the work folder holds, what /tmp holds, and the largest file (10^6 bytes; in memory).
    read_only: further folders of this machine that can be read, at their own path. image: of podman and docker; it
    needs `python3`, `cp` and `tar`. warm: sandboxes of one kind and template that a process starts ahead.
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
    image: str = "python:3.12-slim"
    warm: int = 1

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"a sandbox's kind must be one of {', '.join(KINDS)}; got {self.kind!r}")
        for name in ("seconds", "life_seconds", "memory_mb", "pids", "cpu_seconds", "output_bytes", "disk_mb"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be above 0; got {getattr(self, name)}")
        if not 0 <= self.warm <= 16:
            raise ValueError(f"warm must lie between 0 and 16; got {self.warm}")
