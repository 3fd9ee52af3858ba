"""Deliberately broken variants of the control plane (one of the engine), and the named check that must catch each.

A mutant replaces one method and leaves the rest as it is. `caught_by` are the names that its first failure may carry.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

from rollart.control import llm_proxy
from rollart.control.env_manager import EnvManager
from rollart.control.group import GroupRun
from rollart.control.llm_proxy import LLMProxy
from rollart.control.pipeline import Pipeline
from rollart.control.rollout_scheduler import RolloutScheduler
from rollart.control.sample_buffer import SampleBuffer
from rollart.core.events import Settled, SlotsFreed, TrajectoryEnded
from rollart.core.types import Fate, Outcome, Score
from rollart.sim.engine import SimEngine


@dataclass(frozen=True)
class Mutant:
    """`broken(original)` returns the method that takes the place of `owner.name`."""

    name: str
    owner: Any
    method: str
    broken: Callable[[Any], Any]
    caught_by: tuple[str, ...]

    @contextmanager
    def applied(self):
        with patch.object(self.owner, self.method, self.broken(getattr(self.owner, self.method))):
            yield


MUTANTS: list[Mutant] = []


def mutant(owner: Any, method: str, *caught_by: str):
    """The decorated function takes the original method and returns the broken one; its name is the mutant's."""

    def register(broken):
        MUTANTS.append(Mutant(broken.__name__, owner, method, broken, caught_by))
        return broken

    return register


@mutant(SampleBuffer, "__init__", "I1")
def no_staleness_check(original):
    def init(self, *, schedule, **rest):
        original(self, schedule=replace(schedule, check_always=False), **rest)
    return init


@mutant(EnvManager, "_close", "I3")
def environment_not_closed(original):
    async def close(self, environment):
        pass
    return close


@mutant(EnvManager, "_close", "I3")
def environment_closed_twice(original):
    async def close(self, environment):
        await environment.close()
        await original(self, environment)
    return close


@mutant(SampleBuffer, "take", "I4")
def slots_freed_when_the_batch_is_taken(original):
    def take(self):
        taken = original(self)
        self.training.clear()
        return taken
    return take


@mutant(Pipeline, "_sync", "I6")
def slots_freed_before_the_weights_are_live(original):
    async def sync(self, version, *rest):
        self.journal.emit(SlotsFreed(version, self.buffer.live(version)))
        self.changed.notify()
        await self.sync.sync(version, self._round_over)
    return sync


@mutant(GroupRun, "stop", "I3")
def spares_not_cancelled(original):
    async def stop(self):
        self.members = {}
    return stop


@mutant(GroupRun, "_ended", "I2")
def trajectory_ends_twice(original):
    def ended(self, manager, result):
        original(self, manager, result)
        self._s.journal.emit(TrajectoryEnded(result, Fate.CANCELLED))
    return ended


@mutant(GroupRun, "_ended", "I7")
def failed_member_not_replaced(original):
    def ended(self, manager, result):
        if not result.good:
            self.failures += 1_000
        original(self, manager, result)
    return ended


@mutant(Pipeline, "_join_sync", "I6")
def publishes_overlap(original):
    async def join_sync(self):
        pass
    return join_sync


@mutant(Pipeline, "_sync", "Stalled")
def forgotten_wake_up(original):
    async def sync(self, version, *rest):
        await self.sync.sync(version, self._round_over)
        self.journal.emit(SlotsFreed(version, self.buffer.live(version)))
    return sync


@mutant(RolloutScheduler, "_closed", "I4", "Stalled")
def slot_of_a_dropped_group_never_freed(original):
    def closed(self, group, *rest):
        with patch.object(self._buffer, "discard", lambda id: None):
            original(self, group, *rest)
    return closed


@mutant(EnvManager, "_within", "Stalled")
def stages_without_a_deadline(original):
    async def within(self, stage, limit, failure, work):
        self._s = replace(self._s, settings=replace(self._s.settings, episode_seconds=1e9))
        return await original(self, stage, 1e9, failure, work)
    return within


@mutant(SimEngine, "_drop_kv", "I5")
def kv_kept_over_an_update(original):
    def drop_kv(self):
        pass
    return drop_kv


@mutant(LLMProxy, "forget", "I3")
def kv_of_ended_trajectories_kept(original):
    def forget(self, trajectory):
        self.routing.forget(trajectory)
    return forget


@mutant(LLMProxy, "_load", "I5")
def older_weights_loaded(original):
    async def load(self, engine, manifest):
        return await original(self, engine, replace(manifest, version=max(0, manifest.version - 1)))
    return load


@mutant(LLMProxy, "bring_up", "I5")
def restarted_engine_serves_what_it_has(original):
    async def bring_up(self, engine, manifest, newest):
        return await original(self, engine, manifest, lambda: manifest)
    return bring_up


@mutant(LLMProxy, "_update", "I5")
def weights_swapped_without_suspend(original):
    async def update(self, engine, manifest, first):
        with patch.object(engine, "suspend", lambda: asyncio.sleep(0)):
            return await original(self, engine, manifest, first)
    return update


@mutant(RolloutScheduler, "_closed", "I2")
def task_not_put_back(original):
    def closed(self, group, *rest):
        with patch.object(self._tasks, "put_back", lambda task: None):
            original(self, group, *rest)
    return closed


@mutant(RolloutScheduler, "_closed", "I2")
def task_of_a_trained_group_put_back(original):
    def closed(self, group, *rest):
        if group.kept:
            self._tasks.put_back(group.task)
        original(self, group, *rest)
    return closed


@mutant(GroupRun, "give_up", "I2")
def settled_twice(original):
    def give_up(self):
        good = list(self.good)
        original(self)
        if good:
            self._s.journal.emit(Settled(tuple(member.id for member in good), self.end_fate, self.end_reason))
    return give_up


@mutant(GroupRun, "give_up", "I2")
def good_members_of_a_dropped_group_forgotten(original):
    def give_up(self):
        self.good = []
    return give_up


@mutant(EnvManager, "run", "I2")
def failed_score_counts_as_zero(original):
    async def run(self):
        result = await original(self)
        if result.error.startswith("ScorerFailed"):
            return replace(result, outcome=Outcome.FINISHED, score=Score(0.0), error="")
        return result
    return run


@mutant(llm_proxy, "merge", "I1")
def moved_turn_loses_the_versions_of_its_first_part(original):
    def merge(parts):
        if len(parts) == 1:
            return parts[0]
        moved = len(parts[0].tokens)
        return replace(original(parts), segments=tuple((v, start + moved) for v, start in parts[-1].segments))
    return merge


@mutant(LLMProxy, "generate", "I5")
def tokens_of_weights_that_no_engine_has(original):
    async def generate(self, request):
        completion = await original(self, request)
        return replace(completion, segments=((completion.newest + 1, 0),))
    return generate
