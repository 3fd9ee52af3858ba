"""Fakes of the ports for the control plane's tests, on real tokens and virtual time, and the wiring around them.

A part fails or hangs where its `trouble` says so: a function that returns "", "fail" or "hang".
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rollart.algo.samples import unusable
from rollart.algo.settings import AlgoSettings
from rollart.control.env_manager import Services
from rollart.control.evaluation import Evaluator
from rollart.control.llm_proxy import LLMProxy
from rollart.control.pipeline import Pipeline, PipelineSettings
from rollart.control.rollout_scheduler import RolloutScheduler
from rollart.control.sample_buffer import SampleBuffer
from rollart.control.settings import RolloutSettings, ScheduleSettings
from rollart.control.supervisor import Supervisor
from rollart.control.task_mix import Share, TaskMix
from rollart.control.wave import Wave
from rollart.control.weight_sync import WeightSync
from rollart.core.changed import Changed
from rollart.core.clock import now
from rollart.core.errors import EngineLost, EnvironmentFailed, NoCapacity, ScorerFailed
from rollart.core.events import BatchTaken, Event, GroupReady, Settled, TrajectoryEnded, TrajectoryStarted
from rollart.core.tokens import floats, ids
from rollart.core.types import (
    Action,
    Completion,
    Fate,
    Finish,
    GenerateRequest,
    Manifest,
    Message,
    Observation,
    Outcome,
    Restored,
    Score,
    StepReport,
    Task,
    TrainBatch,
    Trajectory,
    TrajectoryId,
    Turn,
    Version,
)

FOREVER = 1e9  # seconds
STOP = 0


async def hang() -> None:
    await asyncio.get_running_loop().create_future()


async def trouble(kind: str, error: Exception) -> None:
    if kind == "hang":
        await hang()
    if kind == "fail":
        raise error


def leaves(error: BaseException) -> list[BaseException]:
    """The errors inside nested exception groups."""
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in leaves(inner)]
    return [error]


class Log:
    """A journal that keeps (time, event); `on` is called with each event."""

    def __init__(self, on: Callable[[Event], None] = lambda _: None) -> None:
        self.rows: list[tuple[float, Event]] = []
        self.on = on

    def emit(self, event: Event) -> None:
        self.rows.append((now(), event))
        self.on(event)

    def of(self, *kinds: type) -> list[Any]:
        return [event for _, event in self.rows if isinstance(event, kinds)]

    def times(self, *kinds: type) -> list[float]:
        return [at for at, event in self.rows if isinstance(event, kinds)]


class Books:
    """What the events say is in flight, to be compared with the scheduler's own count after each event.

    Make it right before `restored` is handed over.
    """

    def __init__(self, rig: Rig, restored: Restored | None = None) -> None:
        self.rig, self.checks = rig, 0
        self.dispatched = 0
        self.waiting = {member.id: None for group in (restored.groups if restored else ()) for member in group.finished}
        self.ready: dict[int, list[TrajectoryId]] = {}
        rig.log.on = self.on

    def on(self, event: Event) -> None:
        match event:
            case TrajectoryStarted(id=id):
                self.dispatched += 1
                self.waiting[id] = None
            case TrajectoryEnded(trajectory=ended, fate=fate) if fate is not Fate.IN_FLIGHT:
                del self.waiting[ended.id]
            case Settled(ids=settled):
                for id in settled:
                    self.waiting.pop(id, None)
            case GroupReady(group=group):
                self.ready[group.id] = [member.id for member in group.members]
            case BatchTaken(groups=groups):  # in training; spares of these groups may still close
                for id in [id for group in groups for id in self.ready[group]]:
                    del self.waiting[id]
        asyncio.get_running_loop().call_soon(self.check)

    def check(self) -> None:
        self.checks += 1
        assert (self.rig.rollout.dispatched, self.rig.rollout.unsettled) == (self.dispatched, len(self.waiting))


class FakeEngine:
    """Samples `tokens` ids a turn, one every `token_s` seconds, the last of them the stop token."""

    def __init__(self, id: str = "e0", pool: str = "pool", *, tokens: int = 3, token_s: float = 1.0,
                 load_s: float = 2.0, finish: Finish = Finish.STOP) -> None:
        self.id, self.pool, self.tokens, self.token_s, self.load_s, self.finish = (id, pool, tokens, token_s, load_s,
                                                                                  finish)
        self.version: Version | None = None
        self.up, self.paused, self.load_trouble = True, False, ""
        self.requests: list[GenerateRequest] = []
        self.loads: list[Version] = []
        self.released: list[TrajectoryId] = []
        self.running = 0

    async def generate(self, request: GenerateRequest) -> Completion:
        self.requests.append(request)
        self._alive()
        assert self.version is not None, f"{self.id} was asked before it had weights"
        assert request.max_tokens > 0, f"{self.id} was asked for {request.max_tokens} tokens"
        tokens, segments = ids(), []
        wanted = min(self.tokens, request.max_tokens)
        self.running += 1
        try:
            while len(tokens) < wanted:
                await asyncio.sleep(self.token_s)
                while self.paused and self.up:
                    await asyncio.sleep(0.1)
                if not self.up:
                    partial = self._made(tokens, segments, Finish.LENGTH) if len(tokens) else None
                    raise EngineLost(f"{self.id} died", partial)
                if not segments or segments[-1][0] != self.version:
                    segments.append((self.version, len(tokens)))
                tokens.append(100 + len(request.context) + len(tokens))
        finally:
            self.running -= 1
        if self.finish is Finish.STOP:
            tokens[-1] = STOP
        return self._made(tokens, segments, self.finish)

    def _made(self, tokens: Any, segments: list[tuple[Version, int]], finish: Finish) -> Completion:
        return Completion(tokens, floats(-token / 1024 for token in tokens), tuple(segments), finish, self.id)

    def _alive(self) -> None:
        if not self.up:
            raise EngineLost(f"{self.id} is down")

    async def suspend(self) -> None:
        self._alive()
        self.paused = True

    async def load_weights(self, manifest: Manifest) -> None:
        self._alive()
        await trouble(self.load_trouble, EngineLost(f"{self.id}: bad weights"))
        await asyncio.sleep(self.load_s)
        self._alive()
        self.version = manifest.version
        self.loads.append(manifest.version)

    async def resume(self) -> None:
        self._alive()
        self.paused = False

    def release(self, trajectory: TrajectoryId) -> None:
        self.released.append(trajectory)

    def crash(self) -> None:
        self.up, self.version = False, None


class FakeEnvironment:
    def __init__(self, number: int, task: Task, pool: FakePool) -> None:
        self.number, self.task, self.pool, self.steps = number, task, pool, 0
        self.actions: list[Action] = []

    async def first(self) -> Observation:
        await self.pool.work("first", self.number, self.pool.first_s)
        return Observation((Message("user", "begin"),))

    async def step(self, action: Action) -> Observation:
        self.actions.append(action)
        await self.pool.work("step", self.number, self.pool.step_s)
        self.steps += 1
        return Observation((Message("user", f"seen {self.steps}"),), done=self.steps >= self.pool.turns)

    async def close(self) -> None:
        self.pool.closed[self.number] += 1
        await self.pool.work("close", self.number, self.pool.close_s)


class FakePool:
    """`made`: environments that were opened; `closed`: how often each was closed. `trouble(stage, number)`."""

    def __init__(self, *, turns: int = 2, open_s: float = 1.0, first_s: float = 1.0, step_s: float = 1.0,
                 close_s: float = 1.0, trouble: Callable[[str, int], str] = lambda stage, number: "") -> None:
        self.turns, self.open_s, self.first_s, self.step_s, self.close_s = turns, open_s, first_s, step_s, close_s
        self.trouble = trouble
        self.calls = 0
        self.made: dict[int, FakeEnvironment] = {}
        self.closed: Counter[int] = Counter()

    async def work(self, stage: str, number: int, seconds: float) -> None:
        await trouble(self.trouble(stage, number), EnvironmentFailed(f"environment {number} broke in {stage}"))
        await asyncio.sleep(seconds)

    async def open(self, task: Task) -> FakeEnvironment:
        number, self.calls = self.calls, self.calls + 1
        await self.work("open", number, self.open_s)
        self.made[number] = FakeEnvironment(number, task, self)
        return self.made[number]

    def check_closed(self) -> None:
        """Every environment that was opened was closed exactly once."""
        assert self.closed == Counter(dict.fromkeys(self.made, 1))


class FakeScorer:
    """Every `trajectory.id.member` is worth its parity. `trouble(trajectory)`."""

    def __init__(self, *, seconds: float = 1.0, trouble: Callable[[Trajectory], str] = lambda _: "") -> None:
        self.seconds, self.trouble = seconds, trouble
        self.scored: list[TrajectoryId] = []

    async def score(self, trajectory: Trajectory) -> Score:
        await trouble(self.trouble(trajectory), ScorerFailed(f"{trajectory.id}: answered 503"))
        await asyncio.sleep(self.seconds)
        self.scored.append(trajectory.id)
        return Score(float(trajectory.id.member % 2), success=bool(trajectory.id.member % 2))


class FakeRenderer:
    """`text` forgets the ids, so nobody could encode them again."""

    stop = (STOP,)

    def prompt(self, messages: Sequence[Message]) -> Any:
        return ids([1, 2, 3])

    def reply(self, completion: Completion, messages: Sequence[Message]) -> Any:
        return ids([7, 8, *([9] if completion.finish is Finish.LENGTH else [])])

    def fork(self, history: Sequence[Message], context: Any) -> None:
        return None

    def text(self, completion: Completion) -> str:
        return "an action"


class FakeTrainer:
    """`hangs`: the verb that never answers. `batches`: what it was given."""

    def __init__(self, *, version: Version = 0, step_s: float = 5.0, publish_s: float = 3.0, hangs: str = "") -> None:
        self.version, self.step_s, self.publish_s, self.hangs = version, step_s, publish_s, hangs
        self.batches: list[TrainBatch] = []
        self.published: list[Version] = []
        self.retired: list[Version] = []
        self.saved: list[Version] = []

    async def _work(self, verb: str, seconds: float) -> None:
        if verb == self.hangs and self.version:
            await hang()
        await asyncio.sleep(seconds)

    async def step(self, batch: TrainBatch) -> StepReport:
        assert batch.version == self.version
        self.batches.append(batch)
        if self.hangs == "step":
            await hang()
        await asyncio.sleep(self.step_s)
        self.version += 1
        return StepReport(self.version, self.step_s, sum(len(sample.ids) for sample in batch.samples))

    async def publish(self, version: Version) -> Manifest:
        await self._work("publish", self.publish_s)
        self.published.append(version)
        return Manifest(version, f"fake://{version}")

    async def retire(self, manifest: Manifest) -> None:
        await self._work("retire", 0.5)
        self.retired.append(manifest.version)

    async def save(self, folder: Path) -> None:
        version = self.version
        await self._work("save", 1.0)
        self.saved.append(version)

    async def load(self, folder: Path) -> None:
        raise NotImplementedError


class FakeCheckpoints:
    async def save(self, version: Version, state: Mapping[str, Any], trainer: FakeTrainer) -> str:
        await trainer.save(Path(str(version)))
        return str(version)


class FakeCluster:
    """`no_room`: how many restarts are refused first."""

    def __init__(self, engines: Sequence[FakeEngine], *, restart_s: float = 10.0, no_room: int = 0) -> None:
        self.engines = {engine.id: engine for engine in engines}
        self.restart_s, self.no_room = restart_s, no_room
        self.lost: asyncio.Queue[str] = asyncio.Queue(maxsize=100)
        self.restarts: list[tuple[float, str]] = []

    def crash(self, engine: str) -> None:
        self.engines[engine].crash()
        self.lost.put_nowait(engine)

    async def wait_lost(self) -> str:
        return await self.lost.get()

    async def restart(self, engine: str) -> None:
        self.restarts.append((now(), engine))
        await asyncio.sleep(self.restart_s)
        if len(self.restarts) <= self.no_room:
            raise NoCapacity(f"no room for {engine}")
        self.engines[engine].up, self.engines[engine].paused = True, False


def task(number: int = 0, domain: str = "game", *, max_turns: int = 8, max_tokens: int = 16) -> Task:
    return Task(f"{domain}/{number}", domain, {}, max_turns, max_tokens)


def mix(seed: int = 0, **weights: float) -> TaskMix:
    weights = weights or {"game": 1.0}

    def share(name: str) -> Share:
        return Share(weights[name], lambda number: task(number, name))

    return TaskMix({name: share(name) for name in weights}, seed)


def trajectory(group: int, member: int, oldest: Version | None = 0, newest: Version | None = None,
               number: int | None = None) -> Trajectory:
    """A good one, with one sampled token of version `oldest` and one of `newest`."""
    turns: tuple[Turn, ...] = ()
    if oldest is not None:
        newest = oldest if newest is None else newest
        segments = ((oldest, 0),) if newest == oldest else ((oldest, 0), (newest, 1))
        made = Completion(ids([5, STOP]), floats([-1.0, -1.0]), segments, Finish.STOP, "e0")
        turns = (Turn(made, "an action", Observation(done=True), ids()),)
    return Trajectory(TrajectoryId(group, member), task(group if number is None else number), ids([1, 2, 3]),
                      Observation(), turns, Outcome.FINISHED, Score(float(member % 2)))


class Rig:
    """The control plane around fakes. Make it inside the loop."""

    def __init__(self, *, schedule: ScheduleSettings | None = None, rollout: RolloutSettings | None = None,
                 pipeline: PipelineSettings | None = None, pool: Any = None, scorer: Any = None, renderer: Any = None,
                 engines: Sequence[Any] | None = None, trainer: Any = None, tasks: Any = None, cluster: Any = None,
                 affinity: Mapping[str, str] | None = None, version: Version = 0, checkpoints: Any = None,
                 eval_tasks: Sequence[Task] = (), eval_engines: Sequence[Any] = (), eval_pool: Any = None,
                 eval_cluster: Any = None, log: Log | None = None, seed: int = 0,
                 algo: AlgoSettings | None = None) -> None:
        schedule = schedule or ScheduleSettings()
        self.settings = rollout or RolloutSettings(batch_groups=2, group_size=2)
        self.changed, self.log = Changed(), log or Log()
        self.pool, self.scorer = pool or FakePool(), scorer or FakeScorer()
        self.engines = list(engines) if engines else [FakeEngine()]
        self.trainer, self.tasks = trainer or FakeTrainer(version=version), tasks or mix()
        self.cluster = cluster or FakeCluster(self.engines)
        self.buffer = SampleBuffer(batch_groups=self.settings.batch_groups, alpha=schedule.bound,
                                   schedule=schedule.schedule, stale=schedule.stale,
                                   spare_groups=self.settings.spare_groups, version=version)
        self.proxy = LLMProxy(self.engines, affinity or {}, journal=self.log, changed=self.changed)
        self.sync = WeightSync(self.trainer, self.proxy, self.log)
        wave = Wave(self.changed, self.settings.stall_seconds) if schedule.schedule.turn_barrier else None
        renderer = renderer or FakeRenderer()
        self.services = Services(proxy=self.proxy, environments=self.pool, renderer=renderer,
                                 scorer=self.scorer, journal=self.log, settings=self.settings, seed=seed, wave=wave)
        self.rollout = RolloutScheduler(self.services, self.buffer, self.tasks, self.changed,
                                        partial(unusable, settings=algo or AlgoSettings()))
        self.supervisor = Supervisor(self.cluster, self.proxy, self.sync, self.changed)
        self.evaluator = None
        if eval_tasks:
            proxy = LLMProxy(list(eval_engines), {}, journal=self.log, changed=self.changed)
            self.evaluator = Evaluator(
                Services(proxy=proxy, environments=eval_pool or FakePool(), renderer=renderer, scorer=self.scorer,
                         journal=self.log, settings=self.settings, seed=seed), eval_tasks, cluster=eval_cluster)
        self.pipeline = Pipeline(pipeline or PipelineSettings(steps=3, checkpoint_every=0), algo=algo or AlgoSettings(),
                                 buffer=self.buffer, changed=self.changed, rollout=self.rollout, sync=self.sync,
                                 supervisor=self.supervisor, trainer=self.trainer, tasks=self.tasks, journal=self.log,
                                 checkpoints=checkpoints, evaluator=self.evaluator)

    async def serve(self) -> None:
        """Bring the engines up on the trainer's version, as a run does first."""
        await self.sync.sync(self.trainer.version, self.pipeline._at_once)

    async def run(self, restored: Restored | None = None) -> list[BaseException]:
        """The whole run; returns the errors that ended it."""
        try:
            await self.pipeline.run(restored)
        except BaseExceptionGroup as group:
            return leaves(group)
        return []
