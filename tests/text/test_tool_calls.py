"""Tests the parser of tool calls in the text of a turn."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunix_like.text.tool_calls import MOST_CALLS, ToolCall, tool_calls

ADD = '{"name": "add", "arguments": {"a": 1}}'
LLAMA = '{"name": "add", "parameters": {"a": 1}}'
CALL = ToolCall("add", {"a": 1})
TEXT = st.text().filter(lambda text: "<" not in text)  # a tag in an argument would be read as a tag
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
CALLS = st.lists(st.tuples(TEXT.filter(len), st.dictionaries(TEXT, VALUES, max_size=3)), min_size=1, max_size=4)


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("", []),
        ("The answer is 4.", []),
        (f"<tool_call>\n{ADD}\n</tool_call>", [CALL]),
        (f"I add.\n<tool_call>{ADD}</tool_call>\n<tool_call>\n{ADD}\n</tool_call>", [CALL, CALL]),
        (f"<tool_call>{ADD}", [CALL]),
        (f"<tool_call>{ADD}<tool_call>{ADD}</tool_call>", [CALL, CALL]),
        ('<tool_call>{"name": "now"}</tool_call>', [ToolCall("now", {})]),
        ('<tool_call>{"name": "now", "arguments": null}</tool_call>', [ToolCall("now", {})]),
        ('<tool_call>{"name": "now", "arguments": ""}</tool_call>', [ToolCall("now", {})]),
        ('{"name": "now", "parameters": ""}', [ToolCall("now", {})]),
        ('<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', [CALL]),
        (LLAMA, [CALL]),
        (f"  {LLAMA}\n", [CALL]),
        (f"<|python_tag|>{LLAMA}", [CALL]),
        (f"{LLAMA}; {LLAMA}\n{LLAMA}", [CALL] * 3),
        (ADD, [CALL]),
        (f"<think>I could <tool_call>{ADD}</tool_call></think>4", []),
        (f"<think>4</think><tool_call>{ADD}</tool_call>", [CALL]),
        (f"I could <tool_call>{{}}</tool_call>.</think>{LLAMA}", [CALL]),
        (f"<think>without end <tool_call>{ADD}</tool_call>", []),
        ('{"answer": 4}', []),
        ("{4}", []),
        ("{x | x > 0}", []),
        ("[1, 2]", []),
    ],
)
def test_calls_are_parsed(text, calls):
    assert tool_calls(text) == calls


@pytest.mark.parametrize(
    ("text", "errors"),
    [
        ("<tool_call>{add}</tool_call>", ["not valid JSON"]),
        (f"<tool_call>{{</tool_call><tool_call>{ADD}</tool_call>", ["not valid JSON", None]),
        ("<tool_call>[1]</tool_call>", ["not a JSON object"]),
        ('<tool_call>{"arguments": {}}</tool_call>', ['has no "name"']),
        ('<tool_call>{"name": 3}</tool_call>', ['has no "name"']),
        ('<tool_call>{"name": "add", "arguments": [1]}</tool_call>', ["arguments of the tool call are not"]),
        ('<tool_call>{"name": "add", "arguments": "a"}</tool_call>', ["arguments of the tool call are not"]),
        ('{"name": "add", "parameters": {"a": 1}', ["not valid JSON"]),
        (f"{LLAMA}; and so on", [None, "not valid JSON"]),
        ("<|python_tag|>print(4)", ["not a JSON object"]),
        ("<tool_call>" + "[" * 100_000, ["not valid JSON"]),
        ('<tool_call>{"name": "add", "arguments": {"a": ' + "9" * 5000 + "}}</tool_call>", ["not valid JSON"]),
    ],
)
def test_malformed_calls_are_reported(text, errors):
    calls = tool_calls(text)
    assert len(calls) == len(errors)
    for call, error in zip(calls, errors, strict=True):
        assert (call.error is None) if error is None else error in call.error


def test_many_calls():
    for text in (f"<tool_call>{ADD}</tool_call>" * 100, "\n".join([LLAMA] * 100)):
        calls = tool_calls(text)
        assert len(calls) == MOST_CALLS + 1 and "at most 32 tool calls" in calls[-1].error


PIECES = [
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    "<|python_tag|>",
    "{",
    "}",
    '"name"',
    ":",
    ";",
    ADD,
    LLAMA,
]


@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=5), max_size=12).map("".join))
def test_parser_never_raises(text):
    for call in tool_calls(text):
        assert isinstance(call.name, str) and isinstance(call.arguments, dict)
        assert call.error is None or call.error


@given(CALLS, st.booleans(), st.text(alphabet="ab .\n"))
def test_hermes_round_trip(calls, ascii_only, before):
    bodies = [json.dumps({"name": n, "arguments": a}, ensure_ascii=ascii_only) for n, a in calls]
    text = before + "\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)
    assert [(call.name, call.arguments) for call in tool_calls(text)] == calls


@given(CALLS, st.sampled_from(["; ", ";", "\n", "\n\n"]), st.sampled_from(["", "<|python_tag|>"]))
def test_llama_round_trip(calls, separator, tag):
    bodies = [json.dumps({"name": n, "parameters": a}) for n, a in calls]
    assert [(call.name, call.arguments) for call in tool_calls(tag + separator.join(bodies))] == calls
