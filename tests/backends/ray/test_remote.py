"""One worker in an actor: calls, cancels, deaths."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from types import SimpleNamespace

import pytest

pytest.importorskip("ray", reason="needs rollart[ray]: make test-cluster")

import ray
from ray.exceptions import ActorDiedError

from rollart.backends.ray.cluster import RayCluster
from rollart.backends.ray.environments import RemoteEnvironments
from rollart.backends.ray.host import Shared
from rollart.backends.ray.remote import Remote
from rollart.backends.ray.settings import ClusterSettings
from rollart.backends.serverless.serve import ServePlatform
from rollart.backends.serverless.transport import Broken
from rollart.core.errors import ConfigError, EngineLost, NoCapacity
from rollart.rewards.settings import RewardSettings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def joined(logical):
    cluster = RayCluster(ClusterSettings(address=logical.address, start_seconds=60))
    cluster.connect()
    yield cluster
    cluster.close()


def echo(options=dict, worker="ray_workers:Echo", start=120.0, silent=60.0):
    return Remote("echo", worker, "ActorGen", {}, options, EngineLost, start_seconds=start, silent_seconds=silent)


def test_calls_are_gathered_answered_cancelled_and_undone(joined):
    async def play():
        remote = echo()
        await remote.start()
        assert await asyncio.gather(*[remote.call("echo", i) for i in range(500)]) == list(range(500))
        assert remote.calls == 500
        assert remote.posts < 20, "calls of one turn of the loop travel together"
        assert await remote.call("length", Shared(ray.put(b"x" * 3_000_000))) == 3_000_000

        sleeping = asyncio.create_task(remote.call("slow", 60))
        await remote.call("echo", 0)
        sleeping.cancel()
        await asyncio.wait([sleeping])
        assert await remote.call("was_cancelled")

        for pause in (0.0, 0.02, 0.05, 0.06, 0.1):  # before it began, while it runs, as it ends, after
            taking = asyncio.create_task(remote.call("take", undo=lambda thing: remote.tell("give", thing)))
            await asyncio.sleep(pause)
            if taking.cancel():
                with pytest.raises(asyncio.CancelledError):
                    await taking
            else:
                await remote.call("give", taking.result())
        await asyncio.sleep(0.3)
        assert await remote.call("count") == 0, "what came for nobody was given back"

        with pytest.raises(EngineLost, match="as asked"):
            await remote.call("fail")
        with pytest.raises(EngineLost, match="KeyError: 'lost key'"):
            await remote.call("crash")
        assert remote.dead is None, "an error of a call is no death"
        await remote.close()
        with pytest.raises(EngineLost, match="closed"):
            await remote.call("echo", 1)
    asyncio.run(play())


def test_a_killed_actor_fails_its_calls_at_once_and_starts_again(joined):
    async def play():
        remote, deaths = echo(), []
        remote.on_dead(lambda: deaths.append(time.monotonic()))
        await remote.start()
        waiting = [asyncio.create_task(remote.call("slow", 600)) for _ in range(3)]
        await remote.call("echo", 1)
        began = time.monotonic()
        os.kill(remote.pid, signal.SIGKILL)
        for call in waiting:
            with pytest.raises(EngineLost, match="echo is lost"):
                await call
        assert len(deaths) == 1
        assert deaths[0] - began < 10
        await remote.start()
        assert await remote.call("echo", 2) == 2
        await remote.close()
    asyncio.run(play())


def test_a_silent_actor_is_lost_and_one_that_cannot_start_says_why(joined):
    async def play():
        remote = echo(silent=4.0)
        await remote.start()
        with pytest.raises(EngineLost, match="no sign of life for 4 s"):
            await remote.call("freeze")
        await remote.close()
        with pytest.raises(NoCapacity, match="did not start within 3 s: no node has room"):
            await echo(lambda: {"resources": {"H900": 1}}, start=3.0).start()
        with pytest.raises(ConfigError, match="must name a Worker class"):
            await echo(worker="ray_workers:Missing").start()
        joined._settings = ClusterSettings(start_seconds=2)
        with pytest.raises(NoCapacity, match="found no room"):
            await joined.reserve([{"H800": 99.0}], "a giant")
    asyncio.run(play())


class DiesLate:
    """A call whose actor dies in the moment in which it is given up."""

    async def remote(self, *arguments):
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            raise ActorDiedError from None


def test_a_deadline_is_told_as_such_also_where_the_actor_dies_with_it():
    async def play():
        remote = echo(silent=0.05)
        remote._actor = SimpleNamespace(poll=DiesLate())
        await remote._poll()
        assert remote.dead == "no sign of life for 0.05 s (cluster.silent_seconds)"
        platform = ServePlatform({}, RewardSettings(), "test", [], 1.0)
        platform._respond = DiesLate()
        with pytest.raises(Broken, match=r"no answer within 0\.05 s"):
            await platform.send(b"", "", 0.05)
    asyncio.run(play())


def test_a_node_that_left_before_its_environments_were_up_is_left_out_and_one_that_is_there_is_told(joined):
    """The first look at the cluster may still have a node that has just died."""
    here, gone = next(node.id for node in joined.nodes() if node.pool == "CPU"), "e" * 56

    async def play(*looks):
        seen = iter(looks)
        pool = RemoteEnvironments(lambda: next(seen, looks[-1]), lambda node: echo(lambda: joined.on_node(node)), 5.0)
        try:
            await pool.start()
            return pool.stats().nodes
        finally:
            await pool.close()

    assert asyncio.run(play([here, gone], [here])) == 1
    with pytest.raises(NoCapacity, match="could not start"):
        asyncio.run(play([here, gone]))


def test_the_inventory_is_what_the_nodes_say(joined):
    pools = {}
    for node in joined.nodes():
        pools.setdefault(node.pool, []).append((node.units, node.accelerated))
    assert pools == {"H800": [(4, True)], "H20": [(1, True)], "CPU": [(2, False), (2, False)]}
