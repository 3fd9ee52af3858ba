"""What a user may choose about the way of weights from learner to engines. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rollart.core.ranges import above, at_least, literals


@dataclass(frozen=True, kw_only=True)
class WeightsSettings:
    """How weights travel. Raises ValueError.

    carrier: memory (engines in the learner's process), file (one host: a folder in shared memory; or a shared file
        system), collective (broadcast over gloo or NCCL), mooncake (a Mooncake store).
    folder: of `file`; every writer makes its own folder in it. {uid} stands for the user's number; a folder that
        belongs to another user is refused.
    address: host:port. collective: where the learner listens, as engines reach it (port 0: any free one). mooncake: the
        store's master.
    bucket_mb: megabytes (10^6 bytes) that are sent and checked at a time; with `mooncake` at most 64.
    deadline_seconds: longest a bucket, or an answer of the other side, may take.
    backend: of `collective`: gloo, or nccl where learner and engines each have a GPU of their own.
    protocol: of `mooncake`: tcp, or rdma with the network devices named in `devices` (comma-separated; empty: all).
    segment_mb: of `mooncake`: megabytes of memory that the learner's process lends to the store, enough for three
        versions (it evicts from 90 % on); 0: the store has memory of its own (started with `mooncake_client`).
    """

    carrier: Literal["memory", "file", "collective", "mooncake"] = "memory"
    folder: str = "/dev/shm/rollart-{uid}"
    address: str = "127.0.0.1:0"
    bucket_mb: int = 1000
    deadline_seconds: float = 60.0
    backend: Literal["gloo", "nccl"] = "gloo"
    protocol: Literal["tcp", "rdma"] = "tcp"
    devices: str = ""
    segment_mb: int = 0

    def __post_init__(self) -> None:
        literals(self)
        at_least(self, 1, "bucket_mb")
        at_least(self, 0, "segment_mb")
        above(self, 0, "deadline_seconds")
        host, _, port = self.address.rpartition(":")
        if not host or not port.isdigit() or int(port) > 65535:
            raise ValueError(f"address must be host:port; got {self.address!r}")
        if self.carrier == "mooncake" and port == "0":
            raise ValueError(f"carrier mooncake needs the address of its master, such as 10.0.0.1:50051; got "
                             f"{self.address!r}")
        if not self.folder:
            raise ValueError("folder must name a folder, such as /dev/shm/rollart-{uid}; got ''")
