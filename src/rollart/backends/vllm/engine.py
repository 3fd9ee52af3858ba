"""vLLM's asynchronous engine as the control plane's `Engine`: tokens in, tokens out.

Keeps true: log-probs are those of the distribution that was sampled; a token's version is that of the weights which
vLLM's core had when it sampled it (T5); a pause drops all KV, also that of what is in flight, which is computed again
with the new weights (I5); each request ends in a completion, an abort or EngineLost.
Waits for the engine's process, with a deadline for start, pause, load and resume.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from pathlib import Path
from typing import Any

from rollart.backends.vllm.base import BaseEngine, EngineStats
from rollart.backends.vllm.checks import check_model, check_vllm, read_config
from rollart.backends.vllm.handover import Handover, shapes_of
from rollart.backends.vllm.settings import VLLMSettings
from rollart.backends.weights import Reader
from rollart.core.errors import EngineLost
from rollart.core.tokens import floats, ids
from rollart.core.types import Completion, Finish, GenerateRequest, Version

POLL_SECONDS = 0.25


class VLLMEngine(BaseEngine):
    """One vLLM engine; its process is a child of this one. `folder`: a Hugging Face checkpoint, for shape, type and
    tensor names; weights come by `load_weights` only. Raises ConfigError before anything is started."""

    def __init__(self, id: str, pool: str, folder: Path, settings: VLLMSettings, reader: Reader) -> None:
        check_vllm()
        config = read_config(folder)
        tied = bool(config.get("tie_word_embeddings"))
        handover = Handover(reader, shapes_of(folder), tied, settings.handover_folder)
        super().__init__(id, pool, check_model(config, settings), settings.answer_seconds, handover)
        self._folder, self._settings, self._hand, self._llm = folder, settings, handover, None
        self._vocabulary = int(config["vocab_size"])
        self._starting: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._turns: dict[str, asyncio.Task[Completion]] = {}
        self._partials: dict[str, Completion | None] = {}
        self._number = itertools.count()

    def start(self) -> None:
        """Begin to start, on the event loop; suspend, load and resume wait for it. A started engine stays as it is."""
        if self._starting is None:
            self.lost = "starting"
            self._starting = asyncio.create_task(self._start(), name=f"start {self.id}")

    async def restart(self) -> None:
        """Start again with no weights loaded. Raises EngineLost."""
        await self.close()
        self.start()
        await self._ready()

    async def close(self) -> None:
        """Stop the process. What is in flight raises EngineLost with its partial completion."""
        if self._starting is not None:
            await asyncio.wait([self._starting])  # a start cannot be given up half-way; it has its deadline
        if self._watching is not None:
            self._watching.cancel()
        self._starting = self._watching = None
        self._end("closed")
        llm, self._llm = self._llm, None
        if llm is not None:
            await asyncio.to_thread(llm.shutdown)
            llm.shutdown = lambda: None  # its __del__ would do it again, also while the interpreter ends
        await asyncio.to_thread(self._hand.close)

    async def _start(self) -> None:
        def make() -> Any:
            from vllm.v1.engine.async_llm import AsyncLLM

            return AsyncLLM.from_engine_args(_arguments(self._folder, self._settings, self._context),
                                             stat_loggers=[lambda config, *_: _Figures(self._stats, config)])
        making = asyncio.create_task(asyncio.to_thread(make))
        try:
            async with asyncio.timeout(self._settings.start_seconds):
                self._llm = await asyncio.shield(making)
        except TimeoutError:
            making.add_done_callback(lambda late: late.exception() or late.result().shutdown())
            self._die(f"it did not start within {self._settings.start_seconds:g} s")
        except Exception as error:  # noqa: BLE001 - vLLM's start raises whatever its process met
            self._die(f"it did not start: {type(error).__name__}: {error}")
        else:
            self.lost, self.version, self._suspended = None, None, False
            self._watching = asyncio.create_task(self._watch(), name=f"watch {self.id}")

    async def _watch(self) -> None:
        while not self._llm.errored:
            await asyncio.sleep(POLL_SECONDS)
        self._die("its process died")

    async def _ready(self) -> None:
        if self._starting is not None and not self._starting.done():
            await asyncio.wait([self._starting])
        await super()._ready()

    def _end(self, reason: str) -> None:
        super()._end(reason)
        for name, turn in list(self._turns.items()):
            self._partials[name] = self._partial(name)
            turn.cancel()

    async def _pause(self) -> None:
        await self._llm.pause_generation(mode="keep", clear_cache=True)

    async def _update(self, path: Path, version: Version) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        await self._llm.start_weight_update()
        await self._llm.update_weights(WeightTransferUpdateRequest(update_info={"path": str(path)}))
        await self._llm.finish_weight_update(str(version))

    async def _go_on(self) -> None:
        await self._llm.resume_generation()

    async def _generate(self, request: GenerateRequest, limit: int) -> Completion:
        if max(request.context) >= self._vocabulary:
            raise ValueError(f"the model's token ids end at {self._vocabulary - 1}; got {max(request.context)}")
        name = f"{request.trajectory}.{request.turn}.{next(self._number)}"
        turn = self._turns[name] = asyncio.create_task(self._sample(name, request, limit))
        turn.add_done_callback(lambda _: self._turns.pop(name, None))
        try:
            await asyncio.wait([turn])
        except asyncio.CancelledError:
            turn.cancel()  # vLLM then aborts the request
            raise
        if turn.cancelled():
            raise self._gone(partial=self._partials.pop(name, None))
        return turn.result()

    async def _sample(self, name: str, request: GenerateRequest, limit: int) -> Completion:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        sampling = request.sampling
        wanted = SamplingParams(temperature=sampling.temperature, top_p=sampling.top_p, top_k=sampling.top_k,
                                max_tokens=limit, stop_token_ids=list(request.stop), ignore_eos=True, logprobs=0,
                                seed=request.seed, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)
        try:
            prompt = {"prompt_token_ids": list(request.context)}
            async for out in self._llm.generate(prompt, wanted, name, priority=request.trajectory.group):
                final = out.outputs[0]
        except (EngineDeadError, EngineGenerateError) as error:
            raise EngineLost(f"engine {self.id}: {type(error).__name__}: {error}"[:500], self._partial(name)) from None
        return self._completion(final.token_ids, final.logprobs, [(s.version, s.start) for s in final.weight_versions],
                                Finish.STOP if final.finish_reason == "stop" else Finish.LENGTH)

    def _completion(self, tokens: Any, logprobs: Any, spans: Any, finish: Finish) -> Completion:
        chosen = floats(entry[token].logprob for token, entry in zip(tokens, logprobs, strict=False))
        return Completion(ids(tokens), chosen, tuple((int(v), start) for v, start in spans), finish, self.id)

    def _partial(self, name: str) -> Completion | None:
        """What vLLM's output side, in this process, holds of a turn whose engine died."""
        for state in self._llm.output_processor.request_states.values() if self._llm is not None else ():
            if state.external_req_id == name and state.weight_version_starts:
                return self._completion(list(state.detokenizer.output_token_ids), state.logprobs_processor.logprobs,
                                        state.weight_version_starts, Finish.LENGTH)
        return None


class _Figures:
    """vLLM's statistics, as they come, into an engine's."""

    def __init__(self, stats: EngineStats, config: Any) -> None:
        self._stats, self._cache = stats, config.cache_config

    def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
        stats = self._stats
        if scheduler_stats is not None:
            stats.running, stats.waiting = scheduler_stats.num_running_reqs, scheduler_stats.num_waiting_reqs
            stats.kv_tokens = round(scheduler_stats.kv_cache_usage * (self._cache.num_gpu_blocks or 0)
                                    * self._cache.block_size)
        if iteration_stats is not None:
            prompts = iteration_stats.prompt_token_stats
            stats.generated += iteration_stats.num_generation_tokens
            stats.prefilled, stats.reused = stats.prefilled + prompts.computed, stats.reused + prompts.cached_tokens

    def log_engine_initialized(self) -> None: ...
    def log(self) -> None: ...
    def record_sleep_state(self, *_: Any) -> None: ...


def _arguments(folder: Path, settings: VLLMSettings, context: int) -> Any:
    """vLLM's own. Its process is spawned, for a fork would copy this one's threads in whatever state they are."""
    for name, value in {"VLLM_WORKER_MULTIPROC_METHOD": "spawn", "VLLM_NO_USAGE_STATS": "1",
                        "VLLM_LOGGING_LEVEL": "ERROR"}.items():
        os.environ.setdefault(name, value)
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform

    cpu = current_platform.is_cpu()
    if cpu and settings.threads:
        os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(settings.threads)}
    kv_gb = settings.kv_gb or (1.0 if cpu else 0.0)
    return AsyncEngineArgs(
        model=str(folder), skip_tokenizer_init=True, load_format="dummy", dtype=settings.dtype,
        max_model_len=context or None, max_num_seqs=settings.max_concurrent,
        scheduling_policy="priority",  # older groups first: they are the next to be too stale
        max_num_batched_tokens=max(settings.prefill_chunk, settings.max_concurrent),
        kv_cache_memory_bytes=int(kv_gb * 1e9) or None, gpu_memory_utilization=settings.gpu_memory_utilization,
        tensor_parallel_size=settings.tensor_parallel,
        enforce_eager=settings.eager == "always" or (settings.eager == "auto" and cpu),
        enable_prefix_caching=settings.prefix_caching, logprobs_mode="processed_logprobs", disable_log_stats=True,
        worker_extension_cls="rollart.backends.vllm.transfer.Extension", weight_transfer_config={"backend": "rollart"})
