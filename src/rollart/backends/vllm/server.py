"""An OpenAI-compatible server that someone else started, as the control plane's `Engine` over HTTP.

With vLLM's endpoints it is an engine like any other: tokens in, tokens out with the versions they were sampled at;
paused, given new weights through a folder that it sees too, resumed. A server that has `/v1/completions` alone can play
an evaluation of the weights it has, and is refused for training.

Keeps true: as `engine`; a server that does not answer is lost at once; closing the connection aborts its request.
Waits for the server, with a deadline for each call.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from typing import Any

import httpx

from rollart.backends.vllm.engine import EngineStats
from rollart.backends.vllm.handover import Handover
from rollart.backends.vllm.settings import ServerSettings
from rollart.backends.weights import Reader
from rollart.core.errors import ConfigError, EngineLost, InvariantViolated
from rollart.core.tokens import floats, ids
from rollart.core.types import Completion, Finish, GenerateRequest, Manifest, TrajectoryId, Version

GENERATE, COMPLETIONS = "/inference/v1/generate", "/v1/completions"
UPDATE = ("/start_weight_update", "/update_weights", "/finish_weight_update")


class OpenAIEngine:
    """One server at `url`. Without a reader it keeps the weights it has, whatever version they are called."""

    def __init__(self, id: str, pool: str, url: str, settings: ServerSettings, reader: Reader | None = None) -> None:
        self.id, self.pool, self._url, self._settings = id, pool, url.rstrip("/"), settings
        self._handover = Handover(reader, {}, tied=False, folder=settings.handover_folder) if reader else None
        self.lost: str | None = "not started"
        self.version: Version | None = None
        self._model, self._context, self._tokens = settings.model, 0, True
        self._watchers: list[Callable[[str], None]] = []
        self._stats, self._suspended = EngineStats(), False
        key = os.environ.get(settings.key_env, "") if settings.key_env else ""
        self._client = httpx.AsyncClient(base_url=self._url, headers={"Authorization": f"Bearer {key}"} if key else {},
                                         timeout=None, limits=httpx.Limits(max_connections=None))

    async def check(self) -> None:
        """Look at the server before anything starts. Raises ConfigError where it is not there or cannot do what is
        asked of it: with a reader, to be trained with."""
        try:
            listed = (await self._call("GET", "/v1/models"))["data"]
            paths = (await self._call("GET", "/openapi.json"))["paths"]
        except (EngineLost, LookupError, TypeError) as error:
            raise ConfigError(f"no OpenAI-compatible server at {self._url}: {error}") from None
        entry = next((entry for entry in listed if self._model in ("", entry["id"])), None)
        if entry is None:
            raise ConfigError(f"{self._url} has no model {self._model!r}; it has {', '.join(e['id'] for e in listed)}")
        self._model, self._context, self._tokens = entry["id"], int(entry.get("max_model_len") or 0), GENERATE in paths
        if self._handover is None:
            return
        if missing := [path for path in (GENERATE, "/pause", *UPDATE, "/server_info") if path not in paths]:
            raise ConfigError(f"{self._url} cannot be trained with, it has no {missing[0]}: start a vLLM of 0.32 or newer "
                              "as docs/engines.md says")
        config = (await self._call("GET", "/server_info?config_format=json"))["vllm_config"]
        mode, transfer = config["model_config"]["logprobs_mode"], config["weight_transfer_config"] or {}
        if mode != "processed_logprobs" or transfer.get("backend") != "rollart":
            raise ConfigError(f"{self._url} must be started with --logprobs-mode processed_logprobs (it has {mode}) and "
                              f"--weight-transfer-config '{{\"backend\": \"rollart\"}}' (it has {transfer or 'none'})")

    def on_lost(self, callback: Callable[[str], None]) -> None:
        """`callback(engine id)` runs whenever the server does not answer."""
        self._watchers.append(callback)

    def start(self) -> None:
        self.lost = None

    async def restart(self) -> None:
        """Look whether the server is back. Raises EngineLost."""
        self.version, self._suspended = None, False
        await self._call("GET", "/v1/models")
        self.lost = None

    async def close(self) -> None:
        self.lost, self.version = "closed", None
        await self._client.aclose()
        if self._handover is not None:
            self._handover.close()

    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample one turn. Raises EngineLost."""
        if self.lost is not None or self.version is None:
            raise EngineLost(f"engine {self.id} has no weights loaded" if self.lost is None else
                             f"engine {self.id} is lost: {self.lost}")
        version, sampling, context = self.version, request.sampling, list(request.context)  # type: ignore[arg-type]
        limit = min(request.max_tokens, self._context - len(context)) if self._context else request.max_tokens
        if limit <= 0:
            return Completion(ids(), floats(), ((version, 0),), Finish.LENGTH, self.id)
        wanted = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k,
                  "max_tokens": limit, "stop_token_ids": list(request.stop), "ignore_eos": True, "logprobs": 0,
                  "seed": request.seed}
        body = {"token_ids": context, "sampling_params": {**wanted, "detokenize": False}} if self._tokens else {
            "prompt": context, "return_token_ids": True, **wanted}
        self._stats.running += 1
        try:
            answer = await self._call("POST", GENERATE if self._tokens else COMPLETIONS, {"model": self._model, **body},
                                      self._settings.seconds)
            done = self._read(answer["choices"][0], version)
        except (LookupError, TypeError, ValueError) as error:
            raise EngineLost(f"{self._url} answered without token ids and log-probs: {error!r}"[:300]) from None
        finally:
            self._stats.running -= 1
        self._stats.generated += len(done.tokens)
        return done

    def _read(self, choice: Mapping[str, Any], version: Version) -> Completion:
        tokens, given = ids(choice["token_ids"]), choice["logprobs"]
        logprobs = floats([entry["logprob"] for entry in given["content"]] if self._tokens else given["token_logprobs"])
        spans = tuple((int(span["version"]), int(span["start"])) for span in choice.get("weight_versions") or ()
                      if self._handover is not None) or ((version, 0),)
        if len(logprobs) != len(tokens) or choice["finish_reason"] not in ("stop", "length"):
            raise ValueError(f"{len(tokens)} tokens, {len(logprobs)} log-probs, {choice['finish_reason']}")
        return Completion(tokens, logprobs, spans, Finish(choice["finish_reason"]), self.id)

    async def suspend(self) -> None:
        if self._handover is not None:
            self._suspended = True
            await self._call("POST", "/pause?mode=keep")

    async def prefetch(self, manifest: Manifest) -> None:
        if self._handover is not None:
            await asyncio.to_thread(self._handover.fetch, manifest)

    async def load_weights(self, manifest: Manifest) -> None:
        """Raises EngineLost; InvariantViolated when the version would go back."""
        if self.version is not None and manifest.version < self.version:
            raise InvariantViolated(f"I5: engine {self.id} at version {self.version} was given {manifest.version}")
        if self._handover is not None:
            path, serves = await asyncio.to_thread(self._handover.fetch, manifest), not self._suspended
            if serves:
                await self.suspend()
            for step, body in zip(UPDATE, ({}, {"update_info": {"path": str(path)}},
                                           {"weight_version": str(manifest.version)}), strict=True):
                await self._call("POST", step, body)
            await asyncio.to_thread(self._handover.done)
            if serves:
                await self.resume()
        self.version = manifest.version

    async def resume(self) -> None:
        if self._handover is not None:
            await self._call("POST", "/resume")
            self._suspended = False

    def release(self, trajectory: TrajectoryId) -> None:
        """The server's cache gives up what was used least recently."""

    def stats(self) -> EngineStats:
        return self._stats

    async def _call(self, method: str, path: str, body: Any = None, seconds: float = 0.0) -> Any:
        """The JSON that came back. Raises EngineLost, and tells the watchers where nothing answered."""
        try:
            async with asyncio.timeout(seconds or self._settings.answer_seconds):
                answer = await self._client.request(method, path, json=body)
        except (httpx.HTTPError, TimeoutError) as error:
            self.lost, self.version = f"{method} {self._url}{path}: {str(error) or type(error).__name__}", None
            for watcher in self._watchers:
                watcher(self.id)
            raise EngineLost(self.lost) from None
        try:
            if answer.status_code == 200:
                return answer.json()
        except ValueError:
            pass
        raise EngineLost(f"{method} {self._url}{path}: HTTP {answer.status_code}: {answer.text[:200]}")
