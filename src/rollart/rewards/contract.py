"""The one contract of rewards: a plain function `(request: RewardRequest) -> Score`, the same in any process or cloud.

Keeps true: what crosses a border is versioned JSON; a score is finite or there is none (never 0 instead); two requests
with the same content have the same key, so an answer that was lost can be asked for again. Standard library only: a
packaged function carries this file with it.

    request  {"version": 1, "id", "domain", "task": {"id", "payload"}, "messages": [{"role", "content"}], "answer",
              "facts", "truncated", "deadline_seconds", "key"}; a batch is {"version": 1, "requests": [...]}
    answer   {"version": 1, "key", "score": {"value", "success", "parts", "reason"}, "timings": {"seconds"},
              "instance": {"id", "cold"}}, or with "error": {"kind", "message"} instead of the score;
              a batch is {"version": 1, "answers": [...]}. Only score.value is required of a function written elsewhere.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from rollart.core.foreign import encodable, read_json
from rollart.core.types import Message, Outcome, Score, Trajectory

VERSION = 1
REASON_CHARACTERS = 1000
"""Longest reason of a score and message of an error; more is cut."""

LARGEST = 1e30
"""Size of a score or a part: sums and squares of such numbers can still be trained on."""

PROBE_ACCEPTS = ("", "raised", "unscorable")
"""Kinds of answers to `probe_request` of a function that works: it may dislike an episode in which nothing happened."""

F = TypeVar("F", bound=Callable[..., Any])


class BadScore(Exception):
    """What a reward function returned is no score. A repetition would give the same."""


class Unscorable(Exception):
    """Raised by a reward function: this trajectory has no score, and a repetition would not change that."""


class Unavailable(Exception):
    """Raised by a reward function: what it needs (a judge, a key) is not there. It may be, later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardRequest:
    """What a reward function sees of one trajectory; never tokens or log-probs.

    id: the trajectory's, e.g. `g12.3`. task, payload: the task's id and JSON. messages: the whole conversation, the
    agent's as `assistant`. answer: the agent's last action. facts: the environment's, of its last answer. truncated:
    the episode ran into a limit. deadline_seconds: the caller waits that long from now. key: of the content.
    """

    id: str
    domain: str
    task: str = ""
    payload: Mapping[str, Any] = field(default_factory=dict)
    messages: tuple[Message, ...] = ()
    answer: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)
    truncated: bool = False
    deadline_seconds: float = 30.0
    key: str = ""


RewardFunction = Callable[[RewardRequest], Score]
"""A batched one (see `batched`) takes a list of requests and returns as many scores."""


def request_of(trajectory: Trajectory, deadline_seconds: float) -> RewardRequest:
    """The request of a finished trajectory. Raises TypeError where facts or payload are not JSON."""
    t = trajectory
    messages = list(t.start.messages)
    for turn in t.turns:
        messages += [Message("assistant", str(turn.text)), *turn.observation.messages]
    request = RewardRequest(
        id=str(t.id), domain=t.task.domain, task=t.task.id, payload=dict(t.task.payload), messages=tuple(messages),
        answer=str(t.turns[-1].text) if t.turns else "",
        facts=dict(t.turns[-1].observation.facts if t.turns else t.start.facts),
        truncated=t.outcome is Outcome.TRUNCATED, deadline_seconds=deadline_seconds)
    return replace(request, key=content_key(request))


def probe_request(domain: str, deadline_seconds: float) -> RewardRequest:
    """An episode in which nothing happened: what a function is called with before the first trajectory."""
    request = RewardRequest(id="probe", domain=domain, task="probe", deadline_seconds=deadline_seconds)
    return replace(request, key=content_key(request))


def content_key(request: RewardRequest) -> str:
    """A fingerprint of all but the deadline: equal requests have equal keys, in every process."""
    plain = {name: value for name, value in to_json(request).items() if name not in ("deadline_seconds", "key")}
    return hashlib.blake2b(json.dumps(plain, sort_keys=True).encode(), digest_size=16).hexdigest()


def to_json(request: RewardRequest) -> dict[str, Any]:
    """Plain data in the form of the module's docstring."""
    r = request
    return {"version": VERSION, "id": r.id, "domain": r.domain, "task": {"id": r.task, "payload": dict(r.payload)},
            "messages": [{"role": m.role, "content": str(m.content)} for m in r.messages], "answer": r.answer,
            "facts": dict(r.facts), "truncated": r.truncated, "deadline_seconds": r.deadline_seconds, "key": r.key}


def from_json(plain: object) -> RewardRequest:
    """The request in plain data. Raises ValueError that says what is wrong with it."""
    if not isinstance(plain, Mapping):
        raise ValueError(f"a request is a JSON object; got {type(plain).__name__}")
    if plain.get("version") != VERSION:
        raise ValueError(f"this function reads version {VERSION} of the reward contract; got {plain.get('version')!r}")
    try:
        task, messages = plain.get("task", {}), plain.get("messages", [])
        request = RewardRequest(
            id=str(plain["id"]), domain=str(plain["domain"]), task=str(task.get("id", "")),
            payload=dict(task.get("payload", {})),
            messages=tuple(Message(str(m["role"]), str(m["content"])) for m in messages),
            answer=str(plain.get("answer", "")), facts=dict(plain.get("facts", {})),
            truncated=bool(plain.get("truncated", False)), key=str(plain.get("key", "")),
            deadline_seconds=float(plain.get("deadline_seconds", 30.0)))
    except KeyError as missing:
        raise ValueError(f"the request has no {missing}") from None
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ValueError(f"the request has a field of the wrong form: {error}") from None
    return request if request.key else replace(request, key=content_key(request))


def checked(score: object) -> Score:
    """The score itself, its reason cut to its limit. Raises BadScore for what is none, or beyond LARGEST."""
    if not isinstance(score, Score):
        raise BadScore(f"a reward function returns a Score; got {type(score).__name__} {score!r:.80}")
    if not isinstance(score.parts, Mapping) or not all(isinstance(name, str) for name in score.parts):
        raise BadScore(f"a score's parts must be numbers by name; got {score.parts!r:.80}")
    for name, number in (("value", score.value), *score.parts.items()):
        if isinstance(number, bool) or not isinstance(number, int | float) or not abs(number) <= LARGEST:
            raise BadScore(f"a score's {name} must be a finite number; got {number!r:.80} (at most {LARGEST:g})")
    return replace(score, value=float(score.value), success=bool(score.success),
                   parts={encodable(name): float(number) for name, number in score.parts.items()},
                   reason=encodable(str(score.reason))[:REASON_CHARACTERS])


def call(function: Callable[..., Any], requests: Sequence[RewardRequest]) -> list[Score]:
    """One call of a function, batched or not. Raises BadScore, and whatever the function raises."""
    if not getattr(function, "batched", False):
        return [checked(function(request)) for request in requests]
    scores = function(list(requests))
    if not isinstance(scores, list | tuple) or len(scores) != len(requests):
        raise BadScore(f"a batched reward function returns a list of {len(requests)} scores; got {scores!r:.80}")
    return [checked(score) for score in scores]


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back for one request: a score, or the kind and text of an error.

    kind: raised, unavailable (both may be repeated), unscorable, bad_score, bad_request. seconds: inside the
    function. cold: the first request of its instance.
    """

    score: Score | None
    kind: str = ""
    message: str = ""
    seconds: float = 0.0
    cold: bool = False


def read_answers(body: bytes, count: int, *, batch: bool) -> list[Answer]:
    """The answers to `count` requests. Raises BadScore for what is not of this contract."""
    try:
        plain = read_json(body)
    except ValueError as error:
        raise BadScore(f"its answer is not JSON that can be read ({error}): {body[:80]!r}") from None
    answers = plain.get("answers") if batch and isinstance(plain, Mapping) else [plain]
    if not isinstance(answers, list) or len(answers) != count:
        raise BadScore(f"it was sent {count} requests and did not answer as many: {body[:80]!r}")
    return [_read_answer(answer) for answer in answers]


def _read_answer(plain: object) -> Answer:
    if not isinstance(plain, Mapping) or plain.get("version", VERSION) != VERSION:
        raise BadScore(f"its answer is not of version {VERSION} of the reward contract: {plain!r:.80}")
    timings, instance = plain.get("timings"), plain.get("instance")
    seconds = timings.get("seconds", 0.0) if isinstance(timings, Mapping) else 0.0
    seconds = float(seconds) if isinstance(seconds, int | float) and abs(seconds) <= LARGEST else 0.0
    cold = bool(instance.get("cold")) if isinstance(instance, Mapping) else False
    error, score = plain.get("error"), plain.get("score")
    if isinstance(error, Mapping):
        return Answer(None, str(error.get("kind", "raised")), str(error.get("message", ""))[:REASON_CHARACTERS],
                      seconds, cold)
    if not isinstance(score, Mapping) or not isinstance(score.get("parts", {}), Mapping):
        raise BadScore(f"its answer has no score: {plain!r:.80}")
    value: Any = score.get("value")
    return Answer(checked(Score(value, bool(score.get("success", False)), dict(score.get("parts", {})),
                                str(score.get("reason", "")))), "", "", seconds, cold)


def batched(function: F) -> F:
    """Marks a reward function that takes a list of requests and returns a list of scores, for `reward.call.batch`."""
    function.batched = True  # type: ignore[attr-defined]
    return function


def executes_output(function: F) -> F:
    """Marks a reward function that runs what the model wrote (unit tests of written code). It needs a sandbox."""
    function.executes_output = True  # type: ignore[attr-defined]
    return function


def register_serverless(where: str) -> Callable[[F], F]:
    """Binds a reward function to where it runs, as `reward.where` writes it, unless the recipe says otherwise.

    @register_serverless("https://...") def reward(request): ...
    """
    def bind(function: F) -> F:
        function.where = where  # type: ignore[attr-defined]
        return function

    return bind
