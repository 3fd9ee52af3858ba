"""Decorators attach, clusters dispatch."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

import rollart.distributed as rdist
from rollart.core.errors import ConfigError, EngineLost
from rollart.distributed.api import metadata, split


class Base(rdist.Worker):
    role = rdist.Role.ACTOR_GEN

    @rdist.register(mode="execute_all")
    @rdist.hw_mapping(hw_affinity={"swe": "H800"}, default="H20")
    async def everywhere(self, value):
        return self.spec["rank"], value

    @rdist.register(mode="execute_rank_zero")
    async def first(self):
        return self.spec["rank"]

    @rdist.register(mode="split")
    async def shares(self, items, factor):
        return [item * factor for item in items]

    async def plain(self):
        return 1


class Derived(Base):
    async def everywhere(self, value):
        return "derived"


class Torn(Derived):
    @rdist.hw_mapping(hw_affinity={"swe": "H20"})
    async def first(self):
        return 0


class Here:
    """A worker in this process as a handle."""

    def __init__(self, worker, fails=False):
        self.worker, self.fails, self.ended = worker, fails, 0

    async def call(self, method, *arguments):
        await asyncio.sleep(0)
        if self.fails:
            raise EngineLost("gone")
        result = await getattr(self.worker, method)(*arguments)
        self.ended += 1
        return result


def ranks(n, kind=Base):
    return rdist.Cluster(kind, [Here(kind({"rank": i})) for i in range(n)])


def test_each_mode_runs_where_it_says():
    async def play():
        cluster = ranks(3)
        assert await cluster.everywhere("x") == [(0, "x"), (1, "x"), (2, "x")]
        assert await cluster.first() == 0
        assert await cluster.shares([1, 2, 3, 4, 5], 10) == [10, 20, 30, 40, 50]
        assert await cluster.plain() == [1, 1, 1]
    asyncio.run(play())


def test_one_lost_rank_is_raised_after_the_others_have_ended():
    async def play():
        handles = [Here(Base({"rank": 0}), fails=True), Here(Base({"rank": 1}))]
        with pytest.raises(EngineLost):
            await rdist.Cluster(Base, handles).everywhere(1)
        assert handles[1].ended == 1
    asyncio.run(play())


@given(st.lists(st.integers()), st.integers(1, 9))
def test_a_split_keeps_order_and_everything_and_is_even(items, parts):
    made = split(items, parts)
    assert [item for part in made for item in part] == items
    assert len(made) == parts
    assert max(map(len, made)) - min(map(len, made)) <= 1


def test_metadata_is_inherited_and_a_contradiction_is_refused():
    assert metadata(Derived, "everywhere", "rollart_mode") == "execute_all"
    assert rdist.affinity(Derived) == {"default": "H20", "swe": "H800"}
    with pytest.raises(ConfigError, match="binds swe to"):
        rdist.affinity(Torn)
    assert Base({"rank": 7}).spec["rank"] == 7, "a decorated class is used as any other"


@pytest.mark.parametrize(("make", "words"), [
    (lambda: rdist.register(mode="somewhere"), "register needs a mode of execute_all"),
    (lambda: rdist.hw_mapping(hw_affinity={}), "at least one domain or default"),
    (lambda: rdist.hw_mapping(hw_affinity={"swe": ""}), "with the name of a pool"),
    (lambda: rdist.worker_class("rollart.workers:Nothing", rdist.Role.ACTOR_GEN), "must name a Worker class"),
    (lambda: rdist.worker_class("rollart.workers:LearnerWorker", rdist.Role.ACTOR_GEN), "of that role"),
    (lambda: rdist.worker_class("no_such_module:X", rdist.Role.ACTOR_GEN), "needs the module no_such_module"),
])
def test_what_cannot_be_is_refused_in_one_line(make, words):
    with pytest.raises(ConfigError, match=words):
        make()
