"""Placement: a pure function of needs and nodes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollart.core.errors import ConfigError
from rollart.distributed import Need, Node, ResourceManager, Role, place, render_plan

POOLS = {"H800": True, "H20": True, "CPU": False}
nodes = st.lists(st.tuples(st.sampled_from(sorted(POOLS)), st.integers(0, 8)), max_size=8).map(
    lambda rows: [Node(f"n{i}", pool, units, POOLS[pool]) for i, (pool, units) in enumerate(rows)])
wants = st.lists(st.tuples(st.sampled_from(["", *sorted(POOLS)]), st.integers(1, 8)), max_size=10).map(
    lambda rows: [Need(f"e{i}", Role.ACTOR_GEN, pool, units) for i, (pool, units) in enumerate(rows)])


def try_place(needs, inventory):
    try:
        return place(needs, inventory)
    except ConfigError:
        return None


@given(wants, nodes)
def test_no_node_holds_more_than_it_has_and_every_need_has_one_place(needs, inventory):
    placed = try_place(needs, inventory)
    if placed is not None:
        assert [item.need for item in placed] == needs
        for node in inventory:
            assert sum(item.need.units for item in placed if item.node == node) <= node.units


@given(wants, nodes)
def test_a_need_leaves_its_pool_only_when_no_node_there_has_room_and_keeps_its_kind(needs, inventory):
    placed = try_place(needs, inventory) or ()
    free = {node.id: node.units for node in inventory}
    for item in placed:
        own = [node for node in inventory if node.pool == item.need.pool and free[node.id] >= item.need.units]
        assert item.fallback == bool(item.need.pool and not own)
        if item.need.pool:
            assert item.node.accelerated == POOLS[item.need.pool]
            assert not own or item.node.pool == item.need.pool
        free[item.node.id] -= item.need.units


@given(wants, nodes, st.randoms())
def test_the_plan_depends_on_the_inventory_and_not_on_its_order(needs, inventory, chance):
    shuffled = list(inventory)
    chance.shuffle(shuffled)
    assert try_place(needs, inventory) == try_place(needs, shuffled)


@given(wants, nodes)
def test_what_is_refused_fits_nowhere_after_what_was_placed_before(needs, inventory):
    manager = ResourceManager(inventory)
    for need in needs:
        try:
            manager.take(need)
        except ConfigError:
            known = {node.pool for node in inventory}
            assert (need.pool and need.pool not in known) or all(
                manager.free[node.id] < need.units for node in inventory
                if not need.pool or node.accelerated == POOLS[need.pool])


def test_environments_spread_over_the_plain_hosts_and_take_no_units():
    inventory = [Node("a", "H800", 8), Node("c", "CPU", 4, False), Node("b", "CPU", 4, False)]
    environments = Need("environments", Role.ENVIRONMENT, spread=True)
    assert [item.node.id for item in place([environments], inventory)] == ["b", "c"]
    assert [item.node.id for item in place([environments], inventory[:1])] == ["a"], "no plain host: any node"


def test_a_pool_without_nodes_is_named_with_those_that_there_are():
    with pytest.raises(ConfigError, match=r"pool 'H900' has no nodes in this cluster; there are: H800 \(1 nodes\)"):
        place([Need("learner", Role.ACTOR_TRAIN, "H900")], [Node("a", "H800", 8)])


def test_the_printed_plan_says_who_where_with_how_much_and_why_elsewhere():
    inventory = [Node("a", "H800", 8), Node("b", "H20", 1)]
    needs = [Need("decode-0", Role.ACTOR_GEN, "H20"), Need("decode-1", Role.ACTOR_GEN, "H20")]
    first, second = render_plan(place(needs, inventory), {"decode-0": ["guess"]})
    assert first.split() == ["ActorGen", "decode-0", "H20", "b", "1", "of", "1", "units", "domains", "guess"]
    assert "H800" in second
    assert "(fallback: H20 is full)" in second
