"""The inside of a worker process: one episode at a time, or reward calls, until the main process hangs up.

Keeps true: before every opening the global random streams (`random`, numpy's) are seeded from the task's id, so an
episode does not depend on what its process did before. An exception of foreign code is answered with its name and
ends the process: it is never used again. It waits for the next request, for as long as the main process lives.
"""

from __future__ import annotations

import os
import pickle
import random
import resource
import socket
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rollart.backends.process import wire
from rollart.core.clock import draw
from rollart.core.foreign import encodable
from rollart.core.types import ROLES, Action, Observation, Task
from rollart.envs.domain import Domain, Episode
from rollart.observe.payload import observation_dict
from rollart.rewards.contract import LARGEST, RewardFunction, RewardRequest, call


def serve(connection: socket.socket, domains: Mapping[str, Domain],
          rewards: Mapping[str, RewardFunction]) -> None:
    """Answer requests until end of file."""
    desk = _Desk(domains, rewards)
    stream = connection.makefile("rb")
    while header := stream.read(wire.HEADER.size):
        body = stream.read(wire.HEADER.unpack(header)[0])
        kind, *arguments = pickle.loads(body)
        try:
            answer = wire.answer(True, getattr(desk, kind)(*arguments))
        except Exception as error:  # noqa: BLE001  foreign code: whatever it raises is data for the main process
            connection.sendall(wire.answer(False, f"{type(error).__name__}: {error}"[:1000]))
            return
        connection.sendall(answer)


def limit_memory(megabytes: int) -> None:
    """Let this process grow by that much (10^6 bytes) and no more. Linux only: elsewhere there is no such limit."""
    if sys.platform != "linux":
        return
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + megabytes * 1_000_000
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _checked(seen: Observation, call: str) -> dict[str, Any]:
    """An observation as data: what it must be, and text that can be encoded. Raises TypeError that names the call."""
    if not isinstance(seen, Observation):
        raise TypeError(f"{call} must give an Observation; got {seen!r:.80}")
    for message in seen.messages:
        if message.role not in ROLES or not isinstance(message.content, str):
            raise TypeError(f"{call} must give messages of {', '.join(ROLES)} with a text; got {message!r:.120}")
    flags = type(seen.done) is type(seen.truncated) is bool
    if not flags or not isinstance(seen.reward, int | float) or not abs(seen.reward) <= LARGEST:
        raise TypeError(f"{call} must give done and truncated as true or false and a finite reward; got {seen.done!r}, "
                        f"{seen.truncated!r}, {seen.reward!r:.80}")
    said = [[message.role, encodable(str(message.content))] for message in seen.messages]
    return {**observation_dict(seen), "messages": said}


class _Desk:
    """One method per kind of request."""

    def __init__(self, domains: Mapping[str, Domain], rewards: Mapping[str, RewardFunction]) -> None:
        self._domains, self._rewards = domains, rewards
        self._episode: Episode

    def open(self, task: Task) -> dict[str, Any]:
        _seed_globals(task)
        self._episode = self._domains[task.domain].open(task)
        seen = _checked(self._episode.first(), "first")
        if seen["done"]:
            raise ValueError("first must not be done: nothing was played")
        return seen

    def step(self, text: str, truncated: bool) -> dict[str, Any]:
        return _checked(self._episode.step(Action(text, truncated)), "step")

    def close(self) -> None:
        self._episode.close()
        del self._episode

    def score(self, request: RewardRequest) -> dict[str, Any]:
        return asdict(call(self._rewards[request.domain], [request])[0])


def _seed_globals(task: Task) -> None:
    seed = draw(0, "globals", task.id)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)
