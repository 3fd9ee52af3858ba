"""The journal: every event, in order, to every subscriber; and the digest that tells whether two runs were the same.

Keeps true: subscribers see the same events in the same order, each with the loop time of its emission. It waits for
nothing: a subscriber that is slow stops the loop, so none may block. A subscriber's error goes to whoever emitted.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from operator import attrgetter
from pathlib import PurePath
from typing import Any, Protocol

from rollart.core.clock import now
from rollart.core.events import Event
from rollart.core.tokens import Counted
from rollart.core.types import Group, TrajectoryId


class Subscriber(Protocol):
    def on(self, at: float, event: Event) -> None:
        """`at`: loop seconds. Must not block, and must not emit."""
        ...


class Journal:
    """The Journal port of `core.ports`. `clock` gives loop seconds; the running loop's by default."""

    def __init__(self, subscribers: Sequence[Subscriber], clock: Callable[[], float] = now) -> None:
        self._on = tuple(subscriber.on for subscriber in subscribers)
        self._clock = clock
        self.sequence = 0
        """Events emitted so far; while a subscriber is called, the number of its event, from 1."""

    def emit(self, event: Event) -> None:
        at = self._clock()
        self.sequence += 1
        for on in self._on:
            on(at, event)


class Digest:
    """A fingerprint of all events so far. Equal in two processes exactly if they did the same things at the same times.

    Times are rounded to a microsecond, mapping keys are sorted, token arrays stand in by their own hash.
    """

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)

    def on(self, at: float, event: Event) -> None:
        self._hash.update(f"{at:.6f} {canonical(event)}\n".encode())

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


def canonical(value: Any) -> str:
    """A text that depends on the value only, not on the process. Raises TypeError for what has no order, as a set."""
    return (_WRITERS.get(type(value)) or _writer(type(value)))(value)


def _writer(kind: type) -> Callable[[Any], str]:
    """The writer of a type met for the first time; remembered."""
    if is_dataclass(kind):
        writer = _dataclass_writer(kind)
    elif issubclass(kind, Enum):
        writer = _enum_text
    elif issubclass(kind, Mapping):
        writer = _mapping_text
    elif issubclass(kind, PurePath):
        writer = repr
    else:
        raise TypeError(f"an event holds a {kind.__name__}, which has no canonical text; use tuples, mappings, "
                        "numbers, strings and frozen dataclasses")
    _WRITERS[kind] = writer
    return writer


def _dataclass_writer(kind: type) -> Callable[[Any], str]:
    names, name = [field.name for field in fields(kind)], kind.__name__
    if len(names) < 2:
        return lambda value: f"{name}({','.join(canonical(getattr(value, one)) for one in names)})"
    values = attrgetter(*names)
    return lambda value: f"{name}({_joined(values(value))})"


def _joined(values: Iterable[Any]) -> str:
    """Their canonical texts. Half of a digest's time is spent here."""
    return ",".join([(_WRITERS.get(type(value)) or _writer(type(value)))(value) for value in values])


def _enum_text(value: Enum) -> str:
    return f"{type(value).__name__}.{value.name}"


def _mapping_text(value: Mapping[str, Any]) -> str:
    return f"{{{','.join(f'{key!r}:{canonical(value[key])}' for key in sorted(value))}}}"


def _sequence_text(value: Sequence[Any]) -> str:
    return f"[{_joined(value)}]"


def _group_text(value: Group) -> str:
    """Its members by id: what they hold was told when each of them ended."""
    return f"Group({value.id},{canonical(value.task)},{value.born},{[str(member.id) for member in value.members]})"


def _array_text(value: array[Any]) -> str:
    return f"{value.typecode}{len(value)}:{hashlib.blake2b(value, digest_size=8).hexdigest() if value else ''}"


def _bytes_text(value: bytes) -> str:
    return f"b{len(value)}:{hashlib.blake2b(value, digest_size=8).hexdigest()}" if value else "b0"


_WRITERS: dict[type, Callable[[Any], str]] = {
    int: repr, float: repr, str: repr, bool: repr, type(None): repr,
    tuple: _sequence_text, list: _sequence_text, dict: _mapping_text, array: _array_text,
    bytes: _bytes_text,
    Group: _group_text, TrajectoryId: str, Counted: lambda value: f"#{value.n}",
}
