"""The live report over HTTP, on the loopback address only.

Keeps true: nothing but the report of one run is served, and only to who asks for this machine by a loopback name (a
web page elsewhere could have its own name lead here); each request sees the run as it is now, and writes nothing. A
run that cannot be read now is a page that says why and looks again; a client that goes away costs nobody anything.
"""

from __future__ import annotations

import re
import sqlite3
import sys
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from rollart.core.errors import ConfigError, RollArtError
from rollart.observe.report import report_page

REFRESH_SECONDS = 5
LOOPBACK = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:\d+)?", re.IGNORECASE)


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: object, client_address: object) -> None:
        if not isinstance(sys.exception(), OSError):  # which is a client that went away
            super().handle_error(request, client_address)  # type: ignore[arg-type]


def serve_report(run: Path, port: int, ready: Callable[[str], object]) -> None:
    """Serve until interrupted. Raises ConfigError when the port is taken or out of range."""
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if not LOOPBACK.fullmatch(self.headers.get("Host", "")):
                self.send_error(403, "the report is for this machine only: ask for 127.0.0.1 or localhost")
                return
            if self.path != "/":
                self.send_error(404, "only / is here")
                return
            code, kind = 200, "html"
            try:
                body = report_page(run)
            except (RollArtError, OSError, sqlite3.Error) as error:
                code, kind, body = 503, "plain", f"the run cannot be read now: {error}\n".encode(errors="replace")
            self.send_response(code)
            self.send_header("Content-Type", f"text/{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Refresh", str(REFRESH_SECONDS))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    try:
        server = _Server(("127.0.0.1", port), Handler)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"--serve needs a free port of this machine, {port} is not: {error}; "
                          "name another, or 0 for any") from None
    with server:
        ready(f"http://127.0.0.1:{server.server_address[1]}/")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            pass
