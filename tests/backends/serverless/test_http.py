import asyncio

import pytest

from rollart.backends.serverless.http import HttpClient, TooLong, read_message


def read(data, limit=1000, **options):
    async def main():
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        return await read_message(reader, limit, **options)

    return asyncio.run(main())


@pytest.mark.parametrize(("data", "status", "body", "last"), [
    (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi", 200, b"hi", False),
    (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nhi", 200, b"hi", True),
    (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2;x=y\r\nde\r\n0\r\nA: b\r\n\r\n",
     200, b"abcde", False),
    (b"HTTP/1.0 500 Oh no\r\n\r\nuntil the end", 500, b"until the end", True),
    (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 204 X\r\n\r\n", 204, b"", False)])
def test_every_framing_of_a_body_is_read(data, status, body, last):
    message = read(data)
    assert (message.status, message.body, message.last) == (status, body, last)


@pytest.mark.parametrize(("data", "error"), [
    (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhi", EOFError), (b"", EOFError), (b"SSH-2.0\r\n\r\n", ValueError),
    (b"HTTP/1.1 200 OK\r\nContent-Length: 2000\r\n\r\n", TooLong),
    (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nffff\r\n", TooLong),
    (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nno\r\n", ValueError),
    (b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 2000, TooLong), (b"HTTP/1.1 200 OK\r\nA: " + b"x" * 100_000, ValueError),
    (b"HTTP/1.1 abc OK\r\nContent-Length: 0\r\n\r\n", ValueError), (b"HTTP/1.1 -20 X\r\n\r\n", ValueError),
    (b"HTTP/1.1 100 Continue\r\n\r\n" * 2000, ValueError),
    (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"0" * 100_000, ValueError),
    (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n" + b"a" * 100_000, ValueError),
    (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"-2\r\n" * 50 + b"0\r\n\r\n", ValueError)])
def test_what_is_cut_off_too_long_or_no_http_is_told_apart(data, error):
    with pytest.raises(error):
        read(data)


def test_a_connection_that_the_server_closed_while_idle_is_replaced_without_an_error():
    connections = 0

    async def once(reader, writer):  # says that it keeps the connection, and does not
        nonlocal connections
        connections += 1
        await read_message(reader, 1000, request=True)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi")
        await writer.drain()
        await asyncio.sleep(0.02)
        writer.close()

    async def main():
        server = await asyncio.start_server(once, "127.0.0.1", 0)
        client = HttpClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/a?b=c", {}, 100)
        for pause in (0.0, 0.05, 0.0):
            assert (await client.post(b"x", {})).body == b"hi"
            await asyncio.sleep(pause)
        client.close()
        server.close()

    asyncio.run(main())
    assert connections == 3


@pytest.mark.parametrize("url", ["ftp://x/y", "http://", "nothing", "http://x/\r\nInjected: y"])
def test_what_is_no_url_is_refused(url):
    if "\r" in url:  # line breaks are taken out by urlsplit, or refused
        assert "Injected: y\r\n" not in HttpClient(url, {}, 1)._head
        return
    with pytest.raises(ValueError, match="no http:// or https:// URL"):
        HttpClient(url, {}, 1)


def test_a_header_with_a_line_break_is_refused():
    with pytest.raises(ValueError, match="line break"):
        HttpClient("http://x/", {"Authorization": "a\r\nb: c"}, 1)
