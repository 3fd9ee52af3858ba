"""The caller: one trajectory at a time to a function that may be slow, full, broken or gone.

Keeps true: a score is taken once, from the first good answer; an attempt is repeated only where that may help, a
stated number of times, with growing pauses and jitter; being turned away (429) is no failed attempt; nobody waits
longer than wait_seconds to be let out and then score_seconds x (1 + retries); at most `concurrency` calls are out.
Waits for room, for the circuit to close, for the function, each within those deadlines.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from rollart.backends.serverless.transport import Broken, Reply, TooLarge, Transport
from rollart.core.clock import now
from rollart.core.errors import ConfigError, ScorerFailed
from rollart.core.types import Score
from rollart.rewards.contract import PROBE_ACCEPTS, VERSION, Answer, BadScore, RewardRequest, read_answers, to_json
from rollart.rewards.settings import RewardSettings

AGAIN = frozenset({408, 425, 429, 500, 502, 503, 504})
"""HTTP status of what may be repeated."""
PROBES = 3
"""Attempts of the call at the start."""
FEWEST_LATENCIES = 20
"""Latencies to know before a call is hedged."""


@dataclass
class CallCounts:
    """What was called so far. Seconds are the function's own, as it or its platform states them."""

    attempts: int = 0
    retries: int = 0
    throttled: int = 0
    hedges: int = 0
    hedges_won: int = 0
    cold_starts: int = 0
    circuit_opened: int = 0
    function_seconds: float = 0.0
    in_flight: int = 0
    waiting: int = 0
    latencies: deque[float] = field(default_factory=lambda: deque(maxlen=512), repr=False)


class Refused(Exception):
    """No attempt will bring a score."""


class Again(Exception):
    """This attempt failed; another may not. `throttled`: it was only turned away. `pause`: seconds it asked for."""

    def __init__(self, message: str, *, throttled: bool = False, pause: float = 0.0) -> None:
        super().__init__(message)
        self.throttled, self.pause = throttled, pause


class Circuit:
    """Open after `failures` failed attempts in a row; then one attempt each `seconds`, until one succeeds."""

    def __init__(self, failures: int, seconds: float, counts: CallCounts) -> None:
        self._failures, self._seconds, self._counts = failures, seconds, counts
        self._row, self._next = 0, 0.0

    @property
    def open(self) -> bool:
        return self._row >= self._failures

    async def enter(self) -> None:
        """Wait until an attempt may be made: at once while it is closed."""
        while self.open and (left := self._next - now()) > 0:
            await asyncio.sleep(left)
        if self.open:
            self._next = now() + self._seconds

    def failed(self) -> None:
        self._row += 1
        if self._row == self._failures:
            self._counts.circuit_opened += 1
            self._next = now() + self._seconds

    def worked(self) -> None:
        self._row = 0


class Caller:
    """Calls one function over one transport."""

    def __init__(self, transport: Transport, settings: RewardSettings) -> None:
        self._transport, self._settings, self._call = transport, settings, settings.call
        self.counts = CallCounts()
        self._room = asyncio.Semaphore(settings.call.concurrency)
        self._circuit = Circuit(settings.call.breaker_failures, settings.call.breaker_seconds, self.counts)
        self._batches = Batches(settings.call.batch, settings.call.batch_seconds, self._send)
        self._quiet_until = 0.0  # the function asked all of us to wait until then
        self._jitter = random.Random()  # spreads callers; no result depends on it

    async def score(self, request: RewardRequest) -> Score:
        """Raises ScorerFailed: after the last attempt, at the deadline, or where no attempt would help."""
        settings, counts, entered = self._settings, self.counts, now()
        seconds = settings.score_seconds * (1 + settings.retries)
        where = f"{request.id}: score in domain {request.domain} at {self._transport.name}"
        counts.waiting += 1
        try:
            async with asyncio.timeout(settings.wait_seconds):
                await self._room.acquire()
        except TimeoutError:
            raise ScorerFailed(f"{where}: not let out within {settings.wait_seconds:g} s, "
                               f"{self._call.concurrency} calls were (reward.call.concurrency)") from None
        finally:
            counts.waiting -= 1
        counts.in_flight += 1
        trouble = Trouble()
        try:
            async with asyncio.timeout(settings.wait_seconds - (now() - entered) + seconds):
                return await self._attempts(request, trouble)
        except TimeoutError:
            raise ScorerFailed(f"{where}: the deadline has passed; last: {trouble.last}") from None
        except (Refused, Again) as error:
            raise ScorerFailed(f"{where}, attempt {trouble.failed}: {error}") from None
        finally:
            counts.in_flight -= 1
            self._room.release()

    async def probe(self, request: RewardRequest) -> None:
        """One call before the first trajectory. Raises ConfigError for a function that is not there or not one."""
        problem = ""
        for _ in range(PROBES):
            try:
                answer = (await self._send([request]))[0]
            except Refused as refused:
                problem = str(refused)
                break
            except Again as again:
                problem = str(again)
            else:
                if answer.kind in PROBE_ACCEPTS:
                    return
                problem = f"{answer.kind}: {answer.message}"
            await asyncio.sleep(self._pause(1))
        raise ConfigError(f"the reward of domain {request.domain} at {self._transport.name} does not work: {problem}")

    async def close(self) -> None:
        await self._batches.close()
        await self._transport.close()

    async def _attempts(self, request: RewardRequest, trouble: Trouble) -> Score:
        """Attempts until a score, the last retry, or what no attempt will mend."""
        turned_away = 0
        while True:
            await self._circuit.enter()
            if (quiet := self._quiet_until - now()) > 0:
                await asyncio.sleep(quiet * self._jitter.uniform(1.0, 1.25))
            try:
                return await self._hedged(request)
            except Again as again:
                trouble.last = str(again)
                if again.throttled:
                    turned_away += 1
                    self.counts.throttled += 1
                    self._quiet_until = max(self._quiet_until, now() + again.pause)
                else:
                    trouble.failed += 1
                    if trouble.failed > self._settings.retries:
                        raise
                    self.counts.retries += 1
                await asyncio.sleep(max(again.pause, self._pause(trouble.failed + turned_away)))
            except Refused:
                trouble.failed += 1
                raise

    def _pause(self, n: int) -> float:
        longest = min(self._call.backoff_seconds * 2.0 ** min(n - 1, 16), self._call.backoff_limit_seconds)
        return longest * self._jitter.uniform(0.5, 1.0)

    async def _hedged(self, request: RewardRequest) -> Score:
        """One attempt, and a second beside it once the first takes longer than most did."""
        delay = self._hedge_after()
        if delay is None:
            return await self._attempt(request)
        first = asyncio.create_task(self._attempt(request))
        tasks = [first]
        try:
            await asyncio.wait(tasks, timeout=delay)
            if not first.done():
                self.counts.hedges += 1
                tasks.append(asyncio.create_task(self._attempt(request)))
            pending: set[asyncio.Task[Score]] = set(tasks)
            while pending:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                good = next((task for task in done if task.exception() is None), None)
                if good is not None:
                    self.counts.hedges_won += good is not first
                    return good.result()
            return first.result()  # raises
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _hedge_after(self) -> float | None:
        seen = self.counts.latencies
        if not self._call.hedge or len(seen) < FEWEST_LATENCIES:
            return None
        return sorted(seen)[int(self._call.hedge * len(seen))]

    async def _attempt(self, request: RewardRequest) -> Score:
        started = now()
        self.counts.attempts += 1
        try:
            answer = await self._batches.send(request)
        except Again as again:
            if not again.throttled:
                self._circuit.failed()
            raise
        self._circuit.worked()
        self.counts.latencies.append(now() - started)
        if answer.score is None:
            text = f"{answer.kind}: {answer.message}"
            raise Again(text) if answer.kind in ("raised", "unavailable") else Refused(text)
        return answer.score

    async def _send(self, requests: list[RewardRequest]) -> list[Answer]:
        """One call with one request or a batch of them."""
        batch = self._call.batch > 1
        plain: Any = [to_json(request) for request in requests]
        body = json.dumps({"version": VERSION, "requests": plain} if batch else plain[0]).encode()
        if len(body) > self._call.request_mb * 1_000_000:
            raise Refused(f"the request has {len(body)} bytes, above reward.call.request_mb = "
                          f"{self._call.request_mb:g}")
        key = requests[0].key if len(requests) == 1 else ""
        try:
            reply = await self._transport.send(body, key, self._settings.score_seconds)
        except Broken as broken:
            raise Again(str(broken)) from None
        except TooLarge as large:
            raise Refused(str(large)) from None
        answers = _understood(reply, len(requests), batch)
        self.counts.cold_starts += sum(answer.cold for answer in answers)
        self.counts.function_seconds += sum(answer.seconds for answer in answers)
        return answers


@dataclass
class Trouble:
    """What one call has been through."""

    failed: int = 0
    last: str = "no attempt was answered"


def _understood(reply: Reply, count: int, batch: bool) -> list[Answer]:
    """The answers in a reply. Raises Again or Refused for a reply that has none."""
    try:
        if reply.status != 200 and batch:
            raise BadScore("an error for the whole batch")
        answers = read_answers(reply.body, count, batch=batch)
    except BadScore as bad:
        if reply.status == 200:
            raise Refused(str(bad)) from None
        text = f"HTTP {reply.status}: {reply.body[:200].decode(errors='replace')!r}"
        if reply.status in AGAIN or reply.status >= 500:
            raise Again(text, throttled=reply.status == 429, pause=reply.retry_after) from None
        raise Refused(text) from None
    if reply.status == 429:
        raise Again(answers[0].message, throttled=True, pause=reply.retry_after)
    if reply.status >= 500 and answers[0].kind not in ("raised", "unavailable"):
        raise Again(f"HTTP {reply.status}: {answers[0].message}")
    return answers


class Batches:
    """Requests gathered into calls of at most `size`; a call leaves when it is full or `seconds` after its first.

    With size 1 each leaves at once. A request that is given up leaves its batch if that has not left yet.
    """

    def __init__(self, size: int, seconds: float,
                 send: Callable[[list[RewardRequest]], Awaitable[list[Answer]]]) -> None:
        self._size, self._seconds, self._send = size, seconds, send
        self._open: list[tuple[RewardRequest, asyncio.Future[Answer]]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._out: set[asyncio.Task[None]] = set()

    async def send(self, request: RewardRequest) -> Answer:
        if self._size == 1:
            return (await self._send([request]))[0]
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._open.append((request, future))
        if len(self._open) >= self._size:
            self._leave()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._seconds, self._leave)
        return await future

    async def close(self) -> None:
        if self._timer:
            self._timer.cancel()
        for task in self._out:
            task.cancel()
        await asyncio.gather(*self._out, return_exceptions=True)

    def _leave(self) -> None:
        if self._timer:
            self._timer.cancel()
        batch, self._open, self._timer = [item for item in self._open if not item[1].done()], [], None
        if batch:
            task = asyncio.create_task(self._call(batch))
            self._out.add(task)
            task.add_done_callback(self._out.discard)

    async def _call(self, batch: list[tuple[RewardRequest, asyncio.Future[Answer]]]) -> None:
        try:
            answers = await self._send([request for request, _ in batch])
        except (Again, Refused) as error:
            for _, future in batch:
                if not future.done():
                    future.set_exception(Again(str(error), throttled=error.throttled, pause=error.pause)
                                         if isinstance(error, Again) else Refused(str(error)))
            return
        for (_, future), answer in zip(batch, answers, strict=True):
            if not future.done():
                future.set_result(answer)
