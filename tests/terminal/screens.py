"""Programs in pseudo-terminals, and what they wrote there."""

from __future__ import annotations

import re
from pathlib import Path

import pexpect

from helpers import command, environment

UP = re.compile(rb"(?:\x1b\[1A(?:\x1b\[2K)?)+")
OPEN: list[pexpect.spawn] = []
"""What was started; conftest.py closes it after the test, so that a failed one leaves no run behind."""
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def spawn(*arguments: object, rows: int = 24, columns: int = 80, **environ: str) -> pexpect.spawn:
    """`rollart ARGUMENTS` in a terminal of that size; `log` has all it wrote."""
    program, *rest = command(*arguments)
    return started(program, rest, rows, columns, environ)


def shell(folder: Path, **environ: str) -> pexpect.spawn:
    """A shell with job control in a terminal of 80 x 24, and `rollart` as a command of it."""
    words = " ".join(command())
    child = started("bash", ["--norc", "--noprofile", "-i"], 24, 80, {"PS1": "READY> ", **environ}, cwd=str(folder))
    child.expect_exact("READY> ")
    child.sendline(f"alias rollart='{words}'; bind 'set enable-bracketed-paste off'")
    child.expect_exact("READY> ")
    return child


def started(program: str, rest: list[str], rows: int, columns: int, environ: dict[str, str],
            cwd: str | None = None) -> pexpect.spawn:
    plain = {k: v for k, v in environment().items() if k not in ("COLUMNS", "NO_COLOR", "PYTHONIOENCODING")}
    child = pexpect.spawn(program, rest, dimensions=(rows, columns), timeout=120, cwd=cwd,
                          env={**plain, "TERM": "xterm-256color", **environ})
    child.logfile_read = Log()
    OPEN.append(child)
    return child


class Log:
    """All that a program wrote."""

    def __init__(self) -> None:
        self.all = b""

    def write(self, data: bytes) -> None:
        self.all += data

    def flush(self) -> None:
        pass

    def text(self, encoding: str = "utf-8") -> str:
        return ESCAPE.sub("", self.all.decode(encoding))


def ended(child: pexpect.spawn) -> int:
    """The exit code, once it has ended by itself (a signal's number below 0)."""
    child.expect(pexpect.EOF)
    child.wait()
    return int(child.exitstatus if child.exitstatus is not None else -child.signalstatus)


def drawn_over(log: Log) -> int:
    """The most lines that were drawn over at once."""
    return max((found[0].count(b"\x1b[1A") for found in UP.finditer(log.all)), default=0)
