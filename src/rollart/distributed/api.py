"""Workers, the clusters they form, and the decorators on their methods.

    class MyEngine(EngineWorker):
        @rdist.register(mode="execute_all")
        @rdist.hw_mapping(hw_affinity={"frozen_lake": "H800"}, default="H20")
        async def generate(self, request): ...

Keeps true: a decorator changes nothing of a method but its metadata; a method that a subclass overrides keeps the
metadata of the one above it unless it has its own.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any, ClassVar, Protocol, TypeVar

from rollart.core.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])
MODES = ("execute_all", "execute_rank_zero", "split")


class Role(StrEnum):
    """What the workers of a cluster are for, in the paper's words."""

    ACTOR_TRAIN = "ActorTrain"
    ACTOR_GEN = "ActorGen"
    REWARD = "Reward"
    ENVIRONMENT = "Environment"


def register(mode: str = "execute_all") -> Callable[[F], F]:
    """How a Cluster runs the method: on all workers (a list of results by rank), on rank zero (its result), or split:
    the first argument, a sequence, is dealt out in equal parts, in order, and the results' parts are joined."""
    if mode not in MODES:
        raise ConfigError(f"register needs a mode of {', '.join(MODES)}; got {mode!r}")
    return _attach("rollart_mode", mode)


def hw_mapping(hw_affinity: Mapping[str, str], default: str = "") -> Callable[[F], F]:
    """Which hardware pool serves which task domain; `default` (or the key "default") serves all others."""
    table = {**({"default": default} if default else {}), **hw_affinity}
    if not table or not all(isinstance(pool, str) and pool for pool in table.values()):
        raise ConfigError(f"hw_mapping needs at least one domain or default with the name of a pool; got {table}")
    return _attach("rollart_hw_affinity", table)


def _attach(name: str, value: Any) -> Callable[[F], F]:
    def attach(method: F) -> F:
        setattr(method, name, value)
        return method
    return attach


class Worker:
    """One process of a role. `build` makes its part there (heavy imports belong into it); a method that the worker
    does not have is the part's. `spec` is plain data. Subclass a worker of `rollart.workers` to replace a part, and
    name the subclass in the recipe: [cluster.workers] ActorGen = "my_module:MyEngine".
    """

    role: ClassVar[Role]
    part: Any = None

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self.spec = spec

    def build(self) -> Any:
        """The part. Runs in a thread of the actor."""

    async def start(self) -> None:
        """Raises what stops it; the caller has a deadline."""
        self.part = await asyncio.to_thread(self.build)
        for name in ("probe", "start"):
            begun = getattr(self.part, name, lambda: None)()
            if inspect.isawaitable(begun):
                await begun

    async def close(self) -> None:
        """End what the worker started."""
        closing = self.part.close() if hasattr(self.part, "close") else None
        if inspect.isawaitable(closing):
            await closing

    def stats(self) -> Mapping[str, Any]:
        """Figures for status."""
        return dataclasses.asdict(self.part.stats()) if hasattr(self.part, "stats") else {}


def metadata(kind: type, method: str, name: str) -> Any:
    """What a decorator attached to the method or to the nearest one that it overrides; else None."""
    found = (getattr(vars(owner).get(method), name, None) for owner in kind.__mro__)
    return next((value for value in found if value is not None), None)


def affinity(kind: type) -> dict[str, str]:
    """Domain (or "default") to pool, of all methods of a worker class. Raises ConfigError where two disagree."""
    out: dict[str, str] = {}
    for method in sorted(name for owner in kind.__mro__ for name in vars(owner)):
        for domain, pool in (metadata(kind, method, "rollart_hw_affinity") or {}).items():
            if out.setdefault(domain, pool) != pool:
                raise ConfigError(f"{kind.__name__}: hw_mapping binds {domain} to {out[domain]} and to {pool}: keep "
                                  "one")
    return out


def worker_class(name: str, role: Role) -> type[Worker]:
    """The worker called `module:Class`, which must be of that role. Raises ConfigError."""
    module, _, attribute = name.partition(":")
    try:
        kind = getattr(importlib.import_module(module), attribute, None) if attribute else None
    except ModuleNotFoundError as error:
        raise ConfigError(f"worker {name} needs the module {error.name}: install it on every node, or set PYTHONPATH"
                          ) from None
    if not (isinstance(kind, type) and issubclass(kind, Worker) and getattr(kind, "role", None) == role):
        raise ConfigError(f"cluster.workers.{role} must name a Worker class of that role as module:Class; got {name!r}")
    return kind


class Handle(Protocol):
    """A worker somewhere. Raises the PortError of its role."""

    async def call(self, method: str, *arguments: Any) -> Any: ...


class Cluster:
    """All workers of one role as one object: `await cluster.step(batch)` runs `step` as its `register` says.

    A method that is not registered runs on all. Raises the first worker's error; no call is left running then: the
    others are awaited, so that ranks which wait for each other have ended too.
    """

    def __init__(self, kind: type[Worker], handles: Sequence[Handle]) -> None:
        if not handles:
            raise ValueError(f"a cluster of {kind.__name__} needs at least one worker")
        self.kind, self.handles = kind, tuple(handles)

    def __getattr__(self, method: str) -> Callable[..., Awaitable[Any]]:
        mode = metadata(self.kind, method, "rollart_mode") or "execute_all"

        async def run(*arguments: Any) -> Any:
            if mode == "execute_rank_zero":
                return await self.handles[0].call(method, *arguments)
            each = [arguments] * len(self.handles)
            if mode == "split":
                each = [(part, *arguments[1:]) for part in split(arguments[0], len(self.handles))]
            calls = [handle.call(method, *own) for handle, own in zip(self.handles, each, strict=True)]
            results = await asyncio.gather(*calls, return_exceptions=True)
            for result in results:
                if isinstance(result, BaseException):
                    raise result
            return [item for part in results for item in part] if mode == "split" else list(results)
        return run


def split(items: Sequence[Any], parts: int) -> list[Sequence[Any]]:
    """Consecutive parts whose sizes differ by at most one: 7 items in 3 parts are 3, 2 and 2."""
    size, more = divmod(len(items), parts)
    ends = [(i + 1) * size + min(i + 1, more) for i in range(parts)]
    return [items[start:end] for start, end in zip([0, *ends], ends, strict=False)]
