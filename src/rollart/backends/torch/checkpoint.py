"""Models as Hugging Face folders: config.json and safetensors in, the same out, without transformers.

Keeps true: what `save_model` writes, transformers' AutoModelForCausalLM and AutoTokenizer load; a folder that does not
hold exactly the tensors of its config, all values finite, is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from rollart.backends.torch.chat import Chat, read_json
from rollart.backends.torch.lora import plain_state
from rollart.backends.torch.shapes import ModelConfig
from rollart.backends.torch.transformer import Transformer
from rollart.backends.weights.memory import load_into
from rollart.core.errors import ConfigError

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def load_model(folder: Path | str, device: str | torch.device = "cpu",
               dtype: torch.dtype = torch.float32) -> Transformer:
    """The model of a Hugging Face folder. Raises ConfigError, in one line, for anything that is not a whole model of
    a supported kind: a missing file, an unsupported model_type, a missing or unknown tensor, a wrong shape or type, a
    value that is not finite."""
    config, tensors = read_model(folder)
    with torch.device("meta"):
        model = Transformer(config)
    model = model.to(dtype).to_empty(device=device)
    try:
        load_into(model, tensors)
    except ValueError as wrong:
        raise ConfigError(f"{folder}: {wrong}") from None
    return model


def load_config(folder: Path | str) -> ModelConfig:
    """The shape of a Hugging Face folder's model. Raises ConfigError."""
    return ModelConfig.from_hf(_read_json(Path(folder), "config.json"))


def read_model(folder: Path | str) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Shape and tensors of a Hugging Face folder. Raises ConfigError."""
    config = load_config(folder)
    tensors = _tensors(Path(folder))
    if other := next((name for name, tensor in sorted(tensors.items()) if tensor.dtype not in FLOATS), None):
        raise ConfigError(f"the weights in {folder} must be floats of 16 to 64 bits; {other} has "
                          f"{tensors[other].dtype}, as quantized ones do: take the checkpoint they were made from")
    tensors |= {name: tensor.float() for name, tensor in tensors.items() if tensor.dtype == torch.float64}
    if bad := next((name for name, tensor in sorted(tensors.items()) if not tensor.isfinite().all()), None):
        raise ConfigError(f"the weights in {folder} must be finite; {bad} holds others: take another checkpoint")
    head, embedding = tensors.get("lm_head.weight"), tensors.get("model.embed_tokens.weight")
    if config.tied and head is not None:
        if embedding is not None and not (head.shape == embedding.shape and bool((head == embedding).all())):
            raise ConfigError(f"{folder} has tie_word_embeddings = true, but an lm_head.weight that differs from the "
                              "embedding: set it to false in config.json, or remove that tensor from the files")
        del tensors["lm_head.weight"]
    return config, tensors


def save_model(model: Transformer, folder: Path | str, chat: Chat) -> None:
    """Write config, weights (adapters merged in), generation defaults, tokenizer and chat template into `folder` (made
    if missing)."""
    folder = Path(folder)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in plain_state(model).items()}
    save_shape(model.config, folder, chat, next(iter(tensors.values())).dtype)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def save_shape(config: ModelConfig, folder: Path, chat: Chat, dtype: torch.dtype = torch.float32) -> None:
    """All of `save_model` but the weights, which have type `dtype`."""
    folder.mkdir(parents=True, exist_ok=True)
    ends = {"eos_token_id": list(chat.stop), "pad_token_id": chat.padding, "bos_token_id": None}
    _write_json(folder / "config.json",
                {**config.to_hf(), "dtype": str(dtype).removeprefix("torch."), **ends})
    _write_json(folder / "generation_config.json", {"do_sample": True, "temperature": 1.0, **ends})
    chat.save(folder)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _read_json(folder: Path, name: str) -> dict[str, Any]:
    if not folder.is_dir():
        raise ConfigError(f"a model needs a Hugging Face checkpoint folder; {folder} is not a folder")
    try:
        return read_json(folder / name)
    except FileNotFoundError:
        raise ConfigError(f"a model needs a Hugging Face checkpoint folder; {folder} has no {name}") from None


def _tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors by name, but those that the config gives: from one file, or without it from the shards of an index,
    as transformers reads them."""
    files, index = ["model.safetensors"], "model.safetensors.index.json"
    if not (folder / files[0]).exists() and (folder / index).exists():
        shards = _read_json(folder, index).get("weight_map")
        if not isinstance(shards, dict) or not shards or not all(isinstance(file, str) for file in shards.values()):
            raise ConfigError(f"{folder / index} must say in weight_map which file holds each tensor")
        files = sorted(set(shards.values()))
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            (folder / file).open("rb").close()  # safetensors tells a file that may not be read as one that is not there
            with safe_open(folder / file, framework="pt") as shard:
                tensors |= {name: shard.get_tensor(name) for name in shard.keys()}  # noqa: SIM118
        except FileNotFoundError:
            raise ConfigError(f"{folder} has no {file}: weights are read from safetensors files") from None
        except SafetensorError as error:
            raise ConfigError(f"{folder / file} is not a whole safetensors file: {error}") from None
        except (OSError, ValueError) as error:  # ValueError: an index names what can be no file's name
            raise ConfigError(f"{file!r} of {folder} cannot be read: {error}") from None
    return {name: tensor for name, tensor in tensors.items() if not name.endswith("rotary_emb.inv_freq")}
