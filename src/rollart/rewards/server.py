"""A reward function behind HTTP with the standard library only: what a packaged container and an instance run.

    python -m rollart.rewards.server MODULE:FUNC [--port 8080] [--concurrency 1]

Keeps true: at most `concurrency` requests are inside the function at a time, the others wait in their connections; a
request larger than the limit is refused unread. With --until-eof it ends when its standard input does, so an instance
never outlives its platform.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from rollart.core.errors import ConfigError
from rollart.rewards.handler import MAX_BYTES, Handler

READ_SECONDS = 300.0
"""A connection that says nothing for so long is closed."""


def make_server(handler: Handler, host: str, port: int, concurrency: int) -> ThreadingHTTPServer:
    """Bound and listening; `serve_forever` runs it. Raises OSError where the port is taken."""
    room = threading.BoundedSemaphore(concurrency)

    class Request(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1  # head and body leave together
        disable_nagle_algorithm = True
        timeout = READ_SECONDS

        def do_GET(self) -> None:
            self._answer(200, handler.ready())

        def do_POST(self) -> None:
            length = self.headers.get("Content-Length", "")
            if not length.isdecimal() or int(length) > MAX_BYTES:
                self.close_connection = True
                self._answer(411 if not length.isdecimal() else 413, b'{"error": {"kind": "bad_request", "message": '
                             b'"a request needs a Content-Length of at most %d bytes"}}' % MAX_BYTES)
                return
            body = self.rfile.read(int(length))
            with room:
                answer = handler.respond(body)
            self._answer(*answer)

        def _answer(self, status: int, body: bytes) -> None:
            self.send_response_only(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
            self.wfile.flush()

        def log_message(self, format: str, *args: Any) -> None:
            """Requests hold what a model wrote: they are not logged."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 512

        def handle_error(self, request: Any, client_address: Any) -> None:
            """A client that hung up is no error of ours."""
            if not isinstance(sys.exception(), ConnectionError | TimeoutError):
                super().handle_error(request, client_address)

    return Server((host, port), Request)


def main() -> None:
    """The command line; prints one line once it listens, exits with 2 for a function that cannot be served."""
    parser = argparse.ArgumentParser(prog="python -m rollart.rewards.server", description="Serve a reward function.")
    parser.add_argument("functions", nargs="+", metavar="MODULE:FUNC", help="or DOMAIN=MODULE:FUNC for several")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=int(os.environ.get("PORT", "8080")), help="0: any free one")
    parser.add_argument("--concurrency", type=int, default=1, help="requests inside the function at a time")
    parser.add_argument("--until-eof", action="store_true", help="end when standard input ends")
    options = parser.parse_args()
    try:
        server = make_server(Handler(options.functions), options.host, options.port, options.concurrency)
    except (ConfigError, OSError) as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        raise SystemExit(2) from None
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    if options.until_eof:
        threading.Thread(target=lambda: (sys.stdin.buffer.read(), os._exit(0)), daemon=True).start()
    print(f"listening on http://{options.host}:{server.server_address[1]}", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        pass


if __name__ == "__main__":
    main()
