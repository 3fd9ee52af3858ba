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
from vllm.distributed.weight_transfer import base
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform


@dataclass
class NoInit(base.WeightTransferInitInfo):
    """There is nothing to agree upon beforehand."""


@dataclass
class FileUpdate(base.WeightTransferUpdateInfo):
    """`path` of a safetensors file with every tensor of the model under its Hugging Face name."""

    path: str = ""


class FileTransfer(base.WeightTransferEngine[NoInit, FileUpdate]):
    """One update: start, any number of files, finish."""

    init_info_cls, update_info_cls = NoInit, FileUpdate

    def init_transfer_engine(self, init_info: NoInit) -> None: ...
    def shutdown(self) -> None: ...

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)
        self._left = {name for name, _ in self.model.named_parameters()}

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: FileUpdate) -> None:
        tensors = load_file(update_info.path)  # mapped; each worker copies its slice to its device
        self._left -= set(self.model.load_weights(iter(tensors.items())) or self._left)

    def finish_weight_update(self) -> None:
        """Raises ValueError where a parameter was left out."""
        finalize_layerwise_reload(self.model, self.model_config)
        modules = dict(self.model.named_modules())
        if getattr(self.model.config, "tie_word_embeddings", False):
            heads = {name: module for name, module in modules.items() if isinstance(module, ParallelLMHead)}
            self._left -= {f"{name}.weight" for name in heads}
            if current_platform.is_cpu():  # the head keeps the packed copy of the old embedding
                embedding = next(module for module in modules.values() if isinstance(module, VocabParallelEmbedding)
                                 and not isinstance(module, ParallelLMHead))
                for head in heads.values():
                    head.weight = embedding.weight
                    head.quant_method.process_weights_after_loading(head)
        if self._left:
            raise ValueError(f"no tensor came for {len(self._left)} parameters: {', '.join(sorted(self._left)[:4])}")


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


if "rollart" not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine("rollart", FileTransfer)
    if current_platform.is_cpu():
        _pack_experts_again()
