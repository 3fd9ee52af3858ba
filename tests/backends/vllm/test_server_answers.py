"""What a server may answer instead of what was asked: it needs no vLLM to be seen."""

import asyncio

import pytest

pytest.importorskip("httpx")

from rollart.backends.vllm.server import OpenAIEngine
from rollart.backends.vllm.settings import ServerSettings
from rollart.core.errors import ConfigError


@pytest.mark.parametrize("body", [b"[" * 100_000, b"<html>", b'{"data": 3}', b"[1, 2]",
                                  b'{"data": [5], "paths": {}}', b'{"data": {"a": 1}, "paths": {}}',
                                  b'{"data": [{"id": "m", "max_model_len": 1e999}], "paths": {}}',
                                  b'{"data": [{"id": "m", "max_model_len": "x"}], "paths": {}}',
                                  b'{"data": [{"id": "m"}], "paths": 5}'])
def test_an_answer_that_is_not_the_one_asked_for_is_one_line(body):
    async def answer(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        await writer.drain()
        writer.close()

    async def main():
        listening = await asyncio.start_server(answer, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        engine = OpenAIEngine("e", "p", url, ServerSettings())
        try:
            with pytest.raises(ConfigError, match=f"no OpenAI-compatible server at {url}"):
                await engine.probe()
        finally:
            await engine.close()
            listening.close()

    asyncio.run(main())
