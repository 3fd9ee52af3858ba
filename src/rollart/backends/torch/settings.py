"""What a user may choose about the embedded model, engine, learner and warm start.

Imports nothing heavy: a recipe is checked without torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from rollart.core.ranges import above, at_least, between, finite, literals

Schedule = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallModel:
    """A decoder made on the spot, about 1.3 million parameters by default.

    family: `qwen3` or `llama`. layers, heads, kv_heads: counts; heads is a multiple of kv_heads.
    width: hidden width; it is a multiple of 2 * heads. mlp: inner width of the feed-forward part.
    vocabulary: number of token ids (the byte tokenizer has 262). context_tokens: longest context in tokens.
    experts: per layer, each of inner width `mlp` (0: no mixture); a token takes experts_per_token of them.
    """

    family: Literal["qwen3", "llama"] = "qwen3"
    layers: int = 4
    width: int = 192
    heads: int = 4
    kv_heads: int = 1
    mlp: int = 384
    vocabulary: int = 262
    context_tokens: int = 1024
    experts: int = 0
    experts_per_token: int = 0

    def __post_init__(self) -> None:
        if self.experts and (self.family != "qwen3" or not 0 < self.experts_per_token <= self.experts <= 255):
            raise ValueError(f"experts = {self.experts} needs family = 'qwen3', at most 255 of them, and "
                             f"experts_per_token from 1 to experts; got {self.family!r} and {self.experts_per_token}")
        if self.experts_per_token and not self.experts:
            raise ValueError(f"experts_per_token = {self.experts_per_token} is used by nothing with experts = 0")
        literals(self)
        at_least(self, 1, "layers", "width", "heads", "kv_heads", "mlp", "vocabulary", "context_tokens")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads must be a multiple of kv_heads; got {self.heads} and {self.kv_heads}")
        if self.width % (2 * self.heads):
            raise ValueError(f"width must be a multiple of 2 * heads; got {self.width} and {self.heads} heads")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """An embedded engine's limits.

    threads: CPU threads of its steps (0: its share of the cores). max_concurrent: trajectories that run at once.
    context_tokens: longest context with its completion, in tokens; 0 takes the model's. kv_tokens: tokens of keys and
    values, running (reserved up to their limit) and kept between turns together. prefill_chunk: tokens of prefill
    between two decode steps. device: cpu, cuda, cuda:1, ..., or auto: cuda if there is one. answer_seconds: longest
    wait for the thread to obey suspend, load, resume or close.
    """

    threads: int = 0
    max_concurrent: int = 64
    context_tokens: int = 0
    kv_tokens: int = 131_072
    prefill_chunk: int = 1024
    device: str = "auto"
    answer_seconds: float = 120.0

    def __post_init__(self) -> None:
        above(self, 0, "max_concurrent", "kv_tokens", "prefill_chunk", "answer_seconds")
        at_least(self, 0, "threads", "context_tokens")
        if self.kv_tokens < self.context_tokens:
            raise ValueError(f"kv_tokens must hold one whole context of {self.context_tokens}; got {self.kv_tokens}")


@dataclass(frozen=True, kw_only=True)
class LearnerSettings:
    """How the learner steps. Raises ValueError.

    learning_rate: AdamW's, after the warm-up. schedule: constant, or linear / cosine down to 0 at `total_steps`.
    warmup_steps: steps of linear warm-up. total_steps: length of linear and cosine, in steps; 0: the whole
        run.
    beta1, beta2, eps: AdamW's. weight_decay: decoupled, per unit of learning rate; matrices only, not norms and biases.
    max_grad_norm: the gradient's norm is clipped to it; 0 is off.
    micro_batch_tokens: packed tokens per forward and backward pass; it changes memory and speed, never the result.
    minibatches: optimizer steps per batch. threads: CPU threads it computes with (0: its share of the
        cores).
    precision: float32, bfloat16 (autocast; weights and log-probabilities stay float32), or auto: bfloat16 on a GPU
        where no engine is embedded, float32 elsewhere, so that engine and learner compute alike. device: cpu, cuda,
        cuda:1, ..., or auto: cuda if there is one.
    gradient_checkpointing: keep only each layer's input for the backward pass and compute the rest again: less memory,
        about a third more time.
    routing_replay: of a mixture of experts, train with the experts that the engine took where it recorded them.
    ranks: processes that share the learner's work and weights (1: the learner is in the run's own process).
    rank_seconds: longest wait of a rank for the others, and of the run for all ranks to start.
    """

    learning_rate: float = 3e-4
    schedule: Schedule = "constant"
    warmup_steps: int = 0
    total_steps: int = 0
    beta1: float = 0.9
    beta2: float = 0.99
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    micro_batch_tokens: int = 4096
    minibatches: int = 1
    threads: int = 0
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    device: str = "auto"
    gradient_checkpointing: bool = False
    routing_replay: bool = True
    ranks: int = 1
    rank_seconds: float = 600.0

    def __post_init__(self) -> None:
        literals(self)
        finite(self, "learning_rate", "eps", "rank_seconds", "weight_decay", "max_grad_norm")
        above(self, 0, "learning_rate", "eps", "rank_seconds")
        at_least(self, 0, "weight_decay", "max_grad_norm", "threads", "warmup_steps")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be in [0, 1); got {getattr(self, name)!r}")
        at_least(self, 1, "micro_batch_tokens", "minibatches", "ranks")
        if self.schedule != "constant" and 0 < self.total_steps <= self.warmup_steps:
            raise ValueError(f"schedule {self.schedule} needs total_steps above warmup_steps; "
                             f"got {self.total_steps} and {self.warmup_steps}")
        if self.schedule == "constant" and self.total_steps:
            raise ValueError(f"total_steps means nothing to schedule constant; got {self.total_steps}: set it to 0")
        if self.ranks > 1 and ":" in self.device:
            raise ValueError(f"device must be auto, cpu or cuda where {self.ranks} ranks each take their own; got "
                             f"{self.device!r}")


@dataclass(frozen=True, kw_only=True)
class LoraSettings:
    """Low-rank adapters (arXiv 2106.09685) on the model's projections; only they are trained and sent to the engines.

    rank, alpha: W + alpha / rank * B A. targets: names of the projections that get one.
    """

    rank: int = 16
    alpha: float = 32.0
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

    def __post_init__(self) -> None:
        if self.rank < 1 or not self.alpha > 0:
            raise ValueError(f"rank must be at least 1 and alpha above 0; got {self.rank} and {self.alpha:g}")
        unknown = set(self.targets) - set(LoraSettings.__dataclass_fields__["targets"].default)
        if unknown or not self.targets:
            raise ValueError(f"targets must be some of q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj; "
                             f"got {', '.join(sorted(unknown)) or 'none'}")


@dataclass(frozen=True, kw_only=True)
class ChatSettings:
    """How a checkpoint folder's chat template is applied.

    reasoning: keep (a past turn stays as it was sampled, reasoning included) or drop (past turns are rendered anew,
    with what stands up to </think> only where the template keeps it, and the trajectory forks where that reads
    otherwise). tools: how the model writes tool calls: tags, hermes (Qwen too) or llama; tasks see and give them as
    tags (`rollart.envs.tool_calls`).
    """

    reasoning: Literal["keep", "drop"] = "keep"
    tools: Literal["tags", "hermes", "llama"] = "tags"


@dataclass(frozen=True, kw_only=True)
class WarmStartSettings:
    """Imitation before reinforcement, once for all that it depends on: the result is kept in the user's cache folder,
    or in the one that the environment variable ROLLART_CACHE names. Raises ValueError.

    demonstrations: episodes per domain. error_rate: share of random actions in them. episodes, error_rates: the same
        for single domains by name, where they differ. passes: times that each demonstration is used.
    batch_tokens: tokens per optimizer step. learning_rate: AdamW's, after a warm-up over the first twentieth of the
        steps. schedule: constant, or linear / cosine down to 0 at the end. weight_decay: of matrices, per unit of
        learning rate. seed: of the order of sequences.
    """

    demonstrations: int = 512
    episodes: Mapping[str, int] = field(default_factory=dict)
    error_rate: float = 0.3
    error_rates: Mapping[str, float] = field(default_factory=dict)
    passes: int = 4
    batch_tokens: int = 4096
    learning_rate: float = 2e-3
    schedule: Schedule = "cosine"
    weight_decay: float = 0.01
    seed: int = 0

    def __post_init__(self) -> None:
        at_least(self, 1, "demonstrations", "passes", "batch_tokens")
        literals(self)
        finite(self, "learning_rate", "weight_decay")
        above(self, 0, "learning_rate")
        at_least(self, 0, "weight_decay")
        between(self, 0, 1, "error_rate")
        for domain, rate in self.error_rates.items():
            if not 0 <= rate <= 1:
                raise ValueError(f"error_rates.{domain} must lie between 0 and 1; got {rate!r}")
