"""The program `rollart`. Ctrl-C ends it in one line also while its modules are being read, when nothing has begun."""

from __future__ import annotations

import os
import signal
from types import FrameType


def main() -> None:
    """Entry point; see `rollart.cli` for the commands and the exit codes."""
    heeded = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if heeded:
        signal.signal(signal.SIGINT, _leave)
    from rollart.cli import main as run

    if heeded:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()


def _leave(number: int, frame: FrameType | None) -> None:
    try:
        os.write(2, b"interrupted\n")
    finally:
        os._exit(130)


if __name__ == "__main__":
    main()
