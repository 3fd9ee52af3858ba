"""The run's Scorer: each domain's reward where the recipe puts it, counted alike.

Keeps true: a trajectory gets the score of its domain's function or ScorerFailed, never 0 for a failure; no reward runs
anywhere but where the recipe, or else the function's own `register_serverless`, says. Waits for the places, which have
deadlines of their own.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from rollart.backends.process.scorer import ProcessScorer
from rollart.backends.serverless.caller import Caller
from rollart.backends.serverless.elastic import ElasticPlatform
from rollart.backends.serverless.transport import HttpTransport, LambdaTransport, Transport
from rollart.core.clock import now
from rollart.core.errors import ConfigError, ScorerFailed
from rollart.core.events import Event, RewardsSampled
from rollart.core.types import Score, Trajectory
from rollart.rewards.contract import RewardRequest, Unavailable, call, probe_request, request_of
from rollart.rewards.domains import reward_function
from rollart.rewards.settings import RewardSettings, check_place

SAMPLE_SECONDS = 0.5
"""Figures are sampled so often at first, later each thousandth of the run's time."""
PLATFORM_FIGURES = {"instances", "peak_instances", "started", "killed", "alive_seconds", "busy_seconds", "queued",
                    "platform_restarts"}
Site = tuple[str, Sequence[str], float]
"""Of rewards on Ray Serve: see ServePlatform."""


class Place(Protocol):
    """Where rewards run. `score` raises ScorerFailed, `probe` ConfigError."""

    async def score(self, request: RewardRequest) -> Score: ...
    async def probe(self, request: RewardRequest) -> None: ...
    async def close(self) -> None: ...


class InProcess:
    """In the control plane's own process and on its event loop: for rules that take microseconds."""

    def __init__(self, rewards: Mapping[str, str]) -> None:
        self._functions = {domain: reward_function(name) for domain, name in rewards.items()}

    async def score(self, request: RewardRequest) -> Score:
        try:
            return call(self._functions[request.domain], [request])[0]
        except Exception as error:  # noqa: BLE001  foreign code: whatever it raises is a failed score
            raise ScorerFailed(f"{request.id}: score in domain {request.domain}: {type(error).__name__}: "
                               f"{error}") from None

    async def probe(self, request: RewardRequest) -> None:
        try:
            await self.score(request)
        except ScorerFailed as failed:
            if "BadScore" in str(failed) or Unavailable.__name__ in str(failed):
                raise ConfigError(f"the reward of domain {request.domain} does not work: {failed}") from None

    async def close(self) -> None:
        pass


class Scorers:
    """The Scorer of a run. Use `open_scorers`; `close` ends every place."""

    def __init__(self, settings: RewardSettings, site: Site | None = None) -> None:
        self._settings, self._site, self._opened = settings, site, now()
        self._places: dict[str, Place] = {}  # by domain
        self._all: list[Place] = []
        self._callers: list[Caller] = []
        self._platforms: list[Any] = []  # ElasticPlatform, ServePlatform
        self._calls = self._failed = self._in_flight = 0
        self._latencies: deque[float] = deque(maxlen=10_000)
        self._longest = 0.0
        self.last: dict[str, float] = {}
        """The figures when they were last asked for."""

    async def score(self, trajectory: Trajectory) -> Score:
        """Raises ScorerFailed."""
        try:
            request = request_of(trajectory, self._settings.score_seconds)
        except TypeError as error:
            raise ScorerFailed(f"{trajectory.id}: its payload or facts are not JSON: {error}") from None
        return await self.score_request(request)

    async def score_request(self, request: RewardRequest) -> Score:
        """Raises ScorerFailed."""
        began, place = now(), self._places.get(request.domain)
        if place is None:
            raise ScorerFailed(f"{request.id}: no reward is named for domain {request.domain}")
        self._calls += 1
        self._in_flight += 1
        try:
            score = await place.score(request)
        except BaseException:
            self._failed += 1
            raise
        finally:
            self._in_flight -= 1
        self._latencies.append(now() - began)
        self._longest = max(self._longest, now() - began)
        return score

    async def figures(self) -> dict[str, float]:
        """Counts since the run's process began; see docs/rewards.md for each."""
        seen = sorted(self._latencies)
        out: dict[str, float] = {
            "calls": self._calls, "scored": self._calls - self._failed - self._in_flight, "failed": self._failed,
            "in_flight": self._in_flight, "latency_p50_seconds": _percentile(seen, 0.5),
            "latency_p95_seconds": _percentile(seen, 0.95), "latency_max_seconds": self._longest}
        totals = [caller.counts for caller in self._callers]
        for name in ("attempts", "retries", "throttled", "hedges", "hedges_won", "cold_starts", "circuit_opened",
                     "function_seconds", "waiting"):
            out[name] = sum(getattr(counts, name) for counts in totals)
        prices = self._settings.call
        if prices.second_cost or prices.call_cost:
            out["cost"] = out["function_seconds"] * prices.second_cost + out["attempts"] * prices.call_cost
        parts = [place.figures() for place in self._all if isinstance(place, ProcessScorer)]
        for stats in parts + [await platform.stats() for platform in self._platforms]:
            for name in PLATFORM_FIGURES & stats.keys():
                out[name] = out.get(name, 0) + stats[name]
        self.last = {name: round(value, 6) for name, value in out.items()}
        return self.last

    async def watch(self, emit: Callable[[Event], None]) -> None:
        """Emit the figures whenever they have changed, until cancelled."""
        last: dict[str, float] = {}
        while True:
            await asyncio.sleep(max(SAMPLE_SECONDS, (now() - self._opened) / 1000))
            figures = await self.figures()
            if _moving(figures) != last:
                last = _moving(figures)
                emit(RewardsSampled(figures))

    async def close(self) -> None:
        for place in self._all:
            await place.close()
        for platform in self._platforms:
            await platform.close()

    async def _open(self, domains: Mapping[str, str], settings: RewardSettings) -> None:
        for where, rewards in by_place(domains, settings, on_ray=self._site is not None).items():
            place = await self._place(where, rewards)
            self._all.append(place)
            self._places.update(dict.fromkeys(rewards, place))
            for domain in rewards:
                await place.probe(probe_request(domain, settings.score_seconds))

    async def _place(self, where: str, rewards: Mapping[str, str]) -> Place:
        settings = self._settings
        if where == "in_process":
            return InProcess(rewards)
        if where == "processes":
            return ProcessScorer(rewards, settings)
        transport: Transport
        if where in ("elastic", "serve"):
            elastic = settings.elastic  # more calls would only wait inside the platform, against their own deadline
            room = min(settings.call.concurrency, elastic.max_instances * elastic.concurrency)
            settings = replace(settings, call=replace(settings.call, concurrency=room))
        if where == "serve":
            assert self._site is not None, "by_place refuses serve without Ray"
            from rollart.backends.serverless.serve import ServePlatform

            transport = serve = ServePlatform(rewards, settings, *self._site)
            self._platforms.append(serve)
            await serve.start()
        elif where == "elastic":
            platform = ElasticPlatform(rewards, elastic, settings.score_seconds)
            self._platforms.append(platform)
            transport = HttpTransport(await platform.start(), settings.call)
        elif where.startswith("lambda:"):
            transport = LambdaTransport(where.removeprefix("lambda:"), settings.call, settings.score_seconds)
        else:
            transport = HttpTransport(where, settings.call)
        caller = Caller(transport, settings)
        self._callers.append(caller)
        return caller


def by_place(domains: Mapping[str, str], settings: RewardSettings, *, on_ray: bool) -> dict[str, dict[str, str]]:
    """Where which functions run, by domain. Raises ConfigError, also for `serve` in a run that is not `on_ray`."""
    out: dict[str, dict[str, str]] = {}
    for domain, own in domains.items():
        name = settings.functions.get(domain, own)
        where = settings.places.get(domain) or settings.where or _bound(name) or "processes"
        if where == "serve":
            reward_function(name)  # before a cluster is joined
        out.setdefault(where, {})[domain] = name
    if "serve" in out and not on_ray:
        raise ConfigError(f"the reward of {', '.join(out['serve'])} is on serve, which is on the run's Ray cluster: "
                          "train with --ray ADDRESS, or put it on elastic, the same on this machine")
    return out


async def open_scorers(domains: Mapping[str, str], settings: RewardSettings, site: Site | None = None) -> Scorers:
    """`domains`: the reward's own name by domain. `site`: where `serve` is, of a run on Ray. Probes each once. Raises
    ConfigError; then nothing is left open."""
    scorers = Scorers(settings, site)
    try:
        await scorers._open(domains, settings)
    except BaseException:
        await scorers.close()
        raise
    return scorers


def _bound(name: str) -> str:
    where: Any = getattr(reward_function(name), "where", "")
    try:
        check_place(where)
    except ValueError as error:
        raise ConfigError(f"reward {name} is bound by register_serverless: {error}") from None
    return str(where)


def _moving(figures: Mapping[str, float]) -> dict[str, float]:
    """What counts as a change: not the time that merely passes."""
    return {name: value for name, value in figures.items() if not name.endswith("_seconds")}


def _percentile(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
