"""Carrier `memory`: the hand-over of weights from learner to engines inside one process.

Keeps true: what an engine reads is what the learner published, whole or not at all (T9): `put` clones, `get` returns
exactly the tensors under the manifest's checksum, `load_into` checks every name and shape before it writes anything.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from rollart.backends.weights.image import digest, flat
from rollart.core.errors import EngineLost
from rollart.core.types import Manifest, Version


def checksum(tensors: Mapping[str, Tensor]) -> str:
    """A digest of names, shapes, types and contents of all tensors, independent of their order."""
    out = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(tensors.items()):
        out.update(repr((name, tuple(tensor.shape), str(tensor.dtype), digest(flat(tensor)))).encode())
    return out.hexdigest()


def load_into(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy tensors into the model's own storage, as `fill` does."""
    fill(model.state_dict(), tensors)


def fill(own: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Copy tensors into those of the same names, casting type and device.

    Raises ValueError that names every missing or unknown tensor or wrong shape, before anything was changed (T9).
    """
    missing, unknown = sorted(own.keys() - tensors.keys()), sorted(tensors.keys() - own.keys())
    shapes = [f"{name} is {list(tensors[name].shape)} where the model has {list(own[name].shape)}"
              for name in own if name in tensors and tensors[name].shape != own[name].shape]
    if missing or unknown or shapes:
        raise ValueError("; ".join(
            ([f"missing tensors: {_some(missing)}"] if missing else [])
            + ([f"unknown tensors: {_some(unknown)}"] if unknown else [])
            + ([f"wrong shapes: {_some(shapes)}"] if shapes else [])))
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(tensors[name])


def _some(names: list[str], limit: int = 4) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


class MemoryWeights:
    """Published versions in memory, by manifest. Safe to use from several threads, for each call is one look-up.

    Holds what `put` was given until `drop`; the control plane retires versions, so two or three are held at a time.
    """

    def __init__(self) -> None:
        self._held: dict[str, tuple[str, dict[str, Tensor]]] = {}

    def put(self, version: Version, tensors: Mapping[str, Tensor]) -> Manifest:
        """Clone and keep `tensors`; a second put of a version replaces the first (a resumed learner repeats one)."""
        cloned = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        digest = checksum(cloned)
        location = f"memory:{version}"
        self._held[location] = (digest, cloned)
        return Manifest(version=version, location=location, checksum=digest,
                        nbytes=sum(tensor.nbytes for tensor in cloned.values()))

    def get(self, manifest: Manifest) -> Mapping[str, Tensor]:
        """The tensors of a manifest, not to be written to. Raises EngineLost when they are gone or others."""
        held = self._held.get(manifest.location)
        if held is None:
            raise EngineLost(f"weights of version {manifest.version} are not held at {manifest.location}")
        if held[0] != manifest.checksum:
            raise EngineLost(f"weights at {manifest.location} have checksum {held[0]}, not {manifest.checksum}")
        return held[1]

    def drop(self, manifest: Manifest) -> None:
        """Forget these weights. Dropping what is not held changes nothing."""
        self._held.pop(manifest.location, None)

    def close(self) -> None:
        self._held.clear()
