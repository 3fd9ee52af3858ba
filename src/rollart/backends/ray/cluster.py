"""A Ray cluster: find or start one, ask what it has, reserve places, and leave nothing behind.

Keeps true: what was started here (logical nodes, actors, placement groups) ends at `close`, also after a failed start;
an address where nothing answers is said in one line. Waits for Ray, with deadlines: Ray itself would wait for ever for
what does not fit.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Mapping
from typing import Any

import ray
from ray.exceptions import GetTimeoutError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from rollart.backends.ray.settings import ClusterSettings
from rollart.core.errors import ConfigError, NoCapacity
from rollart.distributed.placement import Node

CONNECT_SECONDS = 10.0
STORE_BYTES = 200_000_000  # of each logical node's object store
_OWN = ("CPU", "GPU", "memory", "object_store_memory")
_TYPE = "accelerator_type:"


class RayCluster:
    """Use `connect`; `close` gives everything back."""

    def __init__(self, settings: ClusterSettings) -> None:
        self._settings = settings
        self._groups: list[PlacementGroup] = []
        self.local: Any = None
        """ray.cluster_utils.Cluster, where it was started here."""

    def connect(self) -> None:
        """Join the cluster at the settings' address, or start a local one. Raises ConfigError; nothing is left then."""
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        ray._private.worker.print_to_stdstream = lambda *_, **__: None  # pages about a lost node, over our own output
        address = self._settings.address
        if ray.is_initialized():
            raise ConfigError("this process uses a Ray cluster already: end that run first")
        try:
            if address == "local":
                address = self._start_local()
            elif address != "auto":
                _knock(address)
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            self.close()
            raise ConfigError(f"no Ray cluster at {self._settings.address!r}: {str(error).splitlines()[0]}; start one "
                              "with `ray start --head`, or use --ray local; if it asks for a token, set "
                              "RAY_AUTH_MODE=token here too") from None
        except BaseException:
            self.close()
            raise

    def _start_local(self) -> str:
        from ray.cluster_utils import Cluster

        pools = self._settings.pools
        if not pools:
            raise ConfigError("--ray local starts the nodes of [cluster.pools] on this machine; the recipe has none: "
                              "see recipes/cluster_local.toml")
        common = {"object_store_memory": STORE_BYTES, "include_dashboard": False}
        self.local = Cluster(initialize_head=True, head_node_args={**common, "num_cpus": 0})
        for name, pool in sorted(pools.items()):
            for _ in range(pool.nodes):
                self.local.add_node(num_cpus=pool.cpus, object_store_memory=STORE_BYTES,
                                    resources={name: pool.devices} if pool.devices else {}, wait=False)
        self.local.wait_for_nodes()
        return str(self.local.address)

    def nodes(self) -> list[Node]:
        """Live nodes by pool: that of a custom resource or of an accelerator type, else CPU where there are cores."""
        out = []
        for node in ray.nodes():
            if not node["Alive"]:
                continue
            has: Mapping[str, float] = node["Resources"]
            kinds = [n.removeprefix(_TYPE) for n in has if n.startswith(_TYPE)] if has.get("GPU") else []
            custom = [n for n in has if n not in _OWN and not n.startswith(("node:", _TYPE))]
            for pool in custom or kinds:
                out.append(Node(node["NodeID"], pool, int(has[pool] if pool in custom else has["GPU"])))
            if not custom and not kinds and has.get("CPU"):
                out.append(Node(node["NodeID"], "CPU", int(has["CPU"]), accelerated=False))
        return out

    def demand(self, node: Node, units: int) -> dict[str, float]:
        """What a bundle of so many units of that node's pool asks Ray for."""
        has = next(n["Resources"] for n in ray.nodes() if n["NodeID"] == node.id)
        wanted: dict[str, float] = {}
        if node.pool in has:
            wanted[node.pool] = units
        elif f"{_TYPE}{node.pool}" in has:
            wanted[f"{_TYPE}{node.pool}"] = 0.001
        if node.accelerated and has.get("GPU", 0) >= units:
            wanted["GPU"] = units
        return wanted or {"CPU": units}

    async def reserve(self, bundles: list[dict[str, float]], what: str) -> list[dict[str, Any]]:
        """A placement group; returns the actor options for each bundle. Raises NoCapacity after the deadline."""
        group = placement_group(bundles, strategy="PACK")
        self._groups.append(group)
        try:
            await asyncio.to_thread(ray.get, group.ready(), timeout=self._settings.start_seconds)
        except GetTimeoutError:
            raise NoCapacity(f"Ray found no room for {what} ({bundles}) within {self._settings.start_seconds:g} s "
                             "(cluster.start_seconds): something else holds it") from None
        return [{"scheduling_strategy": PlacementGroupSchedulingStrategy(group, i),
                 "num_gpus": bundle.get("GPU", 0), "num_cpus": bundle.get("CPU", 0),
                 "resources": {k: v for k, v in bundle.items() if k not in _OWN}} for i, bundle in enumerate(bundles)]

    @staticmethod
    def on_node(node: str) -> dict[str, Any]:
        """Actor options: on that very node."""
        return {"scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False)}

    def close(self) -> None:
        """Placement groups, the connection, and the local nodes."""
        if ray.is_initialized():
            for group in self._groups:
                remove_placement_group(group)
            ray.shutdown()
        self._groups.clear()
        local, self.local = self.local, None
        if local:
            local.shutdown()


def _knock(address: str) -> None:
    """Raises OSError or ConfigError: Ray's own search for an absent head takes minutes."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal() or "/" in address:
        raise ConfigError(f"--ray takes local, auto or the HOST:PORT of a Ray head (often port 6379); got {address!r}: "
                          "run the command on a node of the cluster, ray:// clients are not supported")
    with socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS):
        pass
