"""What GPUs, links and models can do, and what one engine step, one optimizer step and one transfer cost.

Keeps true: a cost depends on its arguments only; what is not a data sheet's number is a field of `Calibration`
(`sim/calibration.py` says where each comes from). Units: seconds, bytes, tokens, FLOP.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from rollart.core.errors import ConfigError
from rollart.core.ranges import at_least
from rollart.envs.domain import nearest
from rollart.sim.calibration import Calibration


@dataclass(frozen=True)
class Gpu:
    """tflops: dense bf16. memory: bytes. bandwidth: bytes/s of its memory. link: bytes/s to its neighbours in one node.

    price: relative to one H20, as in the paper where it gives one.
    """

    name: str
    tflops: float
    memory: float
    bandwidth: float
    link: float
    price: float
    source: str


GPUS: Mapping[str, Gpu] = {gpu.name: gpu for gpu in (
    Gpu("H800", 989.5, 80e9, 3.35e12, 400e9, 2.85, "RollArt paper, table of GPUs"),
    Gpu("H20", 148.0, 96e9, 4.0e12, 900e9, 1.00, "RollArt paper, table of GPUs"),
    Gpu("H100", 989.5, 80e9, 3.35e12, 900e9, 2.85, "NVIDIA H100 SXM data sheet; price assumed as H800"),
    Gpu("H200", 989.5, 141e9, 4.8e12, 900e9, 3.3, "NVIDIA H200 SXM data sheet; price assumed"),
    Gpu("A100", 312.0, 80e9, 2.039e12, 600e9, 1.4, "NVIDIA A100 80 GB SXM data sheet; price assumed"),
    Gpu("L40S", 362.0, 48e9, 0.864e12, 32e9, 0.7, "NVIDIA L40S data sheet, PCIe 4 x16; price assumed"),
    Gpu("B200", 2250.0, 180e9, 7.7e12, 1800e9, 5.5, "NVIDIA DGX B200 data sheet / 8; price assumed"),
)}


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A decoder-only transformer. mlp, expert_mlp: width of the gated feed-forward layer (of one expert). experts: 0
    for a dense model; active: experts per token."""

    name: str = "custom"
    layers: int = 36
    hidden: int = 4096
    heads: int = 32
    kv_heads: int = 8
    head: int = 128
    mlp: int = 12288
    vocabulary: int = 151_936
    experts: int = 0
    active: int = 0
    expert_mlp: int = 0
    tied: bool = False

    def __post_init__(self) -> None:
        at_least(self, 1, "layers", "hidden", "heads", "kv_heads", "head", "vocabulary")
        if not 0 <= self.active <= self.experts or bool(self.experts) != bool(self.active and self.expert_mlp):
            raise ValueError(f"a mixture of experts needs experts >= active >= 1 and expert_mlp; got experts "
                             f"{self.experts}, active {self.active}, expert_mlp {self.expert_mlp}")

    @property
    def expert_parameters(self) -> int:
        """Of all experts together; 0 for a dense model."""
        return self.layers * self.experts * 3 * self.hidden * self.expert_mlp

    @property
    def common_parameters(self) -> int:
        """What every token passes: attention, dense feed-forward or router, output layer."""
        attention = 2 * self.hidden * self.head * (self.heads + self.kv_heads)
        feed = self.hidden * self.experts if self.experts else 3 * self.hidden * self.mlp
        return self.layers * (attention + feed) + self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        embedding = 0 if self.tied else self.vocabulary * self.hidden
        return self.common_parameters + self.expert_parameters + embedding

    @property
    def active_parameters(self) -> float:
        """Multiplied with each token: what a forward pass costs is 2 FLOP for each."""
        share = self.active / self.experts if self.experts else 0.0
        return self.common_parameters + share * self.expert_parameters

    @property
    def weight_bytes(self) -> int:
        """In bf16."""
        return 2 * self.parameters

    @property
    def kv_bytes(self) -> int:
        """Of one token of context, in bf16."""
        return 2 * 2 * self.layers * self.kv_heads * self.head

    @property
    def attention_flops(self) -> int:
        """Of one token per token of its context, forward (scores and values)."""
        return 4 * self.layers * self.heads * self.head


MODELS: Mapping[str, Shape] = {shape.name: shape for shape in (
    Shape(name="Qwen3-8B"),
    Shape(name="Qwen3-14B", layers=40, hidden=5120, heads=40, mlp=17408),
    Shape(name="Qwen3-32B", layers=64, hidden=5120, heads=64, mlp=25600),
    Shape(name="Qwen3-30B-A3B", layers=48, hidden=2048, heads=32, kv_heads=4, experts=128, active=8, expert_mlp=768),
    Shape(name="Qwen3-235B-A22B", layers=94, hidden=4096, heads=64, kv_heads=4, experts=128, active=8,
          expert_mlp=1536),
)}
"""Shapes from the models' published config.json."""


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """One engine step over `decoding` sequences and a chunk of prefill, as a roofline.

    overhead_s: seconds of every step. token_s: compute, per token of decode or prefill. sequence_s: per decoding
    sequence besides. weights_s: reading the weights that every step reads. experts_s: reading all experts, of which
    a step reads those that its tokens choose; experts, active: of a layer, and of them those of a token. kv_s: reading
    one token of context. chunk: most prefill tokens of a step. capacity: tokens of KV that fit (a turn that is alone
    may use more). concurrent: most sequences that decode at once. attention: work of a prefill token per token before
    it, in tokens; turn_tokens: of a turn's start. share_prompts: a group's prompt is prefilled once. load_s: seconds to
    exchange the weights.
    """

    overhead_s: float = 0.012
    token_s: float = 1 / 20_000
    sequence_s: float = 0.0
    weights_s: float = 0.0
    experts_s: float = 0.0
    experts: int = 0
    active: int = 0
    kv_s: float = 0.0
    chunk: int = 8192
    capacity: float = float("inf")
    concurrent: float = float("inf")
    attention: float = 0.0
    turn_tokens: float = 0.0
    share_prompts: bool = True
    load_s: float = 8.0

    def __post_init__(self) -> None:
        for f in fields(self):
            if not getattr(self, f.name) >= 0:
                raise ValueError(f"{f.name} must be 0 or more; got {getattr(self, f.name)}")
        if min(self.chunk, self.concurrent) < 1 or not self.capacity or not self.seconds(1, 1, 0):
            raise ValueError(f"chunk, concurrent, capacity and the seconds of a step must be above 0; got chunk "
                             f"{self.chunk}, concurrent {self.concurrent:g}, capacity {self.capacity:g}, "
                             f"{self.seconds(1, 1, 0):g} s")

    def seconds(self, decoding: int, context: float, prefill: float) -> float:
        """One step. context: tokens of KV that the decoding sequences read, all together."""
        tokens = decoding + prefill
        memory = self.weights_s + context * self.kv_s
        if self.experts:
            memory += self.experts_s * (1.0 - (1.0 - self.active / self.experts) ** tokens)
        return self.overhead_s + max(tokens * self.token_s, memory) + decoding * self.sequence_s

    def work(self, new: int, cached: int) -> float:
        """Prefill of `new` tokens behind `cached` ones, in tokens without attention."""
        return self.turn_tokens + new * (1.0 + self.attention * (cached + new / 2))


def engine_cost(shape: Shape, gpu: Gpu, tensor_parallel: int, c: Calibration, *, load_s: float = 0.0) -> StepCost:
    """One engine over `tensor_parallel` GPUs of a node. Raises ConfigError if the model does not fit."""
    flops = tensor_parallel * gpu.tflops * 1e12 * c.compute_efficiency
    bandwidth = tensor_parallel * gpu.bandwidth * c.bandwidth_efficiency
    memory = tensor_parallel * gpu.memory * c.memory_share
    room = memory - shape.weight_bytes
    if room < c.least_context * shape.kv_bytes:
        need = (shape.weight_bytes + c.least_context * shape.kv_bytes) / c.memory_share
        fits = -(-need // gpu.memory)
        raise ConfigError(
            f"{shape.name} ({shape.weight_bytes / 1e9:.0f} GB and {c.least_context} tokens of KV) does not fit "
            f"{tensor_parallel} x {gpu.name} by {(need - tensor_parallel * gpu.memory) / 1e9:.0f} GB: it needs at "
            f"least {fits:.0f} x {gpu.name} per engine; raise tensor_parallel")
    exchange, latency = 0.0, 0.0
    if tensor_parallel > 1:  # two all-reduces a layer, ring
        exchange = 2 * shape.layers * 2 * shape.hidden * 2 * (tensor_parallel - 1) / tensor_parallel / gpu.link
        latency = 2 * shape.layers * c.allreduce_s
    expert_bytes = 2 * shape.expert_parameters
    return StepCost(
        overhead_s=c.step_overhead_s + latency, token_s=2 * shape.active_parameters / flops + exchange,
        sequence_s=c.sequence_overhead_s, weights_s=2 * shape.common_parameters / bandwidth,
        experts_s=expert_bytes / bandwidth, experts=shape.experts, active=shape.active,
        kv_s=shape.kv_bytes / bandwidth, chunk=c.chunk_tokens, capacity=room / shape.kv_bytes,
        attention=shape.attention_flops / (2 * shape.active_parameters), load_s=load_s)


@dataclass(frozen=True, kw_only=True)
class TrainCost:
    """An optimizer step: `fixed_s`, and `token_s` per token plus `attention` tokens per token of context before it."""

    fixed_s: float = 5.0
    token_s: float = 1 / 20_000
    attention: float = 0.0

    def __post_init__(self) -> None:
        if self.fixed_s < 0 or self.token_s < 0 or self.attention < 0:
            raise ValueError(f"fixed_s, token_s and attention must be 0 or more; got {self.fixed_s:g}, "
                             f"{self.token_s:g}, {self.attention:g}")

    def seconds(self, lengths: list[int]) -> float:
        """Of a batch of sequences with these lengths (tokens)."""
        return self.fixed_s + self.token_s * math.fsum(n * (1.0 + self.attention * n / 2) for n in lengths)


def train_cost(shape: Shape, gpu: Gpu, gpus: int, c: Calibration) -> TrainCost:
    """Forward and backward with recomputation and the passes for log-probabilities: `train_passes` forward passes."""
    flops = gpus * gpu.tflops * 1e12 * c.train_efficiency
    needed = shape.parameters * c.train_bytes_per_parameter
    if needed > gpus * gpu.memory:
        raise ConfigError(f"training {shape.name} needs {needed / 1e9:.0f} GB of GPU memory, {gpus} x {gpu.name} have "
                          f"{gpus * gpu.memory / 1e9:.0f} GB: use at least {-(-needed // gpu.memory):.0f}")
    return TrainCost(fixed_s=c.train_fixed_s, token_s=c.train_passes * 2 * shape.active_parameters / flops,
                     attention=shape.attention_flops / (2 * shape.active_parameters))


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """Seconds that one version's weights take. push: into the store. pull: from it, all; exposed: of the pull, while
    the engines stand still (the rest overlaps rollout)."""

    push: float
    pull: float
    exposed: float


def transfer(shape: Shape, c: Calibration, *, colocated: bool = False) -> Transfer:
    """Through the store, or (colocated) by RDMA inside one cluster, where there is no second copy to pull."""
    size = shape.weight_bytes
    if colocated:
        return Transfer(push=0.0, pull=size / c.rdma_bytes_per_s, exposed=size / c.rdma_bytes_per_s)
    pull = size / c.pull_bytes_per_s
    return Transfer(push=size / c.push_bytes_per_s, pull=pull, exposed=pull * (1.0 - c.pull_hidden))


@dataclass(frozen=True, kw_only=True)
class Part:
    """So many GPUs of one kind, as in `96xH800`."""

    gpu: Gpu
    count: int

    @property
    def price(self) -> float:
        """Per hour, in hours of one H20."""
        return self.gpu.price * self.count


@dataclass(frozen=True)
class Inventory:
    """What a cluster has, by kind."""

    parts: tuple[Part, ...] = field(default=())

    def __str__(self) -> str:
        return ",".join(f"{part.count}x{part.gpu.name}" for part in self.parts)


def gpu_kind(name: str, where: str) -> Gpu:
    """Raises ConfigError with the nearest name."""
    if name not in GPUS:
        raise ConfigError(f"{where}: no GPU kind {name}{nearest(name, GPUS)}")
    return GPUS[name]


def parse_cluster(text: str) -> Inventory:
    """`96xH800,32xH20`. Raises ConfigError."""
    counts: dict[str, int] = {}
    for piece in text.split(","):
        found = re.fullmatch(r"\s*(\d{1,6})\s*[xX*]\s*([A-Za-z0-9-]+)\s*", piece)
        if not found or int(found[1]) < 1:
            raise ConfigError(f"a cluster is written like 96xH800,32xH20; got {text!r}, of which {piece.strip()!r} "
                              "is no COUNTxKIND with a count of 1 to 999999")
        gpu = gpu_kind(found[2].upper(), "cluster")
        counts[gpu.name] = counts.get(gpu.name, 0) + int(found[1])
    return Inventory(tuple(Part(gpu=GPUS[name], count=n) for name, n in counts.items()))
