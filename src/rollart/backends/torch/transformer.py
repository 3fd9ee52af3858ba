"""The one decoder of the embedded engine and learner: Llama, Qwen2 and Qwen3 shapes.

Keeps true: parameter names are the Hugging Face names of the same model, so that no mapping exists anywhere; sequences
packed into one row never see each other (L8). Shapes: T tokens in all, D width, H heads, K key-value heads, Dh head
width, N sequences of a group, L their padded length.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rollart.backends.torch.settings import SmallModel
from rollart.core.errors import ConfigError

FAMILIES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary embedding: frequency base and its scaling (`default`, `linear` or `llama3`).

    The scaling formulas are those of transformers' `modeling_rope_utils`: linear divides every frequency by `factor`;
    llama3 divides the frequencies whose wavelength is long against `original` positions, and blends in between.
    """

    theta: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0
    low: float = 1.0
    high: float = 4.0
    original: int = 8192

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Rope:
        """From `rope_parameters`, or from `rope_theta` and `rope_scaling` of older files. Raises ConfigError."""
        given = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
        kind = given.get("rope_type", given.get("type", "default"))
        if kind not in ("default", "linear", "llama3"):
            raise ConfigError(f"rope scaling must be default, linear or llama3; config.json has {kind!r}")
        try:
            return cls(theta=float(given.get("rope_theta", config.get("rope_theta", 10_000.0))), kind=kind,
                       **({"factor": float(given["factor"])} if kind != "default" else {}),
                       **({"low": float(given["low_freq_factor"]), "high": float(given["high_freq_factor"]),
                           "original": int(given["original_max_position_embeddings"])} if kind == "llama3" else {}))
        except KeyError as missing:
            raise ConfigError(f"rope scaling {kind!r} needs {missing} in config.json") from None

    def to_hf(self) -> dict[str, Any]:
        out: dict[str, Any] = {"rope_type": self.kind, "rope_theta": self.theta}
        if self.kind != "default":
            out["factor"] = self.factor
        if self.kind == "llama3":
            out |= {"low_freq_factor": self.low, "high_freq_factor": self.high,
                    "original_max_position_embeddings": self.original}
        return out

    def frequencies(self, head_dim: int) -> Tensor:
        """Radians per position, [Dh / 2], float32 on the CPU."""
        powers = torch.arange(0, head_dim, 2, dtype=torch.int64, device="cpu").float() / head_dim
        frequencies = 1.0 / (self.theta ** powers)
        if self.kind == "linear":
            return frequencies / self.factor
        if self.kind == "llama3":
            turns = self.original * frequencies / (2 * math.pi)
            smooth = ((turns - self.low) / (self.high - self.low)).clamp(0, 1)
            return (1 - smooth) * frequencies / self.factor + smooth * frequencies
        return frequencies


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape of a decoder. `qkv_bias`, `out_bias`: the attention projections have biases; `qk_norm`: Qwen3's."""

    family: str
    vocabulary: int
    width: int
    mlp: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    context_tokens: int
    rope: Rope = Rope()
    norm_eps: float = 1e-6
    tied: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ConfigError(f"heads must be a multiple of kv_heads; got {self.heads} and {self.kv_heads}")
        if self.head_dim % 2:
            raise ConfigError(f"head_dim must be even for the rotary embedding; got {self.head_dim}")

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ModelConfig:
        """From the content of a `config.json`. Raises ConfigError for what this decoder does not do."""
        family = config.get("model_type")
        if family not in FAMILIES:
            raise ConfigError(f"model_type must be one of {', '.join(FAMILIES)}; config.json has {family!r}")
        for key, allowed in (("hidden_act", ("silu",)), ("mlp_bias", (False,)), ("use_sliding_window", (False,)),
                             ("quantization_config", ())):
            if config.get(key) is not None and config[key] not in allowed:
                raise ConfigError(f"{family} with {key} = {config[key]!r} is not supported")
        bias = bool(config.get("attention_bias", False))
        try:
            return cls(family=family, vocabulary=config["vocab_size"], width=config["hidden_size"],
                       mlp=config["intermediate_size"], layers=config["num_hidden_layers"],
                       heads=config["num_attention_heads"],
                       kv_heads=config.get("num_key_value_heads") or config["num_attention_heads"],
                       head_dim=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
                       context_tokens=config["max_position_embeddings"], rope=Rope.from_hf(config),
                       norm_eps=config.get("rms_norm_eps", 1e-6), tied=bool(config.get("tie_word_embeddings", False)),
                       qkv_bias=family == "qwen2" or bias, out_bias=family != "qwen2" and bias,
                       qk_norm=family == "qwen3")
        except KeyError as missing:
            raise ConfigError(f"config.json of a {family} model needs {missing}") from None

    def to_hf(self) -> dict[str, Any]:
        """The content of a `config.json` that transformers reads as the same model."""
        return {
            "architectures": [FAMILIES[self.family]], "model_type": self.family, "hidden_act": "silu",
            "vocab_size": self.vocabulary, "hidden_size": self.width, "intermediate_size": self.mlp,
            "num_hidden_layers": self.layers, "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads, "head_dim": self.head_dim,
            "max_position_embeddings": self.context_tokens, "rms_norm_eps": self.norm_eps,
            "rope_theta": self.rope.theta, "rope_parameters": self.rope.to_hf(),
            "tie_word_embeddings": self.tied, "attention_dropout": 0.0,
            **({} if self.family == "qwen2" else {"attention_bias": self.qkv_bias}),
        }


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [..., Dh] with cos and signed sin [..., Dh], see `rotary`."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


def rotary(positions: Tensor, frequencies: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin [*positions, Dh]; the first half of sin is negative, so that `rotate` needs no second negation."""
    angles = positions[..., None].float() * frequencies
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([cos, cos], -1).to(dtype), torch.cat([-sin, sin], -1).to(dtype)


@dataclass(frozen=True, slots=True)
class Packing:
    """Sequences of like lengths, padded together. `gather` [N, L] indexes packed tokens; `scatter` undoes it.

    Padding stands on the right and attention is causal, so that no token sees it and no mask is needed.
    """

    gathers: tuple[Tensor, ...]
    scatter: Tensor  # [T], into the concatenated flat groups


def packing(lengths: Sequence[int], device: torch.device, waste: float = 0.8) -> Packing:
    """Groups such that within each the shortest sequence has at least `waste` of the longest's length."""
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    order = sorted((i for i, length in enumerate(lengths) if length), key=lambda i: -lengths[i])
    groups: list[list[int]] = []
    for i in order:
        if not groups or lengths[i] < waste * lengths[groups[-1][0]]:
            groups.append([])
        groups[-1].append(i)
    scatter, gathers, offset = torch.empty(starts[-1], dtype=torch.int64), [], 0
    for group in groups:
        longest = lengths[group[0]]
        gather = torch.zeros(len(group), longest, dtype=torch.int64)
        for row, i in enumerate(group):
            gather[row, :lengths[i]] = torch.arange(starts[i], starts[i + 1])
            scatter[starts[i]:starts[i + 1]] = torch.arange(lengths[i]) + offset + row * longest
        gathers.append(gather.to(device))
        offset += len(group) * longest
    return Packing(tuple(gathers), scatter.to(device))


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        self.q_proj = nn.Linear(config.width, config.heads * config.head_dim, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.width, config.kv_heads * config.head_dim, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.width, config.kv_heads * config.head_dim, bias=config.qkv_bias)
        self.o_proj = nn.Linear(config.heads * config.head_dim, config.width, bias=config.out_bias)
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.norm_eps)
            self.k_norm = RMSNorm(config.head_dim, config.norm_eps)
        self.qk_norm = config.qk_norm

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, packed: Packing) -> Tensor:
        """x [T, D], cos and sin [T, 1, Dh]."""
        q = self.q_proj(x).view(-1, self.heads, self.head_dim)
        k = self.k_proj(x).view(-1, self.kv_heads, self.head_dim)
        v = self.v_proj(x).view(-1, self.kv_heads, self.head_dim)
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        outs = []
        for gather in packed.gathers:
            attended = F.scaled_dot_product_attention(  # [N, H, L, Dh]
                q[gather].transpose(1, 2), k[gather].transpose(1, 2), v[gather].transpose(1, 2), is_causal=True,
                enable_gqa=self.heads != self.kv_heads)
            outs.append(attended.transpose(1, 2).reshape(-1, self.heads * self.head_dim))
        return self.o_proj(torch.cat(outs)[packed.scatter])


class MLP(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.width, config.mlp, bias=False)
        self.up_proj = nn.Linear(config.width, config.mlp, bias=False)
        self.down_proj = nn.Linear(config.mlp, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.width, config.norm_eps)
        self.post_attention_layernorm = RMSNorm(config.width, config.norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, packed: Packing) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, packed)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocabulary, config.width)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.width, config.norm_eps)


class Transformer(nn.Module):
    """A causal language model over packed sequences. `state_dict` has the Hugging Face names, without a tied head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        if not config.tied:
            self.lm_head = nn.Linear(config.width, config.vocabulary, bias=False)
        self._frequencies = config.rope.frequencies(config.head_dim)

    def forward(self, ids: Tensor, positions: Tensor, lengths: Sequence[int]) -> Tensor:
        """Hidden states [T, D] of packed sequences. `ids`, `positions` [T] int64; `lengths` sum to T.

        Positions start again with each sequence. Raises ValueError when the lengths do not sum to T.
        """
        if sum(lengths) != len(ids) or len(positions) != len(ids):
            raise ValueError(f"lengths must sum to the number of ids; got {sum(lengths)}, {len(ids)} ids and "
                             f"{len(positions)} positions")
        x = self.model.embed_tokens(ids)
        cos, sin = rotary(positions[:, None], self._frequencies.to(x.device), x.dtype)
        packed = packing(lengths, x.device)
        for layer in self.model.layers:
            x = layer(x, cos, sin, packed)
        return self.model.norm(x)

    @property
    def head(self) -> Tensor:
        """The output projection [V, D]: the embedding's own weight when tied."""
        return self.model.embed_tokens.weight if self.config.tied else self.lm_head.weight

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., D] to [..., V]."""
        return F.linear(hidden, self.head)


def small_config(small: SmallModel) -> ModelConfig:
    """The shape of a small model: tied embeddings, query and key norms for qwen3."""
    return ModelConfig(family=small.family, vocabulary=small.vocabulary, width=small.width, mlp=small.mlp,
                       layers=small.layers, heads=small.heads, kv_heads=small.kv_heads,
                       head_dim=small.width // small.heads, context_tokens=small.context_tokens, tied=True,
                       qk_norm=small.family == "qwen3")


def small_model(settings: SmallModel, seed: int) -> Transformer:
    """A fresh model, float32 on the CPU: normal weights of deviation 0.02, residual projections / sqrt(2 * layers)
    (Radford et al. 2019), norms 1. The same for the same seed; the global random state is left alone."""
    with torch.device("meta"):
        model = Transformer(small_config(settings))
    model = model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:  # norms; a small model has no biases
                parameter.fill_(1.0)
                continue
            residual = name.endswith(("o_proj.weight", "down_proj.weight"))
            parameter.normal_(0.0, 0.02 / math.sqrt(2 * settings.layers) if residual else 0.02, generator=generator)
    return model
