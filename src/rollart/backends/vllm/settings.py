"""What a user may choose about vLLM engines and about servers that someone else started. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rollart.core.ranges import above, at_least, literals


@dataclass(frozen=True, slots=True, kw_only=True)
class VLLMSettings:
    """One vLLM engine, with GPU wheels or the CPU build alike. Raises ValueError.

    dtype: of weights and KV; auto takes the checkpoint's, and bfloat16 where that is float32.
    context_tokens: longest context with its completion, in tokens; 0 takes the model's. max_concurrent: trajectories
        that run at once. prefill_chunk: most tokens of prefill and decode in one step.
    kv_gb: memory of keys and values of one device, in GB (10^9 bytes); 0: on a CPU 1 GB, on a GPU what
        gpu_memory_utilization leaves. gpu_memory_utilization: the engine's share of a GPU's memory, 0 to 1.
    tensor_parallel: devices of one engine; it divides the model's heads.
    eager: always: no compilation and no CUDA graphs (starts a minute earlier, decodes slower); auto: on a CPU only.
    prefix_caching: keep the KV of ended turns for the next one; it is dropped with every new version.
    threads: CPU threads of a CPU engine (0: vLLM's own choice, which pins one a core).
    start_seconds: longest start. answer_seconds: longest wait for suspend, load or resume.
    handover_folder: where weights lie for the workers to map, unless they come in a file already.
    """

    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    context_tokens: int = 0
    max_concurrent: int = 64
    prefill_chunk: int = 2048
    kv_gb: float = 0.0
    gpu_memory_utilization: float = 0.9
    tensor_parallel: int = 1
    eager: Literal["auto", "always", "never"] = "auto"
    prefix_caching: bool = True
    threads: int = 0
    start_seconds: float = 600.0
    answer_seconds: float = 120.0
    handover_folder: str = "/dev/shm/rollart-{uid}"

    def __post_init__(self) -> None:
        literals(self)
        above(self, 0, "max_concurrent", "prefill_chunk", "tensor_parallel", "start_seconds", "answer_seconds")
        at_least(self, 0, "context_tokens", "kv_gb", "threads")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(f"gpu_memory_utilization must be above 0 and at most 1; got {self.gpu_memory_utilization}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """OpenAI-compatible servers that someone else started. Raises ValueError.

    model: its name there (empty: the first that is listed). key_env: environment variable with the key (empty: none).
    handover_folder: a folder that the servers see too, where new weights lie unless they come in a file already.
    seconds: longest turn. answer_seconds: longest wait for pause, load or resume.
    """

    model: str = ""
    key_env: str = ""
    handover_folder: str = "/dev/shm/rollart-{uid}"
    seconds: float = 600.0
    answer_seconds: float = 120.0

    def __post_init__(self) -> None:
        above(self, 0, "seconds", "answer_seconds")
