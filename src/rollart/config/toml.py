"""TOML tables into frozen dataclasses, with one clear line for whatever is wrong.

Keeps true: every key that is accepted sets something; an unknown one is refused with the nearest name.
"""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from rollart.core.errors import ConfigError

T = TypeVar("T")


def read_toml(path: Path) -> dict[str, Any]:
    """The recipe's tables. Raises ConfigError."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"recipe {path} does not exist") from None
    except (IsADirectoryError, PermissionError, UnicodeDecodeError) as error:
        raise ConfigError(f"recipe {path} cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"recipe {path} is not valid TOML: {error}") from None


def override(tables: dict[str, Any], assignments: Iterable[str]) -> None:
    """Apply `a.b=value` in place; the value is read as TOML, and as a plain string where it is none."""
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        if not equals or not path.strip():
            raise ConfigError(f"--set needs key=value, for example pipeline.steps=20; got {assignment!r}")
        try:
            value = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            value = text
        *parents, last = path.strip().split(".")
        table = tables
        for name in parents:
            table = table.setdefault(name, {})
            if not isinstance(table, dict):
                raise ConfigError(f"--set {path.strip()}: {name} is a value, not a table")
        table[last] = value


def nearest(word: str, known: Iterable[str]) -> str:
    """`did you mean x?`, or all there are."""
    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    return f"did you mean {close[0]}?" if close else f"there are {', '.join(names)}"


def check_keys(table: object, kind: Any, where: str) -> None:
    """Refuse keys that `kind` (a dataclass, or a union with one) has no field for, at any depth."""
    options = [kind, *typing.get_args(kind)]
    owner = next((k for k in options if dataclasses.is_dataclass(k)), None)
    if owner is None or not isinstance(table, Mapping):
        return
    hints = typing.get_type_hints(owner)
    known = {f.name for f in dataclasses.fields(owner)}
    for key, value in table.items():
        if key not in known:
            raise ConfigError(f"unknown key {where}{key}: {nearest(key, known)}")
        check_keys(value, hints[key], f"{where}{key}.")


def build(kind: type[T], table: Mapping[str, Any], where: str) -> T:
    """`kind` from a table, types checked strictly. Raises ConfigError in one line that names the key."""
    check_keys(table, kind, f"{where}.")
    adapter: TypeAdapter[T] = TypeAdapter(_lax(kind))
    try:
        return adapter.validate_python(dict(table))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join([where, *(str(part) for part in first["loc"])])
        message = first["msg"].removeprefix("Value error, ")
        shown = "" if message.startswith(where) or "got" in message else f"; got {first['input']!r}"
        raise ConfigError(f"{key}: {message}{shown}") from None


def _lax(kind: Any) -> Any:
    """The dataclass as pydantic sees it: no conversion of strings to numbers, no unknown keys."""
    if not hasattr(kind, "__pydantic_config__"):
        kind.__pydantic_config__ = ConfigDict(extra="forbid", strict=False)
    return kind
