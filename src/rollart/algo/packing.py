"""Sequences into micro-batches without padding. Deterministic: equal input gives equal bins in equal order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def pack(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Indices of `lengths` in bins of at most `max_tokens` tokens: first-fit decreasing, at most 11/9 of the fewest.

    Each index is in exactly one bin; within a bin they ascend. A sequence longer than `max_tokens` gets a bin of its
    own. Raises ValueError for max_tokens < 1.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1; got {max_tokens}")
    bins: list[list[int]] = []
    free: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        need = lengths[index]
        for number, room in enumerate(free):
            if need <= room:
                bins[number].append(index)
                free[number] -= need
                break
        else:
            bins.append([index])
            free.append(max_tokens - need)
    return [sorted(members) for members in bins]


def dealt(indices: Iterable[int], lengths: Sequence[int], parts: int) -> list[list[int]]:
    """Indices of `lengths` in so many parts: dealt longest first to the part with the fewest tokens, so that none has
    more than 4/3 of the least possible maximum (Graham 1969)."""
    held: list[list[int]] = [[] for _ in range(parts)]
    tokens = [0] * parts
    for index in sorted(indices, key=lambda i: -lengths[i]):
        least = tokens.index(min(tokens))
        held[least].append(index)
        tokens[least] += lengths[index]
    return held


def deal(lengths: Sequence[int], ranks: int, max_tokens: int) -> list[list[list[int]]]:
    """Indices of `lengths` as bins of each rank: `dealt`, then packed. One rank: as `pack`."""
    return [[[own[i] for i in members] for members in pack([lengths[i] for i in own], max_tokens)]
            for own in map(sorted, dealt(range(len(lengths)), lengths, ranks))]
