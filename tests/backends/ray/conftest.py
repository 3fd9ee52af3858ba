"""One Ray cluster of logical nodes for all tests here: 4 x H800, 1 x H20, and two plain hosts."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
here = [str(Path(__file__).parent), str(Path(__file__).parents[2])]
os.environ["PYTHONPATH"] = os.pathsep.join([*here, *sys.path[:1], os.environ.get("PYTHONPATH", "")])  # of the actors


class Logical:
    """The nodes by name; `add` and `remove` as a cluster's operator does."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self.cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": 150_000_000,
                                                                     "include_dashboard": False})
        self.nodes = {}
        for name in ("H800", "H20", "CPU-0", "CPU-1"):
            self.add(name)
        self.cluster.wait_for_nodes()
        self.address = self.cluster.address

    def add(self, name: str) -> None:
        resources = {"H800": {"H800": 4}, "H20": {"H20": 1}}.get(name, {})
        self.nodes[name] = self.cluster.add_node(num_cpus=2, resources=resources, object_store_memory=150_000_000,
                                                 wait=False)

    def remove(self, name: str) -> None:
        self.cluster.remove_node(self.nodes.pop(name), allow_graceful=False)


@pytest.fixture(scope="session")
def logical():
    made = Logical()
    yield made
    made.cluster.shutdown()
