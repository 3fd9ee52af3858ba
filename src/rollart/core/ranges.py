"""Range checks that settings share, for their `__post_init__`. Raises ValueError, which names the setting."""

from __future__ import annotations


def above(settings: object, low: float, *names: str) -> None:
    """Each of these attributes is above `low`."""
    for name in names:
        if getattr(settings, name) <= low:
            raise ValueError(f"{name} must be above {low}; got {getattr(settings, name)}")


def at_least(settings: object, low: float, *names: str) -> None:
    """Each of these attributes is at least `low`."""
    for name in names:
        if getattr(settings, name) < low:
            raise ValueError(f"{name} must be at least {low}; got {getattr(settings, name)}")
