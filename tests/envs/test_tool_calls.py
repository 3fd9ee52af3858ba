"""Tool calls: each format gives back what it was given, and translates into the others."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollart.envs.tool_calls import ToolCall, parse, render, translate

FORMATS = ["tags", "hermes", "llama"]
CALLS = st.builds(ToolCall, st.sampled_from(["calc", "web_search", "f2"]),
                  st.dictionaries(st.text(min_size=1, max_size=5), st.text() | st.integers() | st.none(), max_size=3))


@pytest.mark.parametrize("format", FORMATS)
@given(call=CALLS)
def test_what_is_rendered_parses(format, call):
    text = render(call, format)
    if "</" not in str(call.arguments):  # a closing tag inside an argument ends the call early
        assert parse(text, format) == [call]


@pytest.mark.parametrize("source", FORMATS)
@pytest.mark.parametrize("target", FORMATS)
def test_translation_keeps_the_text_around_and_the_order(source, target):
    calls = [ToolCall("calc", {"expression": "2*3"}), ToolCall("look", {"input": "here"})]
    text = "\n".join(["First this.", render(calls[0], source), "Then that:", render(calls[1], source)])
    there = translate(text, source, target)
    assert parse(there, target) == calls
    assert there.startswith("First this.\n")
    assert "\nThen that:\n" in there


def test_the_formats_as_models_write_them():
    assert parse('<tool_call>\n{"name": "calc", "arguments": {"e": 1}}\n</tool_call>', "hermes") == [
        ToolCall("calc", {"e": 1})]
    assert parse('<|python_tag|>{"name": "calc", "parameters": {"e": 1}}', "llama") == [ToolCall("calc", {"e": 1})]
    assert parse("<think>hm <b></think><calc>2*3</calc>", "tags") == [ToolCall("calc", {"input": "2*3"})]
    assert translate('<tool_call>{"name": "calc", "arguments": {"input": "2*3"}}</tool_call>', "hermes", "tags") == (
        "<calc>2*3</calc>")


@pytest.mark.parametrize("broken", ["<tool_call>{</tool_call>", '<tool_call>{"arguments": {}}</tool_call>',
                                    '<tool_call>{"name": "f", "arguments": 3}</tool_call>', "no call"])
def test_what_is_no_call_stays_text(broken):
    assert parse(broken, "hermes") == []
    assert translate(broken, "hermes", "tags") == broken


@pytest.mark.parametrize("unit", ["<tool_call>", '<tool_call>{"name": ', "<a>", "<a><b>", "{", '{"', '{"\\"', "{} "])
@pytest.mark.parametrize("source", FORMATS)
def test_what_a_collapsed_policy_repeats_300_000_characters_long_costs_no_more_than_its_length(source, unit):
    """Work that grew with the square of these lengths would take minutes: it runs on the control plane's loop."""
    text = unit * (300_000 // len(unit))
    target = "hermes" if source == "tags" else "tags"
    call = render(ToolCall("calc", {"input": "2*3"}), source)
    assert translate(text, source, target) == text
    assert translate(call + "\n" + text, source, target) == (
        render(ToolCall("calc", {"input": "2*3"}), target) + "\n" + text)


def test_the_next_closing_tag_ends_a_call_and_nothing_in_it_is_another():
    assert parse("<b><a>1</a><a><a>2</a></a><c>3</c>", "tags") == [
        ToolCall("a", {"input": "1"}), ToolCall("a", {"input": "<a>2"}), ToolCall("c", {"input": "3"})]
    assert parse("<a><b>1</b></a>", "tags") == [ToolCall("a", {"input": "<b>1</b>"})]


def test_llama_calls_may_share_a_line_and_braces_in_strings_or_prose_do_not_count():
    text = ('the set {1, 2} of <|python_tag|>{"name": "f", "parameters": {"a": "}{\\""}}; {"name": "g"} \n\n'
            '{"name": "h"} is said, not called')
    assert parse(text, "llama") == [ToolCall("f", {"a": '}{"'}), ToolCall("g")]
    assert translate(text, "llama", "tags") == (
        'the set {1, 2} of <f>{"a": "}{\\""}</f>; <g>{}</g> \n\n{"name": "h"} is said, not called')
