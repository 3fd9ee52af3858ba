"""JSON that someone else wrote: a reward's server, an environment's process, an inference server.

Keeps true: what is handed on can be pickled, written as JSON and stored again by anyone here: it is nested at most
DEPTH levels, and its text can be encoded. Standard library only: a packaged reward function carries this file.
"""

from __future__ import annotations

import json
from typing import Any

DEPTH = 100
"""Most levels of lists and objects. Python's own JSON, pickle and repr give up at about 1000."""
MOST_BYTES = 64_000_000


def read_json(body: bytes | str) -> Any:
    """The value in `body`. Raises ValueError that says what is wrong with it. Half a surrogate pair becomes `?`."""
    if len(body) > MOST_BYTES:
        raise ValueError(f"it has {len(body)} bytes, above {MOST_BYTES}")
    try:
        value = json.loads(body)
        _check_depth(value)
    except RecursionError:
        raise ValueError(f"it is nested more than {DEPTH} levels") from None
    escaped = b"\\u" in body if isinstance(body, bytes) else "\\u" in body
    return json.loads(encodable(json.dumps(value, ensure_ascii=False))) if escaped else value


def _check_depth(value: object) -> None:
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(DEPTH):
        level = [inner for item in level for inner in (item.values() if isinstance(item, dict) else item)
                 if isinstance(inner, dict | list)]
    if level:
        raise ValueError(f"it is nested more than {DEPTH} levels")


def encodable(text: str) -> str:
    """The text with `?` for each half of a surrogate pair: it can be stored and shown."""
    return text.encode(errors="replace").decode()
