"""The worker's side of a weight update: vLLM maps a safetensors file into each worker and loads its slice of it.

Loaded into vLLM's worker processes (`--worker-extension-cls rollart.backends.vllm.transfer.Extension` and
`--weight-transfer-config '{"backend": "rollart"}'`); a server that someone else starts with these takes updates too.

Keeps true: after an update the model computes with the new weights everywhere, or the update raises: a parameter that
no tensor reached is named. Two parts of the CPU build would silently keep old values, and are packed again: a tied
`lm_head`, and the experts of a mixture. Nothing is copied between processes but the file's name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import load_file
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

BACKEND = "rollart"


@dataclass
class NoInit(WeightTransferInitInfo):
    """There is nothing to agree upon beforehand."""


@dataclass
class FileUpdate(WeightTransferUpdateInfo):
    """`path` of a safetensors file with every tensor of the model under its Hugging Face name."""

    path: str = ""


class FileTransfer(WeightTransferEngine[NoInit, FileUpdate]):
    """One update: start, any number of files, finish."""

    init_info_cls, update_info_cls = NoInit, FileUpdate

    def init_transfer_engine(self, init_info: NoInit) -> None:
        pass

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)
        self._left = {name for name, _ in self.model.named_parameters()}

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: FileUpdate) -> None:
        device = "cpu" if current_platform.is_cpu() else str(current_platform.device_type)
        self._left -= set(self.model.load_weights(iter(load_file(update_info.path, device).items())) or self._left)

    def finish_weight_update(self) -> None:
        """Raises ValueError where a parameter was left out."""
        finalize_layerwise_reload(self.model, self.model_config)
        tied = _tied_heads(self.model)
        left = sorted(name for name in self._left if not any(name == f"{head}.weight" for head, _ in tied))
        if left:
            raise ValueError(f"no tensor came for {len(left)} parameters: {', '.join(left[:4])}, ...")
        if current_platform.is_cpu():
            _pack_tied_heads(self.model, [module for _, module in tied])

    def shutdown(self) -> None:
        pass


def _tied_heads(model: Any) -> list[tuple[str, Any]]:
    if not getattr(model.config, "tie_word_embeddings", False):
        return []
    return [(name, module) for name, module in model.named_modules() if isinstance(module, ParallelLMHead)]


def _pack_tied_heads(model: Any, heads: list[Any]) -> None:
    """A tied lm_head keeps the packed copy of the old embedding: give it the new one and pack it again."""
    for head in heads:
        embedding = next(module for module in model.modules() if isinstance(module, VocabParallelEmbedding)
                         and not isinstance(module, ParallelLMHead))
        head.weight = embedding.weight
        head.quant_method.process_weights_after_loading(head)


def _pack_experts_again() -> None:
    """The CPU build packs experts on the first load only: pack them on every one."""
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    original = UnquantizedFusedMoEMethod._setup_kernel

    def setup(self: Any, layer: Any, w13: Any, w2: Any) -> None:
        again = self.moe_kernel is not None
        original(self, layer, w13, w2)
        if again:
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    UnquantizedFusedMoEMethod._setup_kernel = setup


class Extension:
    """Mixed into vLLM's worker, so that this module is imported there."""


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, FileTransfer)
    if current_platform.is_cpu():
        _pack_experts_again()
