"""Time and chance, the two things a simulator must own.

The running event loop is the clock, so `asyncio.sleep` and `asyncio.timeout` need no wrapper. `core`, `algo` and
`control` import neither `time` nor `random` (ruff's banned-api checks it); this module is the exception.
"""

from __future__ import annotations

import asyncio
import hashlib
import random


def now() -> float:
    """Seconds on the running loop's clock (virtual under simulation)."""
    return asyncio.get_running_loop().time()


def draw(seed: int, *name: object) -> int:
    """A 63-bit number that depends on the seed and the name only: the same in every process and every run."""
    digest = hashlib.blake2b(repr((seed, *name)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def stream(seed: int, *name: object) -> random.Random:
    """An independent random stream per name, so that a new consumer never shifts the draws of an old one."""
    return random.Random(draw(seed, *name))
