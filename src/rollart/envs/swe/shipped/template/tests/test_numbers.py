import pytest
from pocket.numbers import clock, digits, factors, median, roman, union


@pytest.mark.parametrize(("number", "text"), [(1, "I"), (4, "IV"), (9, "IX"), (1994, "MCMXCIV"), (3999, "MMMCMXCIX")])
def test_roman(number, text):
    assert roman(number) == text


@pytest.mark.parametrize("number", [0, 4000])
def test_roman_has_bounds(number):
    with pytest.raises(ValueError, match="only 1 to 3999"):
        roman(number)


def test_digits_in_any_base():
    assert digits(0, 2) == [0]
    assert digits(10, 2) == [1, 0, 1, 0]
    assert digits(16, 16) == [1, 0]


def test_digits_need_a_base():
    with pytest.raises(ValueError, match="at least 2"):
        digits(3, 1)


@pytest.mark.parametrize(("number", "expected"), [(1, []), (7, [7]), (12, [2, 2, 3]), (49, [7, 7]), (97, [97])])
def test_factors(number, expected):
    assert factors(number) == expected


def test_median_of_odd_and_even():
    assert median([3, 1, 2]) == 2
    assert median([4, 1, 3, 2]) == 2.5


def test_median_of_nothing():
    with pytest.raises(ValueError, match="no numbers"):
        median([])


def test_union_joins():
    assert union([(5, 6), (1, 3), (2, 4)]) == [(1, 4), (5, 6)]
    assert union([(1, 9), (2, 3), (9, 10)]) == [(1, 10)]
    assert union([]) == []


@pytest.mark.parametrize(("seconds", "text"), [
    (0, "0:00:00"), (59, "0:00:59"), (600, "0:10:00"), (3661, "1:01:01"), (-70, "-0:01:10")])
def test_clock(seconds, text):
    assert clock(seconds) == text
