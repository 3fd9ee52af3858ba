"""Environments on the nodes of a pool: one actor a node, many environments in each.

Keeps true: an episode lives and dies with its node: when it is lost, its environments raise EnvironmentFailed and the
others go on; the next one opens on the node that has the fewest; a node that comes (back) is used, one that left is
forgotten; whatever was opened for nobody is closed. Waits for a node, at most `wait_seconds`, and looks for nodes every
WATCH_SECONDS.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from types import SimpleNamespace

from rollart.backends.ray.remote import Remote
from rollart.core.changed import Changed
from rollart.core.clock import now
from rollart.core.errors import ConfigError, EnvironmentFailed, NoCapacity, Stalled
from rollart.core.types import Action, Observation, Task

WATCH_SECONDS = 2.0


class RemoteEnvironments:
    """An EnvironmentPool. `nodes()`: ids of the pool's live nodes (it may block); `host(id)`: an actor for one."""

    def __init__(self, nodes: Callable[[], Iterable[str]], host: Callable[[str], Remote], wait_seconds: float) -> None:
        self._nodes, self._host, self._wait_seconds = nodes, host, wait_seconds
        self._hosts: dict[str, Remote] = {}
        self._changed = Changed()
        self._open: Counter[str] = Counter()
        self._starting: dict[str, asyncio.Task[None]] = {}
        self._watching: asyncio.Task[None] | None = None
        self.lost_nodes = 0
        self.recoveries: list[float] = []
        """Seconds from each loss of a node's actor to its next start."""
        self._down: dict[str, float] = {}
        self._opened = self._failed = 0

    async def start(self) -> None:
        """Actors on all nodes that stay. Raises NoCapacity, ConfigError unless each one is up."""
        for node in await asyncio.to_thread(lambda: list(self._nodes())):
            self._hosts[node] = self._new(node)
        await asyncio.gather(*[self._first(node, host) for node, host in self._hosts.items()])
        self._watching = asyncio.create_task(self._watch(), name="watch environment nodes")

    async def open(self, task: Task) -> RemoteEnvironment:
        """Raises EnvironmentFailed."""
        try:
            await self._changed.until(lambda: bool(self._live()), who=task.id, what="a node for environments",
                                      seconds=self._wait_seconds)
        except Stalled as stalled:
            raise EnvironmentFailed(str(stalled)) from None
        node = min(self._live(), key=lambda n: (self._open[n], n))
        host = self._hosts[node]
        self._open[node] += 1
        environment = None
        try:
            number, first = await host.call("open", task, undo=lambda value: host.tell("close_one", value[0]))
            self._opened += 1
            environment = RemoteEnvironment(self, node, host, number, first)
            return environment
        except EnvironmentFailed:
            self._failed += 1
            raise
        finally:
            if environment is None:
                self._open[node] -= 1

    async def close(self) -> None:
        for task in (self._watching, *self._starting.values()):
            if task:
                task.cancel()
        await asyncio.gather(*[host.close() for host in self._hosts.values()])

    def stats(self) -> SimpleNamespace:
        """Sums over the nodes, as their last answers had them; what was opened and failed as seen from here."""
        total = Counter({"live": 0, "idle": 0, "killed": 0, "ahead": 0})
        for host in self._hosts.values():
            total.update({name: host.stats.get(name, 0) for name in total})
        return SimpleNamespace(**total, opened=self._opened, failed=self._failed, nodes=len(self._live()),
                               lost_nodes=self.lost_nodes)

    def _live(self) -> list[str]:
        return [node for node, host in self._hosts.items() if host.dead is None]

    def _new(self, node: str) -> Remote:
        host = self._host(node)
        host.on_dead(lambda: self._dead(node))
        return host

    def _dead(self, node: str) -> None:
        self.lost_nodes += 1
        self._down[node] = now()
        self._changed.notify()

    async def _watch(self) -> None:
        """Start an actor on each node that has none, forget nodes that left."""
        while True:
            nodes = await asyncio.to_thread(lambda: list(self._nodes()))
            for node in [n for n in self._hosts if n not in nodes and self._hosts[n].dead is not None]:
                del self._hosts[node]
            for node in nodes:
                host = self._hosts.get(node)
                if (host is None or host.dead is not None) and node not in self._starting:
                    self._starting[node] = asyncio.create_task(self._start(node), name=f"environments on {node}")
            await asyncio.sleep(WATCH_SECONDS)

    async def _first(self, node: str, host: Remote) -> None:
        try:
            await host.start()
        except NoCapacity:
            if node in await asyncio.to_thread(lambda: list(self._nodes())):
                raise

    async def _start(self, node: str) -> None:
        try:
            host = self._new(node)
            await host.start()
            if old := self._hosts.get(node):
                await old.close()
            self._hosts[node] = host
            self._open[node] = 0
            if node in self._down:
                self.recoveries.append(now() - self._down.pop(node))
        except (NoCapacity, ConfigError):
            pass  # the watch tries again
        finally:
            del self._starting[node]
            self._changed.notify()


class RemoteEnvironment:
    """One episode on a node. Raises EnvironmentFailed."""

    def __init__(self, pool: RemoteEnvironments, node: str, host: Remote, number: int, first: Observation) -> None:
        self._pool, self.node, self._host, self._number, self._first = pool, node, host, number, first
        self._closed = False

    async def first(self) -> Observation:
        return self._first

    async def step(self, action: Action) -> Observation:
        try:
            return await self._host.call("step", self._number, action)
        except EnvironmentFailed:
            self._pool._failed += 1
            raise

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._pool._hosts.get(self.node) is self._host:
            self._pool._open[self.node] -= 1
        try:
            await self._host.call("close_one", self._number)
        except EnvironmentFailed:
            pass  # it went with its node
