"""HTTP/1.1 over asyncio streams: just what calls of functions need, and little enough to be fast at many calls at once.

Keeps true: a body above its limit is not read; a connection that failed, was cancelled or holds unread bytes is closed,
never used again. A connection that the server had closed while it was idle is replaced without a word: calls carry a
key, so a repetition is safe. No proxies, no redirects, no compression. It waits for the server: callers set deadlines.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

IDLE_SECONDS = 30.0
"""An idle connection older than that is not trusted any more."""
INTERIM = 20
"""So many answers of status 1xx may come before the answer."""

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class TooLong(ValueError):
    """A body is above its limit."""


@dataclass(frozen=True, slots=True)
class Message:
    """An HTTP message: the words of its first line, headers by lower-case name, body. `last`: nothing follows it."""

    start: tuple[str, ...]
    headers: Mapping[str, str]
    body: bytes
    last: bool

    @property
    def status(self) -> int:
        return int(self.start[1])


async def read_message(reader: asyncio.StreamReader, limit: int, *, request: bool = False) -> Message:
    """The next message. Raises EOFError (nothing, or cut off), TooLong, ValueError for what is no HTTP."""
    for _ in range(INTERIM):
        head = (await _until(reader, b"\r\n\r\n")).decode("latin-1")
        first, *lines = head[:-4].split("\r\n")
        start = tuple(first.split(None, 2))
        if len(start) < 2 or not (start[-1] if request else start[0]).startswith("HTTP/1."):
            raise ValueError(f"it does not speak HTTP/1.1: {first[:40]!r}")
        if request or not start[1].startswith("1"):  # 100 Continue and the like
            break
    else:
        raise ValueError(f"it promises an answer {INTERIM} times and gives none")
    if not request and not (start[1].isascii() and start[1].isdigit() and len(start[1]) == 3):
        raise ValueError(f"it does not speak HTTP/1.1: {first[:40]!r}")
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    last = headers.get("connection", "").lower() == "close" or "HTTP/1.0" in start
    if headers.get("transfer-encoding", "").lower() == "chunked":
        return Message(start, headers, await _chunks(reader, limit), last)
    length = headers.get("content-length", "")
    if length.isdecimal():
        if int(length) > limit:
            raise TooLong(f"a body of {int(length)} bytes")
        return Message(start, headers, await reader.readexactly(int(length)), last)
    if request or start[1] in ("204", "304"):
        return Message(start, headers, b"", last)
    out = bytearray()
    while part := await reader.read(65536):
        out += part
        if len(out) > limit:
            raise TooLong("a body without end")
    return Message(start, headers, bytes(out), True)


async def _chunks(reader: asyncio.StreamReader, limit: int) -> bytes:
    out = bytearray()
    while size := int((await _until(reader, b"\r\n")).split(b";")[0], 16):
        if size < 0:
            raise ValueError(f"a chunk of {size} bytes")
        if len(out) + size > limit:
            raise TooLong("a body in chunks")
        out += (await reader.readexactly(size + 2))[:-2]
    while (await _until(reader, b"\r\n")) != b"\r\n":  # trailers
        pass
    return bytes(out)


async def _until(reader: asyncio.StreamReader, mark: bytes) -> bytes:
    try:
        return await reader.readuntil(mark)
    except asyncio.LimitOverrunError:
        raise ValueError("a line or the head of the message is too long") from None


class HttpClient:
    """POSTs to one URL over connections that are kept. Raises ValueError for what is no http(s) URL."""

    def __init__(self, url: str, headers: Mapping[str, str], limit: int) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is no http:// or https:// URL")
        secure = parts.scheme == "https"
        self._host, self._port = parts.hostname, parts.port or (443 if secure else 80)
        self._ssl = ssl.create_default_context() if secure else None
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        own = {"Host": parts.netloc.rpartition("@")[2], "Accept": "application/json", **headers}
        if any("\r" in text or "\n" in text for text in (target, *own.values())):
            raise ValueError("a URL or header holds a line break")
        self._head = f"POST {target} HTTP/1.1\r\n" + "".join(f"{name}: {text}\r\n" for name, text in own.items())
        self._limit = limit
        self._idle: list[tuple[Connection, float]] = []

    async def post(self, body: bytes, headers: Mapping[str, str]) -> Message:
        """Raises OSError, EOFError, ValueError (TooLong among them)."""
        extra = "".join(f"{name}: {text}\r\n" for name, text in headers.items())
        request = f"{self._head}{extra}Content-Length: {len(body)}\r\n\r\n".encode() + body
        while (kept := self._take()) is not None:
            try:
                return await self._exchange(kept, request)
            except (ConnectionError, asyncio.IncompleteReadError) as stale:
                if isinstance(stale, asyncio.IncompleteReadError) and stale.partial:
                    raise
        return await self._exchange(
            await asyncio.open_connection(self._host, self._port, ssl=self._ssl), request)

    def close(self) -> None:
        while self._idle:
            self._idle.pop()[0][1].close()

    def _take(self) -> Connection | None:
        """The connection used last, if it is still good; then all older ones may be, too."""
        oldest = asyncio.get_running_loop().time() - IDLE_SECONDS
        while self._idle:
            (reader, writer), used = self._idle.pop()
            if used > oldest and not reader.at_eof() and not writer.is_closing():
                return reader, writer
            writer.close()
        return None

    async def _exchange(self, connection: Connection, request: bytes) -> Message:
        reader, writer = connection
        good = False
        try:
            writer.write(request)
            await writer.drain()
            message = await read_message(reader, self._limit)
            good = not message.last
            return message
        finally:
            if good:
                self._idle.append((connection, asyncio.get_running_loop().time()))
            else:
                writer.close()
