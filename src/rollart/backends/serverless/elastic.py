"""The local elastic platform as a child of this process.

Keeps true: it ends with this process, however that ends (its standard input is a pipe from here); if it dies it is
started again at the same address, and its totals go on. Waits for its first line and for its end, with a deadline.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from rollart.backends.serverless.http import read_message
from rollart.backends.serverless.platform import InstanceFailed, option, port_of
from rollart.core.errors import ConfigError
from rollart.rewards.settings import ElasticSettings

_END_SECONDS = 5.0
_STATS_SECONDS = 2.0
_RESTART_SECONDS = 1.0
_TOTALS = ("requests", "started", "killed", "turned_away", "alive_seconds", "busy_seconds")


class ElasticPlatform:
    """`rewards`: the reward's name by domain. `start` gives the URL. `restarts`: how often it had died."""

    def __init__(self, rewards: Mapping[str, str], settings: ElasticSettings, request_seconds: float) -> None:
        self._rewards, self._settings, self._request_seconds = dict(rewards), settings, request_seconds
        self._process: asyncio.subprocess.Process | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._port, self.restarts = 0, 0
        self._stats: dict[str, Any] = {}
        self._before: dict[str, Any] = {}  # totals of those that died

    async def start(self) -> str:
        """Raises ConfigError where a function cannot be served."""
        process = await self._spawn()
        self._keeper = asyncio.create_task(self._keep(process), name="elastic platform")
        return f"http://127.0.0.1:{self._port}"

    async def stats(self) -> dict[str, Any]:
        """What it did and has (see Platform.stats); the last known where it does not answer."""
        try:
            async with asyncio.timeout(_STATS_SECONDS):
                reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
                try:
                    writer.write(b"GET /stats HTTP/1.1\r\nHost: platform\r\n\r\n")
                    seen = json.loads((await read_message(reader, 1_000_000)).body)
                    self._stats = {**seen, **{name: seen[name] + self._before.get(name, 0) for name in _TOTALS}}
                finally:
                    writer.close()
        except (OSError, EOFError, ValueError, TimeoutError):
            pass
        return {**self._stats, "platform_restarts": self.restarts}

    async def close(self) -> None:
        if self._keeper:
            self._keeper.cancel()
            await asyncio.wait([self._keeper])
        await self._end()

    async def _spawn(self) -> asyncio.subprocess.Process:
        """Start it and wait until it listens. Raises ConfigError."""
        process = self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "rollart.backends.serverless.platform", "--until-eof",
            *(f"{domain}={name}" for domain, name in self._rewards.items()), "--port", str(self._port),
            *(part for name, value in asdict(self._settings).items() for part in (option(name), str(value))),
            "--request-seconds", str(self._request_seconds),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is for us: the run may still need it for its last step
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)})
        try:
            async with asyncio.timeout(self._settings.start_seconds):
                self._port = await port_of(process)
                return process
        except TimeoutError:
            said = f"it did not start within {self._settings.start_seconds:g} s"
        except InstanceFailed as failed:
            said = str(failed).removeprefix("an instance did not start: ").rpartition("\n")[2].removeprefix("error: ")
        await self._end()
        raise ConfigError(f"the elastic platform: {said}")

    async def _keep(self, process: asyncio.subprocess.Process) -> None:
        """Read away what it prints; start it again whenever it dies."""
        while True:
            assert process.stdout is not None
            while await process.stdout.read(65536):
                pass
            await process.wait()
            self.restarts += 1
            self._before = {name: self._stats.get(name, 0) for name in _TOTALS}
            while True:
                await asyncio.sleep(_RESTART_SECONDS)
                try:
                    process = await self._spawn()
                    break
                except (ConfigError, OSError):
                    continue  # the callers' circuit is open meanwhile

    async def _end(self) -> None:
        process = self._process
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            async with asyncio.timeout(_END_SECONDS):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
