"""Checks that settings share, for their `__post_init__`. Raises ValueError, which names the setting."""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite
from typing import Any, Literal, get_args, get_origin, get_type_hints


def above(settings: object, low: float, *names: str) -> None:
    """Each of these attributes is above `low`."""
    _each(settings, names, lambda value: value > low, f"be above {low}")


def at_least(settings: object, low: float, *names: str) -> None:
    """Each of these attributes is at least `low`."""
    _each(settings, names, lambda value: value >= low, f"be at least {low}")


def between(settings: object, low: float, high: float, *names: str) -> None:
    """Each of these attributes is one of `low` to `high`, both included."""
    _each(settings, names, lambda value: low <= value <= high, f"lie between {low} and {high}")


def finite(settings: object, *names: str) -> None:
    """Each of these attributes is a number, and not an infinite one."""
    _each(settings, names, isfinite, "be a finite number")


def literals(settings: object) -> None:
    """Each attribute that is declared as a Literal has one of its values."""
    for name, hint in get_type_hints(type(settings)).items():
        if get_origin(hint) is Literal:
            *others, last = map(str, get_args(hint))
            _each(settings, (name,), get_args(hint).__contains__, f"be {', '.join(others)} or {last}")


def _each(settings: object, names: tuple[str, ...], holds: Callable[[Any], bool], what: str) -> None:
    for name in names:
        value = getattr(settings, name)
        if not holds(value):
            raise ValueError(f"{name} must {what}; got {value!r}")
