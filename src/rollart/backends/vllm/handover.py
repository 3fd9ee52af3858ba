"""Weights from a reader to a file that vLLM's workers map.

Keeps true: what a worker is told to load holds exactly the tensors of the model, or nothing is told: missing, unknown
and misshapen ones are named. Carrier `file` needs no copy: its file is handed on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from rollart.backends.weights import Reader, Writer, open_writer
from rollart.backends.weights.settings import WeightsSettings
from rollart.core.errors import EngineLost, TrainerLost
from rollart.core.types import Manifest

FILE = "model.safetensors"
Shapes = Mapping[str, tuple[int, ...]]


def shapes_of(folder: Path) -> Shapes:
    """Names and shapes of a checkpoint folder's tensors, from its safetensors headers; empty where it has none."""
    found: dict[str, tuple[int, ...]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        found |= {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
    return found


def coverage(expected: Shapes, given: Shapes, *, tied: bool) -> str:
    """What is missing, unknown or of another shape among the given tensors; empty when they are exactly the model's.
    A tied lm_head may be there or not. Without expectations nothing can be said."""
    optional = {"lm_head.weight"} if tied else set()
    wrong = (("missing", expected.keys() - given.keys() - optional),
             ("unknown", given.keys() - expected.keys() - optional),
             ("of another shape", {name for name in expected.keys() & given.keys() if expected[name] != given[name]}))
    return "; ".join(f"{what}: {', '.join(sorted(names)[:4])}" + (f" and {len(names) - 4} more" * (len(names) > 4))
                     for what, names in wrong if names and expected)


class Handover:
    """One engine's. `fetch` blocks its caller; `shapes` of its model, `folder` where files are written if need be."""

    def __init__(self, reader: Reader, shapes: Shapes, tied: bool, folder: str) -> None:
        self._reader, self._shapes, self._tied, self._folder = reader, shapes, tied, folder
        self._fetched: tuple[Manifest, Path] | None = None
        self._writer: Writer | None = None
        self._own: Manifest | None = None

    def fetch(self, manifest: Manifest) -> Path:
        """The file with these weights, the same until `done`. Raises EngineLost when they are gone or do not fit."""
        if self._fetched and self._fetched[0] == manifest:
            return self._fetched[1]
        self.done()
        tensors = self._reader.get(manifest)
        given = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        if wrong := coverage(self._shapes, given, tied=self._tied):
            raise EngineLost(f"weights of version {manifest.version} do not fit the model: {wrong}")
        path = Path(manifest.location) / FILE
        if not path.is_file():
            self._writer = self._writer or open_writer(WeightsSettings(carrier="file", folder=self._folder))
            try:
                self._own = self._writer.put(manifest.version, tensors)
            except TrainerLost as full:
                raise EngineLost(str(full)) from None
            path = Path(self._own.location) / FILE
        self._fetched = manifest, path
        return path

    def done(self) -> None:
        """The file has been loaded: one that was made for this engine goes."""
        if self._writer and self._own:
            self._writer.drop(self._own)
        self._fetched = self._own = None

    def close(self) -> None:
        self._fetched = self._own = None
        if self._writer:
            self._writer.close()
        self._writer = None
