"""Recorded data by path as workloads: request traces, and episodes with the length of each turn.

    TIMESTAMP,ContextTokens,GeneratedTokens            a CSV trace: each request is an episode of one turn
    {"timestamp": ms, "input_length", "output_length", "hash_ids"}     a JSON-lines trace: a request whose blocks begin
                                                       with all whole blocks of an earlier one, two at least,
                                                       continues it
    {"turns": [["user", characters], ["assistant", characters], ...]}  an episode a line
    {"query_chars", "action_chars": [...], "observation_chars": [...]} an episode a line

Keeps true: a file is read whole or refused with the line that is wrong. Characters count as CHARACTERS_PER_TOKEN.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rollart.core.errors import ConfigError
from rollart.core.types import ROLES
from rollart.sim.workload import Record

CHARACTERS_PER_TOKEN = 4.0
"""Of English text and code under current tokenizers, about."""
BLOCK = 512
"""Tokens that one of `hash_ids` stands for."""
_CSV = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]


@dataclass(frozen=True, slots=True)
class Recorded:
    """What a file holds. gaps: seconds between a conversation's turns, where the trace has times and conversations."""

    records: tuple[Record, ...]
    gaps: tuple[float, ...] = ()


class _Bad(ValueError):
    """What is wrong with a line."""


def read_records(path: Path) -> Recorded:
    """Raises ConfigError: no file, an unknown form, or the first wrong line with its number."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"records {path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not lines:
        raise ConfigError(f"records {path} is empty")
    if lines[0][1].strip().split(",") == _CSV:
        if len(lines) == 1:
            raise ConfigError(f"records {path} has no request below its heading")
        return _whole(path, lines[1:], _requests_csv)
    if not lines[0][1].lstrip().startswith("{"):
        raise ConfigError(f"records {path} line {lines[0][0]}: a trace begins with {','.join(_CSV)}, or each line is a "
                          f"JSON object; got {lines[0][1][:60]!r}")
    first = _whole(path, lines[:1], lambda parsed: next(parsed))
    kinds = {"hash_ids": _conversations, "action_chars": _queries, "turns": _chats}
    reader = next((reader for key, reader in kinds.items() if key in first), None)
    if reader is None:
        raise ConfigError(f"records {path} line {lines[0][0]}: none of the keys {', '.join(kinds)}; got "
                          f"{', '.join(first)}")
    return _whole(path, lines, reader)


def _whole(path: Path, lines: list[tuple[int, str]], reader: Callable[[Iterator[Any]], Any]) -> Any:
    """`reader` over parsed lines; what it raises gets the number of the line that it had taken last."""
    at, objects = 0, lines[0][1].lstrip().startswith("{")

    def parsed() -> Iterator[Any]:
        nonlocal at
        for number, line in lines:
            at = number
            if line.lstrip().startswith("{") != objects:
                raise _Bad(f"needs {'a JSON object' if objects else 'comma-separated fields'} as the first one has; "
                           f"got {line[:60]!r}")
            yield json.loads(line) if objects else next(csv.reader([line]))

    try:
        return reader(parsed())
    except json.JSONDecodeError as error:
        raise ConfigError(f"records {path} line {at}: not JSON: {error.msg}") from None
    except KeyError as error:
        raise ConfigError(f"records {path} line {at}: the key {error} is missing") from None
    except (_Bad, ValueError, TypeError) as error:
        raise ConfigError(f"records {path} line {at}: {error}") from None


def _length(value: Any, name: str, least: int = 0) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise _Bad(f"{name} must be a whole number of at least {least}; got {value!r}")
    return value


def _lengths(values: Any, name: str) -> list[int]:
    if not isinstance(values, list):
        raise _Bad(f"{name} must be a list of lengths; got {values!r}")
    return [_length(value, name) for value in values]


def _forward(now: float, before: float) -> float:
    if now < before:
        raise _Bad(f"time goes backwards, from {before:.3f} s to {now:.3f} s")
    return now


def _requests_csv(rows: Iterator[list[str]]) -> Recorded:
    records, before = [], float("-inf")
    for row in rows:
        if len(row) != 3:
            raise _Bad(f"needs the three fields {','.join(_CSV)}; got {len(row)}")
        before = _forward(_time(row[0].strip()), before)
        numbers = [int(field) if field.strip().lstrip("-").isdigit() else field for field in row[1:]]
        records.append(Record(_length(numbers[0], _CSV[1], 1), (_length(numbers[1], _CSV[2], 1),)))
    return Recorded(_some(records))


def _time(text: str) -> float:
    """Seconds, or a date and time as 2023-11-16 18:17:03.97, which is UTC where it does not say."""
    try:
        seconds = float(text)
    except ValueError:
        try:
            time = datetime.fromisoformat(text[:26])
            seconds = time.replace(tzinfo=time.tzinfo or UTC).timestamp()
        except ValueError:
            seconds = math.nan
    if not math.isfinite(seconds):
        raise _Bad(f"TIMESTAMP must be seconds or a time like 2023-11-16 18:17:03.97; got {text!r}")
    return seconds


@dataclass(slots=True)
class _Conversation:
    prompt: int
    actions: list[int]
    observations: list[int]
    total: int
    time: float


def _conversations(lines: Iterator[Mapping[str, Any]]) -> Recorded:
    """A later turn's input repeats the blocks of the earlier one, all but its last, which was not full."""
    open_: dict[tuple[int, ...], _Conversation] = {}
    all_: list[_Conversation] = []
    gaps, before = [], float("-inf")
    for line in lines:
        time = before = _forward(_length(line["timestamp"], "timestamp") / 1000.0, before)
        tokens = _length(line["input_length"], "input_length", 1)
        says = _length(line["output_length"], "output_length", 1)
        blocks = tuple(_lengths(line["hash_ids"], "hash_ids"))
        found = next((open_.pop(blocks[:n]) for n in range(len(blocks) - 1, 1, -1) if blocks[:n] in open_
                      and open_[blocks[:n]].total < tokens), None)
        if found:
            found.observations.append(tokens - found.total)
            found.actions.append(says)
            gaps.append(time - found.time)
        else:
            found = _Conversation(tokens, [says], [], 0, time)
            all_.append(found)
        found.total, found.time = tokens + says, time
        if len(whole := blocks[: tokens // BLOCK]) > 1:
            open_[whole] = found
    return Recorded(_some([Record(c.prompt, tuple(c.actions), tuple(c.observations)) for c in all_]), tuple(gaps))


def _tokens(characters: int) -> int:
    return max(1, round(characters / CHARACTERS_PER_TOKEN))


def _queries(lines: Iterator[Mapping[str, Any]]) -> Recorded:
    records = []
    for line in lines:
        actions = _lengths(line["action_chars"], "action_chars")
        seen = _lengths(line["observation_chars"], "observation_chars")
        if not actions:
            continue  # nothing was sampled
        if len(seen) != len(actions):
            raise _Bad(f"{len(actions)} actions need as many observations; got {len(seen)}")
        records.append(Record(_tokens(_length(line["query_chars"], "query_chars")), tuple(map(_tokens, actions)),
                              tuple(map(_tokens, seen[:-1]))))
    return Recorded(_some(records))


def _chats(lines: Iterator[Mapping[str, Any]]) -> Recorded:
    """Messages between two of the assistant's are one observation; those before its first are the prompt."""
    records = []
    for line in lines:
        prompt, actions, seen = 0, [], []
        if not isinstance(line["turns"], list):
            raise _Bad(f"turns must be a list of [role, characters]; got {line['turns']!r}")
        for message in line["turns"]:
            if not isinstance(message, list) or len(message) != 2 or message[0] not in ROLES:
                raise _Bad(f"each of turns must be [role, characters] with a role of {', '.join(ROLES)}; got "
                           f"{message!r}")
            characters = _length(message[1], "characters")
            if message[0] == "assistant":
                actions.append(characters)
                seen.append(0)
            elif actions:
                seen[-1] += characters
            else:
                prompt += characters
        if actions:
            records.append(Record(_tokens(prompt), tuple(map(_tokens, actions)), tuple(map(_tokens, seen[:-1]))))
    return Recorded(_some(records))


def _some(records: list[Record]) -> tuple[Record, ...]:
    if not records:
        raise _Bad("no episode in it")
    return tuple(records)
