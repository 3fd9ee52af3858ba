"""JSON that someone else wrote: whatever it holds, it is a value that can be stored again, or a ValueError."""

from __future__ import annotations

import json
import pickle

import pytest

from rollart.core import foreign
from rollart.core.foreign import DEPTH, encodable, read_json


def nested(levels: int) -> str:
    return "[" * levels + "]" * levels


@pytest.mark.parametrize("levels", [DEPTH + 1, 960, 990, 100_000])
@pytest.mark.parametrize("form", ["%s", '{"facts": %s}', '[1, {"a": [%s]}]'])
def test_what_is_nested_too_deeply_is_refused_however_deep(levels: int, form: str) -> None:
    with pytest.raises(ValueError, match="nested more than 100 levels"):
        read_json((form % nested(levels)).encode())


@pytest.mark.parametrize("body", [nested(DEPTH), '{"a": [1, 2.5, null, true, "x"]}', "7", '"\\ud83d\\ude42 \\u00e9"'])
def test_what_can_be_handed_on_is_as_it_was(body: str) -> None:
    value = read_json(body)
    assert value == read_json(body.encode()) == json.loads(body)
    assert pickle.loads(pickle.dumps(value)) == json.loads(json.dumps(value)) == value


@pytest.mark.parametrize("body", [b"", b"<html>", b"[1", b"\xff", b"1" * 5000])
def test_what_is_no_json_is_a_value_error(body: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        read_json(body)


def test_halves_of_surrogate_pairs_are_replaced_wherever_they_are() -> None:
    assert read_json(b'{"a\\ud83d": ["\\uDE42", {"b": "x\\ud800y"}]}') == {"a?": ["?", {"b": "x?y"}]}
    assert encodable("half \ud83d pair") == "half ? pair"


def test_a_body_above_the_limit_is_refused_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign, "MOST_BYTES", 10)
    with pytest.raises(ValueError, match="it has 12 bytes, above 10"):
        read_json(b'{"abcde": 1}')
