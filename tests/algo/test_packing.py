"""Packing: nothing lost, nothing over the limit, little wasted."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollart.algo.packing import pack

LENGTHS = st.lists(st.integers(1, 120), max_size=60)


@given(LENGTHS, st.integers(1, 100))
def test_every_sequence_is_in_one_bin_and_only_a_lone_one_passes_the_limit(lengths, limit):
    bins = pack(lengths, limit)
    assert sorted(i for members in bins for i in members) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in members) <= limit or len(members) == 1 for members in bins)


@given(LENGTHS, st.integers(100, 200))
def test_no_two_bins_could_be_one(lengths, limit):
    filled = sorted(sum(lengths[i] for i in members) for members in pack(lengths, limit))
    assert len(filled) < 2 or filled[0] + filled[1] > limit


def test_decreasing_order_fills_what_first_come_would_leave_open():
    assert pack([3, 3, 7, 7], 10) == [[0, 2], [1, 3]]
    assert pack([], 10) == []


def test_a_limit_below_one_is_an_error():
    with pytest.raises(ValueError, match="at least 1; got 0"):
        pack([1], 0)
