"""The recipe's `[reward]` table: what scores, where it runs, and how it is called."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rollart.core.ranges import above, at_least


@dataclass(frozen=True, kw_only=True)
class CallSettings:
    """How a function behind a URL, on Lambda, on the elastic platform or on Ray Serve is called.

    concurrency: calls at a time; more wait (calls). backoff_seconds: pause before the first retry; it doubles, with
    jitter, up to backoff_limit_seconds. hedge: percentile of the latencies so far after which a second call is made
    beside the first (0: never; 0.95 is usual). batch: trajectories in one call; batch_seconds: longest wait for a
    batch to fill. breaker_failures: so many failed attempts in a row open the circuit: then one attempt is made every
    breaker_seconds until one succeeds, and the rest waits. token_env: environment variable whose value is sent as
    bearer token (empty: none). request_mb, answer_mb: largest bodies (10^6 bytes). second_cost, call_cost: price of
    a second inside the function and of a call, in your currency (0: no estimate).
    """

    concurrency: int = 256
    backoff_seconds: float = 0.2
    backoff_limit_seconds: float = 10.0
    hedge: float = 0.0
    batch: int = 1
    batch_seconds: float = 0.02
    breaker_failures: int = 20
    breaker_seconds: float = 1.0
    token_env: str = ""
    request_mb: float = 16.0
    answer_mb: float = 1.0
    second_cost: float = 0.0
    call_cost: float = 0.0

    def __post_init__(self) -> None:
        above(self, 0, "concurrency", "batch", "breaker_failures", "request_mb", "answer_mb", "breaker_seconds")
        at_least(self, 0, "backoff_seconds", "batch_seconds", "second_cost", "call_cost")
        if self.backoff_limit_seconds < self.backoff_seconds:
            raise ValueError(f"backoff_limit_seconds must be at least backoff_seconds = {self.backoff_seconds:g}; "
                             f"got {self.backoff_limit_seconds:g}")
        if not 0 <= self.hedge < 1:
            raise ValueError(f"hedge must be a percentile from 0 (off) to below 1; got {self.hedge}")


@dataclass(frozen=True, kw_only=True)
class ElasticSettings:
    """Instances of the function, from zero to a maximum and back: processes of the local elastic platform, or replicas
    on Ray Serve.

    max_instances: instances at most. concurrency: requests inside one instance at a time. idle_seconds: an instance
    without a request for so long ends. start_seconds: deadline of a cold start (elastic). queue: requests that may
    wait for an instance; more are told to come back (HTTP 429). cpus: cores that a replica reserves (serve).
    """

    max_instances: int = 8
    concurrency: int = 1
    idle_seconds: float = 10.0
    start_seconds: float = 30.0
    queue: int = 1000
    cpus: float = 1.0

    def __post_init__(self) -> None:
        above(self, 0, "max_instances", "concurrency", "idle_seconds", "start_seconds", "queue", "cpus")


@dataclass(frozen=True, kw_only=True)
class RewardSettings:
    """where: in_process (trivial rules only: it stops the control plane while it runs), processes, elastic (a local
    platform that scales from and to zero), serve (the same by Ray Serve on the run's cluster), lambda:NAME, or the
    https:// URL of a function. Empty: where the function was bound by `register_serverless`, else processes.

    places: the same for single domains, by name. functions: the reward of single domains by name, as module:function,
    in place of the domain's own.
    score_seconds: deadline of one attempt (seconds). retries: further attempts after a failed one. wait_seconds:
    deadline for a free process, or for a call to be let out (seconds).
    processes: worker processes of `processes`. memory_mb: how much one may grow (10^6 bytes; enforced on Linux).
    """

    where: str = ""
    places: Mapping[str, str] = field(default_factory=dict)
    functions: Mapping[str, str] = field(default_factory=dict)
    processes: int = 2
    score_seconds: float = 30.0
    wait_seconds: float = 600.0
    retries: int = 2
    memory_mb: int = 1024
    call: CallSettings = field(default_factory=CallSettings)
    elastic: ElasticSettings = field(default_factory=ElasticSettings)

    def __post_init__(self) -> None:
        above(self, 0, "processes", "score_seconds", "wait_seconds", "memory_mb")
        at_least(self, 0, "retries")
        for where in (self.where, *self.places.values()):
            check_place(where)


def check_place(where: str) -> None:
    """Raises ValueError for a place that there is not."""
    if where in ("", "in_process", "processes", "elastic", "serve") or where.startswith(("http://", "https://")):
        return
    if where.startswith("lambda:") and len(where) > len("lambda:"):
        return
    raise ValueError(f"a reward runs in_process, in processes, elastic, on serve, at an https:// URL or as "
                     f"lambda:NAME; got {where!r}")
