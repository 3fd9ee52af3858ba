"""Low-rank adapters by peft, and weights that cross to the engines as adapters only.

Keeps true: the base never changes, so it is copied once and only adapters are published; what an engine loads is
W + alpha / rank * B A in float32, cast to the type of W; a saved folder holds the merged model, and `adapter/` in
peft's own format beside it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from rollart.backends.torch.settings import LoraSettings
from rollart.backends.weights.memory import MemoryWeights, checksum, fill
from rollart.core.errors import ConfigError
from rollart.core.types import Manifest

ADAPTER = "adapter"
_PEFT = "base_model.model."


def add_adapter(model: nn.Module, settings: LoraSettings, seed: int) -> None:
    """Inject adapters that change nothing yet, and freeze everything else. The global random state is left alone."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        raise ConfigError("[lora] needs peft: pip install 'rollart[lora]'") from None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(LoraConfig(r=settings.rank, lora_alpha=settings.alpha,
                                           target_modules=list(settings.targets)), model.model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".lora_" in name)


def adapter_state(model: nn.Module) -> dict[str, Tensor]:
    """The adapters by module: `....q_proj.lora_A.weight` [rank, in] and `lora_B` [out, rank]; empty without any."""
    return {name.replace(".default.", "."): tensor for name, tensor in model.state_dict().items() if ".lora_" in name}


def base_checksum(model: nn.Module) -> str:
    """Of everything but the adapters: what an adapter belongs to."""
    return checksum({name: tensor for name, tensor in model.state_dict().items() if ".lora_" not in name})


def plain_state(model: nn.Module) -> dict[str, Tensor]:
    """The model's tensors under their Hugging Face names, adapters merged in. Without adapters: its state."""
    state, adapters = model.state_dict(), adapter_state(model)
    if not adapters:
        return state
    base = {name.replace(".base_layer.", "."): tensor for name, tensor in state.items() if ".lora_" not in name}
    return merged(base, adapters, _scale(model))


def merged(base: Mapping[str, Tensor], adapters: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
    """base with scale * B A added where there is an adapter. Raises ValueError that names an adapter without a base."""
    out = dict(base)
    for name, a in adapters.items():
        module, found, _ = name.partition(".lora_A.")
        if not found:
            continue
        if f"{module}.weight" not in base or f"{module}.lora_B.weight" not in adapters:
            raise ValueError(f"an adapter needs a base and both halves; {module} has not")
        weight, b = base[f"{module}.weight"], adapters[f"{module}.lora_B.weight"]
        out[f"{module}.weight"] = (weight.float() + scale * (b.float() @ a.float()).to(weight.device)).to(weight.dtype)
    return out


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """The model is its base within."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:  # not peft's enable_adapters, which also changes what requires a gradient
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def _scale(model: nn.Module) -> float:
    from peft.tuners.lora import LoraLayer

    return float(next(module for module in model.modules() if isinstance(module, LoraLayer)).scaling["default"])


def save_adapter(model: nn.Module, folder: Path, settings: LoraSettings, base: str) -> None:
    """Write `folder`/adapter so that peft's `PeftModel.from_pretrained` reads it on the base model."""
    own = folder / ADAPTER
    own.mkdir(exist_ok=True)
    tensors = {_PEFT + name: tensor.detach().cpu().contiguous() for name, tensor in adapter_state(model).items()}
    save_file(tensors, own / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "r": settings.rank,
              "lora_alpha": settings.alpha, "target_modules": list(settings.targets), "inference_mode": True}
    (own / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def load_adapter(model: nn.Module, folder: Path) -> None:
    """Read what `save_adapter` wrote. Raises ValueError, before any change, when it is another model's."""
    tensors = {name.removeprefix(_PEFT): tensor
               for name, tensor in load_file(folder / ADAPTER / "adapter_model.safetensors").items()}
    try:
        fill(adapter_state(model), tensors)
    except ValueError as wrong:
        raise ValueError(f"{folder / ADAPTER} is of another model or rank: {wrong}") from None


class AdapterWeights(MemoryWeights):
    """Published adapters over one base: `put` takes adapters, `get` gives whole weights."""

    def __init__(self, base: Mapping[str, Tensor], settings: LoraSettings) -> None:
        super().__init__()
        self._base = {name: tensor.detach().clone() for name, tensor in base.items()}
        self._scaling = settings.alpha / settings.rank

    def get(self, manifest: Manifest) -> Mapping[str, Tensor]:
        return merged(self._base, super().get(manifest), self._scaling)
