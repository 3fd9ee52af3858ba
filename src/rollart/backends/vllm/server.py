"""An OpenAI-compatible server that someone else started, as the control plane's `Engine` over HTTP.

With vLLM's endpoints it is an engine like any other: `/inference/v1/generate` gives tokens with the versions they were
sampled at, the development endpoints pause it and load new weights from a folder that it sees too. A server with
`/v1/completions` alone can play an evaluation of the weights it has; it is refused for training.

Keeps true: as `engine`; a server that does not answer is lost at once, and closing the connection aborts its request.
Waits for the server, with a deadline for each call.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx

from rollart.backends.vllm.engine import EngineStats, Reader, write_weights
from rollart.backends.vllm.settings import ServerSettings
from rollart.core.errors import ConfigError, EngineLost, InvariantViolated
from rollart.core.tokens import floats, ids
from rollart.core.types import Completion, Finish, GenerateRequest, Manifest, TrajectoryId, Version

GENERATE, COMPLETIONS = "/inference/v1/generate", "/v1/completions"
UPDATE = ("/pause", "/resume", "/init_weight_transfer_engine", "/start_weight_update", "/update_weights",
          "/finish_weight_update")


class OpenAIEngine:
    """One server at `url`. `check` before `start`."""

    def __init__(self, id: str, pool: str, url: str, settings: ServerSettings, reader: Reader | None = None) -> None:
        self.id, self.pool, self._url, self._settings, self._reader = id, pool, url.rstrip("/"), settings, reader
        self.lost: str | None = "not started"
        self.version: Version | None = None
        self._model, self._context, self._tokens = settings.model, 0, True
        self._watchers: list[Callable[[str], None]] = []
        self._stats, self._suspended, self._joined = EngineStats(), False, False
        key = os.environ.get(settings.key_env, "") if settings.key_env else ""
        self._client = httpx.AsyncClient(base_url=self._url, headers={"Authorization": f"Bearer {key}"} if key else {},
                                         limits=httpx.Limits(max_connections=settings.max_concurrent + 4))

    async def check(self, *, training: bool) -> None:
        """Look at the server. Raises ConfigError where it is not there, or cannot do what is asked of it."""
        try:
            listed = (await self._get("/v1/models"))["data"]
            paths = (await self._get("/openapi.json")).get("paths", {})
        except (EngineLost, LookupError, TypeError) as error:
            raise ConfigError(f"no OpenAI-compatible server at {self._url}: {error}") from None
        entry = next((entry for entry in listed if self._model in ("", entry["id"])), None)
        if entry is None:
            raise ConfigError(f"{self._url} has no model {self._model!r}; it has {', '.join(e['id'] for e in listed)}")
        self._model, self._context, self._tokens = entry["id"], int(entry.get("max_model_len") or 0), GENERATE in paths
        if not training:
            return
        if missing := [path for path in (GENERATE, *UPDATE) if path not in paths]:
            raise ConfigError(f"{self._url} cannot be trained with: it has no {missing[0]} (vLLM 0.32 or newer, started "
                              "with VLLM_SERVER_DEV_MODE=1 and --enable-scale-out, see docs/engines.md); it can evaluate "
                              "or judge")
        if "/server_info" in paths:
            config = (await self._get("/server_info?config_format=json"))["vllm_config"]
            mode = config["model_config"].get("logprobs_mode")
            transfer = (config.get("weight_transfer_config") or {}).get("backend")
            if mode != "processed_logprobs" or transfer != "rollart":
                raise ConfigError(f"{self._url} must be started with --logprobs-mode processed_logprobs (it has {mode}) "
                                  f"and --weight-transfer-config '{{\"backend\": \"rollart\"}}' (it has {transfer})")

    def on_lost(self, callback: Callable[[str], None]) -> None:
        self._watchers.append(callback)

    def start(self) -> None:
        self.lost = None

    async def restart(self) -> None:
        """Look whether the server is back. Raises EngineLost."""
        self.version, self._joined, self._suspended = None, False, False
        await self._get("/v1/models")
        self.lost = None

    async def close(self) -> None:
        self.lost, self.version = "closed", None
        await self._client.aclose()

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
        if self._tokens:
            body = {"model": self._model, "token_ids": context, "sampling_params": {**wanted, "detokenize": False}}
        else:
            body = {"model": self._model, "prompt": context, "return_token_ids": True, **wanted}
        self._stats.running += 1
        try:
            answer = await self._post(GENERATE if self._tokens else COMPLETIONS, body, self._settings.seconds)
        finally:
            self._stats.running -= 1
        try:
            return self._read(answer["choices"][0], version)
        except (LookupError, TypeError, ValueError) as error:
            raise EngineLost(f"{self._url} answered without token ids and log-probs: {error!r}") from None

    def _read(self, choice: Mapping[str, Any], version: Version) -> Completion:
        tokens, given = ids(choice["token_ids"]), choice["logprobs"]
        logprobs = [entry["logprob"] for entry in given["content"]] if self._tokens else given["token_logprobs"]
        if len(logprobs) != len(tokens) or choice["finish_reason"] not in ("stop", "length"):
            raise ValueError(f"{len(tokens)} tokens, {len(logprobs)} log-probs, {choice['finish_reason']}")
        spans = [(int(span["version"]), int(span["start"])) for span in choice.get("weight_versions") or ()
                 if str(span["version"]).isdigit()]
        self._stats.generated += len(tokens)
        return Completion(tokens, floats(logprobs), tuple(spans) or ((version, 0),),
                          Finish.STOP if choice["finish_reason"] == "stop" else Finish.LENGTH, self.id)

    async def suspend(self) -> None:
        if self._reader is not None:
            await self._post("/pause?mode=keep", {}, self._settings.answer_seconds)
            self._suspended = True

    async def resume(self) -> None:
        if self._reader is not None:
            await self._post("/resume", {}, self._settings.answer_seconds)
            self._suspended = False

    async def load_weights(self, manifest: Manifest) -> None:
        """Hand new weights to the server; without a reader it keeps those it has, and they get this version's number.
        Raises EngineLost; InvariantViolated when the version would go back."""
        if self.version is not None and manifest.version < self.version:
            raise InvariantViolated(f"I5: engine {self.id} at version {self.version} was given {manifest.version}")
        if self._reader is not None:
            running = not self._suspended
            if running:
                await self.suspend()
            tensors = await asyncio.to_thread(self._reader.get, manifest)
            os.makedirs(self._settings.weights_folder, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix="rollart-vllm-", dir=self._settings.weights_folder) as folder:
                path = await asyncio.to_thread(write_weights, tensors, Path(folder) / "model.safetensors")
                await self._load(path, manifest.version)
            if running:
                await self.resume()
        self.version = manifest.version

    async def _load(self, path: Path, version: Version) -> None:
        steps: list[tuple[str, dict[str, Any]]] = [
            ("/start_weight_update", {}), ("/update_weights", {"update_info": {"path": str(path)}}),
            ("/finish_weight_update", {"weight_version": str(version)})]
        if not self._joined:
            steps.insert(0, ("/init_weight_transfer_engine", {"init_info": {}}))
        for step, body in steps:
            await self._post(step, body, self._settings.answer_seconds)
        self._joined = True

    def release(self, trajectory: TrajectoryId) -> None:
        """The server's cache gives up what was used least recently."""

    def stats(self) -> EngineStats:
        return self._stats

    async def _get(self, path: str) -> Any:
        return await self._call("GET", path, None, self._settings.answer_seconds)

    async def _post(self, path: str, body: Mapping[str, Any], seconds: float) -> Any:
        return await self._call("POST", path, body, seconds)

    async def _call(self, method: str, path: str, body: Mapping[str, Any] | None, seconds: float) -> Any:
        """Raises EngineLost, and tells the watchers where nothing answered."""
        try:
            async with asyncio.timeout(seconds):
                answer = await self._client.request(method, path, json=body, timeout=None)
        except (httpx.HTTPError, TimeoutError) as error:
            self.lost, self.version = f"{method} {self._url}{path}: {str(error) or type(error).__name__}", None
            for watcher in self._watchers:
                watcher(self.id)
            raise EngineLost(self.lost) from None
        if answer.status_code != 200:
            raise EngineLost(f"{method} {self._url}{path}: HTTP {answer.status_code}: {answer.text[:200]}")
        try:
            return answer.json()
        except ValueError:
            raise EngineLost(f"{method} {self._url}{path}: no JSON: {answer.text[:100]!r}") from None
