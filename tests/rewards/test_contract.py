import dataclasses
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollart.core.types import Message, Score
from rollart.rewards.contract import (
    LARGEST,
    BadScore,
    RewardRequest,
    checked,
    content_key,
    from_json,
    read_answers,
    to_json,
)
from rollart.rewards.handler import Handler
from rollart.rewards.mix import Mix

JSON = st.dictionaries(st.text(max_size=5), st.one_of(st.integers(), st.text(max_size=9), st.booleans(), st.none()))
REQUESTS = st.builds(
    RewardRequest, id=st.text(min_size=1), domain=st.text(), task=st.text(), payload=JSON, facts=JSON,
    messages=st.lists(st.builds(Message, st.sampled_from(["user", "assistant"]), st.text())).map(tuple),
    answer=st.text(), truncated=st.booleans(), deadline_seconds=st.floats(0, 1e6), key=st.text(min_size=1))


@given(REQUESTS)
def test_a_request_crosses_a_border_unchanged_and_its_key_is_of_its_content(request):
    there = json.dumps(to_json(request))
    assert from_json(json.loads(there)) == request
    later = dataclasses.replace(request, deadline_seconds=1.5, key="other")
    assert content_key(later) == content_key(request)
    assert content_key(dataclasses.replace(request, answer=request.answer + "x")) != content_key(request)


@pytest.mark.parametrize(("plain", "says"), [
    ([], "a JSON object; got list"), ({}, "version 1 of the reward contract; got None"),
    ({"version": 2, "id": "a"}, "got 2"), ({"version": 1, "domain": "d"}, "has no 'id'"),
    ({"version": 1, "id": "a", "domain": "d", "messages": 3}, "of the wrong form"),
    ({"version": 1, "id": "a", "domain": "d", "facts": 3}, "of the wrong form")])
def test_what_is_no_request_is_told(plain, says):
    with pytest.raises(ValueError, match=says):
        from_json(plain)


@pytest.mark.parametrize("body", [
    b"", b"<html>", b"[]", b"{}", b'{"score": null}', b'{"score": {"value": "1"}}', b'{"score": {"value": true}}',
    b'{"score": {"value": NaN}}', b'{"score": {"value": 1, "parts": {"a": Infinity}}}', b'{"version": 7, "score": {}}',
    b'{"score": {"value": 1, "parts": 3}}', b"[" * 100_000, b'{"score": ' + b"[" * 960 + b"]" * 960 + b"}",
    b'{"score": {"value": 1e300}}', b'{"score": {"value": 1%s}}' % (b"0" * 400),
    b'{"score": {"value": 1, "parts": {"a": 1e31}}}'])
def test_garbage_is_never_a_score(body):
    with pytest.raises(BadScore):
        read_answers(body, 1, batch=False)


@pytest.mark.parametrize(("score", "says"), [
    (Score(1e300), r"value must be a finite number; got 1e\+300"), (Score(10**400), "value must be a finite number"),
    (Score(True), "value must be"), (Score(0.0, parts={"a": -1e31}), "a must be a finite number"),
    (Score(0.0, parts={("a", 1): 1.0}), "parts must be numbers by name"),
    (Score(0.0, parts=3), "parts must be numbers")])
def test_a_number_that_cannot_be_trained_on_or_stored_is_no_score(score, says):
    with pytest.raises(BadScore, match=says):
        checked(score)


def test_the_largest_score_is_one_and_its_texts_can_be_stored():
    score = checked(Score(LARGEST, True, {"half \ud83d": -LARGEST}, "why \udc00"))
    assert score == Score(1e30, True, {"half ?": -1e30}, "why ?")


def test_the_handler_refuses_a_request_that_is_nested_too_deeply():
    for body in (b"[" * 100_000, json.dumps({"version": 1, "facts": json.loads("[" * 500 + "]" * 500)}).encode()):
        status, answer = Handler(["reward_functions:fine"]).respond(body)
        assert (status, json.loads(answer)["error"]["kind"]) == (400, "bad_request")


def test_a_function_written_elsewhere_needs_to_answer_the_value_only():
    (answer,) = read_answers(b'{"score": {"value": 0.25}}', 1, batch=False)
    assert answer.score == Score(0.25)


def answered(handler, request):
    status, body = handler.respond(json.dumps(to_json(request)).encode())
    return status, json.loads(body)


def test_the_handler_tells_every_kind_of_failure_by_status_and_kind():
    request = RewardRequest(id="a", domain="d", key="k")
    for function, status, kind in [("raises", 500, "raised"), ("later", 503, "unavailable"),
                                   ("never", 422, "unscorable"), ("nan", 422, "bad_score"),
                                   ("nothing", 422, "bad_score")]:
        got, answer = answered(Handler([f"reward_functions:{function}"]), request)
        assert (got, answer["error"]["kind"], answer["key"]) == (status, kind, "k")
    status, body = Handler(["reward_functions:fine"]).respond(b"{")
    assert status == 400
    assert "not JSON" in json.loads(body)["error"]["message"]


def test_the_handler_scores_by_domain_and_only_the_first_request_is_cold():
    handler = Handler(["a=reward_functions:fine", "b=reward_functions:raises"])
    request = RewardRequest(id="1", domain="a", answer="yes")
    first, second = (answered(handler, dataclasses.replace(request, key=key)) for key in "xy")
    assert (first[1]["instance"]["cold"], second[1]["instance"]["cold"]) == (True, False)
    assert answered(handler, dataclasses.replace(request, domain="b", key="z"))[0] == 500
    assert answered(handler, dataclasses.replace(request, domain="c", key="z"))[0] == 400


@pytest.mark.parametrize("event", [
    {"body": "REQUEST", "isBase64Encoded": False}, {"body": "QkFTRTY0", "isBase64Encoded": True}, "direct", "bytes"])
def test_a_clouds_event_is_answered_as_its_request_would_be(event):
    import base64

    handler, request = Handler(["reward_functions:fine"]), RewardRequest(id="1", domain="a", answer="yes", key="k")
    text = json.dumps(to_json(request))
    if event == "direct":
        answer = handler.event(json.loads(text))
    elif event == "bytes":
        answer = handler.event(text.encode())
    else:
        body = base64.b64encode(text.encode()).decode() if event["isBase64Encoded"] else text
        out = handler.event({**event, "body": body})
        assert out["statusCode"] == 200
        answer = json.loads(out["body"])
    assert answer["score"] == {"value": 0.3, "success": True, "parts": {"length": 3.0}, "reason": "counted"}


def good(request):
    return Score(1.0, True, reason="good")


def half(request):
    return Score(0.5, False)


def test_a_mix_weighs_its_parts_and_names_them():
    request = RewardRequest(id="1", domain="d")
    mixed = Mix({"rule": (0.8, good), "judge": (0.2, half)}, success="rule")(request)
    assert mixed == Score(pytest.approx(0.9), True, {"rule": 1.0, "judge": 0.5}, "rule: good")
    assert not Mix({"rule": (0.8, good), "judge": (0.2, half)})(request).success


def test_a_part_without_a_score_leaves_the_mix_without_one():
    def broken(request):
        return Score(math.nan)

    with pytest.raises(BadScore):
        Mix({"rule": (0.8, good), "judge": (0.2, broken)})(RewardRequest(id="1", domain="d"))
    with pytest.raises(ValueError, match="success names a part"):
        Mix({"rule": (1.0, good)}, success="rules")
