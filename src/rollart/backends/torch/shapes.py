"""Shapes and rotary embeddings of decoders, as config.json has them: Llama, Qwen2, Qwen3, Qwen3-MoE.

Keeps true: `from_hf(to_hf())` is the same shape; what the decoder cannot do is refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rollart.backends.torch.settings import SmallModel
from rollart.core.errors import ConfigError

FAMILIES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM",
            "qwen3_moe": "Qwen3MoeForCausalLM"}

MOST = 1_000_000_000
"""Above what any shape counts: a damaged number is said before memory is asked for it."""


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
        given = config.get("rope_parameters") or config.get("rope_scaling") or {}
        if not isinstance(given, Mapping):
            raise ConfigError(f"rope scaling in config.json must be an object; got {given!r}")
        kind = given.get("rope_type", given.get("type", "default"))
        if kind not in ("default", "linear", "llama3"):
            raise ConfigError(f"rope scaling must be default, linear or llama3; config.json has {kind!r}")
        theta = given if "rope_theta" in given else {"rope_theta": 10_000.0, **config}
        try:
            return cls(theta=_positive(theta, "rope_theta"), kind=kind,
                       **({"factor": _positive(given, "factor")} if kind != "default" else {}),
                       **({"low": _positive(given, "low_freq_factor"), "high": _positive(given, "high_freq_factor"),
                           "original": _count(given, "original_max_position_embeddings")} if kind == "llama3" else {}))
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
    """The shape of a decoder. `qkv_bias`, `out_bias`: the attention projections have biases; `qk_norm`: Qwen3's.
    `experts`: of each layer (0: no mixture), of which a token takes `experts_per_token`; `mlp` is then the width of
    one; `norm_topk`: the weights of those taken are made to sum to 1."""

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
    experts: int = 0
    experts_per_token: int = 0
    norm_topk: bool = False

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ConfigError(f"heads must be a multiple of kv_heads; got {self.heads} and {self.kv_heads}")
        if self.head_dim % 2:
            raise ConfigError(f"head_dim must be even for the rotary embedding; got {self.head_dim}")
        if not 0 <= self.experts_per_token <= self.experts <= 255 or bool(self.experts) != bool(self.experts_per_token):
            raise ConfigError(f"a mixture has at most 255 experts and takes at least one; got {self.experts} experts, "
                              f"{self.experts_per_token} per token")

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ModelConfig:
        """From the content of a `config.json`. Raises ConfigError for what this decoder does not do."""
        family = config.get("model_type")
        if not isinstance(family, str) or family not in FAMILIES:
            raise ConfigError(f"model_type must be one of {', '.join(FAMILIES)}; config.json has {family!r}")
        for key, allowed in (("hidden_act", ("silu",)), ("mlp_bias", (False,)), ("use_sliding_window", (False,)),
                             ("quantization_config", ()), ("decoder_sparse_step", (1,)), ("mlp_only_layers", ([],))):
            if config.get(key) is not None and config[key] not in allowed:
                raise ConfigError(f"{family} with {key} = {config[key]!r} is not supported")
        bias, mixture = bool(config.get("attention_bias", False)), family == "qwen3_moe"
        try:
            heads = _count(config, "num_attention_heads")
            return cls(family=family, vocabulary=_count(config, "vocab_size"), width=_count(config, "hidden_size"),
                       mlp=_count(config, "moe_intermediate_size" if mixture else "intermediate_size"),
                       layers=_count(config, "num_hidden_layers"), heads=heads,
                       kv_heads=_count(config, "num_key_value_heads") if config.get("num_key_value_heads") else heads,
                       head_dim=_count(config, "head_dim") if config.get("head_dim") else
                       _count(config, "hidden_size") // heads,
                       context_tokens=_count(config, "max_position_embeddings"), rope=Rope.from_hf(config),
                       norm_eps=_positive({"rms_norm_eps": 1e-6, **config}, "rms_norm_eps"),
                       tied=bool(config.get("tie_word_embeddings", False)),
                       qkv_bias=family == "qwen2" or bias, out_bias=family != "qwen2" and bias,
                       qk_norm=family in ("qwen3", "qwen3_moe"),
                       **({"experts": _count(config, "num_experts" if config.get("num_experts") else
                                             "num_local_experts"),
                           "experts_per_token": _count(config, "num_experts_per_tok"),
                           "norm_topk": bool(config.get("norm_topk_prob", False))} if mixture else {}))
        except KeyError as missing:
            raise ConfigError(f"config.json of a {family} model needs {missing}") from None

    def to_hf(self) -> dict[str, Any]:
        """The content of a `config.json` that transformers, 4 and 5, reads as the same model."""
        scaling = {} if self.rope.kind == "default" else self.rope.to_hf()
        scaling.pop("rope_theta", None)
        return {
            "architectures": [FAMILIES[self.family]], "model_type": self.family, "hidden_act": "silu",
            "vocab_size": self.vocabulary, "hidden_size": self.width, "intermediate_size": self.mlp,
            "num_hidden_layers": self.layers, "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads, "head_dim": self.head_dim,
            "max_position_embeddings": self.context_tokens, "rms_norm_eps": self.norm_eps,
            "rope_parameters": self.rope.to_hf(),
            "rope_theta": self.rope.theta, "rope_scaling": scaling or None,  # what transformers 4 reads instead
            "tie_word_embeddings": self.tied, "attention_dropout": 0.0,
            **({} if self.family == "qwen2" else {"attention_bias": self.qkv_bias}),
            **({"moe_intermediate_size": self.mlp, "num_experts": self.experts, "norm_topk_prob": self.norm_topk,
                "num_experts_per_tok": self.experts_per_token, "decoder_sparse_step": 1, "mlp_only_layers": []}
               if self.experts else {}),
        }


def _count(config: Mapping[str, Any], key: str) -> int:
    """Raises KeyError where it is missing, ConfigError for anything but a whole number from 1."""
    value = config[key]
    if type(value) is not int or not 1 <= value < MOST:
        raise ConfigError(f"{key} in config.json must be a whole number from 1, below {MOST:,}; got {value!r}")
    return value


def _positive(config: Mapping[str, Any], key: str) -> float:
    """Raises KeyError where it is missing, ConfigError for anything but a finite number above 0."""
    value = config[key]
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise ConfigError(f"{key} in config.json must be a number above 0; got {value!r}")
    return float(value)


def small_config(small: SmallModel) -> ModelConfig:
    """The shape of a small model: tied embeddings, query and key norms for qwen3; with experts it is a Qwen3-MoE."""
    mixture = {"family": "qwen3_moe", "experts": small.experts, "experts_per_token": small.experts_per_token,
               "norm_topk": True} if small.experts else {}
    return ModelConfig(**{"family": small.family, **mixture}, vocabulary=small.vocabulary, width=small.width,
                       mlp=small.mlp, layers=small.layers, heads=small.heads, kv_heads=small.kv_heads,
                       head_dim=small.width // small.heads, context_tokens=small.context_tokens, tied=True,
                       qk_norm=small.family == "qwen3")
