"""What a user may choose about the way of weights from learner to engines. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Carrier = Literal["memory", "file", "collective", "mooncake"]


@dataclass(frozen=True, kw_only=True)
class WeightsSettings:
    """How weights travel. Raises ValueError.

    carrier: memory (engines in the learner's process), file (one host: a folder in shared memory; or a shared file
        system), collective (broadcast over gloo or NCCL), mooncake (a Mooncake store).
    folder: of `file`; every writer makes its own folder in it.
    address: host:port. collective: where the learner listens, as engines reach it (port 0: any free one). mooncake: the
        store's master.
    bucket_mb: megabytes (10^6 bytes) that are sent and checked at a time; with `mooncake` at most 64.
    deadline_seconds: longest a bucket, or an answer of the other side, may take.
    backend: of `collective`: gloo, or nccl where learner and engines each have a GPU of their own.
    protocol: of `mooncake`: tcp, or rdma with the network devices named in `devices` (comma-separated; empty: all).
    segment_mb: of `mooncake`: megabytes of memory that the learner's process lends to the store, enough for three
        versions (it evicts from 90 % on); 0: the store has memory of its own (started with `mooncake_client`).
    """

    carrier: Carrier = "memory"
    folder: str = "/dev/shm/rollart"
    address: str = "127.0.0.1:0"
    bucket_mb: int = 1000
    deadline_seconds: float = 60.0
    backend: Literal["gloo", "nccl"] = "gloo"
    protocol: Literal["tcp", "rdma"] = "tcp"
    devices: str = ""
    segment_mb: int = 0

    def __post_init__(self) -> None:
        if self.carrier not in get_args(Carrier):
            raise ValueError(f"carrier must be one of {', '.join(get_args(Carrier))}; got {self.carrier!r}")
        if self.bucket_mb < 1 or self.segment_mb < 0:
            raise ValueError(f"bucket_mb must be at least 1 and segment_mb at least 0 megabytes; got {self.bucket_mb} "
                             f"and {self.segment_mb}")
        if not self.deadline_seconds > 0:
            raise ValueError(f"deadline_seconds must be above 0; got {self.deadline_seconds}")
        if self.backend not in ("gloo", "nccl") or self.protocol not in ("tcp", "rdma"):
            raise ValueError(f"backend must be gloo or nccl and protocol tcp or rdma; got {self.backend!r} and "
                             f"{self.protocol!r}")
        host, _, port = self.address.rpartition(":")
        if not host or not port.isdigit() or int(port) > 65535:
            raise ValueError(f"address must be host:port; got {self.address!r}")
        if self.carrier == "mooncake" and port == "0":
            raise ValueError(f"carrier mooncake needs the address of its master, such as 10.0.0.1:50051; got "
                             f"{self.address!r}")
        if not self.folder:
            raise ValueError("folder must name a folder, such as /dev/shm/rollart; got ''")
