import pytest
from pocket.words import caesar, distance, parse_pairs, wrap


def test_wrap_fills_lines():
    assert wrap("a bc def g", 4) == ["a bc", "def", "g"]
    assert wrap("ab cd", 5) == ["ab cd"]
    assert wrap("  ", 5) == []


def test_wrap_leaves_a_long_word_whole():
    assert wrap("a longword b", 4) == ["a", "longword", "b"]


def test_caesar_goes_round():
    assert caesar("xyz", 3) == "abc"
    assert caesar("Abc", -1) == "Zab"


def test_caesar_leaves_the_rest():
    assert caesar("a-1 \u00e9", 1) == "b-1 \u00e9"


@pytest.mark.parametrize(("one", "other", "expected"), [
    ("", "", 0), ("a", "", 1), ("", "ab", 2), ("kitten", "sitting", 3), ("flaw", "lawn", 2), ("abc", "abc", 0)])
def test_distance(one, other, expected):
    assert distance(one, other) == expected


def test_parse_pairs_reads_values():
    assert parse_pairs("a=1, b = 2,a=3") == {"a": "3", "b": "2"}
    assert parse_pairs("x=y=z") == {"x": "y=z"}


def test_parse_pairs_reads_flags_and_separators():
    assert parse_pairs("quiet;n=4;;", ";") == {"quiet": True, "n": "4"}
