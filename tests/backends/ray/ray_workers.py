"""Workers that the tests put in place of those that ship, and a reward."""

from __future__ import annotations

import asyncio
import os
import time

import rollart.distributed as rdist
from reward_functions import moody
from rollart.core.errors import ConfigError, EngineLost
from rollart.workers import EngineWorker, LearnerWorker


class MappedEngine(EngineWorker):
    """Its decorator sends one domain to H20 and all others to H800."""

    @rdist.hw_mapping(hw_affinity={"calculator": "H20"}, default="H800")
    async def generate(self, request):
        return await self.part.generate(request)


class SlowLearner(LearnerWorker):
    """Half a second a step, so that a kill finds it in one."""

    async def step(self, batch):
        await asyncio.sleep(0.5)
        return await self.part.step(batch)


class Broken(EngineWorker):
    async def start(self):
        raise ConfigError("this engine does not want to")


class Echo(rdist.Worker):
    """For the calls themselves."""

    role = rdist.Role.ACTOR_GEN
    held = 0

    async def echo(self, value):
        return value

    def length(self, value):
        return len(value)

    async def slow(self, seconds):
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            self.cancelled = True
            raise

    async def was_cancelled(self):
        return getattr(self, "cancelled", False)

    async def take(self):
        await asyncio.sleep(0.05)
        self.held += 1
        return "thing"

    async def give(self, thing):
        self.held -= 1

    async def count(self):
        return self.held

    async def fail(self):
        raise EngineLost("as asked")

    async def crash(self):
        raise KeyError("lost key")

    async def freeze(self):
        time.sleep(60)  # the whole actor stands still

    def stats(self):
        return {"held": self.held}


def noted(request):
    """A reward: 50 ms, or as the facts say; each call leaves a line in the file that the facts name."""
    import ray

    if "calls" in request.facts:
        with open(request.facts["calls"], "a") as file:
            file.write(f"{request.id} {os.getpid()} {ray.get_runtime_context().get_node_id()}\n")
    time.sleep(0.05)
    return moody(request)
