"""Simulated environments, scorer, trainer, tasks and cluster: the ports of `core.ports` with costs instead of work.

Keeps true, and tells `violated(name, what)` where the control plane breaks it: an environment is closed once and is
not used afterwards (I3); steps do not overlap, publishes do not overlap (I6). What only its owner can count stays
readable: open environments, scored trajectories.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rollart.control.task_mix import Share, TaskMix
from rollart.core.clock import draw, now, stream
from rollart.core.errors import EnvironmentFailed, NoCapacity, ScorerFailed, TrainerLost
from rollart.core.ports import Trainer
from rollart.core.tokens import Counted
from rollart.core.types import (
    Action,
    Completion,
    Finish,
    Manifest,
    Message,
    Observation,
    Score,
    StepReport,
    Task,
    TrainBatch,
    Trajectory,
    TrajectoryId,
    Version,
)
from rollart.sim.costs import TrainCost
from rollart.sim.engine import DisaggregatedEngine, SimEngine
from rollart.sim.faults import Faults
from rollart.sim.workload import Load


def chance(seed: int, *name: object) -> float:
    """A uniform number of 0 to 1 that this seed and name stand for."""
    return draw(seed, *name) / 2.0**63


def _limit(n: int) -> AbstractAsyncContextManager[Any]:
    """At most `n` at once, in order; 0: no limit."""
    return asyncio.Semaphore(n) if n else nullcontext()


async def _hang() -> None:
    await asyncio.get_running_loop().create_future()


class SimEnvironment:
    """One episode. Opened by its pool, which counts it until it is closed."""

    def __init__(self, number: int, task: Task, pool: SimEnvironmentPool) -> None:
        self._number, self._task, self._pool = number, task, pool
        self._load = pool.domains[task.domain]
        self._plan = self._load.episode(pool.seed, number, task.id)
        self._turn = 0

    async def first(self) -> Observation:
        await self._work(0.1)
        return Observation((Message("user", Counted(self._plan.prompt)),))

    async def step(self, action: Action) -> Observation:
        await self._work(1.0)
        turn, self._turn = self._turn, self._turn + 1
        if self._turn >= self._plan.turns:
            return Observation(done=True)
        return Observation((Message("user", Counted(self._plan.observations[turn])),))

    async def close(self) -> None:
        self._pool.closed(self._number, self._task)
        await asyncio.sleep(0.0)

    async def _work(self, share: float) -> None:
        if self._number not in self._pool.live:
            self._pool.violated("I3", f"a closed environment of {self._task.id} was used")
        faults, seed, name = self._pool.faults, self._pool.seed, (self._number, self._turn, share)
        luck = chance(seed, "step luck", *name) if faults.any_step else 0.5
        if luck < faults.step_hangs:
            await _hang()
        await asyncio.sleep(share * self._load.step_s.draw(seed, "step", *name))
        if luck > 1.0 - faults.step_fails:
            raise EnvironmentFailed(f"{self._task.id}: the sandbox went away in a step")


class SimEnvironmentPool:
    """`live`: the environments that are open now, by number. At most `opening` open at once (0: no limit): images are
    pulled through one registry."""

    def __init__(self, *, seed: int, faults: Faults, domains: Mapping[str, Load],
                 violated: Callable[[str, str], None], opening: int = 0) -> None:
        self.seed, self.faults, self.domains, self.violated = seed, faults, domains, violated
        self.live: dict[int, Task] = {}
        self._numbers = itertools.count()
        self._pulls = _limit(opening)

    async def open(self, task: Task) -> SimEnvironment:
        number = next(self._numbers)
        async with self._pulls:
            luck = chance(self.seed, "open luck", number)
            if luck < self.faults.open_hangs:
                await _hang()
            await asyncio.sleep(self.domains[task.domain].open_s.draw(self.seed, "open", number))
            if luck > 1.0 - self.faults.open_fails:
                raise EnvironmentFailed(f"{task.id}: image pull failed")
        self.live[number] = task
        return SimEnvironment(number, task, self)

    def closed(self, number: int, task: Task) -> None:
        if self.live.pop(number, None) is None:
            self.violated("I3", f"an environment of {task.id} was closed twice")


@dataclass(frozen=True, kw_only=True)
class RewardCost:
    """Where rewards run. instances: how many calls run at once (0: no limit). serverless: instances start when they are
    needed (cold_start_s) and end after idle_s without a call; otherwise all of them are reserved from the start."""

    instances: int = 0
    serverless: bool = True
    cold_start_s: float = 2.0
    idle_s: float = 60.0

    def __post_init__(self) -> None:
        if self.instances < 0 or self.cold_start_s < 0 or self.idle_s < 0:
            raise ValueError(f"needs instances, cold_start_s, idle_s >= 0; got {self.instances}, "
                             f"{self.cold_start_s:g}, {self.idle_s:g}")
        if not self.serverless and not self.instances:
            raise ValueError("reserved rewards (serverless = false) need instances of at least 1; got 0")


class SimScorer:
    """`answered`: the trajectories that have a real score, for the check that no failure became one.

    busy, warm: seconds that instances computed, and that they existed for.
    """

    def __init__(self, *, seed: int, faults: Faults, domains: Mapping[str, Load], cost: RewardCost) -> None:
        self._seed, self._faults, self._domains, self._cost = seed, faults, domains, cost
        self._calls = itertools.count()
        self.answered: dict[TrajectoryId, None] = {}
        self.busy = self._gone = 0.0
        self.cold_starts = 0
        self._running = _limit(cost.instances)
        self._idle: deque[tuple[float, float]] = deque()  # (idle since, started at), the latest last

    @property
    def warm(self) -> float:
        """Instance-seconds so far."""
        if not self._cost.serverless:
            return self._cost.instances * now()
        return self._gone + sum(min(since + self._cost.idle_s, now()) - started for since, started in self._idle)

    async def score(self, trajectory: Trajectory) -> Score:
        number = next(self._calls)
        luck = chance(self._seed, "score luck", number)
        async with self._running:
            started = await self._instance()
            began = now()
            try:
                if luck < self._faults.score_hangs:
                    await _hang()
                await asyncio.sleep(self._domains[trajectory.task.domain].reward_s.draw(self._seed, "score", number))
            finally:
                self.busy += now() - began
                self._idle.append((now(), started))
        if luck > 1.0 - self._faults.score_fails:
            raise ScorerFailed(f"{trajectory.id}: the reward function answered 503")
        self.answered[trajectory.id] = None
        solved = chance(self._seed, "solved", str(trajectory.id)) < self._domains[trajectory.task.domain].success
        return Score(float(solved), success=solved)

    async def _instance(self) -> float:
        """When the instance that takes this call was started: a warm one, else a new one."""
        if not self._cost.serverless:
            return 0.0
        while self._idle and self._idle[0][0] + self._cost.idle_s < now():
            since, started = self._idle.popleft()
            self._gone += since + self._cost.idle_s - started
        if self._idle:
            return self._idle.pop()[1]
        self.cold_starts += 1
        started = now()
        await asyncio.sleep(self._cost.cold_start_s)
        return started


class SimTrainer:
    """`publish_s`: seconds until a version can be read by the engines, beside rollout; `save_s`: of a save; `jitter`:
    largest deviation of a step and a publish (share). busy: seconds in optimizer steps."""

    def __init__(self, *, seed: int, faults: Faults, violated: Callable[[str, str], None], cost: TrainCost,
                 publish_s: float = 3.0, save_s: float = 4.0, jitter: float = 0.1) -> None:
        self._chance, self._faults, self._violated, self._cost = stream(seed, "trainer"), faults, violated, cost
        self._publish_s, self._save_s, self._jitter = publish_s, save_s, jitter
        self.version: Version = 0
        self.busy = 0.0
        self._stepping = self._publishing = False
        self._saved: dict[Path, Version] = {}

    def _about(self, seconds: float) -> float:
        return seconds * self._chance.uniform(1.0 - self._jitter, 1.0 + self._jitter)

    async def step(self, batch: TrainBatch) -> StepReport:
        if self._stepping or batch.version != self.version:
            self._violated("I6", f"a step on version {batch.version} while the trainer stands at {self.version}"
                           + (" in a step" if self._stepping else ""))
        self._stepping = True
        lengths = [len(sample.ids) for sample in batch.samples]
        seconds = self._about(self._cost.seconds(lengths))
        try:
            await asyncio.sleep(seconds)
            if self._chance.random() < self._faults.trainer_fails:
                raise TrainerLost(f"a learner rank died in the step on version {batch.version}")
        finally:
            self._stepping = False
        self.version += 1
        self.busy += seconds
        return StepReport(self.version, seconds, sum(lengths), {"loss": self._chance.random()})

    async def publish(self, version: Version) -> Manifest:
        if self._publishing or version != self.version:
            self._violated("I6", f"version {version} is published while the trainer stands at {self.version}"
                           + (" and another publish runs" if self._publishing else ""))
        self._publishing = True
        try:
            await asyncio.sleep(self._about(self._publish_s))
        finally:
            self._publishing = False
        return Manifest(version, f"sim://weights/{version}")

    async def retire(self, manifest: Manifest) -> None:
        await asyncio.sleep(0.0)

    async def save(self, folder: Path) -> None:
        version = self.version
        await asyncio.sleep(self._save_s)
        self._saved[folder] = version

    async def load(self, folder: Path) -> None:
        await asyncio.sleep(self._save_s)
        self.version = self._saved[folder]


class SimCheckpoints:
    """Checkpoints in memory; the folder is a name only."""

    async def save(self, version: Version, state: Mapping[str, Any], trainer: Trainer) -> str:
        folder = Path(f"step-{version}")
        await trainer.save(folder)
        return str(folder)


def sim_task(domain: str, load: Load, index: int) -> Task:
    """Task number `index` of a simulated domain."""
    return Task(f"{domain}/{index}", domain, {}, load.max_turns, load.max_tokens)


class SimTasks(TaskMix):
    """A task mix over simulated domains. `drawn`, `returned`: how often a task was handed out and came back."""

    def __init__(self, weights: Mapping[str, float], domains: Mapping[str, Load], *, seed: int) -> None:
        super().__init__({domain: Share(weight, partial(sim_task, domain, domains[domain]))
                          for domain, weight in weights.items()}, seed)
        self.drawn = self.returned = 0

    def next(self) -> Task:
        self.drawn += 1
        return super().next()

    def put_back(self, task: Task) -> None:
        self.returned += 1
        super().put_back(task)


class SimRenderer:
    """Chat as lengths: 4 tokens of template per message, 3 for the next assistant header, 1 stop token."""

    stop = (0,)

    def prompt(self, messages: Sequence[Message]) -> Counted:
        return Counted(sum(len(message.content) + 4 for message in messages) + 3)

    def reply(self, completion: Completion, messages: Sequence[Message]) -> Counted:
        return self.prompt(messages)

    def fork(self, history: Sequence[Message], context: object) -> None:
        return None

    def text(self, completion: Completion) -> Counted:
        return Counted(len(completion.tokens) - (completion.finish is Finish.STOP))


class SimCluster:
    """Crashes engines by chance from `begin` on, reports them, and starts them again when it is asked to."""

    def __init__(self, engines: Sequence[SimEngine | DisaggregatedEngine], *, seed: int, faults: Faults) -> None:
        self._engines = {engine.id: engine for engine in engines}
        self._faults = faults
        self._chance = {engine.id: stream(seed, "cluster", engine.id) for engine in engines}
        self._lost: asyncio.Queue[str] = asyncio.Queue(maxsize=2 * len(engines))

    def begin(self) -> None:
        for engine in self._engines:
            self._arm(engine)

    async def wait_lost(self) -> str:
        return await self._lost.get()

    async def restart(self, engine: str) -> None:
        chance = self._chance[engine]
        await asyncio.sleep(self._faults.engine_repair * chance.uniform(0.5, 2.0))
        if chance.random() < self._faults.no_capacity:
            raise NoCapacity(f"no room to start {engine} again")
        self._engines[engine].restart()
        self._arm(engine)

    def _arm(self, engine: str) -> None:
        if self._faults.engine_mtbf:
            seconds = self._chance[engine].expovariate(1.0 / self._faults.engine_mtbf)
            asyncio.get_running_loop().call_later(seconds, self._crash, engine)

    def _crash(self, engine: str) -> None:
        self._engines[engine].crash("crashed")
        self._lost.put_nowait(engine)
