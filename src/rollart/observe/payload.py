"""A trajectory as bytes and back, exactly: a JSON header for the structure, packed arrays for tokens and log-probs.

Keeps true: `decode(encode(t)) == t`, for real and for simulated tokens. Nothing is ever unpickled. Layout: format byte,
header length (uint32), header (JSON), then all arrays one after the other in the order the header names them.
"""

from __future__ import annotations

import json
import struct
import sys
from array import array
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rollart.core.tokens import Counted, Text, Tokens
from rollart.core.types import (
    Completion,
    Finish,
    Message,
    Observation,
    Outcome,
    Score,
    Task,
    Trajectory,
    TrajectoryId,
    Turn,
)

_HEAD = struct.Struct("<BI")
_FORMAT = 2


def encode(trajectory: Trajectory) -> bytes:
    """Raises TypeError if a task's payload or an observation's facts are not JSON."""
    blobs: list[bytes] = []

    def pack(values: Tokens) -> Any:
        if isinstance(values, Counted):
            return -len(values) - 1
        blobs.append(_little(values).tobytes())
        return len(values)

    def pack_bytes(values: bytes) -> int:
        blobs.append(values)
        return len(values)

    t = trajectory
    header = {
        "id": [t.id.group, t.id.member, t.id.kind], "task": task_dict(t.task), "outcome": t.outcome.value,
        "error": t.error, "seconds": dict(t.seconds), "prompt": pack(t.prompt), "start": observation_dict(t.start),
        "score": None if t.score is None else [t.score.value, t.score.success, dict(t.score.parts), t.score.reason],
        "turns": [{
            "tokens": pack(turn.completion.tokens), "logprobs": pack(turn.completion.logprobs),
            "segments": turn.completion.segments, "finish": turn.completion.finish.value,
            "engine": turn.completion.engine, "text": _text_json(turn.text),
            "observation": observation_dict(turn.observation), "reply": pack(turn.reply),
            "fork": None if turn.fork is None else pack(turn.fork), "routes": pack_bytes(turn.completion.routes),
        } for turn in t.turns],
    }
    text = json.dumps(header, separators=(",", ":")).encode()
    return b"".join([_HEAD.pack(_FORMAT, len(text)), text, *blobs])


def decode(body: bytes) -> Trajectory:
    """Raises ValueError for bytes that are not a trajectory of this format."""
    try:
        return _decoded(body)
    except (TypeError, KeyError, AttributeError, IndexError, struct.error) as error:
        raise ValueError(f"a stored trajectory is damaged: {error!r}") from error


def _decoded(body: bytes) -> Trajectory:
    if len(body) < _HEAD.size or body[0] != _FORMAT:
        raise ValueError(f"a stored trajectory begins with format {body[:1]!r}; this version reads {_FORMAT}")
    _, length = _HEAD.unpack_from(body)
    at = _HEAD.size + length
    header = json.loads(body[_HEAD.size:at])

    def unpack(length: int, code: str = "i") -> Any:
        nonlocal at
        if length < 0:
            return Counted(-length - 1)
        values, end = array(code), at + 4 * length
        values.frombytes(body[at:end])
        at = end
        return _little(values)

    prompt = unpack(header["prompt"])
    turns = []
    for turn in header["turns"]:
        tokens, logprobs = unpack(turn["tokens"]), unpack(turn["logprobs"], "f")
        completion = Completion(tokens, logprobs, tuple((v, s) for v, s in turn["segments"]), Finish(turn["finish"]),
                                turn["engine"])
        reply, fork = unpack(turn["reply"]), None if turn["fork"] is None else unpack(turn["fork"])
        completion = replace(completion, routes=bytes(body[at:at + turn["routes"]]))
        at += turn["routes"]
        turns.append(Turn(completion, _text(turn["text"]), observation(turn["observation"]), reply, fork))
    if at != len(body):
        raise ValueError(f"a stored trajectory has {len(body)} bytes, its header says {at}")
    score = header["score"] and Score(*header["score"])
    return Trajectory(TrajectoryId(*header["id"]), Task(**header["task"]), prompt, observation(header["start"]),
                      tuple(turns), Outcome(header["outcome"]), score, header["error"], header["seconds"])


def task_dict(task: Task) -> dict[str, Any]:
    return {"id": task.id, "domain": task.domain, "payload": dict(task.payload), "max_turns": task.max_turns,
            "max_tokens": task.max_tokens}


def _little(values: array[Any]) -> array[Any]:
    if sys.byteorder == "big":
        values = values[:]
        values.byteswap()
    return values


def _text_json(text: Text) -> Any:
    return len(text) if isinstance(text, Counted) else text


def _text(value: str | int) -> Text:
    return Counted(value) if isinstance(value, int) else value


def observation_dict(seen: Observation) -> dict[str, Any]:
    """As JSON, for `observation`."""
    return {"messages": [[message.role, _text_json(message.content)] for message in seen.messages], "done": seen.done,
            "truncated": seen.truncated, "reward": seen.reward, "facts": dict(seen.facts)}


def observation(value: Mapping[str, Any]) -> Observation:
    messages = tuple(Message(role, _text(content)) for role, content in value["messages"])
    return Observation(messages, value["done"], value["truncated"], value["reward"], value["facts"])
