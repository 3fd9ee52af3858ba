"""Simulated environments, scorer, trainer, tasks and cluster: the ports of `core.ports` with costs instead of work.

Keeps true, and tells `violated(name, what)` where the control plane breaks it: an environment is closed once and is
not used afterwards (I3); steps do not overlap, publishes do not overlap (I6). What only its owner can count stays
readable: open environments, scored trajectories.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from rollart.control.task_mix import Share, TaskMix
from rollart.core.clock import stream
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
from rollart.sim.engine import SimEngine
from rollart.sim.faults import Faults


@dataclass(frozen=True, kw_only=True)
class DomainCost:
    """What episodes of one domain look like; times are log-normal medians.

    turns: turns of an episode (sigma 0.6).
    open_s, step_s: seconds to open, and of one step (sigma 0.8).
    prompt_tokens, observation_tokens: tokens of the first and of each later observation.
    success: probability that an episode is solved.
    """

    turns: float = 4.0
    open_s: float = 3.0
    step_s: float = 1.0
    prompt_tokens: int = 500
    observation_tokens: int = 150
    success: float = 0.5


DOMAINS: Mapping[str, DomainCost] = {
    "math": DomainCost(turns=1.0, open_s=0.1, step_s=0.1, prompt_tokens=200, observation_tokens=20),
    "game": DomainCost(turns=6.0, open_s=2.0, step_s=0.3, prompt_tokens=400, observation_tokens=80),
    "code": DomainCost(turns=8.0, open_s=20.0, step_s=4.0, prompt_tokens=1500, observation_tokens=400, success=0.3),
}


async def _hang() -> None:
    await asyncio.get_running_loop().create_future()


class SimEnvironment:
    """One episode. Opened by its pool, which counts it until it is closed."""

    def __init__(self, number: int, task: Task, cost: DomainCost, chance: Random, pool: SimEnvironmentPool) -> None:
        self._number, self._task, self._cost, self._chance, self._pool = number, task, cost, chance, pool
        self._left = max(1, int(cost.turns * chance.lognormvariate(0.0, 0.6)))

    async def first(self) -> Observation:
        await self._work(0.1)
        return Observation((Message("user", Counted(self._cost.prompt_tokens)),))

    async def step(self, action: Action) -> Observation:
        await self._work(1.0)
        self._left -= 1
        return Observation((Message("user", Counted(self._cost.observation_tokens)),), done=self._left <= 0)

    async def close(self) -> None:
        self._pool.closed(self._number, self._task)
        await asyncio.sleep(self._chance.uniform(0.0, 0.5))

    async def _work(self, share: float) -> None:
        if self._number not in self._pool.live:
            self._pool.violated("I3", f"a closed environment of {self._task.id} was used")
        faults, luck = self._pool.faults, self._chance.random()
        if luck < faults.step_hangs:
            await _hang()
        await asyncio.sleep(share * self._cost.step_s * self._chance.lognormvariate(0.0, 0.8))
        if luck > 1.0 - faults.step_fails:
            raise EnvironmentFailed(f"{self._task.id}: the sandbox went away in a step")


class SimEnvironmentPool:
    """`live`: the environments that are open now, by number."""

    def __init__(self, *, seed: int, faults: Faults, domains: Mapping[str, DomainCost],
                 violated: Callable[[str, str], None]) -> None:
        self.seed, self.faults, self.domains, self.violated = seed, faults, domains, violated
        self.live: dict[int, Task] = {}
        self._numbers = itertools.count()

    async def open(self, task: Task) -> SimEnvironment:
        number = next(self._numbers)
        cost, chance = self.domains[task.domain], stream(self.seed, "environment", number)
        luck = chance.random()
        if luck < self.faults.open_hangs:
            await _hang()
        await asyncio.sleep(cost.open_s * chance.lognormvariate(0.0, 0.8))
        if luck > 1.0 - self.faults.open_fails:
            raise EnvironmentFailed(f"{task.id}: image pull failed")
        self.live[number] = task
        return SimEnvironment(number, task, cost, chance, self)

    def closed(self, number: int, task: Task) -> None:
        if self.live.pop(number, None) is None:
            self.violated("I3", f"an environment of {task.id} was closed twice")


class SimScorer:
    """`answered`: the trajectories that have a real score, for the check that no failure became one."""

    def __init__(self, *, seed: int, faults: Faults, domains: Mapping[str, DomainCost]) -> None:
        self._seed, self._faults, self._domains = seed, faults, domains
        self._calls = itertools.count()
        self.answered: dict[TrajectoryId, None] = {}

    async def score(self, trajectory: Trajectory) -> Score:
        chance = stream(self._seed, "score", next(self._calls))
        luck = chance.random()
        if luck < self._faults.score_hangs:
            await _hang()
        await asyncio.sleep(chance.lognormvariate(0.0, 0.7))
        if luck > 1.0 - self._faults.score_fails:
            raise ScorerFailed(f"{trajectory.id}: the reward function answered 503")
        self.answered[trajectory.id] = None
        solved = stream(self._seed, "solved", str(trajectory.id)).random() < self._domains[
            trajectory.task.domain].success
        return Score(float(solved), success=solved)


class SimTrainer:
    """`step_s`: seconds of a step besides its tokens; `publish_s`, `save_s`: seconds of a publish and of a save."""

    def __init__(self, *, seed: int, faults: Faults, violated: Callable[[str, str], None],
                 tokens_per_s: float = 20_000.0, step_s: float = 5.0, publish_s: float = 3.0,
                 save_s: float = 4.0) -> None:
        self._chance, self._faults, self._violated = stream(seed, "trainer"), faults, violated
        self._tokens_per_s, self._step_s, self._publish_s, self._save_s = tokens_per_s, step_s, publish_s, save_s
        self.version: Version = 0
        self._stepping = self._publishing = False
        self._saved: dict[Path, Version] = {}

    async def step(self, batch: TrainBatch) -> StepReport:
        if self._stepping or batch.version != self.version:
            self._violated("I6", f"a step on version {batch.version} while the trainer stands at {self.version}"
                           + (" in a step" if self._stepping else ""))
        self._stepping = True
        tokens = sum(len(sample.ids) for sample in batch.samples)
        seconds = (self._step_s + tokens / self._tokens_per_s) * self._chance.uniform(0.8, 1.25)
        try:
            await asyncio.sleep(seconds)
            if self._chance.random() < self._faults.trainer_fails:
                raise TrainerLost(f"a learner rank died in the step on version {batch.version}")
        finally:
            self._stepping = False
        self.version += 1
        return StepReport(self.version, seconds, tokens, {"loss": self._chance.random()})

    async def publish(self, version: Version) -> Manifest:
        if self._publishing or version != self.version:
            self._violated("I6", f"version {version} is published while the trainer stands at {self.version}"
                           + (" and another publish runs" if self._publishing else ""))
        self._publishing = True
        try:
            await asyncio.sleep(self._publish_s * self._chance.uniform(0.8, 2.0))
        finally:
            self._publishing = False
        return Manifest(version, f"sim://weights/{version}")

    async def retire(self, manifest: Manifest) -> None:
        await asyncio.sleep(0.0)

    async def save(self, folder: Path) -> None:
        await asyncio.sleep(self._save_s)
        self._saved[folder] = self.version

    async def load(self, folder: Path) -> None:
        await asyncio.sleep(self._save_s)
        self.version = self._saved[folder]


class SimCheckpoints:
    """Checkpoints in memory; the folder is a name only."""

    async def save(self, version: Version, state: Mapping[str, Any], trainer: Trainer) -> str:
        folder = Path(f"step-{version}")
        await trainer.save(folder)
        return str(folder)


def sim_task(domain: str, index: int, *, max_turns: int, max_tokens: int) -> Task:
    """Task number `index` of a simulated domain."""
    return Task(f"{domain}/{index}", domain, {}, max_turns, max_tokens)


class SimTasks(TaskMix):
    """A task mix over simulated domains. `drawn`, `returned`: how often a task was handed out and came back."""

    def __init__(self, weights: Mapping[str, float], *, seed: int, max_turns: int, max_tokens: int) -> None:
        super().__init__({
            domain: Share(weight, partial(sim_task, domain, max_turns=max_turns, max_tokens=max_tokens))
            for domain, weight in weights.items()
        }, seed)
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

    def __init__(self, engines: Sequence[SimEngine], *, seed: int, faults: Faults) -> None:
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
