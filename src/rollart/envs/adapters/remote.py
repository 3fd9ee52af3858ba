"""Adapters of environments behind an address: OpenEnv's WebSocket, and a plain HTTP protocol (docs/environments.md).

Keeps true: one connection or one `episode` id per episode, closed with it; the seed of the task goes to the server,
which alone knows whether it repeats itself; an error of the server is one of the environment, never a reward.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any

from rollart.core.types import Task
from rollart.envs.adapters.foreign import Foreign, ForeignSettings, Reply, Session, library

_SECONDS = 600.0  # beyond the deadlines of those who call


class _Stay(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        """A redirect is an error: its status."""


_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}), _Stay)
"""Neither proxies of the environment nor redirects."""


class _Http(Session):
    def __init__(self, env: ForeignSettings, task: Task) -> None:
        super().__init__(env, task)
        self.episode: Any = None

    def reset(self) -> Reply:
        answer = self._post("open", {**self.env.arguments, "seed": self.payload["seed"]})
        if answer.get("episode") is None:
            raise TypeError(f"{self.env.id}: open must answer with the id of its episode; got {answer!r:.80}")
        self.episode = answer["episode"]
        return Reply(answer.get("text"))  # type: ignore[arg-type]  # checked by the caller

    def step(self, text: str) -> Reply:
        a = self._post("step", {"episode": self.episode, "action": text})
        for key in ("done", "truncated", "valid", "success"):
            if not isinstance(a.get(key), bool) and (key == "done" or a.get(key) is not None):
                raise TypeError(f"{self.env.id}: step must answer with {key} as true or false; got {a.get(key)!r:.80}")
        return Reply(a.get("text"), a.get("reward", 0.0), a["done"],  # type: ignore[arg-type]  # checked by the caller
                     bool(a.get("truncated")), a.get("valid") is not False, a.get("success"))

    def close(self) -> None:
        if self.episode is not None:
            self._post("close", {"episode": self.episode})

    def _post(self, call: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        request = urllib.request.Request(f"{self.env.id.rstrip('/')}/{call}", json.dumps(body).encode(),
                                         {"Content-Type": "application/json"})
        said = b""
        try:
            with _DIRECT.open(request, timeout=_SECONDS) as response:
                answer = json.loads(said := response.read())
        except urllib.error.HTTPError as error:
            raise ConnectionError(f"{self.env.id}: {call}: {error.code} {error.read()[:300]!r}") from None
        except (OSError, HTTPException) as error:
            raise ConnectionError(f"{self.env.id}: {call}: {getattr(error, 'reason', error)}") from None
        except ValueError:
            answer = None
        if not isinstance(answer, Mapping):
            raise TypeError(f"{self.env.id}: {call} must answer with a JSON object; got {said!r:.80}")
        return answer


class Http(Foreign):
    """id: the server's URL. arguments: sent with each opening."""

    name = "http"
    schemes: tuple[str, ...] = ("http://", "https://")
    Session: type[Session] = _Http

    def check(self) -> None:
        if not self.settings.id.startswith(self.schemes):
            raise ValueError(f"the id must be an address that begins with {' or '.join(self.schemes)}")

    def make(self) -> Any:
        return self.settings


@dataclass(frozen=True, kw_only=True)
class OpenEnvSettings(ForeignSettings):
    """action: the field of the server's action that takes the agent's text. show: the field of its observation that the
    agent reads (empty: all of it, as JSON)."""

    action: str = "message"
    show: str = ""


class _OpenEnv(Session):
    def __init__(self, env: OpenEnvSettings, task: Task) -> None:
        super().__init__(env, task)
        self.socket = library("websockets.sync.client", "openenv").connect(
            env.id.rstrip("/").removesuffix("/ws") + "/ws", open_timeout=_SECONDS)

    def reset(self) -> Reply:
        return self._ask("reset", {**self.env.arguments, "seed": self.payload["seed"]})

    def step(self, text: str) -> Reply:
        return self._ask("step", {self.env.action: text})

    def close(self) -> None:
        self.socket.send(json.dumps({"type": "close"}))
        self.socket.close()

    def _ask(self, call: str, data: Mapping[str, Any]) -> Reply:
        self.socket.send(json.dumps({"type": call, "data": data}))
        answer = json.loads(self.socket.recv(timeout=_SECONDS))
        said = answer.get("data", {})
        if answer.get("type") == "error":
            raise ConnectionError(f"{self.env.id}: {call}: {said.get('message', said)!s:.300}")
        seen, show = said.get("observation", {}), self.env.show
        if show and show not in seen:
            raise TypeError(f"{self.env.id}: {call} gave no {show!r}: it has {', '.join(seen)}")
        return Reply(seen[show] if show else json.dumps(seen), said.get("reward") or 0.0, said.get("done", False))


class OpenEnv(Http):
    """id: the server's address, `ws://host:port`. arguments: sent with each reset."""

    name = "openenv"
    schemes = ("ws://", "wss://")
    Settings, Session = OpenEnvSettings, _OpenEnv

    def check(self) -> None:
        super().check()
        library("websockets.sync.client", "openenv")
