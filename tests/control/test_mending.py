"""A learner that dies anywhere does its steps again and stands where it stood."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from fakes import hang
from hypothesis import given
from hypothesis import strategies as st

from rollart.control.mending import MendingTrainer
from rollart.core.errors import NoCapacity, TrainerLost
from rollart.core.types import Manifest, StepReport, TrainBatch
from rollart.sim.loop import run_virtual


class Fragile:
    """Its state is the list of batches that its weights have seen. `dies`: numbers of the calls in which it dies."""

    def __init__(self, dies=(), no_room=0, dies_again=0):
        self.dies, self.no_room, self.dies_again = set(dies), no_room, dies_again
        self.seen, self.dead, self.calls, self.restarts, self.saved = (), False, 0, 0, {}
        self.published = []

    async def _work(self, seconds):
        self.calls += 1
        mine = self.calls
        if self.dead:
            raise TrainerLost("dead")
        for _ in range(10):
            await asyncio.sleep(seconds / 10)
            if mine in self.dies and _ == 4:
                self.dead = True
            if self.dead:
                raise TrainerLost(f"died in call {mine}")

    async def step(self, batch):
        assert batch.version == len(self.seen)
        await self._work(5.0)
        assert batch.version == len(self.seen), "two steps at once"
        self.seen = (*self.seen, batch.version)
        return StepReport(batch.version + 1, 5.0, 1)

    async def publish(self, version):
        assert version == len(self.seen), "the copy of that version is gone"
        copy = self.seen
        await self._work(1.0)
        self.published.append(copy)
        return Manifest(version, f"{copy}")

    async def retire(self, manifest):
        await self._work(0.1)

    async def save(self, folder):
        seen = self.seen
        assert folder.name == str(len(seen)), "the state of another version"
        await self._work(7.0)
        self.saved[len(seen)] = seen

    async def load(self, folder):
        self.seen = self.saved[int(folder.name)]

    async def restart(self, folder):
        self.restarts += 1
        await asyncio.sleep(2.0)
        if self.restarts <= self.no_room:
            raise NoCapacity("no room")
        self.dead, self.seen = self.restarts <= self.no_room + self.dies_again, ()
        if folder:
            await self.load(folder)


async def train(inner, steps, every, **settings):
    """As the pipeline does: step; publish beside the next step; a checkpoint each `every` steps, beside it too."""
    def newest():
        return max(((v, Path(str(v))) for v in inner.saved), default=None)
    trainer = MendingTrainer(inner, newest, **settings)
    syncing = saving = None
    for version in range(steps):
        report = await trainer.step(TrainBatch(version, ()))
        assert report.version == version + 1
        if syncing:
            await trainer.retire(await syncing)
        syncing = asyncio.create_task(trainer.publish(version + 1))
        if every and (version + 1) % every == 0:
            if saving:
                await saving
            saving = asyncio.create_task(trainer.save(Path(str(version + 1))))
            await asyncio.sleep(0)
    await syncing
    if saving:
        await saving
    return trainer


@given(st.sets(st.integers(1, 40), max_size=6), st.integers(0, 3), st.integers(1, 8))
def test_wherever_it_dies_each_version_is_made_of_the_same_batches(dies, every, steps):
    inner = Fragile(dies)
    trainer = run_virtual(train(inner, steps, every, max_restarts=20))
    assert inner.seen == tuple(range(steps))
    assert list(dict.fromkeys(inner.published)) == [tuple(range(v)) for v in range(1, steps + 1)]
    assert inner.saved == {v: tuple(range(v)) for v in range(1, steps + 1) if every and v % every == 0}
    assert len(trainer.recoveries) <= len(dies)


def test_a_restart_without_room_is_tried_again_and_given_up_in_the_end():
    inner = Fragile({3}, no_room=2)
    assert len(run_virtual(train(inner, 4, 0)).recoveries) == 1
    assert inner.restarts == 3
    with pytest.raises(TrainerLost, match="given up after 4 restarts: no room"):
        run_virtual(train(Fragile({3}, no_room=99), 4, 0, max_restarts=4))


def test_one_that_dies_in_every_try_ends_the_run_with_its_reason():
    with pytest.raises(TrainerLost, match="given up after 3 restarts: dead"):
        run_virtual(train(Fragile({3}, dies_again=99), 4, 0, max_restarts=3))


def test_batches_that_are_not_kept_any_more_are_said():
    with pytest.raises(TrainerLost, match="batch of step 0 is not kept any more"):
        run_virtual(train(Fragile({9}), 9, 0, redo_batches=3))


def test_the_callers_deadline_holds_through_a_recovery():
    inner = Fragile({1})
    inner.restart = lambda folder: hang()

    async def play():
        async with asyncio.timeout(30):
            await train(inner, 1, 0)
    with pytest.raises(TimeoutError):
        run_virtual(play())
