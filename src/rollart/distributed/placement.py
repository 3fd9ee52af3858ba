"""Who runs on which node: roles and an inventory in, a placement out. A pure function, and its printed plan.

Keeps true: no node holds more units than it has; one need's units are on one node; a need whose preferred pool is full
goes to a compatible pool (its own kind: accelerators or plain hosts) and says so; the same input gives the same plan.
Needs are placed in the order given, so what matters most comes first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rollart.core.errors import ConfigError
from rollart.distributed.api import Role


@dataclass(frozen=True, slots=True)
class Node:
    """`units`: accelerators, or on a plain host CPU cores. `accelerated`: which of the two."""

    id: str
    pool: str
    units: int
    accelerated: bool = True


@dataclass(frozen=True, slots=True)
class Need:
    """One process to place. pool: the preferred one ("": any). units: devices it takes, all on one node.

    spread: it takes no units and wants one process on each node of its pool (environments).
    """

    name: str
    role: Role
    pool: str = ""
    units: int = 1
    spread: bool = False


@dataclass(frozen=True, slots=True)
class Placed:
    """`fallback`: the preferred pool was full."""

    need: Need
    node: Node
    fallback: bool = False


class ResourceManager:
    """The inventory, and what of it is taken."""

    def __init__(self, nodes: Iterable[Node]) -> None:
        self.nodes = tuple(sorted(nodes, key=lambda n: (n.pool, n.id)))
        self.free: dict[str, int] = {node.id: node.units for node in self.nodes}

    @property
    def pools(self) -> dict[str, tuple[Node, ...]]:
        names = sorted({node.pool for node in self.nodes})
        return {name: tuple(n for n in self.nodes if n.pool == name) for name in names}

    def compatible(self, pool: str) -> list[str]:
        """The pools that may serve who prefers `pool`, in order: itself, then others of its kind, the freest first.

        Without a preference: accelerators before plain hosts. Raises ConfigError for a pool without nodes.
        """
        pools = self.pools
        if pool and pool not in pools:
            known = ", ".join(f"{name} ({len(nodes)} nodes)" for name, nodes in pools.items()) or "none"
            raise ConfigError(f"pool {pool!r} has no nodes in this cluster; there are: {known}. Name one of them, or "
                              f"start nodes that have the resource {pool}")
        kind = {name: nodes[0].accelerated for name, nodes in pools.items()}
        others = [name for name in pools if name != pool and (not pool or kind[name] == kind[pool])]
        others.sort(key=lambda name: (not kind[name], -sum(self.free[n.id] for n in pools[name]), name))
        return ([pool] if pool else []) + others

    def take(self, need: Need) -> list[Placed]:
        """Place one need (several if it spreads). Raises ConfigError when it fits nowhere."""
        pools = self.pools
        candidates = self.compatible(need.pool)
        if need.spread:
            plain = [name for name in candidates if not pools[name][0].accelerated]
            chosen = need.pool or next(iter(plain or candidates), "")
            return [Placed(need, node) for node in pools.get(chosen, ())]
        for pool in candidates:
            fitting = [n for n in pools[pool] if self.free[n.id] >= need.units]
            if fitting:  # the fullest node that still has room, so that large needs find whole nodes
                node = min(fitting, key=lambda n: (self.free[n.id], n.id))
                self.free[node.id] -= need.units
                return [Placed(need, node, bool(need.pool) and pool != need.pool)]
        room = ", ".join(f"{p} {'+'.join(str(self.free[n.id]) for n in pools[p])}" for p in candidates) or "none"
        raise ConfigError(f"no node has {need.units} free units for {need.name}; free by node of the pools that may "
                          f"serve it: {room}. Lower replicas or the devices of each, or add nodes")


def place(needs: Sequence[Need], nodes: Iterable[Node]) -> tuple[Placed, ...]:
    """Every need on a node. Raises ConfigError when one fits nowhere."""
    manager = ResourceManager(nodes)
    return tuple(placed for need in needs for placed in manager.take(need))


def render_plan(placed: Sequence[Placed], domains: Mapping[str, Sequence[str]]) -> list[str]:
    """The plan as lines. `domains`: which task domains prefer which need's pool of engines."""
    out = []
    for item in placed:
        need, node = item.need, item.node
        note = f"  (fallback: {need.pool} is full)" if item.fallback else ""
        mine = f"  domains {', '.join(domains[need.name])}" if domains.get(need.name) else ""
        units = f"{need.units} of {node.units} units" if not need.spread else "as many as the run needs"
        out.append(f"{need.role.value:12} {need.name:18} {node.pool:8} {node.id[:12]:12} {units}{mine}{note}")
    return out
