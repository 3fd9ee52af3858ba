"""Shares of the cores: who computes on which, so that rollout and training do not push each other aside.

Keeps true: a thread that claimed a share computes with at most that many threads, on those cores where the system can
pin a thread (Linux); elsewhere only their number is kept.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch


def shares() -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(engines, learner): the process's cores in two halves; both halves are the one core where there is only one."""
    cores = available()
    middle = len(cores) // 2
    return tuple(cores[:middle] or cores), tuple(cores[middle:])


def available() -> list[int]:
    """The cores that this process may use."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def claim(threads: int, cores: Sequence[int]) -> None:
    """For the calling thread: `threads` CPU threads (0: one per core of the share), on `cores` (empty: any)."""
    torch.set_num_threads(threads or len(cores) or 1)
    if cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)  # 0 is the calling thread; those it starts inherit the cores
