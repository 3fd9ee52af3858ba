"""Weights on their way from the learner to engines: one manifest, several carriers.

Keeps true: what an engine reads is what the learner published, whole or not at all (T9). A carrier is two halves that
know each other only by manifests: a `Writer` in the learner's process, a `Reader` in each process with engines. Both
block their caller; they are used from threads beside the event loop. Imports torch only when one is opened.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Protocol, cast

from rollart.backends.weights.settings import WeightsSettings
from rollart.core.errors import ConfigError
from rollart.core.types import Manifest, Version

if TYPE_CHECKING:
    from torch import Tensor


class Writer(Protocol):
    """The learner's half. One call at a time."""

    def put(self, version: Version, tensors: Mapping[str, Tensor]) -> Manifest:
        """Publish; `tensors` may be written to again when it returns. A second put of a version replaces the first.
        Raises TrainerLost when the carrier failed or did not answer in time."""
        ...

    def drop(self, manifest: Manifest) -> None:
        """No one will read these weights again. Dropping what is not held changes nothing. Never waits."""
        ...

    def close(self) -> None: ...


class Reader(Protocol):
    """An engine's half. Safe to use from several threads."""

    def get(self, manifest: Manifest) -> Mapping[str, Tensor]:
        """The verified tensors of a manifest, not to be written to; theirs stays the memory they lie in, also after
        `drop` and `close`. Raises EngineLost when they are gone, torn or changed, or did not come in time."""
        ...

    def close(self) -> None: ...


def open_writer(settings: WeightsSettings) -> Writer:
    """Raises ConfigError where this machine lacks what the carrier needs."""
    if settings.carrier == "memory":
        from rollart.backends.weights.memory import MemoryWeights

        return MemoryWeights()
    return cast(Writer, _half(settings, "Writer"))


def open_reader(settings: WeightsSettings, writer: Writer | None = None) -> Reader:
    """`writer`: the other half, where it lives in this process: carrier `memory` reads from it. Raises ConfigError."""
    if settings.carrier == "memory":
        if writer is None:
            raise ConfigError("weights.carrier = 'memory' reaches engines in the learner's own process only: set it "
                              "to 'file', 'collective' or 'mooncake'")
        return cast(Reader, writer)
    return cast(Reader, _half(settings, "Reader"))


def _half(settings: WeightsSettings, half: str) -> object:
    """`FileWriter` of file.py, and so on."""
    module = import_module(f"{__name__}.{settings.carrier}")
    return getattr(module, settings.carrier.capitalize() + half)(settings)
