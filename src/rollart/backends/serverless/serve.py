"""Rewards on Ray Serve: one deployment on the run's cluster, from no replica to a maximum and back, called by handle.

Keeps true: nothing listens for it (no HTTP proxy is started, the application has no route); it ends with the run, also
after half a start, and Serve with it where nothing else is served; a replica with a call that is late ends itself, so a
hung function holds no place. Waits for Serve and for the function, each with a deadline. The handle's router has a
thread and a loop of its own, so calls need nothing of the control plane's; what Serve does by blocking is in threads.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from time import perf_counter
from typing import Any

from ray import serve
from ray.exceptions import RayActorError, RayError
from ray.serve.exceptions import BackPressureError, RayServeException

from rollart import __version__
from rollart.backends.serverless.transport import Broken, Reply, TooLarge
from rollart.core.clock import now
from rollart.core.errors import ConfigError
from rollart.rewards.handler import Handler
from rollart.rewards.settings import RewardSettings

DEPLOYMENT, END_SECONDS = "reward", 30.0
SAMPLE_SECONDS, LOOK_BACK_SECONDS = 0.5, 2.0
"""The handle tells Serve so often how many calls it has, and Serve scales by their mean over the second."""


class Replica:
    """At most `concurrency` calls at a time inside the function, each at most `seconds` long. A function that is not
    there is told by `ready`: Serve would start a replica that raises again and again."""

    def __init__(self, specs: list[str], concurrency: int, seconds: float, answer_bytes: int) -> None:
        self._threads, self._seconds, self._limit = ThreadPoolExecutor(concurrency), seconds, answer_bytes
        self._problem = ""
        try:
            self._handler = Handler(specs)
        except ConfigError as error:
            self._problem = str(error)

    async def ready(self, version: str) -> str:
        """What is wrong here."""
        return self._problem if version == __version__ else (
            f"a replica has rollart {__version__}, the driver {version}: install the same version on every node")

    async def respond(self, body: bytes) -> tuple[int, bytes, float]:
        """HTTP status, answer (status 0: it is too large) and seconds inside."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._respond, body)

    def _respond(self, body: bytes) -> tuple[int, bytes, float]:
        began, late = perf_counter(), threading.Timer(self._seconds, os._exit, [1])
        late.daemon = True
        late.start()
        try:
            status, answer = self._handler.respond(body)
        finally:
            late.cancel()
        return (status, answer, perf_counter() - began) if len(answer) <= self._limit else (0, b"", 0.0)


class ServePlatform:
    """A Transport, and a platform with figures. rewards: the reward's name by domain. application: the name that it
    has in Serve. avoid: ids of nodes that get no replica. start_seconds: until a first replica must answer."""

    name = "serve"

    def __init__(self, rewards: Mapping[str, str], settings: RewardSettings, application: str, avoid: Sequence[str],
                 start_seconds: float) -> None:
        self._rewards, self._settings, self._application = rewards, settings, application
        self._avoid, self._start_seconds = avoid, start_seconds
        self._tasks: list[asyncio.Task[Any]] = []  # the deployment, then the counting of replicas
        self._respond: Any = None
        self._stats = dict.fromkeys(("instances", "peak_instances", "killed", "alive_seconds", "busy_seconds"), 0.0)

    async def start(self) -> None:
        """Deploy, and see a replica answer. Raises ConfigError; whoever calls closes in any case."""
        try:
            async with asyncio.timeout(self._start_seconds):
                self._tasks.append(asyncio.create_task(asyncio.to_thread(self._deploy), name="deploy rewards"))
                handle = await asyncio.shield(self._tasks[0])
                self._respond = handle.options(method_name="respond")
                problem = await handle.options(method_name="ready").remote(__version__)
        except (TimeoutError, RayError, RayServeException, RuntimeError) as error:
            problem = f"no replica answers (cluster.start_seconds = {self._start_seconds:g}): {_line(error)}"
            with suppress(TimeoutError, RayError, RayServeException, KeyError):
                async with asyncio.timeout(5.0):
                    problem += "; Serve: " + " ".join((await asyncio.to_thread(self._deployed)).message.split())[:300]
        if problem:
            raise ConfigError(f"rewards on serve: {problem}")
        self._stats.update(instances=1, peak_instances=1)
        self._tasks.append(asyncio.create_task(self._count(), name="count replicas"))

    async def send(self, body: bytes, key: str, seconds: float) -> Reply:
        """One attempt. What is given up leaves the queue; inside a replica it goes on, and keeps its place there."""
        limit = asyncio.timeout(seconds)
        try:
            async with limit:
                status, answer, busy = await self._respond.remote(body)
        except TimeoutError:
            raise Broken(f"no answer within {seconds:g} s") from None
        except BackPressureError as full:
            return Reply(429, str(full).encode(), 1.0)
        except (RayError, RayServeException, asyncio.CancelledError) as error:
            if (task := asyncio.current_task()) and task.cancelling():
                raise  # else it was Serve that cancelled the call
            if limit.expired():  # the replica may end itself, or Serve the call, in the moment that we give it up
                raise Broken(f"no answer within {seconds:g} s") from None
            self._stats["killed"] += isinstance(error, RayActorError)
            raise Broken(_line(error)) from None
        self._stats["busy_seconds"] += busy
        if not status:
            raise TooLarge(f"its answer is above reward.call.answer_mb = {self._settings.call.answer_mb:g}")
        return Reply(status, answer)

    async def stats(self) -> dict[str, float]:
        """Replicas (starting and stopping ones too), calls that died with one, seconds of replicas and inside them."""
        return self._stats

    async def close(self) -> None:
        tasks, self._tasks = self._tasks, []
        for task in tasks[1:]:
            task.cancel()
        if tasks:
            with suppress(TimeoutError, RayError, RayServeException):
                async with asyncio.timeout(END_SECONDS):
                    await asyncio.gather(*tasks, return_exceptions=True)
                    await asyncio.to_thread(self._end)

    def _deploy(self) -> Any:
        reward, instances, nowhere = self._settings, self._settings.elastic, ",".join(("none", *self._avoid))
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        deployment = serve.deployment(
            Replica, name=DEPLOYMENT, max_ongoing_requests=instances.concurrency,
            max_queued_requests=instances.queue, graceful_shutdown_wait_loop_s=0.2, graceful_shutdown_timeout_s=2.0,
            ray_actor_options={"num_cpus": instances.cpus,
                               "label_selector": {"ray.io/node-id": f"!in({nowhere})"}},
            autoscaling_config={
                "min_replicas": 0, "max_replicas": instances.max_instances, "upscale_delay_s": 0.0,
                "downscale_delay_s": instances.idle_seconds, "target_ongoing_requests": instances.concurrency,
                "look_back_period_s": LOOK_BACK_SECONDS, "metrics_interval_s": SAMPLE_SECONDS},
            logging_config={"enable_access_log": False, "log_level": "WARNING"})
        app = deployment.bind([f"{domain}={name}" for domain, name in self._rewards.items()], instances.concurrency,
                              reward.score_seconds, int(reward.call.answer_mb * 1_000_000))
        serve.start(proxy_location="Disabled")
        return serve.run(app, name=self._application, route_prefix=None)

    def _deployed(self) -> Any:
        return serve.status().applications[self._application].deployments[DEPLOYMENT]

    def _end(self) -> None:
        serve.delete(self._application)
        left = serve.status()
        if not left.applications and not left.proxies:
            serve.shutdown()

    async def _count(self) -> None:
        stats, seen = self._stats, now()
        while True:
            await asyncio.sleep(SAMPLE_SECONDS)
            with suppress(RayError, RayServeException, KeyError):
                count = sum((await asyncio.to_thread(self._deployed)).replica_states.values())
                before, seen = seen, now()
                stats["alive_seconds"] += (seen - before) * (stats["instances"] + count) / 2
                stats.update(instances=count, peak_instances=max(count, stats["peak_instances"]))


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:300]}".rstrip(": ")
