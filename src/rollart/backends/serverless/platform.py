"""A local elastic platform: instances of a reward function as processes, from zero to a maximum and back, behind HTTP.

    python -m rollart.backends.serverless.platform MODULE:FUNC [--port 0] [--max-instances 8] ...

Keeps true: an instance has at most `concurrency` requests at a time; one that is late is killed and its requests are
answered 504, one that dies 502; requests beyond the queue are told to come back (429); an answered key is answered
again without work (KEPT of them); no instance outlives the platform. GET /stats says what it did. Waits for an
instance to start, for a free one, for its answer, each with a deadline.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from rollart.backends.serverless.http import HttpClient, read_message
from rollart.core.errors import ConfigError
from rollart.rewards.handler import MAX_BYTES, Handler
from rollart.rewards.settings import ElasticSettings

KEPT = 10_000
"""Answers kept for those who ask again."""
CONNECTION_SECONDS = 300.0
"""A client that says nothing for so long is hung up on."""
_READY = b"listening on http://"


class InstanceFailed(Exception):
    """It did not start, died, or was late. `status`: what its requests are answered."""

    def __init__(self, message: str, status: int = 502) -> None:
        super().__init__(message)
        self.status = status


async def port_of(process: asyncio.subprocess.Process) -> int:
    """Where it listens, once it says so. Raises InstanceFailed with what it said instead."""
    assert process.stdout is not None
    tail = deque[bytes](maxlen=5)
    while line := await process.stdout.readline():
        if line.startswith(_READY):
            return int(line.rsplit(b":", 1)[1])
        tail.append(line)
    said = b"".join(tail).decode(errors="replace").strip()[-500:]
    raise InstanceFailed(f"an instance did not start: {said}", 503)


@dataclass(eq=False)
class Instance:
    """One process. busy: requests inside. idle_since: loop seconds."""

    process: asyncio.subprocess.Process
    started: float
    busy: int = 0
    idle_since: float = 0.0
    client: HttpClient | None = None

    async def ready(self) -> None:
        """Wait until it listens. Raises InstanceFailed."""
        self.client = HttpClient(f"http://127.0.0.1:{await port_of(self.process)}", {}, MAX_BYTES)

    async def forward(self, body: bytes) -> tuple[int, bytes]:
        """Its status and body. Raises InstanceFailed where it died."""
        assert self.client is not None
        try:
            answer = await self.client.post(body, {})
        except (OSError, EOFError, ValueError) as error:
            raise InstanceFailed(f"an instance died with the request inside ({type(error).__name__})") from None
        return answer.status, answer.body


class Platform:
    """Call `serve` with each request's body; `close` ends every instance."""

    def __init__(self, specs: list[str], settings: ElasticSettings, request_seconds: float) -> None:
        self._specs, self._settings, self._request_seconds = specs, settings, request_seconds
        self._live: list[Instance] = []
        self._starting: set[asyncio.Task[None]] = set()
        self._watches: set[asyncio.Task[None]] = set()
        self._waiting: deque[asyncio.Future[Instance]] = deque()
        self._kept: OrderedDict[str, tuple[int, bytes]] = OrderedDict()
        self._totals = {"requests": 0, "started": 0, "killed": 0, "turned_away": 0, "peak_instances": 0,
                        "alive_seconds": 0.0, "busy_seconds": 0.0}

    def stats(self) -> dict[str, Any]:
        """Now: instances (starting ones too), busy requests, queued; and totals since the platform began."""
        time = asyncio.get_running_loop().time()
        alive = self._totals["alive_seconds"] + sum(time - i.started for i in self._live)
        return {**self._totals, "alive_seconds": round(alive, 3), "busy_seconds":
                round(self._totals["busy_seconds"], 3), "instances": len(self._live) + len(self._starting),
                "starting": len(self._starting), "busy": sum(i.busy for i in self._live),
                "queued": sum(not future.done() for future in self._waiting)}

    async def serve(self, body: bytes, key: str) -> tuple[int, bytes]:
        """Status and body of the answer; never raises."""
        self._totals["requests"] += 1
        if key and key in self._kept:
            return self._kept[key]
        if len(self._waiting) >= self._settings.queue:
            self._totals["turned_away"] += 1
            return _error(429, f"{len(self._waiting)} requests wait for an instance already")
        try:
            async with asyncio.timeout(self._request_seconds + self._settings.start_seconds):
                instance = await self._free_instance()
        except TimeoutError:
            return _error(503, "no instance was free in time")
        except InstanceFailed as failed:
            return _error(failed.status, str(failed))
        began = asyncio.get_running_loop().time()
        try:
            if key and key in self._kept:  # answered while this one waited
                return self._kept[key]
            async with asyncio.timeout(self._request_seconds):
                answer = await instance.forward(body)
        except TimeoutError:
            self._kill(instance)
            return _error(504, f"no answer within {self._request_seconds:g} s, the instance was killed")
        except InstanceFailed as failed:
            self._kill(instance)
            return _error(failed.status, str(failed))
        finally:
            self._totals["busy_seconds"] += asyncio.get_running_loop().time() - began
            instance.busy -= 1
            instance.idle_since = asyncio.get_running_loop().time()
            self._match()
        if key and answer[0] == 200:
            self._kept[key] = answer
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return answer

    async def run(self) -> None:
        """End instances that were idle for long enough, for ever."""
        idle = self._settings.idle_seconds
        while True:
            await asyncio.sleep(min(idle / 4, 0.5))
            time = asyncio.get_running_loop().time()
            for instance in [i for i in self._live if not i.busy and time - i.idle_since > idle]:
                self._kill(instance)

    async def close(self) -> None:
        for task in self._starting:
            task.cancel()
        for instance in list(self._live):
            self._kill(instance)
        await asyncio.gather(*self._starting, *self._watches, return_exceptions=True)

    async def _free_instance(self) -> Instance:
        future: asyncio.Future[Instance] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        self._match()
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                future.result().busy -= 1
                self._match()
            raise

    def _match(self) -> None:
        """Give waiting requests to free instances, the last used first; then start what is missing."""
        while self._waiting and self._waiting[0].done():
            self._waiting.popleft()
        free = sorted((i for i in self._live if i.busy < self._settings.concurrency), key=lambda i: i.idle_since)
        while free and self._waiting:
            future = self._waiting.popleft()
            if future.done():
                continue
            free[-1].busy += 1
            future.set_result(free[-1])
            if free[-1].busy >= self._settings.concurrency:
                free.pop()
        while (len(self._waiting) > len(self._starting) * self._settings.concurrency
               and len(self._live) + len(self._starting) < self._settings.max_instances):
            self._starting.add(asyncio.create_task(self._start()))
        self._totals["peak_instances"] = max(self._totals["peak_instances"], len(self._live) + len(self._starting))

    async def _start(self) -> None:
        instance, failed = None, None
        try:
            async with asyncio.timeout(self._settings.start_seconds):
                instance = Instance(await self._spawn(), asyncio.get_running_loop().time())
                await instance.ready()
        except TimeoutError:
            failed = InstanceFailed(f"an instance did not start within {self._settings.start_seconds:g} s", 503)
        except (InstanceFailed, OSError) as error:
            failed = InstanceFailed(str(error), 503)
        finally:
            self._starting.discard(asyncio.current_task())
            if instance is not None and not instance.client:
                self._end(instance)
                await instance.process.wait()
        if instance is None or failed:
            while self._waiting:  # none of them would fare better
                future = self._waiting.popleft()
                if not future.done():
                    future.set_exception(failed or InstanceFailed("an instance did not start", 503))
            return
        self._totals["started"] += 1
        instance.idle_since = asyncio.get_running_loop().time()
        self._live.append(instance)
        watch = asyncio.create_task(self._watch(instance))
        self._watches.add(watch)
        watch.add_done_callback(self._watches.discard)
        self._match()

    async def _spawn(self) -> asyncio.subprocess.Process:
        one_thread = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        return await asyncio.create_subprocess_exec(
            sys.executable, "-m", "rollart.rewards.server", *self._specs, "--port", "0", "--until-eof",
            "--concurrency", str(self._settings.concurrency), stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), **one_thread})

    async def _watch(self, instance: Instance) -> None:
        """Read away what it prints until it ends."""
        assert instance.process.stdout is not None
        while await instance.process.stdout.read(65536):
            pass
        await instance.process.wait()
        self._kill(instance)
        self._match()

    def _kill(self, instance: Instance) -> None:
        if instance in self._live:
            self._live.remove(instance)
            self._totals["alive_seconds"] += asyncio.get_running_loop().time() - instance.started
            self._totals["killed"] += instance.busy > 0
            self._end(instance)

    def _end(self, instance: Instance) -> None:
        if instance.client:
            instance.client.close()
        with suppress(ProcessLookupError):
            os.killpg(instance.process.pid, 9)


def _error(status: int, message: str) -> tuple[int, bytes]:
    return status, json.dumps({"version": 1, "error": {"kind": "platform", "message": message}}).encode()


def connection(platform: Platform, ready: bytes) -> Callable[..., Any]:
    """What answers one client connection after the other request."""
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                async with asyncio.timeout(CONNECTION_SECONDS):
                    asked = await read_message(reader, MAX_BYTES, request=True)
                if asked.start[0] == "GET":
                    status, out = 200, json.dumps(platform.stats()).encode() if asked.start[1] == "/stats" else ready
                else:
                    status, out = await platform.serve(asked.body, asked.headers.get("idempotency-key", ""))
                later = b"Retry-After: 1\r\n" if status == 429 else b""
                writer.write(b"HTTP/1.1 %d X\r\nContent-Type: application/json\r\n%sContent-Length: %d\r\n\r\n"
                             % (status, later, len(out)) + out)
                await writer.drain()
        except (OSError, EOFError, ValueError, TimeoutError):
            pass  # the client hung up, or does not speak HTTP
        finally:
            writer.close()

    return answer


async def run_platform(options: argparse.Namespace) -> None:
    settings = ElasticSettings(**{name: getattr(options, name) for name in asdict(ElasticSettings())})
    ready = Handler(options.functions).ready()  # the function is there, or we say so now
    platform = Platform(options.functions, settings, options.request_seconds)
    server = await asyncio.start_server(connection(platform, ready), options.host, options.port, backlog=1024)
    print(f"listening on http://{options.host}:{server.sockets[0].getsockname()[1]}", flush=True)
    reaper = asyncio.create_task(platform.run())
    try:
        if options.until_eof:
            await asyncio.to_thread(sys.stdin.buffer.read)
        else:
            await reaper
    finally:
        server.close()
        reaper.cancel()
        await platform.close()


def option(name: str) -> str:
    """How a setting is called on the command line."""
    return f"--{name.replace('_', '-')}"


def main() -> None:
    """The command line; prints one line once it listens, exits with 2 for a function that cannot be served."""
    parser = argparse.ArgumentParser(prog="python -m rollart.backends.serverless.platform")
    parser.add_argument("functions", nargs="+", metavar="MODULE:FUNC", help="or DOMAIN=MODULE:FUNC for several")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0: any free one")
    for name, default in asdict(ElasticSettings()).items():
        parser.add_argument(option(name), type=type(default), default=default)
    parser.add_argument("--request-seconds", type=float, default=30.0)
    parser.add_argument("--until-eof", action="store_true", help="end when standard input ends")
    try:
        asyncio.run(run_platform(parser.parse_args()))
    except KeyboardInterrupt:
        pass
    except (ConfigError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
