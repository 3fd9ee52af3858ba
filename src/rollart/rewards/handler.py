"""Bytes in, bytes out: the inside of every served reward function, whatever carries the bytes (HTTP, Lambda).

Keeps true: a request gets exactly one answer, a score or a named error; a key that has its score is not computed again
in this process (KEPT scores are kept), so a caller whose connection broke asks again at no cost; an exception of the
function harms no other request. Waits for the function only: its deadline is the platform's to enforce.
"""

from __future__ import annotations

import base64
import json
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any

from rollart.core.errors import ConfigError
from rollart.core.foreign import read_json
from rollart.core.types import Score
from rollart.rewards.contract import (
    REASON_CHARACTERS,
    VERSION,
    BadScore,
    RewardRequest,
    Unavailable,
    Unscorable,
    call,
    from_json,
)
from rollart.rewards.domains import reward_function

MAX_BYTES = 16_000_000
"""Largest body of a request."""
KEPT = 4096
"""Answers kept for those who ask again."""
STATUS = {"raised": 500, "unavailable": 503, "unscorable": 422, "bad_score": 422, "bad_request": 400}
"""HTTP status of an error by its kind; 200 is a score."""


class Handler:
    """Answers for one function, or for one per domain. Safe to call from several threads.

    specs: `module:function`, or `domain=module:function` for each domain. Raises ConfigError.
    """

    def __init__(self, specs: Sequence[str]) -> None:
        named = [spec.partition("=") if "=" in spec else ("*", "=", spec) for spec in specs]
        if not named:
            raise ConfigError("no reward function to serve: name one as module:function")
        self._functions = {domain: reward_function(name) for domain, _, name in named}
        self.names = {domain: name for domain, _, name in named}
        self._answers: OrderedDict[str, dict[str, Any]] = OrderedDict()
        self._lock = threading.Lock()
        self._cold = True
        self.id = f"{os.getpid()}"

    def respond(self, body: bytes) -> tuple[int, bytes]:
        """HTTP status and JSON body for the JSON body of a request."""
        with self._lock:
            cold, self._cold = self._cold, False
        if len(body) > MAX_BYTES:
            return self._one(_failure("bad_request", f"the request has {len(body)} bytes, above {MAX_BYTES}"), cold)
        try:
            plain = read_json(body)
        except ValueError as error:
            return self._one(_failure("bad_request", f"the request is not JSON that can be read: {error}"), cold)
        if isinstance(plain, Mapping) and isinstance(plain.get("requests"), list):
            answers = self._batch(plain["requests"])
            for answer in answers:
                answer["instance"] = {"id": self.id, "cold": cold}
                cold = False
            return 200, json.dumps({"version": VERSION, "answers": answers}).encode()
        return self._one(self._batch([plain])[0], cold)

    def ready(self) -> bytes:
        """What a GET is told."""
        return json.dumps({"ready": True, "version": VERSION, "functions": self.names}).encode()

    def event(self, event: Any, context: Any = None) -> dict[str, Any]:
        """A cloud's event: an HTTP one (with `body`; Lambda function URLs, Function Compute) or the request itself."""
        if isinstance(event, bytes | str):
            event = read_json(event)
        if "body" not in event:
            return json.loads(self.respond(json.dumps(event).encode())[1])  # type: ignore[no-any-return]
        body = event["body"] or ""
        raw = base64.b64decode(body) if event.get("isBase64Encoded") else body.encode()
        status, answer = self.respond(raw) if raw else (200, self.ready())
        return {"statusCode": status, "headers": {"Content-Type": "application/json"}, "isBase64Encoded": False,
                "body": answer.decode()}

    def _one(self, answer: dict[str, Any], cold: bool) -> tuple[int, bytes]:
        error = answer.get("error")
        told = {"version": VERSION, **answer, "instance": {"id": self.id, "cold": cold}}
        return STATUS[error["kind"]] if error else 200, json.dumps(told).encode()

    def _batch(self, plain: Sequence[object]) -> list[dict[str, Any]]:
        """Read, answer from what is kept, and call each function once with what is left for it."""
        answers: list[dict[str, Any] | None] = [None] * len(plain)
        work: dict[str, list[tuple[int, RewardRequest]]] = {}
        for i, one in enumerate(plain):
            try:
                request = from_json(one)
            except ValueError as error:
                answers[i] = _failure("bad_request", str(error))
                continue
            domain = request.domain if request.domain in self._functions else "*"
            with self._lock:
                kept = self._answers.get(request.key)
            if kept is not None:
                answers[i] = dict(kept)
            elif domain not in self._functions:
                answers[i] = _failure("bad_request", f"no reward is served for domain {request.domain!r}", request.key)
            else:
                work.setdefault(domain, []).append((i, request))
        for domain, items in work.items():
            for (i, _), answer in zip(items, self._called(domain, [request for _, request in items]), strict=True):
                answers[i] = answer
        return [answer for answer in answers if answer is not None]

    def _called(self, domain: str, requests: Sequence[RewardRequest]) -> list[dict[str, Any]]:
        function = self._functions[domain]
        if not getattr(function, "batched", False):
            return [self._call(function, [request])[0] for request in requests]
        return self._call(function, requests)

    def _call(self, function: Callable[..., Any], requests: Sequence[RewardRequest]) -> list[dict[str, Any]]:
        started, failed = perf_counter(), None
        scores: list[Score] = []
        try:
            scores = call(function, requests)
        except BadScore as bad:
            failed = ("bad_score", str(bad))
        except Unscorable as never:
            failed = ("unscorable", str(never))
        except Unavailable as later:
            failed = ("unavailable", str(later))
        except Exception as error:  # noqa: BLE001  foreign code: whatever it raises is told to the caller
            failed = ("raised", f"{type(error).__name__}: {error}")
        seconds = {"seconds": round((perf_counter() - started) / len(requests), 6)}
        if failed:
            return [{**_failure(*failed, request.key), "timings": seconds} for request in requests]
        answers = [{"key": request.key, "score": {"value": score.value, "success": score.success,
                                                  "parts": dict(score.parts), "reason": score.reason},
                    "timings": seconds} for request, score in zip(requests, scores, strict=True)]
        with self._lock:
            for request, answer in zip(requests, answers, strict=True):
                self._answers[request.key] = answer
            while len(self._answers) > KEPT:
                self._answers.popitem(last=False)
        return [dict(answer) for answer in answers]


def _failure(kind: str, message: str, key: str = "") -> dict[str, Any]:
    return {"key": key, "error": {"kind": kind, "message": message[:REASON_CHARACTERS]}}
