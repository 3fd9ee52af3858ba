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
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Format = Literal["tags", "hermes", "llama"]

_PATTERNS: Mapping[str, re.Pattern[str]] = {
    "tags": re.compile(r"<([A-Za-z_]\w*)>(.*?)</\1>", re.DOTALL),
    "hermes": re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL),
    "llama": re.compile(r"(?:<\|python_tag\|>)?(\{.*\})\s*(?=;|$)", re.MULTILINE),
}
_NO_TOOLS = ("think", "tool_call", "tool_response")


@dataclass(frozen=True)
class ToolCall:
    """A tool's name and its arguments, as JSON."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


def parse(text: str, format: Format) -> list[ToolCall]:
    """The calls in a text, in order; none where nothing parses."""
    return [call for match in _PATTERNS[format].finditer(text) if (call := _call(match, format)) is not None]


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

    def one(match: re.Match[str]) -> str:
        call = _call(match, source)
        return match.group() if call is None else render(call, target)

    return _PATTERNS[source].sub(one, text)


def _call(match: re.Match[str], format: Format) -> ToolCall | None:
    if format == "tags":
        name, body = match.groups()
        if name in _NO_TOOLS:
            return None
        arguments = _json(body)
        return ToolCall(name, {"input": body} if arguments is None else arguments)
    said = _json(match.group(1))
    arguments = (said or {}).get("arguments" if format == "hermes" else "parameters", {})
    if said is None or not isinstance(said.get("name"), str) or not isinstance(arguments, dict):
        return None
    return ToolCall(said["name"], arguments)


def _json(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):  # a number or a nesting without end
        return None
    return value if isinstance(value, dict) else None
