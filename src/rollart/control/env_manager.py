"""One environment, one trajectory, from open to close.

Keeps true: an environment that was opened is closed exactly once, on success, failure and cancellation; whatever goes
wrong across a port, or because the chat cannot say what this one trajectory holds, becomes a trajectory with outcome
FAILED and an error that names it, never an exception; the context only grows, by exact ids; every stage has a deadline,
and all stages together `episode_seconds` (pauses between openings and barriers do not count).
Waits for: the environment (open, first, step), the proxy (generate), the scorer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import ParamSpec, TypeVar

from rollart.control.llm_proxy import LLMProxy
from rollart.control.settings import RolloutSettings
from rollart.control.wave import Wave
from rollart.core.clock import draw, stream
from rollart.core.deadline import Deadline
from rollart.core.errors import ConfigError, EngineLost, EnvironmentFailed, PortError, ScorerFailed
from rollart.core.events import EnvironmentClosed, EnvironmentOpened, TurnEnded
from rollart.core.foreign import encodable
from rollart.core.ports import Environment, EnvironmentPool, Journal, Renderer, Scorer
from rollart.core.tokens import Counted, Tokens, ids, join
from rollart.core.types import (
    Action,
    Finish,
    GenerateRequest,
    Message,
    Observation,
    Outcome,
    Sampling,
    Score,
    Task,
    Trajectory,
    TrajectoryId,
    Turn,
    Version,
)

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Services:
    """What an episode needs around it. `wave` is there under the synchronous schedule only."""

    proxy: LLMProxy
    environments: EnvironmentPool
    renderer: Renderer
    scorer: Scorer
    journal: Journal
    settings: RolloutSettings
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0
    wave: Wave | None = None


def _said(say: Callable[P, T], *words: P.args, **named: P.kwargs) -> T:
    """What the chat makes of this trajectory. Raises ConfigError where it cannot say it."""
    try:
        return say(*words, **named)
    except ValueError as error:
        raise ConfigError(f"the chat cannot say what this trajectory holds: {error}") from error


class EnvManager:
    """Drives one episode. `on_turn` is called after each sampled turn, when `oldest` may have changed."""

    def __init__(self, id: TrajectoryId, task: Task, services: Services,
                 on_turn: Callable[[EnvManager], None] = lambda _: None) -> None:
        self.id, self.task, self._s, self._on_turn = id, task, services, on_turn
        self._now = asyncio.get_running_loop().time  # asked for four times a turn
        self.started = self._now()
        self.stage, self.since = "waiting", self.started
        self.turns: list[Turn] = []
        self.oldest: Version | None = None
        """Version of the oldest sampled token; None before the first."""
        self.seconds: dict[str, float] = {}
        self._spent = 0.0  # the sum of `seconds`
        self._deadline = Deadline()
        self._calls: list[float] = []
        self._prompt: Tokens = ids()
        self._start = Observation()
        self._note = ""

    def trajectory(self, outcome: Outcome, score: Score | None = None, error: str = "") -> Trajectory:
        """What there is so far, as data."""
        return Trajectory(self.id, self.task, self._prompt, self._start, tuple(self.turns), outcome, score, error,
                          {stage: round(seconds, 6) for stage, seconds in self.seconds.items()})

    async def run(self) -> Trajectory:
        """The whole episode. Raises nothing but CancelledError and InvariantViolated."""
        wave = self._s.wave
        try:
            outcome = await self._rollout(wave)
            if wave:
                await wave.all_left(f"{self.id} score")
            score = await self._within("score", self._s.settings.score_seconds, ScorerFailed,
                                       self._s.scorer.score(self.trajectory(outcome)))
            return self.trajectory(outcome, score, self._note)
        except (PortError, ConfigError) as failure:
            return self.trajectory(Outcome.FAILED, error=encodable(f"{type(failure).__name__}: {failure}"))
        finally:
            self.stage, self.since = "ended", self._now()
            self._deadline.close()
            self._s.proxy.forget(self.id)

    async def _rollout(self, wave: Wave | None) -> Outcome:
        if wave:
            wave.join()
        try:
            environment = await self._open()
            try:
                return await self._episode(environment, wave)
            finally:
                await self._close(environment)
        finally:
            if wave:
                wave.leave()

    async def _open(self) -> Environment:
        settings, attempt = self._s.settings, 0
        while True:
            attempt += 1
            try:
                environment = await self._within("open", settings.open_seconds, EnvironmentFailed,
                                                 self._s.environments.open(self.task))
            except EnvironmentFailed:
                if attempt >= settings.open_attempts:
                    raise
                jitter = stream(self._s.seed, "backoff", str(self.id), attempt).uniform(0.5, 1.5)
                await asyncio.sleep(settings.open_backoff_seconds * 2 ** (attempt - 1) * jitter)
            else:
                self._s.journal.emit(EnvironmentOpened(self.id, self.seconds["open"], attempt))
                return environment

    async def _episode(self, environment: Environment, wave: Wave | None) -> Outcome:
        s, settings = self._s, self._s.settings
        observation = self._start = await self._within("environment", settings.environment_seconds, EnvironmentFailed,
                                                       environment.first())
        context = self._prompt = _said(s.renderer.prompt, observation.messages)
        if not len(context):
            raise ConfigError(f"the chat makes no token of the first messages: {observation.messages!r:.120}")
        history = list(observation.messages)
        if wave:
            await wave.arrive(f"{self.id} before turn 0")
        for turn in range(self.task.max_turns):
            if settings.context_tokens and len(context) + self.task.max_tokens > settings.context_tokens:
                self._note = (f"the {'context' if turn else 'prompt'} left no room for an action in "
                              f"{settings.context_tokens} tokens")
                return Outcome.TRUNCATED
            request = GenerateRequest(self.id, turn, self.task.domain, context, self.task.max_tokens, s.sampling,
                                      s.renderer.stop, draw(s.seed, "sample", str(self.id), turn))
            completion = await self._within("generate", settings.generate_seconds, EngineLost,
                                            s.proxy.generate(request))
            text = _said(s.renderer.text, completion)
            nothing: Tokens = Counted(0) if isinstance(context, Counted) else ids()
            if self.turns and self.turns[-1].completion.routes and self.turns[-1].fork is None:
                # the newer ones cover the whole context
                self.turns[-1] = replace(self.turns[-1], completion=replace(self.turns[-1].completion, routes=b""))
            self.turns.append(Turn(completion, text, Observation(), nothing))
            oldest = completion.oldest
            self.oldest = oldest if self.oldest is None else min(self.oldest, oldest)
            s.journal.emit(TurnEnded(self.id, turn, completion.engine, len(completion.tokens), oldest,
                                     completion.newest))
            self._on_turn(self)
            if wave:
                await wave.arrive(f"{self.id} before the environment")
            observation = await self._within("environment", settings.environment_seconds, EnvironmentFailed,
                                             environment.step(Action(text, completion.finish is Finish.LENGTH)))
            self._calls.append(round(self._now() - self.since, 6))
            last = observation.done or turn + 1 == self.task.max_turns
            reply = nothing if last else _said(s.renderer.reply, completion, observation.messages)
            context = join(context, completion.tokens, reply)
            history += [Message("assistant", text), *observation.messages]
            fork = None if last else _said(s.renderer.fork, history, context)
            self.turns[-1] = Turn(completion, text, observation, reply if fork is None else nothing, fork)
            if observation.done:
                return Outcome.TRUNCATED if observation.truncated else Outcome.FINISHED
            context = context if fork is None else fork
            if wave:
                await wave.arrive(f"{self.id} before turn {turn + 1}")
        return Outcome.TRUNCATED

    async def _close(self, environment: Environment) -> None:
        """Runs to its end even if this task is cancelled (again) while it waits."""

        async def close() -> None:
            try:
                async with asyncio.timeout(self._s.settings.close_seconds):
                    await environment.close()
            except TimeoutError:
                pass  # the pool reaps it; nobody waits for it here
            self._s.journal.emit(EnvironmentClosed(self.id, tuple(self._calls)))

        self.stage, self.since = "close", self._now()
        closing = asyncio.create_task(close(), name=f"close {self.id}")
        cancelled: asyncio.CancelledError | None = None
        while not closing.done():
            try:
                await asyncio.shield(closing)
            except asyncio.CancelledError as again:
                cancelled = again
        if cancelled:
            raise cancelled

    async def _within(self, stage: str, limit: float, failure: type[PortError], work: Awaitable[T]) -> T:
        """`work` under the stage's deadline and what is left of the episode's; its time is added to the stage."""
        left = self._s.settings.episode_seconds - self._spent
        self.stage, self.since = stage, self._now()
        try:
            with self._deadline.within(min(limit, left)):
                return await work
        except TimeoutError:
            what = f"{stage} gave no answer within {limit:g} s" if limit <= left else (
                f"the {self._s.settings.episode_seconds:g} s of rollout.episode_seconds were used up in {stage}")
            raise failure(f"{self.id} ({self.task.id}) after {len(self.turns)} sampled turns: {what}; "
                          f"the trajectory is {self._now() - self.started:.3g} s old") from None
        finally:
            took = self._now() - self.since
            self._spent += took
            self.seconds[stage] = self.seconds.get(stage, 0.0) + took
