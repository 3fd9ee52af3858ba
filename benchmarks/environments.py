"""What an opening costs the agent: cold processes, warm ones, and environments opened ahead of time, in one run.

    python benchmarks/environments.py            # the slow environment; --fast for one that opens at once

Groups of four members play one after the other in two slots, as a run's groups do: a slot takes the next task, opens
its members together and plays five turns of 0.5 s. The slow environment takes 1 to 2 s to open (by its task), the fast
one none. Printed: seconds from asking for an environment to its first observation, median and 99th percentile.
"""

import argparse
import asyncio
import itertools
import random
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from rollart.backends.process.environments import ProcessEnvironments, ProcessSettings
from rollart.core.types import Action, Message, Observation
from rollart.envs.domain import Domain, Episode

MEMBERS, SLOTS, TURNS, TURN_SECONDS = 4, 2, 5, 0.5


class Slow(Domain):
    """Opens in 1 to 2 s."""

    name, reward, seconds = "slow", "own", (1.0, 2.0)

    def problem(self, rng):
        return {"seconds": rng.uniform(*self.seconds)}

    def open(self, task):
        time.sleep(task.payload["seconds"])
        return Nothing()

    player = random_player = None


class Fast(Slow):
    name, seconds = "fast", (0.0, 0.0)


Slow.__abstractmethods__ = Fast.__abstractmethods__ = frozenset()


class Nothing(Episode):
    def first(self):
        return Observation((Message("user", "go"),))

    def step(self, action):
        return Observation((Message("user", "on"),))


async def measure(domain, groups, **settings):
    """Seconds of each opening, but for the first groups, which start the processes."""
    name = f"environments:{type(domain).__name__}"
    domain.name = name
    tasks, at, waits = [domain.task(i, "train") for i in range(groups + 50)], itertools.count(), []
    pool = ProcessEnvironments({name: {}}, ProcessSettings(max_processes=SLOTS * MEMBERS, **settings))
    drawn = 0
    pool.upcoming = lambda: (task for task in tasks[drawn:] for _ in range(MEMBERS))

    async def member(task, index):
        begin = time.monotonic()
        environment = await pool.open(task)
        await environment.first()
        if index >= SLOTS:
            waits.append(time.monotonic() - begin)
        for _ in range(TURNS):
            await asyncio.sleep(TURN_SECONDS * random.uniform(0.8, 1.2))
            await environment.step(Action("on"))
        await environment.close()

    async def slot():
        nonlocal drawn
        while (index := next(at)) < groups:
            drawn = index + 1
            await asyncio.gather(*(member(tasks[index], index) for _ in range(MEMBERS)))

    try:
        await asyncio.gather(*(slot() for _ in range(SLOTS)))
        return waits, pool.stats()
    finally:
        await pool.close()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fast", action="store_true")
    parser.add_argument("--groups", type=int, default=30)
    arguments = parser.parse_args()
    domain = Fast() if arguments.fast else Slow()
    print(f"{'':34}  median s    99 % s   found ahead")
    for label, settings in (("cold processes", {"idle_processes": 0}), ("warm processes", {}),
                            ("warm, one group opened ahead", {"preopen": MEMBERS}),
                            ("warm, two groups opened ahead", {"preopen": SLOTS * MEMBERS})):
        waits, stats = asyncio.run(measure(domain, arguments.groups, **settings))
        p99 = sorted(waits)[min(len(waits) - 1, int(0.99 * len(waits)))]
        print(f"{label:34}{statistics.median(waits):10.4f}{p99:10.4f}{stats.ahead:9} of {stats.opened}", flush=True)


if __name__ == "__main__":
    main()
