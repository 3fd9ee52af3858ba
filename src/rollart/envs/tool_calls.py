"""Tool calls in the ways that models write them, and from one way to another. Tasks speak `tags`; a chat translates.

    tags      <calc>{"expression": "2*3"}</calc>   or   <calc>2*3</calc>, which is {"input": "2*3"}
    hermes    <tool_call>{"name": "calc", "arguments": {"expression": "2*3"}}</tool_call>       Hermes, Qwen
    llama     <|python_tag|>{"name": "calc", "parameters": {"expression": "2*3"}}               Llama 3.1 and later

Keeps true: `parse(render(call, format), format) == [call]`; what does not parse as a call stays the text it was, so
that the task answers it; text around calls is kept.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Format = Literal["tags", "hermes", "llama"]

_TAGS: Mapping[str, re.Pattern[str]] = {"tags": re.compile(r"<(/?)([A-Za-z_]\w*)>"),
                                        "hermes": re.compile(r"<(/?)(tool_call)>")}
_PYTHON = "<|python_tag|>"
_BRACE = re.compile(r'[{}]|"(?:[^"\\]|\\.?)*(?:"|$)')  # within an object: a string is skipped whole
_CALL_ENDS = re.compile(r"\s*(?:;|$)")
_NO_TOOLS = ("think", "tool_call", "tool_response")


@dataclass(frozen=True)
class ToolCall:
    """A tool's name and its arguments, as JSON."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


def parse(text: str, format: Format) -> list[ToolCall]:
    """The calls in a text, in order; none where nothing parses."""
    return [call for _, _, call in _calls(text, format)]


def render(call: ToolCall, format: Format) -> str:
    if format == "tags":
        plain = call.arguments.get("input")
        only = len(call.arguments) == 1 and isinstance(plain, str) and _json(plain) is None
        return f"<{call.name}>{plain if only else json.dumps(dict(call.arguments))}</{call.name}>"
    key = "arguments" if format == "hermes" else "parameters"
    body = json.dumps({"name": call.name, key: dict(call.arguments)})
    return f"<tool_call>\n{body}\n</tool_call>" if format == "hermes" else body


def translate(text: str, source: Format, target: Format) -> str:
    """The text with each call in it written the other way."""
    if source == target:
        return text
    out, done = [], 0
    for start, end, call in _calls(text, source):
        out += [text[done:start], render(call, target)]
        done = end
    return "".join(out) + text[done:]


def _calls(text: str, format: Format) -> Iterator[tuple[int, int, ToolCall]]:
    """(start, end, call) of each call in a text, in order. Linear in its length, whatever a policy may write."""
    if format == "llama":
        for start, end, body in _objects(text):
            if (call := _named(body, "parameters")) is not None:
                yield start, end, call
        return
    for opening, closing in _elements(text, _TAGS[format]):
        body = text[opening.end():closing.start()]
        if format == "hermes":
            call = _named(body, "arguments")
        elif opening[2] in _NO_TOOLS:
            call = None
        else:
            arguments = _json(body)
            call = ToolCall(opening[2], {"input": body} if arguments is None else arguments)
        if call is not None:
            yield opening.start(), closing.end(), call


def _elements(text: str, tag: re.Pattern[str]) -> Iterator[tuple[re.Match[str], re.Match[str]]]:
    """Each opening tag with the next closing one of its name, left to right; what lies within one is no other."""
    nearest: dict[str, re.Match[str]] = {}
    pairs = []
    for mark in reversed(list(tag.finditer(text))):  # from the end, the next closing tag is the last one seen
        if mark[1]:
            nearest[mark[2]] = mark
        elif mark[2] in nearest:
            pairs.append((mark, nearest[mark[2]]))
    end = 0
    for opening, closing in reversed(pairs):
        if opening.start() >= end:
            yield opening, closing
            end = closing.end()


def _objects(text: str) -> Iterator[tuple[int, int, str]]:
    """(start, end, body) of each {...} that stands on one line and before its end or a semicolon; the python tag
    before it counts as its start."""
    at = 0
    for line in text.split("\n"):
        begin = line.find("{")
        while begin >= 0:
            end = _balanced(line, begin)
            if not end:
                break
            if _CALL_ENDS.match(line, end):
                start = begin - len(_PYTHON) if line.endswith(_PYTHON, 0, begin) else begin
                yield at + start, at + end, line[begin:end]
            begin = line.find("{", end)
        at += len(line) + 1


def _balanced(line: str, begin: int) -> int:
    """Where the object that opens at `begin` has closed; 0 where it never does."""
    depth = 0
    for mark in _BRACE.finditer(line, begin):
        depth += {"{": 1, "}": -1}.get(mark.group(), 0)
        if not depth:
            return mark.end()
    return 0


def _named(body: str, key: str) -> ToolCall | None:
    """The call that an object names, its arguments under `key`."""
    said = _json(body) or {}
    name, arguments = said.get("name"), said.get(key, {})
    return ToolCall(name, arguments) if isinstance(name, str) and isinstance(arguments, dict) else None


def _json(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):  # a number or a nesting without end
        return None
    return value if isinstance(value, dict) else None
