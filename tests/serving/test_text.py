"""Tests incremental detokenization against the decoded whole text, and the separation of tool calls from content."""

from __future__ import annotations

import json

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from tunix_like.data import reverse_text
from tunix_like.environments.chat_messages import parsed_calls
from tunix_like.serving.answers import CompletionAnswer
from tunix_like.serving.batcher import NewTokens
from tunix_like.serving.requests import ParsedRequest, Settings
from tunix_like.serving.runner import Job, JobSampling
from tunix_like.serving.text import CallStream, TextStream


def byte_level():
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
        special_tokens=["<s>"],
    )  # fmt: skip
    backend.train_from_iterator(["the theme of the themes äöü 日本 the the"] * 3, trainer)
    return backend


def metaspace():
    """Returns a tokenizer whose decoder removes the space before the first word."""
    words = {word: index for index, word in enumerate(["<s>", "▁the", "▁a", "b", "▁", "c"])}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<s>"))
    backend.add_special_tokens(["<s>"])
    backend.decoder = tokenizers.decoders.Metaspace()
    return backend


BACKENDS = {"bytes": (byte_level(), 300), "metaspace": (metaspace(), 6)}


def grown(stream, tokens, cuts):
    """Adds tokens in parts. Returns the text, the number of tokens used, and the stop string."""
    ends = sorted({cut % (len(tokens) + 1) for cut in cuts} | {len(tokens)})
    text, used, start = "", 0, 0
    for end in ends:
        added = stream.add(tokens[start:end], last=end == len(tokens))
        text, used, start = text + added.text, used + added.used, end
        if added.stop is not None:
            return text, used, added.stop
    return text, used, None


@pytest.mark.parametrize("name", BACKENDS)
@given(data=st.data())
def test_text_of_parts_equals_the_decoded_whole_text(name, data):
    backend, size = BACKENDS[name]
    decode = lambda ids: backend.decode(list(ids), skip_special_tokens=True)  # noqa: E731
    tokens = data.draw(st.lists(st.integers(0, size - 1), max_size=30))
    if name == "bytes":  # the number of replacement characters depends on how bytes are grouped
        text = data.draw(st.text(max_size=30))
        tokens = backend.encode(text).ids
    cuts = data.draw(st.lists(st.integers(0, 30), max_size=8))
    assert grown(TextStream(decode), tokens, cuts) == (decode(tokens), len(tokens), None)


@given(text=st.text("abc", max_size=40), stops=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
       cuts=st.lists(st.integers(0, 40), max_size=8))  # fmt: skip
def test_stop_strings_are_found_wherever_the_parts_are_cut(text, stops, cuts):
    """Each letter is a token. The oracle adds the letters to the text one at a time."""
    tokens = list(map(ord, text))
    found = grown(TextStream(lambda ids: "".join(map(chr, ids)), stops), tokens, cuts)
    for length in range(1, len(text) + 1):
        hits = [(text[:length].find(stop), stop) for stop in stops if stop in text[:length]]
        if hits:
            start, stop = min(hits)
            assert found == (text[:start], length, stop)
            return
    assert found == (text, len(tokens), None)


CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "<tool"}}\n</tool_call>'
LLAMA = '{"name": "f", "parameters": {"a": 1}}'
ANSWERS = {
    "plain": ("just text < tool_call", 0),
    "call": (f"Wait.\n\n{CALL}", 1),
    "two": (f"{CALL}\n{CALL}", 2),
    "llama": ('{"name": "f", "parameters": {"a": 1}}', 1),
    "tag": ('<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}', 2),
    "text and tag": ('I add.\n<|python_tag|>{"name": "f", "parameters": {"a": 1}}', 1),
    "text and two calls after a tag": (f"Now: <|python_tag|>{LLAMA}; {LLAMA}\n", 2),
    "two tags": (f"<|python_tag|>{LLAMA} or <|python_tag|>{LLAMA}", 1),
    "tag and malformed": ('I add. <|python_tag|>{"name": ', 0),
    "tag and text": (f"I add. <|python_tag|>{LLAMA} and so on", 0),
    "beginning of a tag": ("I add <|python", 0),
    "thought, text and tag": (f"hm</think>So: <|python_tag|>{LLAMA}", 1),
    "tag in a thought": (f"I could <|python_tag|>{LLAMA}</think>\n\nNo.", 0),
    "text after a call": (f"Wait. {CALL}\nDone.", 1),
    "text around calls": (f"One {CALL} two\n\n{CALL}{CALL} three \n", 3),
    "text right after a call": (f"{CALL}Done", 1),
    "text that looks like JSON": ("{x} is a set", 0),
    "call with a tag in it": ("a " + CALL.replace('"<tool"', '"<|python_tag|>"'), 1),
    "tag before a call": (f"a <|python_tag|> b {CALL} c", 1),
    "json": ('{"answer": 4}', 0),
    "thought": (f"<think>\nI could {CALL}\n</think>\n\nNo.", 0),
    "thought and call": (f"<think>hm</think>\nSo: {CALL}", 1),
    "thought and llama": ('thinking</think>\n\n{"name": "f", "parameters": {}}', 1),
    "malformed": ('Wait <tool_call>{"name": f}</tool_call>', 0),
    "unfinished": ("Wait <tool_c", 0),
}


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_streamed_answer_equals_the_parsed_whole_answer(name, size):
    text, count = ANSWERS[name]
    content, calls = parsed_calls(text)
    assert len(calls) == count and (calls or content == text)
    assert all(isinstance(json.loads(call["function"]["arguments"]), dict) for call in calls)
    stream = CallStream()
    parts = [stream.add(text[start : start + size]) for start in range(0, len(text), size)]
    rest, streamed = stream.finish()
    assert "".join(parts) + rest == content
    assert [call["function"] for call in streamed] == [call["function"] for call in calls]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("text and tag", "I add."),
        ("text and two calls after a tag", "Now:"),
        ("thought, text and tag", "hm</think>So:"),
        ("text after a call", "Wait. \nDone."),
        ("text around calls", "One  two\n\n three"),
        ("text right after a call", "Done"),
    ],
)
def test_text_around_calls_is_the_content(name, content):
    assert parsed_calls(ANSWERS[name][0])[0] == content


def test_each_token_of_a_stream_is_decoded_once_for_its_logprob(monkeypatch):
    """Writing the events of a long completion takes as long as writing its whole answer."""
    request = ParsedRequest((Job([1], 1, JobSampling(100)),), stream=True, logprobs=True)
    answer = CompletionAnswer(request, Settings("letters", "1", 20, 128, 100), reverse_text.tokenizer())
    whole = CompletionAnswer(request, answer.settings, answer.tokenizer)
    decoded, token_text = [], answer.token_text
    monkeypatch.setattr(answer, "token_text", lambda token: decoded.append(token) or token_text(token))
    (choice,), (complete,) = answer.choices.values(), whole.choices.values()
    offsets, tokens = [], [4, 5, 6, 7, 8, 9, 4]
    for place, token in enumerate(tokens):
        text = choice.add(NewTokens(0, [token], [0.0], None))
        for found in answer.deltas(choice, text, slice(place, place + 1)):
            offsets += found["logprobs"]["text_offset"]
    complete.add(NewTokens(0, tokens, [0.0] * len(tokens), "length"))
    assert decoded == tokens and offsets == whole.choice(complete)["logprobs"]["text_offset"]
