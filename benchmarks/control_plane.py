"""What the control plane costs, with instant engines and environments: in one process, and over Ray actors.

    python benchmarks/control_plane.py [--concurrent 16 256 2048] [--turns 20000]

Each trajectory is driven by an EnvManager (open, 8 turns of generate and step, score, close). Per turn: milliseconds,
calls of ports, and Ray calls. `gathered` is how the product calls (backends/ray/remote.py: calls of one turn of the
event loop travel together); `one by one` makes a Ray call of each.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from pathlib import Path
from typing import Any

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])

import ray

from rollart.backends.ray.engines import RemoteEngine
from rollart.backends.ray.environments import RemoteEnvironments
from rollart.backends.ray.remote import Remote
from rollart.control.env_manager import EnvManager, Services
from rollart.control.llm_proxy import LLMProxy
from rollart.control.settings import RolloutSettings
from rollart.core.changed import Changed
from rollart.core.errors import EngineLost, EnvironmentFailed, PortError
from rollart.core.tokens import floats, ids
from rollart.core.types import Completion, Finish, Manifest, Message, Observation, Score, Task, TrajectoryId
from rollart.distributed import Role, Worker

TURNS = 8
TOKENS = 16
SAID = Observation((Message("user", "and now?"),))


class InstantEngine(Worker):
    """Samples 16 tokens at once."""

    role = Role.ACTOR_GEN
    id, pool = "e", "pool"

    async def generate(self, request: Any) -> Completion:
        return Completion(ids(range(TOKENS)), floats([-1.0] * TOKENS), ((0, 0),), Finish.STOP, self.id)

    async def suspend(self) -> None: ...
    async def load_weights(self, manifest: Any) -> None: ...
    async def resume(self) -> None: ...
    def release(self, trajectory: Any) -> None: ...


class RemoteInstantEngine(InstantEngine):
    async def release(self, trajectory: Any) -> None: ...  # type: ignore[override]


class InstantEnvironment:
    async def first(self) -> Observation:
        return SAID

    async def step(self, action: Any) -> Observation:
        return SAID

    async def close(self) -> None: ...


class InstantEnvironments(Worker):
    """In this process a pool, in an actor the worker of one."""

    role = Role.ENVIRONMENT

    async def open(self, task: Task) -> Any:
        return InstantEnvironment()


class RemoteInstantEnvironments(InstantEnvironments):
    async def open(self, task: Task) -> Any:
        return 1, SAID

    async def step(self, number: int, action: Any) -> Observation:
        return SAID

    async def close_one(self, number: int) -> None: ...


class OneByOne:
    """A Ray call for each call; otherwise as Remote is used here."""

    def __init__(self, name: str, worker: str) -> None:
        self.name, self.dead, self.calls, self.posts, self.polls, self.stats = name, None, 0, 0, 0, {}
        module, _, attribute = worker.partition(":")

        class Plain:
            def __init__(self) -> None:
                import importlib

                self.worker = getattr(importlib.import_module(module), attribute)({})

            async def call(self, method: str, *arguments: Any) -> Any:
                return await getattr(self.worker, method)(*arguments)
        self.actor = ray.remote(Plain).options(num_cpus=0, max_concurrency=1000).remote()

    def on_dead(self, callback: Any) -> None: ...

    async def start(self) -> None: ...

    async def call(self, method: str, *arguments: Any, undo: Any = None) -> Any:
        self.calls += 1
        self.posts += 1
        return await self.actor.call.remote(method, *arguments)

    def tell(self, method: str, *arguments: Any) -> None:
        self.calls += 1
        self.posts += 1
        self.actor.call.remote(method, *arguments)

    async def close(self) -> None:
        ray.kill(self.actor)


class Renderer:
    stop = (0,)

    def prompt(self, messages: Any) -> Any:
        return ids(range(64))

    def reply(self, completion: Any, messages: Any) -> Any:
        return ids(range(16))

    def fork(self, history: Any, context: Any) -> None:
        return None

    def text(self, completion: Any) -> str:
        return "an action"


class Scorer:
    async def score(self, trajectory: Any) -> Score:
        return Score(1.0)


class Silent:
    def emit(self, event: Any) -> None: ...


def gathered(name: str, worker: str, role: str, lost: type[PortError]) -> Any:
    return Remote(name, worker, role, {}, dict, lost, start_seconds=120, silent_seconds=120)


async def measure(how: str, concurrent: int, turns: int) -> str:
    remotes: list[Any] = []

    def remote(worker: str, role: str, lost: type[PortError]) -> Any:
        name = f"control_plane:{worker}"
        remotes.append(gathered(worker, name, role, lost) if how == "gathered" else OneByOne(worker, name))
        return remotes[-1]

    if how == "in one process":
        engines: list[Any] = [InstantEngine({}) for _ in range(2)]
        for i, engine in enumerate(engines):
            engine.id = f"e{i}"
        environments: Any = InstantEnvironments({})
    else:
        engines = [RemoteEngine(f"e{i}", "pool", remote("RemoteInstantEngine", "ActorGen", EngineLost))
                   for i in range(2)]
        await asyncio.gather(*[engine.remote.start() for engine in engines])
        environments = RemoteEnvironments(
            lambda: ["a", "b"], lambda _: remote("RemoteInstantEnvironments", "Environment", EnvironmentFailed), 60.0)
        await environments.start()
    proxy = LLMProxy(engines, {}, journal=Silent(), changed=Changed())
    await proxy.update(Manifest(0, "nowhere"))
    services = Services(proxy=proxy, environments=environments, renderer=Renderer(), scorer=Scorer(), journal=Silent(),
                        settings=RolloutSettings())
    numbers = iter(range(max(concurrent, turns // TURNS)))

    async def drive() -> None:
        for number in numbers:
            task = Task(f"t{number}", "d", {}, TURNS, TOKENS)
            ended = await EnvManager(TrajectoryId(number, 0), task, services).run()
            assert ended.good, ended.error

    before = [r.calls for r in remotes], [r.posts + r.polls for r in remotes]
    began, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*[drive() for _ in range(concurrent)])
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    done = max(concurrent, turns // TURNS) * TURNS
    calls = (sum(r.calls for r in remotes) - sum(before[0])) / done
    of_ray = (sum(r.posts + r.polls for r in remotes) - sum(before[1])) / done
    if how != "in one process":
        await environments.close()
        await asyncio.gather(*[engine.remote.close() for engine in engines])
    return (f"| {how} | {concurrent} | {1000 * seconds / done:.3f} | {1000 * cpu / done:.3f} | {calls:.2f} | "
            f"{of_ray:.2f} | {done / seconds:,.0f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--concurrent", type=int, nargs="*", default=[16, 256, 2048])
    parser.add_argument("--turns", type=int, default=20_000)
    arguments = parser.parse_args()
    ray.init(num_cpus=2, log_to_driver=False, logging_level="ERROR", include_dashboard=False)
    try:
        print("| | concurrent | ms a turn | driver's CPU ms a turn | calls a turn | Ray calls a turn | turns/s |")
        print("|---|---|---|---|---|---|---|")
        for concurrent in arguments.concurrent:
            for how in ("in one process", "gathered", "one by one"):
                turns = arguments.turns if how != "one by one" else arguments.turns // 4
                print(asyncio.run(measure(how, concurrent, turns)), flush=True)
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
