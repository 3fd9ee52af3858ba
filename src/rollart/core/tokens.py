"""Token sequences as the control plane sees them: it measures and joins them, and never looks inside.

Real tokens are packed 32-bit integers (`array('i')`: 32,768 tokens are 0.13 MB). Simulated tokens are `Counted`: a
length and nothing else, so a context of 100,000 tokens is one small object and the control plane's code is the same.
The same holds for text: a `str`, or `Counted` under simulation.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Counted:
    """Simulated tokens: a length without content."""

    n: int

    def __len__(self) -> int:
        return self.n


Tokens: TypeAlias = "array[int] | Counted"
Text: TypeAlias = "str | Counted"


def ids(values: Iterable[int] = ()) -> array[int]:
    """Real tokens from integers: `ids([1, 2, 3])`."""
    return array("i", values)


def floats(values: Iterable[float] = ()) -> array[float]:
    """Packed 32-bit floats, e.g. log-probabilities."""
    return array("f", values)


def join(*parts: Tokens) -> Tokens:
    """The concatenation, as a new sequence. Raises TypeError when real and simulated tokens meet."""
    if all(isinstance(part, Counted) for part in parts) and parts:
        return Counted(sum(len(part) for part in parts))
    out = ids()
    for part in parts:
        if isinstance(part, Counted):
            if len(part):
                raise TypeError("cannot join real and simulated tokens: one side is Counted")
            continue
        out.extend(part)
    return out


def cut(tokens: Tokens, start: int) -> Tokens:
    """`tokens[start:]` for both kinds."""
    return Counted(max(0, len(tokens) - start)) if isinstance(tokens, Counted) else tokens[start:]
