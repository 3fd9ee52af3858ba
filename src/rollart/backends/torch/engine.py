"""The embedded engine: continuous batching of one small model on a thread of its own.

Between two steps the thread takes commands (new request, abort, release, suspend, load, resume); a step is one chunk of
prefill for requests that lack keys and values, and one decode for all that do not. Keeps true: no request reads KV of
an older version than its own weights, and a version never goes back (I5); a token's version is that of the weights it
was sampled with (T5); draws belong to the request, not to the batch; each request ends in a completion, an abort or
EngineLost. Waits for commands when it has nothing to do, at most a second at a time. `turns` has what it works on.
"""

from __future__ import annotations

import asyncio
import random
import threading
from array import array
from bisect import insort
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter

import torch

from rollart.backends.torch.runner import Runner
from rollart.backends.torch.sampling import Rows, sample
from rollart.backends.torch.settings import EngineSettings
from rollart.backends.torch.threads import choose_device, claim
from rollart.backends.torch.transformer import Transformer
from rollart.backends.torch.turns import Batch, EngineStats, Parked, Running, answer, call_soon, ignore
from rollart.backends.weights import Reader
from rollart.core.errors import ConfigError, EngineLost, InvariantViolated
from rollart.core.types import Completion, Finish, GenerateRequest, Manifest, TrajectoryId, Version


class EmbeddedEngine:
    """The core's `Engine` over a model in this process. `model` gives shape and type; weights come by `load_weights`.

    Until the first `load_weights`, and after `restart`, `generate` raises EngineLost. Raises ConfigError for limits
    that the model or the KV budget does not have.
    """

    def __init__(self, id: str, pool: str, model: Transformer, weights: Reader, settings: EngineSettings,
                 cores: Sequence[int] = ()) -> None:
        self.id, self.pool, self._weights, self._settings, self._cores = id, pool, weights, settings, cores
        config = model.config
        self._context = settings.context_tokens or config.context_tokens
        if self._context > config.context_tokens:
            raise ConfigError(f"engine context_tokens must be at most the model's {config.context_tokens}; "
                              f"got {self._context}")
        if self._context > settings.kv_tokens:
            raise ConfigError(f"engine kv_tokens must hold one whole context of {self._context} tokens; "
                              f"got {settings.kv_tokens}: raise it, or lower context_tokens")
        self._runner = Runner(config, settings.max_concurrent, self._context, model.head.dtype,
                              choose_device(settings.device))
        self._wake = threading.Condition()
        self._commands: deque[tuple[Callable[[], None], Callable[[Exception], None]]] = deque()
        self._posted: list[tuple[Callable[[], None], Callable[[Exception], None]]] = []
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.lost: str | None = "not started"
        """Why the engine does not serve, or None while it does."""
        self._watchers: list[Callable[[str], None]] = []
        self._generated = self._prefilled = self._reused = 0
        self._busy = 0.0
        self._clear()

    def _clear(self) -> None:
        self._commands.clear()
        self._waiting: list[Running] = []  # older groups first: they are the next to be too stale
        self._rows: list[Running | None] = [None] * self._settings.max_concurrent
        self._parked: dict[TrajectoryId, Parked] = {}  # least recently used first
        self._batch: Batch | None = None
        self.version: Version | None = None  # of the loaded weights
        self._refuse = ignore
        self._suspended = self._closing = False
        self._fetched: tuple[Manifest | None, Mapping[str, torch.Tensor]] = (None, {})
        self._runner.clear()

    # The port, on the event loop.

    def on_lost(self, callback: Callable[[str], None]) -> None:
        """`callback(engine id)` runs on the event loop that called `start` whenever the engine dies."""
        self._watchers.append(callback)

    def start(self) -> None:
        """Start the thread; call it on the event loop. A started engine stays as it is."""
        if self._thread is not None and self._thread.is_alive():
            return
        self._loop = asyncio.get_running_loop()
        self.lost = None
        self._thread = threading.Thread(target=self._run, name=f"engine-{self.id}", daemon=True)
        self._thread.start()

    async def close(self) -> None:
        """Stop the thread. What is in flight raises EngineLost with its partial completion."""
        def stop() -> None:
            self._closing = True
        self._post(stop)
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, self._settings.answer_seconds)

    async def restart(self) -> None:
        """Start again with nothing in memory and no weights loaded."""
        await self.close()
        self._clear()
        self.start()

    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample one turn. Raises EngineLost, ValueError for a context that is empty or has unknown token ids."""
        context, vocabulary = request.context, self._runner.config.vocabulary
        if not isinstance(context, array) or not context or min(context) < 0 or max(context) >= vocabulary:
            raise ValueError(f"a context needs at least one token id in 0..{vocabulary - 1}; got {context!r:.80}")
        if self.version is None:
            raise EngineLost(f"engine {self.id} has no weights loaded" if self.lost is None else
                             f"engine {self.id} is lost: {self.lost}")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Completion] = loop.create_future()
        turn = Running(request, min(request.max_tokens, self._context - len(context)), context[:],
                     lambda result: answer(loop, future, result), random.Random(request.seed))
        self._post(lambda: self._add(turn), turn.done)
        try:
            return await future
        except asyncio.CancelledError:
            self._post(lambda: self._abort(turn))
            raise

    async def suspend(self) -> None:
        """No step begins any more; returns between two steps."""
        await self._ask(lambda: self._suspend(True))

    async def prefetch(self, manifest: Manifest) -> None:
        """Fetch weights in a thread of their own while decoding goes on. Raises EngineLost when they do not come."""
        def fetch() -> Mapping[str, torch.Tensor]:
            torch.set_num_threads(1)
            return self._weights.get(manifest)
        self._fetched = manifest, await asyncio.to_thread(fetch)

    async def load_weights(self, manifest: Manifest) -> None:
        """Swap the weights between two steps. Raises EngineLost when they are gone or do not fit (the old ones then
        stay), InvariantViolated when the version would go back."""
        await self._ask(lambda: self._load(manifest))

    async def resume(self) -> None:
        await self._ask(lambda: self._suspend(False))

    def release(self, trajectory: TrajectoryId) -> None:
        self._post(lambda: self._release(trajectory))

    def stats(self) -> EngineStats:
        return EngineStats(self._generated, self._prefilled, self._reused, self._busy,
                           sum(turn is not None for turn in self._rows), len(self._waiting), self._held())

    def _post(self, command: Callable[[], None], refuse: Callable[[Exception], None] | None = None) -> None:
        """Queue a command for the engine's thread, from any thread; `refuse` hears of it when the engine is lost before
        or while it runs.

        What is posted in one pass of the event loop reaches the thread at once: requests that wake together are then
        batched together, whatever the threads' timing, so that a run in waves repeats itself. The queue is as long as
        there are callers: each but abort and release waits for its answer.
        """
        with self._wake:
            self._posted.append((command, refuse or ignore))
            first = len(self._posted) == 1
        if self._loop is None:  # it was never started: whoever waits is told at once
            self._hand_over()
        elif first:
            call_soon(self._loop, self._hand_over)

    def _hand_over(self) -> None:
        with self._wake:
            posted, self._posted = self._posted, []
            if self.lost is None:
                self._commands.extend(posted)
                self._wake.notify()
                return
        for _, refuse in posted:
            refuse(EngineLost(f"engine {self.id} is lost: {self.lost}"))

    async def _ask(self, command: Callable[[], None]) -> None:
        """Have the thread run a command and wait for its end. Raises what it raises, or EngineLost."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()

        def obey() -> None:
            try:
                command()
            except (EngineLost, InvariantViolated) as error:
                answer(loop, future, error)
            else:
                answer(loop, future, None)
        self._post(obey, lambda error: answer(loop, future, error))
        try:
            async with asyncio.timeout(self._settings.answer_seconds):
                await future
        except TimeoutError:
            raise EngineLost(f"engine {self.id} did not answer in {self._settings.answer_seconds:.0f} s") from None

    # Commands, on the engine's thread between two steps.

    def _add(self, turn: Running) -> None:
        if turn.limit <= 0:
            turn.done(turn.completion(Finish.LENGTH, self.id, self.version or 0))
        else:
            insort(self._waiting, turn, key=lambda turn: turn.request.trajectory)

    def _abort(self, turn: Running) -> None:
        if turn in self._waiting:
            self._waiting.remove(turn)
        elif turn in self._rows:
            self._rows[self._rows.index(turn)] = None
            self._batch = None

    def _release(self, trajectory: TrajectoryId) -> None:
        self._parked.pop(trajectory, None)
        for turn in self._rows:
            if turn is not None and turn.request.trajectory == trajectory:
                turn.keep = False

    def _suspend(self, suspended: bool) -> None:
        self._suspended = suspended

    def _load(self, manifest: Manifest) -> None:
        if self.version is not None and manifest.version < self.version:
            raise InvariantViolated(f"I5: engine {self.id} at version {self.version} was given {manifest.version}")
        fetched, tensors = self._fetched
        self._fetched = None, {}
        try:
            self._runner.load(tensors if fetched == manifest else self._weights.get(manifest))
        except ValueError as wrong:
            raise EngineLost(f"weights of version {manifest.version} do not fit engine {self.id}: {wrong}") from None
        self._parked.clear()
        for turn in self._rows:
            if turn is not None:
                turn.filled = 0
        self._batch = None
        self.version = manifest.version

    # Steps, on the engine's thread.

    def _run(self) -> None:
        claim(self._settings.threads, self._cores)
        try:
            with torch.inference_mode():
                while not self._closing:
                    if not self._step():
                        with self._wake:
                            if not self._commands:
                                self._wake.wait(timeout=1.0)
            self._die("closed")
        except InvariantViolated as error:
            self._die(str(error), error)
        except FloatingPointError as diverged:
            self._die(f"weights of version {self.version} give {diverged}")
        except Exception as error:  # noqa: BLE001 - the thread's edge: whatever it was, each request must hear of it
            self._die(f"{type(error).__name__}: {error}")

    def _die(self, reason: str, violated: InvariantViolated | None = None) -> None:
        """Nothing runs any more: tell every caller, with its partial completion, and whoever watches."""
        with self._wake:
            self.lost = reason
        version, self.version = self.version, None
        message = f"engine {self.id} is lost: {reason}"
        for refuse in (self._refuse, *(refuse for _, refuse in self._commands)):
            refuse(violated or EngineLost(message))
        for turn in [*self._rows, *self._waiting]:
            if turn is not None:
                partial = turn.completion(Finish.LENGTH, self.id, version or 0) if turn.segments else None
                turn.done(violated or EngineLost(message, partial))
        if not self._closing:
            for watcher in self._watchers:
                call_soon(self._loop, watcher, self.id)

    def _step(self) -> bool:
        """Take commands, then prefill and decode. False when there was nothing to do."""
        while self._commands:
            command, self._refuse = self._commands.popleft()
            command()
        self._refuse = ignore
        if self._suspended or self._closing or self.version is None:
            return False
        if self._waiting:
            self._admit()
        begun = perf_counter()
        worked = self._prefill()
        worked |= self._decode()
        if worked:
            self._busy += perf_counter() - begun
        return worked

    def _held(self) -> int:
        """Tokens of KV: reserved by running requests, and parked."""
        return sum(turn.reserved for turn in list(self._rows) if turn is not None) + sum(
            len(parked.ids) for parked in list(self._parked.values()))

    def _admit(self) -> None:
        """Give rows to waiting requests, older groups first, while rows and the KV budget last."""
        free = [row for row, turn in enumerate(self._rows) if turn is None]
        budget = self._settings.kv_tokens
        while self._waiting and free:
            turn = self._waiting[0]
            if turn.reserved + sum(other.reserved for other in self._rows if other is not None) > budget:
                return
            parked = self._parked.pop(turn.request.trajectory, None)
            while self._held() + turn.reserved > budget:
                del self._parked[next(iter(self._parked))]
            row = free.pop(0)
            self._runner.reserve(row + 1, turn.reserved)
            if parked and turn.ids[:len(parked.ids)] == parked.ids:
                turn.filled = min(len(parked.ids), len(turn.ids) - 1)
                self._runner.put(row, parked.kept, turn.filled)
                self._reused += turn.filled
            self._rows[row] = self._waiting.pop(0)
            self._batch = None

    def _prefill(self) -> bool:
        """One chunk of prefill: requests that lack about equally much, up to the chunk's tokens. The last id of each
        is left to decode."""
        chunk, taken, longest = self._settings.prefill_chunk, [], 0
        for row, turn in enumerate(self._rows):
            if turn is None or turn.pending == 1:
                continue
            need = min(turn.pending - 1, chunk)
            longest = longest or need
            if longest < 2 * need <= 2 * longest and (len(taken) + 1) * longest <= chunk:
                taken.append((row, turn, need))
        if not taken:
            return False
        self._runner.prefill([row for row, _, _ in taken], [turn.filled for _, turn, _ in taken],
                             [turn.ids[turn.filled:turn.filled + need] for _, turn, need in taken])
        for _, turn, need in taken:
            turn.filled += need
            self._prefilled += need
        if any(turn.pending == 1 for _, turn, _ in taken):
            self._batch = None
        return True

    def _compact(self) -> int:
        """Move the last rows into holes, so that the rows in use come first; returns how many there are."""
        used = sum(turn is not None for turn in self._rows)
        holes = [row for row, turn in enumerate(self._rows[:used]) if turn is None]
        for row in range(used, len(self._rows)):
            turn = self._rows[row]
            if turn is not None:
                hole = holes.pop()
                self._runner.move(row, hole, turn.filled)
                self._rows[hole], self._rows[row] = turn, None
        return used

    def _build(self) -> Batch | None:
        used = self._compact()
        rows = [turn if turn is not None and turn.pending == 1 else None for turn in self._rows[:used]]
        turns = [(row, turn) for row, turn in enumerate(rows) if turn is not None]
        if not turns:
            return None
        device, scratch = self._runner.device, self._runner.scratch
        return Batch(
            turns, Rows.of([turn.request.sampling for turn in self._rows[:used] if turn is not None],
                           self._runner.config.vocabulary, device),
            torch.tensor([turn.ids[-1] if turn else 0 for turn in rows], device=device),
            torch.tensor([turn.filled if turn else scratch for turn in rows], device=device),
            torch.tensor([int(turn is not None) for turn in rows], device=device))

    def _decode(self) -> bool:
        """One token for every request that lacks nothing else."""
        batch = self._batch = self._batch or self._build()
        if batch is None:
            return False
        filled = [turn.filled for _, turn in batch.turns]
        longest = max(filled) + 1
        logits = self._runner.decode(batch.tokens, batch.positions, longest,
                                     len(filled) == len(batch.tokens) and min(filled) + 1 == longest)
        uniforms = [0.0] * len(batch.tokens)
        for row, turn in batch.turns:
            uniforms[row] = turn.draws.random()
        batch.tokens, logprobs = sample(logits, batch.rows, torch.tensor(uniforms, device=logits.device))
        batch.positions += batch.advance
        self._generated += len(batch.turns)
        tokens, logprobs, version = batch.tokens.tolist(), logprobs.tolist(), self.version
        for row, turn in batch.turns:
            sampled = len(turn.logprobs)
            if not turn.segments or turn.segments[-1][0] != version:
                turn.segments.append((version, sampled))
            turn.filled += 1
            turn.ids.append(tokens[row])
            turn.logprobs.append(logprobs[row])
            if tokens[row] in turn.request.stop:
                self._end(row, turn, Finish.STOP)
            elif sampled + 1 == turn.limit:
                self._end(row, turn, Finish.LENGTH)
        return True

    def _end(self, row: int, turn: Running, finish: Finish) -> None:
        self._rows[row] = None
        self._batch = None
        if turn.keep:
            trajectory = turn.request.trajectory
            self._parked.pop(trajectory, None)  # so that it comes last
            self._parked[trajectory] = Parked(turn.ids[:turn.filled], self._runner.take(row, turn.filled))
        turn.done(turn.completion(finish, self.id, self.version or 0, self._runner.routes(row, turn.filled)))

    def check(self) -> None:
        """Raises InvariantViolated when rows, KV and budget do not add up. Call it while the engine is suspended."""
        held, budget = self._held(), self._settings.kv_tokens
        if held > budget:
            raise InvariantViolated(f"engine {self.id} holds {held} tokens of KV, its budget is {budget}")
        for turn in self._rows:
            if turn is not None and not 0 <= turn.filled < len(turn.ids) <= turn.reserved:
                raise InvariantViolated(f"engine {self.id}: {turn.filled} filled of {len(turn.ids)} ids, "
                                        f"{turn.reserved} reserved")
        for trajectory, parked in self._parked.items():
            if len(parked.kept) != len(parked.ids):
                raise InvariantViolated(f"engine {self.id}: KV of {len(parked.kept)} for {len(parked.ids)} ids of "
                                        f"{trajectory}")
