"""TOML tables into frozen dataclasses and back, with one clear line for whatever is wrong; what both kinds of recipe
share.

Keeps true: every key that is accepted sets something; an unknown one is refused with the nearest name.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import re
import tomllib
import typing
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from rollart.core.errors import ConfigError
from rollart.envs.domain import nearest

T = TypeVar("T")
_SCALARS = {int: "an integer", float: "a number", str: "a text", bool: "true or false"}


def read_toml(path: Path, assignments: Iterable[str] = ()) -> dict[str, Any]:
    """The recipe's tables, with `a.b=value` overrides. Raises ConfigError."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"recipe {path} does not exist{_nearest_recipe(path)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"recipe {path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"recipe {path} is not valid TOML: {error}") from None
    override(tables, assignments)
    return tables


def _nearest_recipe(path: Path) -> str:
    """Of those beside it and in recipes/, by name without its ending; where none is near: all of them."""
    found = {file.stem: str(file) for folder in (Path("recipes"), path.parent) if folder.is_dir()
             for file in folder.glob("*.toml") if file.name != "pyproject.toml"}
    match = difflib.get_close_matches(path.stem, found, n=1)
    if match:
        return f": did you mean {found[match[0]]!r}?"
    return f": there are {', '.join(sorted(found.values()))}" if found else ""


def override(tables: dict[str, Any], assignments: Iterable[str]) -> None:
    """Apply `a.b=value` in place; the value is read as TOML, and as a plain string where it is none."""
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        if not equals or not path.strip():
            raise ConfigError(f"--set needs key=value, for example pipeline.steps=20; got {assignment!r}")
        try:
            added = tomllib.loads(assignment)
        except tomllib.TOMLDecodeError:
            try:
                added = tomllib.loads(f"{path} = {json.dumps(text.strip())}")
            except tomllib.TOMLDecodeError as error:
                raise ConfigError(f"--set {assignment!r}: {path.strip()} is not a key of TOML: {error}") from None
        _merge(tables, added, path.strip())


def _merge(into: dict[str, Any], added: Mapping[str, Any], path: str) -> None:
    for name, value in added.items():
        if isinstance(value, dict) and value:
            if not isinstance(into.setdefault(name, {}), dict):
                raise ConfigError(f"--set {path}: {name} is a value, not a table")
            _merge(into[name], value, path)
        else:
            into[name] = value


def check_keys(table: object, kind: Any, where: str) -> None:
    """Refuse keys that `kind` (a dataclass, or a union with one) has no field for, at any depth, and wrong types."""
    if typing.get_origin(kind) is Mapping and isinstance(table, Mapping):
        for name, value in table.items():
            check_keys(value, typing.get_args(kind)[-1], f"{where}{name}.")
        return
    owner = _dataclass(kind)
    if owner is None or not isinstance(table, Mapping):
        return
    hints = typing.get_type_hints(owner)
    known = {f.name: f.default for f in dataclasses.fields(owner)}
    for key, value in table.items():
        if key not in known:
            raise ConfigError(f"unknown key {where}{key}{nearest(key, known)}")
        expected = hints[key]
        if expected in _SCALARS and not (type(value) is expected or (expected is float and type(value) is int)):
            raise ConfigError(f"{where}{key} must be {_SCALARS[expected]}; got {value!r}")
        if expected is float and not math.isfinite(value) and value != known[key]:  # inf only where it is the default
            raise ConfigError(f"{where}{key} must be a finite number; got {value!r}")
        check_keys(value, expected, f"{where}{key}.")


def build(kind: type[T], table: object, where: str) -> T:
    """`kind` from a table, types checked. Raises ConfigError in one line that names the key."""
    if not isinstance(table, Mapping):
        raise ConfigError(f"{where} must be a table [{where}]; got {table!r}")
    check_keys(table, kind, f"{where}.")
    adapter: TypeAdapter[T] = TypeAdapter(kind)
    try:
        return adapter.validate_python(dict(table))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join([where, *(str(part) for part in first["loc"])])
        if first["type"] != "value_error":
            raise ConfigError(f"{key}: {first['msg']}; got {first['input']!r}") from None
        message = first["msg"].removeprefix("Value error, ")  # of a __post_init__, which often begins with its key
        raise ConfigError(f"{key}{'.' if re.match('[a-z_]+ (must|needs) ', message) else ': '}{message}") from None


def _dataclass(kind: Any) -> Any:
    """The kind itself, or the one in a union; None for all else."""
    options = () if typing.get_origin(kind) is Mapping else (kind, *typing.get_args(kind))
    return next((option for option in options if dataclasses.is_dataclass(option)), None)


def sections(recipe: type) -> dict[str, Any]:
    """The tables of a recipe that are one dataclass each, in the order of its fields."""
    kinds = {name: _dataclass(hint) for name, hint in typing.get_type_hints(recipe).items()}
    return {name: kind for name, kind in kinds.items() if kind}


def read_recipe(tables: Mapping[str, Any], plain: Mapping[str, type],
                readers: Mapping[str, Callable[[Mapping[str, Any]], Any]]) -> dict[str, Any]:
    """A recipe's top level, checked: `plain` keys by their type, and tables by what reads them. Raises ConfigError."""
    values: dict[str, Any] = {}
    for key, value in tables.items():
        if key in plain:
            if type(value) is not plain[key]:
                raise ConfigError(f"{key} must be {plain[key].__name__}; got {value!r}")
            values[key] = value
        elif key not in readers:
            raise ConfigError(f"unknown key {key}{nearest(key, [*plain, *readers])}")
        elif not isinstance(value, Mapping):
            raise ConfigError(f"{key} must be a table [{key}]; got {value!r}")
        else:
            values[key] = readers[key](value)
    return values


def as_tables(recipe: Any) -> dict[str, Any]:
    """Plain data, without what is not set (None)."""
    return dataclasses.asdict(recipe, dict_factory=lambda pairs: {k: v for k, v in pairs if v is not None})


def refuse_unknown(where: str, names: Iterable[str], domains: Collection[str]) -> None:
    """Raises ConfigError for a name that is no domain of the recipe."""
    for name in names:
        if name not in domains:
            raise ConfigError(f"{where}: no domain {name}{nearest(name, domains)}")


def check_pools(pools: Mapping[str, Any], domains: Collection[str]) -> dict[str, str]:
    """The pool of each domain that one names. Raises ConfigError where that domain is not there, or in two pools."""
    bound: dict[str, str] = {}
    for pool, settings in pools.items():
        refuse_unknown(f"pools.{pool}.domains", settings.domains, domains)
        for domain in settings.domains:
            if domain in bound:
                raise ConfigError(f"domain {domain} is bound to two pools, {bound[domain]} and {pool}: keep one")
            bound[domain] = pool
    return bound
