"""Every number of the cost model that no data sheet gives, with where it comes from.

Keeps true: a constant is KNOWN (published), FITTED (once, to the named figures of the paper's motivation or of public
measurements) or ASSUMED (ours); the paper's evaluation tables are not used here, so they are predictions.
`docs/reproduction.md` shows this list and how the headlines move when an assumed one is halved or doubled.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any


def _is(default: float, kind: str, source: str) -> Any:
    return field(default=default, metadata={"kind": kind, "source": source})


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Units are in the names; efficiencies are shares of the data sheet's peak."""

    compute_efficiency: float = _is(0.5, "assumed", "share of bf16 peak that large prefill steps reach in vLLM")
    bandwidth_efficiency: float = _is(0.8, "assumed", "share of HBM bandwidth that decode steps reach in vLLM")
    memory_share: float = _is(0.9, "known", "vLLM's default gpu_memory_utilization")
    step_overhead_s: float = _is(0.003, "assumed", "scheduling, sampling and launch of one engine step")
    sequence_overhead_s: float = _is(2e-5, "assumed", "sampling and bookkeeping per decoding sequence and step")
    allreduce_s: float = _is(1e-5, "assumed", "latency of one small all-reduce inside a node")
    chunk_tokens: int = _is(8192, "known", "vLLM's default max_num_batched_tokens on large GPUs")
    least_context: int = _is(32_768, "known", "context of the paper's runs: at least one must fit an engine")
    train_efficiency: float = _is(0.15, "fitted", "training is 23.1 % of the paper's 365.7 s step (8B, 32 H800)")
    train_passes: float = _is(6.0, "assumed", "forward 1, backward 2, recomputed forward 1, two log-prob passes")
    train_fixed_s: float = _is(5.0, "assumed", "optimizer, gradient exchange and bookkeeping of one step")
    train_bytes_per_parameter: float = _is(18.0, "known", "bf16 weights and gradients, fp32 master and Adam moments")
    push_bytes_per_s: float = _is(0.50e9, "fitted", "paper: push of 15.26/27.51/61.02 GB takes 32.4/67.8/127.3 s")
    pull_bytes_per_s: float = _is(2.20e9, "fitted", "paper: pull of the same takes 6.2/16.3/29.7 s")
    pull_hidden: float = _is(0.72, "fitted", "paper: 67-78 % of the pull is hidden behind rollout")
    rdma_bytes_per_s: float = _is(7.0e9, "fitted", "paper: RDMA over 400 Gb/s takes 5.5/5.8/9.4 s")
    kv_bytes_per_s: float = _is(25e9, "known", "200 Gb/s Ethernet: KV from prefill to decode engines")

    def __post_init__(self) -> None:
        zero = ("step_overhead_s", "sequence_overhead_s", "allreduce_s", "train_fixed_s", "pull_hidden")
        for name, value in ((f.name, getattr(self, f.name)) for f in fields(self)):
            share = name.endswith("_efficiency") or name in ("memory_share", "pull_hidden")
            if not 0 <= value <= (1.0 if share else 1e15) or not (value or name in zero):
                raise ValueError(f"{name} must be {'0 or more' if name in zero else 'above 0'}"
                                 f"{', at most 1' if share else ''}; got {value:g}")

    @classmethod
    def rows(cls) -> list[tuple[str, float, str, str]]:
        """(name, value, kind, source) of each constant."""
        return [(f.name, f.default, f.metadata["kind"], f.metadata["source"]) for f in fields(cls)]  # type: ignore[misc]


DEFAULT = Calibration()
