"""The recipe's `[cluster]` table. Imports nothing heavy: a recipe is checked without Ray."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rollart.core.ranges import above
from rollart.distributed.api import Role


@dataclass(frozen=True, kw_only=True)
class HardwarePool:
    """What one pool consists of: `nodes` of them with `devices` accelerators each (0: plain hosts) and `cpus` cores.

    `--ray local` starts such logical nodes on this machine, `--dry-run` without an address plans with them; a cluster
    that runs already is asked what it has.
    """

    nodes: int = 1
    devices: int = 0
    cpus: int = 8

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.devices < 0 or self.cpus < 1:
            raise ValueError(f"needs nodes >= 1, devices >= 0 and cpus >= 1; got {self}")


@dataclass(frozen=True, kw_only=True)
class ClusterSettings:
    """Where the roles of the run are, once it runs on Ray (`--ray ADDRESS`, which sets `address`).

    address: host:port of a Ray head, auto (the one on this machine), local (start `pools` on this machine for this
    run), or empty: everything in one process, where the rest of this table means nothing.
    train, environments, evaluation, rewards: pools of the learner, of the environments, of the evaluation's engine and
    of rewards on Ray Serve (empty: any). Engines name theirs in [pools.NAME] hardware. pools: the hardware, by name.
    workers: classes that take the place of those that ship, by role (ActorTrain, ActorGen, Environment), as
    module:Class. Rewards have [reward] functions and places.
    start_seconds: deadline for a role to be placed and to start. silent_seconds: an actor that answers nothing for so
    long is lost. max_restarts: starts of one engine, or of the learner between two finished steps, before it is given
    up. redo_batches: batches since the last checkpoint that are kept, so that a lost learner can do their steps again
    (batches; beyond it the run ends, to be resumed).
    """

    address: str = ""
    train: str = ""
    environments: str = ""
    evaluation: str = ""
    rewards: str = ""
    pools: Mapping[str, HardwarePool] = field(default_factory=dict)
    workers: Mapping[str, str] = field(default_factory=dict)
    start_seconds: float = 300.0
    silent_seconds: float = 60.0
    max_restarts: int = 5
    redo_batches: int = 64

    def __post_init__(self) -> None:
        above(self, 0, "start_seconds", "silent_seconds", "max_restarts", "redo_batches")
        roles = [role.value for role in Role if role is not Role.REWARD]
        if unknown := sorted(set(self.workers) - set(roles)):
            raise ValueError(f"workers are named by role, {', '.join(roles)}; got {unknown[0]}")
