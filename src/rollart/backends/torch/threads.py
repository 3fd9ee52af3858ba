"""Where torch computes: shares of the cores, so that rollout and training do not push each other aside; devices.

Keeps true: a thread that claimed a share computes with at most that many threads, on those cores where the system can
pin a thread (Linux); elsewhere, or where the user set a number of threads, only the number is kept.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from rollart.core.errors import ConfigError


def shares() -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(engines, learner): the process's cores in two halves; both halves are the one core where there is only one."""
    cores = available()
    middle = len(cores) // 2
    return tuple(cores[:middle] or cores), tuple(cores[middle:])


def available() -> list[int]:
    """The cores that this process may use."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def claim(threads: int, cores: Sequence[int]) -> None:
    """For the calling thread: `threads` CPU threads anywhere, or (0) one per core of its share, pinned there."""
    torch.set_num_threads(threads or len(cores) or 1)
    if cores and not threads and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)  # 0 is the calling thread; those it starts inherit the cores


def choose_device(name: str, rank: int | None = None) -> torch.device:
    """`rank`: among the processes that share this machine's GPUs. Raises ConfigError for a device that is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and rank is not None and torch.cuda.is_available():
        name = f"cuda:{rank % torch.cuda.device_count()}"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device must be auto, cpu, cuda or cuda:N; got {name!r}") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device {name!r} needs a GPU; this machine has {torch.cuda.device_count()}: set 'auto'")
    return device
