"""A simulated inference replica: costs instead of work, and the same promises as `core.ports.Engine`.

Each step decodes one token of every running sequence and prefills a chunk at the seconds of `StepCost`; one event per
turn and not per token. KV is a budget: what ended turns left is evicted, least recently used first, then new turns wait
(older groups first), and a sequence that no longer fits is preempted and computed again.

Keeps true: every sampled token has the version that was loaded when it was sampled; no request reads KV of other
weights than those it decodes with (I5: raised here, because only the engine sees its cache); weights are swapped only
while it stands still or has nothing in flight.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from array import array
from bisect import insort, insort_left
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from rollart.core.clock import stream
from rollart.core.errors import EngineLost
from rollart.core.tokens import Counted
from rollart.core.types import Completion, Finish, GenerateRequest, Manifest, TrajectoryId, Version
from rollart.sim.costs import StepCost

Says = Callable[[TrajectoryId, str, int], int]
"""Sampled tokens of (trajectory, domain, turn)."""
PROMPTS = 4096
"""Group prompts whose KV an engine remembers to share between members."""


@dataclass(slots=True)
class _Turn:
    """One request in flight. `prefilled_at`: the engine's prefill work after which it decodes; `start`: the decode
    step at which it began (None: it waits or prefills); `done`: tokens sampled before that, `held`: tokens of KV that
    it holds besides those sampled since `start`."""

    request: GenerateRequest
    waiter: asyncio.Future[Completion]
    length: int
    prefilled_at: float | None = None
    start: float | None = None
    done: int = 0
    held: int = 0
    segments: list[tuple[Version, int]] = field(default_factory=list)


class SimEngine:
    """Starts up, with no weights. `crash` and `restart` are the cluster's; `violated(name, what)` hears of breaches."""

    def __init__(self, id: str, pool: str, *, seed: int, cost: StepCost, says: Says,
                 violated: Callable[[str, str], None]) -> None:
        self.id, self.pool, self.cost, self._says, self._violated = id, pool, cost, says, violated
        self._loop = asyncio.get_running_loop()
        self.version: Version | None = None
        self.up = True
        self.kv: dict[TrajectoryId, tuple[int, Version]] = {}
        """Of trajectories between turns, least recently used first: tokens of context cached, and by which weights."""
        self.busy, self.preempted, self.prefill_tokens = 0.0, 0, 0
        """Seconds in which it computed; turns that lost their KV to others; tokens prefilled."""
        self._chance = stream(seed, "engine", id)
        self._prompts: dict[tuple[str, int], int] = {}
        self._turns: dict[int, _Turn] = {}
        self._numbers = itertools.count()
        self._waiting: list[int] = []  # older groups first: they are the next to be too stale
        self._prefills: deque[int] = deque()
        self._ends: list[tuple[float, int]] = []  # heap of (decode step at which it ends, number)
        self._cached = 0  # tokens of `kv`
        self._held = 0  # tokens that prefilling and decoding turns hold, besides those sampled since their start
        self._decoding, self._starts = 0, 0.0  # decoding turns, and the sum of their `start`
        self._steps = self._work = self._queued = 0.0  # decode steps, prefill work done, and work ever queued
        self._stamp, self._step_s, self._chunk = 0.0, 0.0, 0.0  # since when, at what pace
        self._timer: asyncio.TimerHandle | None = None
        self._paused = self._swapped = False
        self._died: asyncio.Event = asyncio.Event()

    @property
    def in_flight(self) -> int:
        """Requests that wait, prefill or decode."""
        return len(self._turns)

    # -- the port ------------------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> Completion:
        length = self._says(request.trajectory, request.domain, request.turn)
        return await self.run(request, max(1, min(request.max_tokens, length)))

    async def run(self, request: GenerateRequest, length: int, *, prefilled: bool = False) -> Completion:
        """Sample `length` tokens. `prefilled`: the context's KV came from another engine."""
        self._alive()
        if self.version is None:
            self._violated("I5", f"{self.id} was asked for a turn of {request.trajectory} before any weights")
        if request.max_tokens < 1:
            self._violated("I1", f"{request.trajectory} asks {self.id} for {request.max_tokens} tokens")
        number = next(self._numbers)
        turn = self._turns[number] = _Turn(request, self._loop.create_future(), length)
        if prefilled:
            self.kv[request.trajectory] = (len(request.context), self.version or 0)
            self._cached += len(request.context)
        insort(self._waiting, number, key=self._group)
        if not self._paused:
            self._advance()
            self._admit()
            self._arm()
        try:
            return await turn.waiter
        finally:
            self._forget(number)

    async def suspend(self) -> None:
        self._alive()
        self._advance()
        self._paused = True
        self._arm()
        await self._sleep(self.cost.overhead_s)

    async def load_weights(self, manifest: Manifest) -> None:
        self._alive()
        if self._turns and not self._paused:
            self._violated("I5", f"{self.id} got version {manifest.version} in the middle of a decode step")
        await self._sleep(self.cost.load_s * self._chance.uniform(0.9, 1.1))
        self.version, self._swapped = manifest.version, True
        self._drop_kv()
        for turn in self._turns.values():
            if turn.segments:
                sampled = self._sampled(turn)
                turn.segments = [s for s in turn.segments if s[1] < sampled] + [(manifest.version, sampled)]

    async def resume(self) -> None:
        """What was in flight is computed again before it decodes on."""
        self._alive()
        self._paused = False
        self._stamp = self._loop.time()
        if self._swapped:
            self._swapped = False
            for number in [*(n for n, turn in self._turns.items() if turn.held)]:
                self._unstart(number)
                self._queue_prefill(number, 0)
        self._admit()
        self._arm()

    def release(self, trajectory: TrajectoryId) -> None:
        self._cached -= self.kv.pop(trajectory, (0, 0))[0]

    # -- the cluster's side --------------------------------------------------------------------------------------

    def crash(self, reason: str) -> None:
        """Lose the weights, the KV and every request, which fails with what it had sampled."""
        self._advance()
        self.up, self.version = False, None
        self._died.set()
        for turn in self._turns.values():
            if not turn.waiter.done():
                sampled = self._sampled(turn)
                partial = self._completion(turn, sampled, Finish.LENGTH) if sampled else None
                turn.waiter.set_exception(EngineLost(f"{self.id}: {reason}", partial))
        for container in (self._turns, self._waiting, self._prefills, self._ends, self.kv, self._prompts):
            container.clear()
        self._cached, self._decoding, self._starts, self._held, self._queued = 0, 0, 0.0, 0, self._work
        self._arm()

    def restart(self) -> None:
        """Up again, with nothing loaded and nothing in flight."""
        self.up, self._paused, self._swapped = True, False, False
        self._died = asyncio.Event()

    # -- inside --------------------------------------------------------------------------------------------------

    def _group(self, number: int) -> int:
        return self._turns[number].request.trajectory.group

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
        self._prompts.clear()
        self._cached = 0

    @property
    def _used(self) -> float:
        """Tokens of KV in use: by turns in flight, and kept for later ones."""
        return self._cached + self._held + self._decoding * self._steps - self._starts

    def _fit(self, tokens: float) -> bool:
        """Evict what is between turns until `tokens` more fit."""
        while self._used + tokens > self.cost.capacity and self.kv:
            self.release(next(iter(self.kv)))
        return self._used + tokens <= self.cost.capacity

    def _admit(self) -> None:
        """Start the prefill of waiting turns, in order, as long as their context fits."""
        while self._waiting and len(self._prefills) + self._decoding < self.cost.concurrent:
            number = self._waiting[0]
            turn = self._turns[number]
            request = turn.request
            cached, version = self.kv.pop(request.trajectory, (0, self.version))
            self._cached -= cached
            if version != self.version:
                self._violated("I5", f"{request.trajectory} reads KV of version {version} on {self.id}, which serves "
                               f"version {self.version}")
            context = len(request.context) + turn.done
            if not self._fit(context + 1) and (self._prefills or self._decoding):
                return  # its own KV is gone too: it made room
            del self._waiting[0]
            if request.turn == 0 and not cached and self.cost.share_prompts:
                cached = self._prompts.get((request.trajectory.kind, request.trajectory.group), 0)
            self._queue_prefill(number, min(cached, context - 1))

    def _queue_prefill(self, number: int, cached: int) -> None:
        turn = self._turns[number]
        context = len(turn.request.context) + turn.done
        self._held += context - turn.held
        turn.held = context
        self.prefill_tokens += context - cached
        self._queued += self.cost.work(context - cached, cached)
        turn.prefilled_at = self._queued
        self._prefills.append(number)

    def _unstart(self, number: int) -> None:
        """Back to before its prefill, with what it has sampled kept."""
        turn = self._turns[number]
        if turn.start is not None:
            turn.done = self._sampled(turn)
            self._decoding -= 1
            self._starts -= turn.start
            turn.start = None
        elif turn.prefilled_at is not None:
            self._prefills.remove(number)
            if not self._prefills:
                self._queued = self._work
        turn.prefilled_at = None

    def _begin_decode(self, number: int) -> None:
        turn = self._turns[number]
        assert self.version is not None, "a crash clears every prefill"
        turn.prefilled_at, turn.start = None, self._steps
        if not turn.segments:
            turn.segments = [(self.version, 0)]
        self._decoding += 1
        self._starts += self._steps
        heapq.heappush(self._ends, (self._steps + turn.length - turn.done, number))
        if turn.request.turn == 0:
            if len(self._prompts) >= PROMPTS:
                del self._prompts[next(iter(self._prompts))]
            self._prompts[turn.request.trajectory.kind, turn.request.trajectory.group] = len(turn.request.context)

    def _advance(self) -> None:
        """Account for the steps since the last change."""
        if self._timer is not None:
            passed = self._loop.time() - self._stamp
            self.busy += passed
            steps = passed / self._step_s
            self._work += steps * self._chunk
            if self._decoding:
                self._steps += steps
        self._stamp = self._loop.time()

    def _arm(self) -> None:
        """Set the pace, and the one timer to the next turn that changes its state."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        ends, turns = self._ends, self._turns
        while ends and not self._ends_so(*ends[0]):
            heapq.heappop(ends)
        if self._paused or not (self._prefills or self._decoding):
            return
        self._chunk = min(float(self.cost.chunk), self._queued - self._work) if self._prefills else 0.0
        steps = float("inf")
        if self._prefills:
            target = turns[self._prefills[0]].prefilled_at
            assert target is not None
            steps = max(0.0, target - self._work) / self._chunk if self._chunk > 0 else 0.0
        context = self._used - self._cached
        if self._decoding:
            steps = min(steps, max(0.0, ends[0][0] - self._steps))
            if self.cost.capacity < float("inf"):
                steps = min(steps, max(1.0, self.cost.capacity - self._used) / self._decoding)
        self._step_s = self.cost.seconds(self._decoding, context + self._decoding * steps / 2, self._chunk)
        self._timer = self._loop.call_later(steps * self._step_s, self._tick)

    def _ends_so(self, step: float, number: int) -> bool:
        """Whether a heap entry still says when its turn ends."""
        turn = self._turns.get(number)
        return (turn is not None and turn.start is not None
                and abs(turn.start + turn.length - turn.done - step) < 1e-6)

    def _tick(self) -> None:
        self._advance()
        self._timer = None
        while self._prefills:
            target = self._turns[self._prefills[0]].prefilled_at
            assert target is not None
            if target > self._work + 1e-3:
                break
            self._begin_decode(self._prefills.popleft())
        while self._ends and self._ends[0][0] <= self._steps + 1e-6:
            step, number = heapq.heappop(self._ends)
            if self._ends_so(step, number):
                self._finish(self._turns[number])
        if self._decoding and not self._fit(0.5):
            self._preempt()
        self._admit()
        self._arm()

    def _finish(self, turn: _Turn) -> None:
        """Its last token: the KV stays for the next turn."""
        assert turn.start is not None
        finish = Finish.LENGTH if turn.length == turn.request.max_tokens else Finish.STOP
        if not turn.waiter.done():
            turn.waiter.set_result(self._completion(turn, turn.length, finish))
        self._decoding -= 1
        self._starts -= turn.start
        self._held -= turn.held
        context = len(turn.request.context) + turn.length
        turn.start, turn.held, turn.done = None, 0, turn.length
        self.kv[turn.request.trajectory] = (context, turn.segments[-1][0])
        self._cached += context

    def _preempt(self) -> None:
        """The youngest decoding turn of the youngest group gives its KV back and waits, at the head of its group."""
        decoding = (number for number, turn in self._turns.items() if turn.start is not None)
        number = max(decoding, key=lambda number: (self._group(number), number))
        if self._decoding == 1 and not self._prefills:
            return  # alone it may use more than there is, rather than wait for ever
        turn = self._turns[number]
        self._unstart(number)
        self._held -= turn.held
        turn.held = 0
        insort_left(self._waiting, number, key=self._group)
        self.preempted += 1

    def _sampled(self, turn: _Turn) -> int:
        if turn.start is None:
            return turn.done
        return min(turn.length, turn.done + int(self._steps - turn.start + 1e-6))

    def _completion(self, turn: _Turn, tokens: int, finish: Finish) -> Completion:
        segments = tuple(s for s in turn.segments if s[1] < tokens)
        return Completion(Counted(tokens), array("f"), segments, finish, self.id)

    def _forget(self, number: int) -> None:
        """The caller has its answer, or gave up: free what the turn held, except the KV of a whole turn."""
        turn = self._turns.get(number)
        if turn is None:  # a crash emptied the engine
            return
        if turn.held or turn.start is not None or not turn.waiter.done() or turn.waiter.cancelled():
            self._advance()
            self._unstart(number)
            self._held -= turn.held
            if number in self._waiting:
                self._waiting.remove(number)
            del self._turns[number]
            if not self._paused:
                self._admit()
            self._arm()
        else:
            del self._turns[number]


class DisaggregatedEngine:
    """Prefill and decode on engines of their own (xPyD) behind one Engine: each turn is prefilled on the least loaded
    prefill unit, its KV moves at `link` bytes/s, and the unit that holds its trajectory decodes it."""

    def __init__(self, id: str, pool: str, prefill: list[SimEngine], decode: list[SimEngine], *, kv_bytes: int,
                 link: float, says: Says) -> None:
        self.id, self.pool, self._says = id, pool, says
        self._prefill, self._decode, self._per_token = prefill, decode, kv_bytes / link
        self._homes: dict[TrajectoryId, tuple[SimEngine, SimEngine]] = {}
        self.moved_tokens = 0

    @property
    def units(self) -> list[SimEngine]:
        return [*self._prefill, *self._decode]

    @property
    def in_flight(self) -> int:
        return sum(unit.in_flight for unit in self.units)

    @property
    def kv(self) -> dict[TrajectoryId, tuple[int, Version]]:
        return {id: held for unit in self.units for id, held in unit.kv.items()}

    def crash(self, reason: str) -> None:
        """One part's loss is the loss of all: a turn needs both."""
        self._homes.clear()
        for unit in self.units:
            unit.crash(reason)

    def restart(self) -> None:
        for unit in self.units:
            unit.restart()

    async def generate(self, request: GenerateRequest) -> Completion:
        if request.trajectory not in self._homes:
            load = {unit.id: 0 for unit in self.units}
            for pair in self._homes.values():
                for unit in pair:
                    load[unit.id] += 1
            self._homes[request.trajectory] = (min(self._prefill, key=lambda u: load[u.id]),
                                               min(self._decode, key=lambda u: load[u.id]))
        first, second = self._homes[request.trajectory]
        length = max(1, min(request.max_tokens, self._says(request.trajectory, request.domain, request.turn)))
        new = len(request.context) - second.kv.get(request.trajectory, (0, 0))[0]
        await first.run(replace(request, max_tokens=1), 1)
        self.moved_tokens += new
        await asyncio.sleep(new * self._per_token)
        second.release(request.trajectory)
        done = await second.run(request, length, prefilled=True)
        return replace(done, engine=self.id)

    async def suspend(self) -> None:
        await asyncio.gather(*[unit.suspend() for unit in self.units])

    async def load_weights(self, manifest: Manifest) -> None:
        await asyncio.gather(*[unit.load_weights(manifest) for unit in self.units])

    async def resume(self) -> None:
        await asyncio.gather(*[unit.resume() for unit in self.units])

    def release(self, trajectory: TrajectoryId) -> None:
        for unit in self._homes.pop(trajectory, ()):
            unit.release(trajectory)
