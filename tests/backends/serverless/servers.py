"""A real HTTP server on loopback that answers as it is told, one word for each request it gets."""

import asyncio
import json
from contextlib import asynccontextmanager

from rollart.backends.serverless.http import read_message
from rollart.rewards.handler import Handler

ODD = {"status": b"HTTP/1.1 abc X\r\nContent-Length: 0\r\n\r\n", "promises": b"HTTP/1.1 102 Wait\r\n\r\n" * 1500,
       "chunk": b"HTTP/1.1 200 X\r\nTransfer-Encoding: chunked\r\n\r\n" + b"0" * 100_000}
"""What is no HTTP, in ways that only show while it is read."""


class Server:
    """`moods`: one per request, the last goes on. `served`: keys that were worked on. `most`: requests at once."""

    def __init__(self, moods, function="reward_functions:fine"):
        self.moods, self.handler = list(moods), Handler([function])
        self.served, self.heads, self.inside, self.most, self.url = [], [], 0, 0, ""

    async def connected(self, reader, writer):
        try:
            while True:
                asked = await read_message(reader, 10_000_000, request=True)
                self.heads.append(asked.headers)
                self.inside += 1
                self.most = max(self.most, self.inside)
                try:
                    await self.answer(asked.body, writer)
                finally:
                    self.inside -= 1
        except (OSError, EOFError, ConnectionError):
            pass
        finally:
            writer.close()

    async def answer(self, body, writer):
        mood = self.moods.pop(0) if len(self.moods) > 1 else self.moods[0]
        word, _, detail = mood.partition(" ")
        if word == "hang":
            await asyncio.sleep(600)
        if word == "slow":
            await asyncio.sleep(float(detail))
        if word == "refuse":  # hangs up before any work
            raise ConnectionError
        if word in ODD:
            writer.write(ODD[word])
            await writer.drain()
            raise ConnectionError
        if word.isdecimal():
            extra = f"Retry-After: {detail}\r\n" if detail else ""
            writer.write(f"HTTP/1.1 {word} X\r\n{extra}Content-Length: 4\r\n\r\nbusy".encode())
            return
        status, out = self.handler.respond(body)
        plain = json.loads(body)
        self.served += [item["key"] for item in plain.get("requests", [plain])]
        if word == "drop":  # the work is done, its answer is lost
            raise ConnectionError
        if word == "garbage":
            status, out = 200, b"<html>it works</html>"
        if word == "huge":
            out = b"x" * 3_000_000
        if word == "deep":
            out = b"[" * 100_000
        if word == "infinite":
            out = b'{"score": {"value": Infinity}}'
        writer.write(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n" % (status, len(out)) + out)
        await writer.drain()


@asynccontextmanager
async def serving(*moods, function="reward_functions:fine"):
    server = Server(moods, function)
    listening = await asyncio.start_server(server.connected, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/score"
    try:
        yield server
    finally:
        listening.close()
