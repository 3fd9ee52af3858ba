"""How the main process and its workers talk: a 4-byte length, then the bytes.

Keeps true: requests are pickles, made by the main process; answers are JSON, so that nothing a worker sends can run
code in the main process. An answer is `[true, value]` or `[false, message]`.
"""

from __future__ import annotations

import json
import pickle
import struct
from typing import Any

HEADER = struct.Struct("!I")
CONTROL = struct.Struct("!cQ")
"""One order to the fork server: SPAWN (with the worker's socket) or KILL, and the worker's number."""
SPAWN, KILL = b"s", b"k"


def request(*parts: Any) -> bytes:
    """A framed request."""
    body = pickle.dumps(parts, protocol=pickle.HIGHEST_PROTOCOL)
    return HEADER.pack(len(body)) + body


def answer(ok: bool, value: Any) -> bytes:
    """A framed answer. Raises TypeError where the value is not JSON, ValueError where it holds NaN or infinity."""
    body = json.dumps([ok, value], allow_nan=False, separators=(",", ":")).encode()
    return HEADER.pack(len(body)) + body
