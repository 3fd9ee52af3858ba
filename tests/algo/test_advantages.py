"""Facts A1-A5: rewards of a group to advantages."""

import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollart.algo.advantages import group_advantages
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


@pytest.mark.parametrize(("normalisation", "expected"), [
    ("population_std", [1.732, -0.577, -0.577, -0.577]),
    ("mean_only", [0.75, -0.25, -0.25, -0.25]),
    ("leave_one_out", [1, -1 / 3, -1 / 3, -1 / 3]),
    ("mean_ratio", [3, -1, -1, -1]),
])
def test_a1_a2_other_normalisations(normalisation, expected):
    assert group_advantages([1, 0, 0, 0], normalisation=normalisation) == near(expected)


def test_a2_mean_ratio_refuses_negative_rewards_in_one_line():
    with pytest.raises(ConfigError, match=r"mean_ratio.*>= 0; got -1; set 'sample_std'"):
        group_advantages([1, -1], normalisation="mean_ratio")


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
    assert group_advantages([0.1 + 0.2] * 3, normalisation="mean_only") == [0.0] * 3
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
