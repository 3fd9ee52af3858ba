"""Routing: domain to pool, stickiness, least load, fallback."""

from __future__ import annotations

from collections import Counter

import pytest

from rollart.control.routing import Routing
from rollart.core.types import TrajectoryId

ENGINES = [("a0", "compute"), ("a1", "compute"), ("b0", "bandwidth"), ("b1", "bandwidth")]
AFFINITY = {"math": "compute", "default": "bandwidth"}


def routing(full: int = 0, up: str = "a0 a1 b0 b1") -> Routing:
    r = Routing(ENGINES, AFFINITY, full)
    for engine in up.split():
        r.mark(engine, up=True)
    return r


def id(number: int) -> TrajectoryId:
    return TrajectoryId(number, 0)


def test_a_domain_goes_to_its_pool_and_others_to_the_default() -> None:
    r = routing()
    assert r.choose(id(0), "math") == "a0"
    assert r.choose(id(1), "game") == "b0"
    assert r.fallbacks == 0


def test_without_a_default_an_unbound_domain_may_go_anywhere() -> None:
    r = Routing(ENGINES, {"math": "compute"})
    for engine, _ in ENGINES:
        r.mark(engine, up=True)
    assert {r.choose(id(n), "game") for n in range(4)} == {"a0", "a1", "b0", "b1"}
    assert r.fallbacks == 0


def test_a_trajectory_stays_where_its_kv_is_although_others_are_idle() -> None:
    r = routing()
    homes = [r.choose(id(n), "math") for n in range(6)]
    for n in (1, 3, 5):
        r.forget(id(n))
    assert [r.choose(id(n), "math") for n in (0, 2, 4)] == [homes[0], homes[2], homes[4]]
    assert r.seats["a1"].load == 0


def test_a_new_trajectory_goes_to_the_least_loaded_engine_of_its_pool() -> None:
    r = routing()
    assert Counter(r.choose(id(n), "math") for n in range(10)) == {"a0": 5, "a1": 5}
    r.forget(id(0))
    assert r.choose(id(10), "math") == "a0"


def test_a_full_pool_falls_back_to_another_and_only_then_queues_in_its_own() -> None:
    r = routing(full=1)
    assert [r.choose(id(n), "math") for n in range(2)] == ["a0", "a1"]
    assert r.fallbacks == 0
    assert [r.choose(id(n), "math") for n in (2, 3)] == ["b0", "b1"]
    assert r.fallbacks == 2
    assert r.choose(id(4), "math") == "a0"  # everything is full: it queues at home
    assert r.fallbacks == 2


def test_a_pool_that_is_down_falls_back_and_is_used_again_when_it_is_up() -> None:
    r = routing(up="b0 b1")
    assert r.choose(id(0), "math") == "b0"
    assert r.fallbacks == 1
    r.mark("a1", up=True)
    assert r.choose(id(1), "math") == "a1"
    assert r.choose(id(0), "math") == "b0"  # its KV is there


def test_the_loss_of_an_engine_moves_its_trajectories_and_their_load() -> None:
    r = routing()
    assert r.choose(id(0), "math") == "a0"
    r.mark("a0", up=False)
    assert r.choose(id(0), "math") == "a1"
    assert (r.seats["a0"].load, r.seats["a1"].load) == (0, 1)


def test_no_engine_up_chooses_none_and_leaves_no_load() -> None:
    r = routing(up="")
    assert r.live == []
    assert r.choose(id(0), "math") is None
    assert all(seat.load == 0 for seat in r.seats.values())


def test_forget_is_repeatable_and_names_the_engine_once() -> None:
    r = routing()
    r.choose(id(0), "math")
    assert r.forget(id(0)) == "a0"
    assert r.forget(id(0)) is None
    assert r.seats["a0"].load == 0


def test_a_domain_bound_to_an_unknown_pool_is_refused_with_the_pools_there_are() -> None:
    with pytest.raises(ValueError, match=r"domain math is bound to pool 'gpu'; the pools are bandwidth, compute"):
        Routing(ENGINES, {"math": "gpu"})


def test_routing_without_engines_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one engine"):
        Routing([], {})
