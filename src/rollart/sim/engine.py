"""A simulated inference replica: costs instead of work, and the same promises as `core.ports.Engine`.

Prefill is first come, first served; decode steps are shared by all running sequences, with one event per turn and not
per token. Keeps true: every sampled token has the version that was loaded when it was sampled; no request reads KV of
other weights than those it decodes with (I5: raised here, because only the engine sees its cache); weights are swapped
only while it stands still or has nothing in flight.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

from rollart.core.clock import now, stream
from rollart.core.errors import EngineLost
from rollart.core.tokens import Counted
from rollart.core.types import Completion, Finish, GenerateRequest, Manifest, TrajectoryId, Version


@dataclass(frozen=True, kw_only=True)
class EngineCost:
    """Speed of one engine.

    prefill_tokens_per_s: tokens of prompt per second.
    decode_base_s: seconds of one decode step with an empty batch.
    decode_slope_s: seconds that each running sequence adds to a step.
    load_s: seconds to read one version's weights.
    turn_tokens: median of the sampled tokens of one turn (log-normal, sigma 0.8).
    """

    prefill_tokens_per_s: float = 20_000.0
    decode_base_s: float = 0.012
    decode_slope_s: float = 0.0002
    load_s: float = 8.0
    turn_tokens: float = 120.0


@dataclass(slots=True)
class _Turn:
    """One request in flight. `start`: the engine's decode step at which it began, None while it waits or prefills."""

    request: GenerateRequest
    waiter: asyncio.Future[Completion]
    length: int
    start: float | None = None
    segments: list[tuple[Version, int]] = field(default_factory=list)
    prefill: asyncio.TimerHandle | None = None


class SimEngine:
    """Starts up, with no weights. `crash` and `restart` are the cluster's; `violated(name, what)` hears of breaches."""

    def __init__(self, id: str, pool: str, *, seed: int, cost: EngineCost,
                 violated: Callable[[str, str], None]) -> None:
        self.id, self.pool, self.cost, self._violated = id, pool, cost, violated
        self.version: Version | None = None
        self.up = True
        self.kv: dict[TrajectoryId, tuple[int, Version]] = {}
        """Per trajectory: how many tokens of context are cached, and by which weights."""
        self._seed, self._chance = seed, stream(seed, "engine", id)
        self._turns: dict[int, _Turn] = {}
        self._numbers = itertools.count()
        self._ends: list[tuple[float, int]] = []  # heap of (decode step at which it ends, number)
        self._decoding = 0
        self._steps, self._stamp = 0.0, 0.0  # decode steps done so far, and when that was true
        self._prefill_free = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._paused = self._swapped = False
        self._died: asyncio.Event = asyncio.Event()

    @property
    def in_flight(self) -> int:
        """Requests that wait, prefill or decode."""
        return len(self._turns)

    # -- the port ------------------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> Completion:
        self._alive()
        if self.version is None:
            self._violated("I5", f"{self.id} was asked for a turn of {request.trajectory} before any weights")
        if request.max_tokens < 1:
            self._violated("I1", f"{request.trajectory} asks {self.id} for {request.max_tokens} tokens")
        chance = stream(self._seed, "turn", str(request.trajectory), request.turn, len(request.context))
        length = max(1, min(request.max_tokens, int(self.cost.turn_tokens * chance.lognormvariate(0.0, 0.8))))
        turn = _Turn(request, asyncio.get_running_loop().create_future(), length)
        number = next(self._numbers)
        self._turns[number] = turn
        if not self._paused:
            self._begin_prefill(number)
        try:
            return await turn.waiter
        finally:
            self._forget(number)

    async def suspend(self) -> None:
        self._alive()
        self._advance()
        self._paused = True
        self._arm()
        for turn in self._turns.values():
            if turn.prefill is not None:
                turn.prefill.cancel()
                turn.prefill = None
        await self._sleep(self.cost.decode_base_s)

    async def load_weights(self, manifest: Manifest) -> None:
        self._alive()
        if self._turns and not self._paused:
            self._violated("I5", f"{self.id} got version {manifest.version} in the middle of a decode step")
        await self._sleep(self.cost.load_s * self._chance.uniform(0.9, 1.5))
        self.version, self._swapped = manifest.version, True
        self._drop_kv()
        for turn in self._turns.values():
            if turn.start is not None:
                turn.segments = [s for s in turn.segments if s[1] < self._sampled(turn)]
                turn.segments.append((manifest.version, self._sampled(turn)))

    async def resume(self) -> None:
        self._alive()
        if self._swapped:
            stale = sum(len(t.request.context) + self._sampled(t) for t in self._turns.values() if t.start is not None)
            await self._sleep(stale / self.cost.prefill_tokens_per_s)
        self._swapped = self._paused = False
        self._stamp = now()
        self._prefill_free = max(self._prefill_free, now())
        for number, turn in list(self._turns.items()):
            if turn.start is None and turn.prefill is None:
                self._begin_prefill(number)
        self._arm()

    def release(self, trajectory: TrajectoryId) -> None:
        self.kv.pop(trajectory, None)

    # -- the cluster's side --------------------------------------------------------------------------------------

    def crash(self, reason: str) -> None:
        """Lose the weights, the KV and every request, which fails with what it had sampled."""
        self._advance()
        self.up, self.version = False, None
        self._died.set()
        self.kv.clear()
        for turn in self._turns.values():
            if turn.prefill is not None:
                turn.prefill.cancel()
            if not turn.waiter.done():
                sampled = self._sampled(turn)
                partial = self._completion(turn, sampled, Finish.LENGTH) if sampled else None
                turn.waiter.set_exception(EngineLost(f"{self.id}: {reason}", partial))
        self._turns.clear()
        self._ends.clear()
        self._decoding = 0
        self._arm()

    def restart(self) -> None:
        """Up again, with nothing loaded and nothing in flight."""
        self.up, self._paused, self._swapped, self._prefill_free = True, False, False, now()
        self._died = asyncio.Event()

    # -- inside --------------------------------------------------------------------------------------------------

    def _alive(self) -> None:
        if not self.up:
            raise EngineLost(f"{self.id} is down")

    async def _sleep(self, seconds: float) -> None:
        """Work of `seconds`, cut short by a crash."""
        died = self._died
        try:
            async with asyncio.timeout(seconds):
                await died.wait()
        except TimeoutError:
            if not died.is_set():
                return
        raise EngineLost(f"{self.id} went down")

    def _drop_kv(self) -> None:
        self.kv.clear()

    def _begin_prefill(self, number: int) -> None:
        turn = self._turns[number]
        context, trajectory = len(turn.request.context), turn.request.trajectory
        cached, version = self.kv.get(trajectory, (0, self.version))
        if version != self.version:
            self._violated("I5", f"{trajectory} reads KV of version {version} on {self.id}, which serves version "
                           f"{self.version}")
        self._prefill_free = (max(self._prefill_free, now())
                              + max(1, context - cached) / self.cost.prefill_tokens_per_s)
        turn.prefill = asyncio.get_running_loop().call_at(self._prefill_free, self._prefilled, number)

    def _prefilled(self, number: int) -> None:
        turn = self._turns[number]
        assert self.version is not None, "a crash cancels every prefill"
        self._advance()
        turn.prefill, turn.start, turn.segments = None, self._steps, [(self.version, 0)]
        self._decoding += 1
        heapq.heappush(self._ends, (self._steps + turn.length, number))
        self._arm()

    def _advance(self) -> None:
        """Account for the decode steps since the last change."""
        if self._decoding and not self._paused:
            step_s = self.cost.decode_base_s + self.cost.decode_slope_s * self._decoding
            self._steps += (now() - self._stamp) / step_s
        self._stamp = now()

    def _arm(self) -> None:
        """Set the one timer to the next turn that ends."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._ends and self._ends[0][1] not in self._turns:
            heapq.heappop(self._ends)
        if self._ends and not self._paused:
            step_s = self.cost.decode_base_s + self.cost.decode_slope_s * self._decoding
            wait = max(0.0, self._ends[0][0] - self._steps) * step_s
            self._timer = asyncio.get_running_loop().call_later(wait, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._advance()
        while self._ends and self._ends[0][0] <= self._steps + 1e-6:
            turn = self._turns.get(heapq.heappop(self._ends)[1])
            if turn is not None and not turn.waiter.done():
                finish = Finish.LENGTH if turn.length == turn.request.max_tokens else Finish.STOP
                turn.waiter.set_result(self._completion(turn, turn.length, finish))
                self.kv[turn.request.trajectory] = (len(turn.request.context) + turn.length, turn.segments[-1][0])
        self._arm()

    def _sampled(self, turn: _Turn) -> int:
        if turn.start is None:
            return 0
        return min(turn.length, int(self._steps - turn.start + 1e-6))

    def _completion(self, turn: _Turn, tokens: int, finish: Finish) -> Completion:
        segments = tuple(s for s in turn.segments if s[1] < tokens)
        return Completion(Counted(tokens), array("f"), segments, finish, self.id)

    def _forget(self, number: int) -> None:
        """The caller has its answer, or gave up: free what the turn held, except its KV."""
        turn = self._turns.pop(number, None)
        if turn is None:  # a crash emptied the engine
            return
        if turn.prefill is not None:
            turn.prefill.cancel()
        if turn.start is not None:
            self._advance()
            self._decoding -= 1
            self._arm()
