"""The declarative face of a cluster: `import rollart.distributed as rdist`.

A worker is a class; decorators say how its methods run over the workers of its role and which hardware they prefer.
They only attach metadata: the composition root reads it, so the same class runs in one process or in actors.
"""

from rollart.distributed.api import Cluster, Role, Worker, affinity, hw_mapping, register, worker_class
from rollart.distributed.placement import Need, Node, Placed, ResourceManager, place, render_plan
from rollart.rewards.contract import register_serverless

__all__ = ["Cluster", "Need", "Node", "Placed", "ResourceManager", "Role", "Worker", "affinity", "hw_mapping", "place",
           "register", "register_serverless", "render_plan", "worker_class"]
