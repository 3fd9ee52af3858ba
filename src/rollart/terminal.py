"""The person's terminal: the one way out for everything that a command prints.

Keeps true: what is printed never ends a command. A character that the terminal has no code for becomes its nearest in
ASCII; control characters of foreign text (a model's, an environment's, an exception's) are shown, never obeyed; a
reader that goes away (a closed terminal, `| head -1`) or a disk that is full costs the rest of the output only.
"""

from __future__ import annotations

import codecs
import errno
import io
import os
import re
import sys
from collections.abc import Iterable
from typing import Any, TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

NEAREST = {**dict.fromkeys("█▇▆▅▄▃▂▁■▌▐", "#"), **dict.fromkeys("·•…", "."), **dict.fromkeys("–—‑━─╸╺╴╶", "-"),
           **dict.fromkeys("│┃║", "|"), **dict.fromkeys("╭╮╰╯┌┐└┘├┤┬┴┼┏┓┗┛┡┩╇╞╡╪", "+"), "→": ">", "←": "<",
           **dict.fromkeys("“”", '"'), **dict.fromkeys("‘’", "'"), "×": "x", "±": "~"}
"""One character for one, so that columns stay where they are. Everything else that has no code is a question mark."""

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def _nearest(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    wanted = error.object[error.start:error.end]
    near = "".join(NEAREST.get(character, "?") for character in wanted)
    return near, error.end


codecs.register_error("nearest", _nearest)


def harmless(text: str) -> str:
    """`text` with its control characters, marks of direction and lone surrogates as visible characters: an escape is
    shown as U+241B. New lines and tabs stay."""
    return _CONTROL.sub(lambda found: _shown(ord(found[0])), text)


def _shown(code: int) -> str:
    return chr(0x2400 + code) if code < 0x20 else "\u2421" if code == 0x7F else "\ufffd"


class Terminal(Console):
    """A console that takes text as it is: no markup, no emoji codes, no guessed colours, no control characters."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    @property
    def live(self) -> bool:
        """A panel can be drawn and drawn over here."""
        return self.is_terminal and not self.is_dumb_terminal

    @property
    def gone(self) -> bool:
        """Nobody reads this any more."""
        return getattr(self.file, "gone", False)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=harmless(segment.text))


class Outlet(io.TextIOWrapper):
    """A standard stream that may come to lead nowhere: its reader went away, or its disk is full."""

    gone = False
    failed = ""
    """Why, where it is no reader that went."""

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except OSError as error:
            self._lost(error)
            return len(text)

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            self._lost(error)

    def _lost(self, error: OSError) -> None:
        self.gone = True
        self.failed = "" if error.errno in (errno.EPIPE, errno.EIO) else str(error.strerror)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.fileno())  # what waits in the buffer goes there too
        os.close(nowhere)


def open_streams() -> None:
    """Make stdout and stderr of this process outlets. A standard stream that is closed leads nowhere from now on, so
    that no file of the command gets its number."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number, which is this one
    sys.stdin = sys.stdin or os.fdopen(0)
    sys.stdout, sys.stderr = _outlet(sys.stdout, 1), _outlet(sys.stderr, 2)


def _outlet(stream: TextIO | None, number: int) -> TextIO:
    if stream is None:
        return os.fdopen(number, "w", encoding="utf-8", errors="replace")
    if not isinstance(stream, io.TextIOWrapper):
        return stream  # somebody's own, e.g. a test's
    line, direct = stream.line_buffering or stream.isatty(), stream.write_through
    return Outlet(stream.detach(), encoding=stream.encoding, errors="nearest", line_buffering=line,
                  write_through=direct)
