"""An OpenAI-compatible server that someone else started, as the control plane's `Engine` over HTTP.

With vLLM's endpoints it is an engine like any other: tokens in, tokens out with the versions they were sampled at;
paused, given new weights through a folder that it sees too, resumed. A server that has `/v1/completions` alone can play
an evaluation of the weights it has, and is refused for training.

Keeps true: as `base`; a server that does not answer is lost at once; closing the connection aborts its request.
Waits for the server, with a deadline for each call.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from rollart.backends.vllm.base import BaseEngine
from rollart.backends.vllm.handover import Handover
from rollart.backends.vllm.settings import ServerSettings
from rollart.backends.weights import Reader
from rollart.core.errors import ConfigError, EngineLost
from rollart.core.foreign import read_json
from rollart.core.tokens import floats, ids
from rollart.core.types import Completion, Finish, GenerateRequest, Version

GENERATE, COMPLETIONS = "/inference/v1/generate", "/v1/completions"
TRAINING = (GENERATE, "/pause", "/resume", "/start_weight_update", "/update_weights", "/finish_weight_update",
            "/server_info")

ODD = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)
"""What reading an answer raises that is JSON, and another than was asked for. (A number too large: ArithmeticError.)"""


class OpenAIEngine(BaseEngine):
    """One server at `url`. A reader means that it is to be trained with."""

    def __init__(self, id: str, pool: str, url: str, settings: ServerSettings, reader: Reader | None = None) -> None:
        super().__init__(id, pool, 0, settings.answer_seconds,
                         Handover(reader, {}, False, settings.handover_folder) if reader else None)
        self._url, self._seconds, self._model, self._tokens = url.rstrip("/"), settings.seconds, settings.model, True
        key = os.environ.get(settings.key_env, "") if settings.key_env else ""
        self._client = httpx.AsyncClient(base_url=self._url, headers={"Authorization": f"Bearer {key}"} if key else {},
                                         timeout=None, limits=httpx.Limits(max_connections=None))

    async def probe(self) -> None:
        """Look at the server before anything starts. Raises ConfigError where it is not there, or cannot do what is
        asked of it."""
        try:
            listed = (await self._call("GET", "/v1/models"))["data"]
            paths = (await self._call("GET", "/openapi.json"))["paths"]
            models = {str(entry["id"]): int(entry.get("max_model_len") or 0) for entry in listed}
            trained = GENERATE in paths
        except (EngineLost, *ODD) as error:
            raise ConfigError(f"no OpenAI-compatible server at {self._url}: {error}") from None
        model = self._model or next(iter(models), "")
        if model not in models:
            raise ConfigError(f"{self._url} has no model {model!r}; it has {', '.join(models)}")
        self._model, self._context, self._tokens = model, models[model], trained
        if self._handover is None:
            return
        if missing := [path for path in TRAINING if path not in paths]:
            raise ConfigError(f"{self._url} cannot be trained with, it has no {missing[0]}: start a vLLM of 0.32 or "
                              "newer as docs/engines.md says")
        try:
            config = (await self._call("GET", "/server_info?config_format=json"))["vllm_config"]
            mode, transfer = config["model_config"]["logprobs_mode"], config["weight_transfer_config"] or {}
            backend = transfer.get("backend")
        except (EngineLost, *ODD) as error:
            raise ConfigError(f"{self._url} does not say how it was started, as vLLM does: {error!r:.300}") from None
        if mode != "processed_logprobs" or backend != "rollart":
            raise ConfigError(f"{self._url} must be started with --logprobs-mode processed_logprobs (it has {mode}) "
                              f"and --weight-transfer-config backend rollart (it has {backend})")

    def start(self) -> None:
        self.lost = None

    async def restart(self) -> None:
        """Look whether the server is back. Raises EngineLost."""
        self.version, self._suspended = None, False
        await self._call("GET", "/v1/models")
        self.lost = None

    async def close(self) -> None:
        self._end("closed")
        await self._client.aclose()
        if self._handover is not None:
            self._handover.close()

    async def _generate(self, request: GenerateRequest, limit: int) -> Completion:
        sampling, version, context = request.sampling, self.version or 0, list(request.context)  # type: ignore[arg-type]
        wanted = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k,
                  "max_tokens": limit, "stop_token_ids": list(request.stop), "ignore_eos": True, "logprobs": 0,
                  "seed": request.seed}
        body = {"token_ids": context, "sampling_params": {**wanted, "detokenize": False}} if self._tokens else {
            "prompt": context, "return_token_ids": True, **wanted}
        self._stats.running += 1
        try:
            answer = await self._call("POST", GENERATE if self._tokens else COMPLETIONS, {"model": self._model, **body},
                                      self._seconds)
            done = self._read(answer["choices"][0], version)
        except ODD as error:
            raise EngineLost(f"{self._url} answered without token ids and log-probs: {error!r}"[:300]) from None
        finally:
            self._stats.running -= 1
        self._stats.generated += len(done.tokens)
        return done

    def _read(self, choice: Mapping[str, Any], version: Version) -> Completion:
        tokens, given = ids(choice["token_ids"]), choice["logprobs"]
        logprobs = floats([entry["logprob"] for entry in given["content"]] if self._tokens else given["token_logprobs"])
        spans = [(int(span["version"]), int(span["start"])) for span in choice.get("weight_versions") or ()
                 if self._handover is not None]
        if len(logprobs) != len(tokens):
            raise ValueError(f"{len(tokens)} tokens and {len(logprobs)} log-probs")
        return Completion(tokens, logprobs, tuple(spans) or ((version, 0),), Finish(choice["finish_reason"]), self.id)

    async def _pause(self) -> None:
        await self._call("POST", "/pause?mode=keep")

    async def _update(self, path: Path, version: Version) -> None:
        await self._call("POST", "/start_weight_update")
        await self._call("POST", "/update_weights", {"update_info": {"path": str(path)}})
        await self._call("POST", "/finish_weight_update", {"weight_version": str(version)})

    async def _go_on(self) -> None:
        await self._call("POST", "/resume")

    async def _call(self, method: str, path: str, body: Any = None, seconds: float = 0.0) -> Any:
        """The JSON that came back. Raises EngineLost; a server that does not answer is dead."""
        try:
            async with asyncio.timeout(seconds or self._answer_seconds):
                answer = await self._client.request(method, path, json=body)
        except (httpx.HTTPError, TimeoutError) as error:
            self._die(f"{method} {self._url}{path}: {str(error) or type(error).__name__}")
            raise self._gone() from None
        try:
            if answer.status_code == 200:
                return read_json(answer.content)
        except ValueError:
            pass
        raise EngineLost(f"{method} {self._url}{path}: HTTP {answer.status_code}: {answer.text[:200]}")
