"""Facts A1-A5, L3, L11: rewards to advantages."""

import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollart.algo.advantages import (
    Member,
    gae,
    gigpo,
    group_advantages,
    overlong_penalty,
    pass_at_k,
    returns,
    turns,
    whitened,
)
from rollart.algo.catalogue import function
from rollart.algo.settings import AlgoSettings
from rollart.core.errors import ConfigError


def near(expected):
    return pytest.approx(expected, abs=5e-4)


@pytest.mark.parametrize(("rewards", "expected"), [
    ([1, 0, 0, 0], [1.5, -0.5, -0.5, -0.5]),
    ([1, 0, 0, 1], [0.866, -0.866, -0.866, 0.866]),
    ([2, 4, 6], [-1, 0, 1]),
])
def test_a1_sample_standard_deviation(rewards, expected):
    assert group_advantages(rewards) == near(expected)


@pytest.mark.parametrize(("kind", "expected"), [
    ("grpo_population", [1.732, -0.577, -0.577, -0.577]),
    ("mean_only", [0.75, -0.25, -0.25, -0.25]),
    ("rloo", [1, -1 / 3, -1 / 3, -1 / 3]),
    ("maxrl", [3, -1, -1, -1]),
])
def test_a1_a2_other_group_advantages(kind, expected):
    assert group_advantages([1, 0, 0, 0], kind) == near(expected)


def test_a2_maxrl_refuses_negative_rewards_in_one_line():
    with pytest.raises(ConfigError, match=r"maxrl.*>= 0; got -1; set 'grpo'"):
        group_advantages([1, -1], "maxrl")


@pytest.mark.parametrize(("rewards", "expected"), [
    ([1, 0, 1], [0.577, -1.155, 0.577]),
    ([0, 1], [-0.707, 0.707]),
    ([1, 1, 0], [0.577, 0.577, -1.155]),
])
def test_a3_groups_of_unequal_size(rewards, expected):
    assert group_advantages(rewards) == near(expected)


def test_a4_equal_rewards_give_exactly_zero_where_the_formula_does_not():
    single = struct.unpack("f", struct.pack("f", 0.7))[0]
    assert group_advantages([single] * 7) == [0.0] * 7
    assert group_advantages([0.1 + 0.2] * 3, "mean_only") == [0.0] * 3
    assert group_advantages([5.0]) == [0.0]
    assert group_advantages([]) == []


def test_a5_a_lost_member_is_not_reward_zero():
    assert group_advantages([1, 0, None, 1]) == near([0.577, -1.155, 0, 0.577])
    assert group_advantages([None, None]) == [0.0, 0.0]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_reward_that_is_no_number_is_an_error_and_not_an_advantage(bad):
    with pytest.raises(ValueError, match="finite"):
        group_advantages([1.0, bad])


@given(st.lists(st.floats(-100, 100).map(lambda x: round(x, 3)), min_size=2, max_size=9), st.randoms())
def test_advantages_sum_to_zero_and_follow_their_member(rewards, chance):
    plain = group_advantages(rewards)
    assert math.fsum(plain) == pytest.approx(0, abs=1e-6 * len(rewards))
    order = list(range(len(rewards)))
    chance.shuffle(order)
    assert group_advantages([rewards[i] for i in order]) == [plain[i] for i in order]


def settings(**changes):
    return AlgoSettings(**changes)


def member(*turns, anchors=None):
    return Member(math.fsum(turns), tuple(turns), tuple(anchors or range(len(turns))))


def test_l3_generalised_advantages():
    assert gae([0, 0, 1], [0.5, 0.6, 0.7], 0.0, 1.0, 0.95) == pytest.approx([0.46575, 0.385, 0.3])
    assert gae([0, 0, 0], [0.5, 0.6, 0.7], 0.8, 1.0, 0.95) == pytest.approx([0.28525, 0.195, 0.1])
    assert gae([0, 1], [0.5, 0.7], 0.0, 1.0, 0.95) == pytest.approx([0.485, 0.3])  # observations between are skipped


def test_gae_with_lambda_one_is_return_minus_value_and_with_zero_the_one_step_error():
    rewards, values = [0.3, -1.0, 2.0], [0.1, 0.2, 0.3]
    whole = returns(rewards, 0.9)
    assert gae(rewards, values, 0.0, 0.9, 1.0) == pytest.approx([g - v for g, v in zip(whole, values, strict=True)])
    assert gae(rewards, values, 0.5, 0.9, 0.0) == pytest.approx([0.3 + 0.18 - 0.1, -1 + 0.27 - 0.2, 2 + 0.45 - 0.3])


def test_turn_returns_are_compared_at_the_same_turn():
    group = [member(0.0, 1.0), member(0.0, 0.0), member(1.0)]
    made = turns(group, settings(advantage="turns", turn_discount=0.5))
    first = group_advantages([0.5, 0.0, 1.0])
    assert made == [near((first[0], 0.7071)), near((first[1], -0.7071)), near((first[2],))]


def test_gigpo_adds_the_advantage_among_turns_that_answered_the_same_state():
    group = [member(0.0, 1.0, anchors="sa"), member(0.0, 0.0, anchors="sb"), member(0.0, 0.0, anchors="sa")]
    episode = group_advantages([1.0, 0.0, 0.0])
    made = gigpo(group, settings(advantage="gigpo", turn_discount=0.5, step_weight=2.0))
    start, at_a = group_advantages([0.5, 0.0, 0.0]), group_advantages([1.0, 0.0])
    assert made[0] == near((episode[0] + 2 * start[0], episode[0] + 2 * at_a[0]))
    assert made[1] == near((episode[1] + 2 * start[1], episode[1]))  # state b was met once: the episode's only
    assert made[2] == near((episode[2] + 2 * start[2], episode[2] + 2 * at_a[1]))


@pytest.mark.parametrize("kind", ["grpo", "turns", "gigpo"])
def test_equal_groups_and_lost_members_give_exactly_zero(kind):
    made = function("advantage", kind)([member(0.1, 0.7), member(0.1, 0.7), Member(None, (0.0,), (None,))],
                                       settings(advantage=kind))
    assert made == [(0.0, 0.0), (0.0, 0.0), (0.0,)]


def test_whitening_counts_a_trajectory_once_and_keeps_domains_apart():
    rows = [(1.0,), (3.0, 3.0, 3.0), (100.0,), (300.0,)]
    made = whitened(rows, ["a", "a", "b", "b"], settings(whiten="domain"))
    assert made == [near((-1.0,)), near((1.0, 1.0, 1.0)), near((-1.0,)), near((1.0,))]
    together = whitened(rows, ["a", "a", "b", "b"], settings(whiten="batch"))
    flat = [row[0] for row in together]
    assert sum(flat) == pytest.approx(0, abs=1e-9)
    assert sum(x * x for x in flat) / 4 == pytest.approx(1)
    assert whitened([(0.7,), (0.7,)], ["a", "a"], settings(whiten="batch")) == [(0.0,), (0.0,)]
    assert whitened([(), (1.0,)], ["a", "a"], settings(whiten="batch")) == [(), (0.0,)]


@pytest.mark.parametrize(("tokens", "expected"), [(0, 0), (16_384, 0), (18_432, -0.5), (20_480, -1), (30_000, -1)])
def test_l11_overlong_shaping(tokens, expected):
    assert overlong_penalty(tokens, 20_480, 4_096) == expected
    assert overlong_penalty(tokens, 0, 0) == 0


def test_l11_pass_at_k():
    assert pass_at_k(8, 2, 1) == 0.25
    assert pass_at_k(8, 2, 4) == pytest.approx(0.785714, abs=1e-6)
    assert (pass_at_k(8, 0, 8), pass_at_k(8, 8, 1)) == (0.0, 1.0)
