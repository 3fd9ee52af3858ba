"""What `rollart algorithms` prints: each algorithm as a block of a recipe, and each piece with formula and source."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator

from rollart.algo.catalogue import ALGORITHMS, PIECES, pieces, resolve
from rollart.algo.settings import AlgoSettings


def block(name: str) -> str:
    """The whole [algorithm] table of an algorithm as TOML; keys that no piece of it reads are left out. Raises
    ConfigError for an unknown name."""
    settings = AlgoSettings(**resolve({"name": name}))
    idle = {key for piece in PIECES for key in piece.keys} - {
        key for piece in PIECES if (piece.kind, piece.name) in settings.chosen for key in piece.keys}
    lines = [f"{field.name} = {json.dumps(getattr(settings, field.name))}" for field in dataclasses.fields(settings)
             if field.name not in idle]
    return "\n".join(["[algorithm]", *lines])


def listing(name: str | None = None) -> Iterator[tuple[str, str]]:
    """Lines with their style. With a name: that algorithm's block and the pieces in it."""
    settings = AlgoSettings(**resolve({"name": name})) if name else None
    if name:
        yield "", block(name)
    else:
        yield "bold", "Algorithms (`name` in [algorithm]; `rollart algorithms NAME` prints all keys of one)"
        for known, changes in ALGORITHMS.items():
            changed = ", ".join(f"{k} = {json.dumps(v)}" for k, v in changes.items())
            yield "", f"  {known:22}{changed or 'the defaults'}"
    defaults = AlgoSettings()
    for kind in dict.fromkeys(piece.kind for piece in PIECES):
        own = [piece for piece in pieces(kind) if settings is None or (kind, piece.name) in settings.chosen]
        if own:
            key = "kl_value, kl_gradient" if kind == "kl" else kind
            default = getattr(defaults, kind, "k3, k2")
            yield "bold", f"\n{key} (default {default})"
        for piece in own:
            keys = ", ".join(f"{key} = {getattr(settings or defaults, key)}" for key in piece.keys)
            source = "; ".join(part for part in (piece.source, keys) if part)
            yield "", f"  {piece.name:16}{piece.formula}" + (f"   [{source}]" if source else "")
