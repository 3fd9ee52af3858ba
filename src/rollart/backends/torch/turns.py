"""What the engine's thread works on: requests on their way, what is kept of them, and how it answers callers.

A request, its ids and what of them lies in its KV row (`filled`); pending = len(ids) - filled:

    waiting   no row yet: rows or the KV budget are taken
    prefill   pending > 1     after admission, or after new weights (filled = 0)
    decode    pending = 1     the last id goes through the model, the next one is sampled
    parked    the turn has ended: its KV is copied out of the row, kept for the next turn or until it must go
"""

from __future__ import annotations

import asyncio
import random
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from rollart.backends.torch.runner import Kept
from rollart.backends.torch.sampling import Rows
from rollart.core.tokens import floats
from rollart.core.types import Completion, Finish, GenerateRequest, Version


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counts since the engine was made. Tokens: sampled, prefilled (recomputed ones too), and taken from kept KV."""

    generated: int
    prefilled: int
    reused: int
    busy_seconds: float
    running: int
    waiting: int
    kv_tokens: int


@dataclass(slots=True, eq=False)
class Running:
    """One request on its way through the engine."""

    request: GenerateRequest
    limit: int  # most tokens to sample
    ids: array[int]  # context and what was sampled
    done: Callable[[Completion | Exception], None]
    draws: random.Random
    filled: int = 0
    keep: bool = True
    logprobs: array[float] = field(default_factory=floats)
    segments: list[tuple[Version, int]] = field(default_factory=list)

    @property
    def pending(self) -> int:
        return len(self.ids) - self.filled

    @property
    def reserved(self) -> int:
        """Most tokens of keys and values it can come to hold."""
        return len(self.request.context) + self.limit

    def completion(self, finish: Finish, engine: str, version: Version, routes: bytes = b"") -> Completion:
        return Completion(tokens=self.ids[len(self.request.context):], logprobs=self.logprobs, finish=finish,
                          segments=tuple(self.segments) or ((version, 0),), engine=engine, routes=routes)


@dataclass(slots=True)
class Parked:
    """KV kept between turns: of `ids`, of the current weights."""

    ids: array[int]
    kept: Kept


@dataclass(slots=True)
class Batch:
    """What stays the same from one decode step to the next while no row changes; tensors [rows in use]."""

    turns: list[tuple[int, Running]]  # rows that decode
    rows: Rows
    tokens: Tensor
    positions: Tensor
    advance: Tensor  # 1 where a row decodes, 0 where it rests at the scratch position


def ignore(error: Exception) -> None:
    """For commands whose callers do not wait."""


def call_soon(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *arguments: object) -> None:
    """Run on the loop; a loop that is closed has nobody left to hear it."""
    try:
        loop.call_soon_threadsafe(function, *arguments)
    except RuntimeError:
        if not loop.is_closed():
            raise


def answer(loop: asyncio.AbstractEventLoop, future: asyncio.Future, result: object) -> None:
    """Resolve a future from the engine's thread; one that was cancelled meanwhile stays so."""
    def resolve() -> None:
        if not future.done():
            if isinstance(result, Exception):
                future.set_exception(result)
            else:
                future.set_result(result)
    call_soon(loop, resolve)
