import pytest
from pocket.lists import chunks, merge, rotate, runs, search


def test_chunks_cut_a_list():
    assert chunks([1, 2, 3, 4, 5], 2) == [[1, 2], [3, 4], [5]]
    assert chunks([], 3) == []
    assert chunks([1, 2], 1) == [[1], [2]]


def test_chunks_need_a_size():
    with pytest.raises(ValueError, match="at least 1"):
        chunks([1], 0)


def test_rotate_turns_left_and_right():
    assert rotate([1, 2, 3], 1) == [2, 3, 1]
    assert rotate([1, 2, 3], -1) == [3, 1, 2]
    assert rotate([1, 2, 3], 5) == [3, 1, 2]


def test_rotate_of_nothing():
    assert rotate([], 4) == []


def test_merge_keeps_the_order():
    assert merge([1, 4, 6], [2, 3, 7, 8]) == [1, 2, 3, 4, 6, 7, 8]
    assert merge([], [5]) == [5]


def test_merge_takes_the_left_one_first():
    assert [type(n) for n in merge([1, 2.0], [1.0, 2])] == [int, float, float, int]


@pytest.mark.parametrize("wanted", [1, 3, 5, 7, 9])
def test_search_finds(wanted):
    assert search([1, 3, 5, 7, 9], wanted) == (wanted - 1) // 2


def test_search_finds_nothing():
    assert search([1, 3, 5], 4) == -1
    assert search([], 1) == -1
    assert search([1, 3], 9) == -1


def test_runs_count_neighbours():
    assert runs("aabccca") == [["a", 2], ["b", 1], ["c", 3], ["a", 1]]
    assert runs([]) == []
