"""Tests `/v1/responses` and `/v1/messages` with the clients of OpenAI and Anthropic."""

from __future__ import annotations

import itertools
import json
import re

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.serving import served
from tests.serving.conversations import OPENED, THOUGHT_AND_CALL, template
from tests.serving.served import NAME
from tunix_like.environments import messages_api, responses_api
from tunix_like.environments.chat_messages import parsed_calls
from tunix_like.environments.messages_api import MessagesReply
from tunix_like.environments.responses_api import ResponsesReply
from tunix_like.environments.wire import THINK, Thoughts, Usage, sealed, unsealed
from tunix_like.serving import app, requests
from tunix_like.serving.text import CallStream

anthropic = pytest.importorskip("anthropic")
openai = pytest.importorskip("openai")
httpx2 = pytest.importorskip("httpx2")  # what both send requests with

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
CHAT_TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": SCHEMA}}
TOOL = {"type": "function", "name": "add", "description": "Adds.", "parameters": SCHEMA, "strict": False}
CUSTOM = {"name": "add", "description": "Adds.", "input_schema": SCHEMA}
BRIEF, QUESTION = "Be brief.", "2 + 3? <|im_end|>"


class Served:
    """A server with a model that always gives the same answer, the clients, and the prompts of their requests."""

    def __init__(self, url, server, tokenizer, words):
        self.url, self.server, self.tokenizer = url, server, tokenizer
        self.answer = [tokenizer.encode(word, add_special_tokens=False)[0] for word in words] + [tokenizer.eos_ids[0]]
        self.bodies: list[bytes] = []
        hooks = {"request": [lambda request: self.bodies.append(request.read())]}
        http, http2 = httpx.Client(event_hooks=hooks, timeout=60), httpx2.Client(event_hooks=hooks, timeout=60)
        self.openai = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=http)
        self.anthropic = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, http_client=http2)

    def prompts(self, parse):
        return [list(parse(b, self.server.settings, self.tokenizer).jobs[0].prompt) for b in self.bodies]

    def chat(self, messages, tools=(CHAT_TOOL,)):
        """Returns the prompt of the chat completions route, the oracle."""
        body = json.dumps({"messages": messages, "tools": [*tools]}).encode()
        return list(requests.chat_request(body, self.server.settings, self.tokenizer).jobs[0].prompt)

    def post(self, path, body, **more):
        return httpx.post(f"{self.url}{path}", json=body, timeout=60, **more)


@pytest.fixture(scope="module", params=[False, True], ids=["thought", "opened"])
def thinking(request):
    words = OPENED if request.param else THOUGHT_AND_CALL
    weights, tokenizer = served.speaker(words, template(request.param))
    with served.running(weights, tokenizer, longest=2000, max_tokens=40) as (url, server):
        yield url, server, tokenizer, words


@pytest.fixture
def model(thinking, monkeypatch):
    monkeypatch.setattr("tunix_like.serving.batcher.MOST_STEPS", 1)  # an event per token
    return Served(*thinking)


SYSTEM = {"role": "system", "content": BRIEF}
USER = {"role": "user", "content": QUESTION}


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_loop_of_responses_keeps_the_sampled_tokens(model, stream):
    given = {"model": NAME, "instructions": BRIEF, "tools": [TOOL], "temperature": 0, "store": False}
    history = [USER]
    for _ in range(3):
        if stream:
            with model.openai.responses.stream(input=history, **given) as events:
                kinds = [event.type for event in events]
                answer = events.get_final_response()
            assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.completed"
            assert kinds.count("response.output_item.done") == 3 and "response.reasoning_text.delta" in kinds
        else:
            answer = model.openai.responses.create(input=history, **given)
        reasoning, _, call = answer.output
        assert reasoning.content[0].text == "hm" and answer.output_text == "Let me add."
        assert call.name == "add" and json.loads(call.arguments) == {"a": 2, "b": 3} and answer.status == "completed"
        assert answer.usage.output_tokens == len(model.answer)
        history += [*answer.output, {"type": "function_call_output", "call_id": call.call_id, "output": "5"}]
    prompts = model.prompts(requests.responses_request)
    assert prompts[0] == model.chat([SYSTEM, USER]) and answer.usage.input_tokens == len(prompts[2])
    for before, after in itertools.pairwise(prompts):
        assert after[: len(before) + len(model.answer)] == before + model.answer


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_loop_of_messages_keeps_the_sampled_tokens(model, stream):
    given = {"model": NAME, "system": BRIEF, "tools": [CUSTOM], "extra_body": {"temperature": 0}, "max_tokens": 40}
    history = [USER]
    for _ in range(3):
        if stream:
            with model.anthropic.messages.stream(messages=history, **given) as events:
                kinds = [event.type for event in events]
                answer = events.get_final_message()
            assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
            assert kinds.count("content_block_stop") == 3
        else:
            answer = model.anthropic.messages.create(messages=history, **given)
        thinking, text, call = answer.content
        assert thinking.thinking == "hm" and text.text == "Let me add." and answer.stop_reason == "tool_use"
        assert call.name == "add" and call.input == {"a": 2, "b": 3}
        assert answer.usage.output_tokens == len(model.answer)
        result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "5"}]}
        history += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    prompts = model.prompts(requests.messages_request)
    assert prompts[0] == model.chat([SYSTEM, USER])
    assert answer.usage.input_tokens + answer.usage.cache_read_input_tokens == len(prompts[2])
    for before, after in itertools.pairwise(prompts):
        assert after[: len(before) + len(model.answer)] == before + model.answer
    count = model.anthropic.messages.count_tokens(
        model=NAME, messages=history[:-2], system=BRIEF, tools=[CUSTOM], tool_choice={"type": "auto"}
    )
    assert count.input_tokens == len(prompts[2])


def test_histories_are_those_of_chat_completions(model):
    """Instructions, several system messages, parts, results of several calls, and text beside them."""
    calls = [
        {"id": f"c{n}", "type": "function", "function": {"name": "add", "arguments": json.dumps({"a": n})}}
        for n in range(2)
    ]
    chat = [
        {"role": "system", "content": "One.\n\nTwo."},
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "so", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c0", "content": "5"},
        {"role": "tool", "tool_call_id": "c1", "content": ""},
        {"role": "user", "content": "next"},
        {"role": "assistant", "content": "x"},
        {"role": "assistant", "content": "y"},
        {"role": "user", "content": "z"},
    ]
    text = lambda kind, value: {"type": kind, "text": value}  # noqa: E731
    items = [
        {"role": "developer", "content": "Two."},
        {"type": "message", "role": "user", "content": [text("input_text", "a"), text("input_text", "b")]},
        {"role": "assistant", "content": [text("output_text", "so") | {"annotations": []}], "type": "message"},
        *({"type": "function_call", "call_id": c["id"], **c["function"]} for c in calls),
        {"type": "function_call_output", "call_id": "c0", "output": [text("input_text", "5")]},
        {"type": "function_call_output", "call_id": "c1", "output": ""},
        {"role": "user", "content": "next"},
        {"role": "assistant", "content": "x"},
        {"role": "user", "content": "z"},
    ]
    body = {"instructions": "One.", "input": items, "tools": [TOOL]}
    blocks = [
        {"role": "user", "content": [text("text", "a") | {"cache_control": {"type": "ephemeral"}}, text("text", "b")]},
        {"role": "assistant", "content": [
            text("text", "so"),
            *({"type": "tool_use", "id": f"c{n}", "name": "add", "input": {"a": n}} for n in range(2))
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "c0", "content": "5"}, {"type": "tool_result", "tool_use_id": "c1"},
            text("text", "next"),
        ]},
        *chat[6:],
    ]  # fmt: skip
    other = {"system": [text("text", "One.\n\n"), text("text", "Two.")], "messages": blocks, "tools": [CUSTOM]}
    of = (model.server.settings, model.tokenizer)
    assert list(requests.messages_request(json.dumps(other | {"max_tokens": 1}).encode(), *of).jobs[0].prompt) == (
        model.chat(chat)
    )
    one = [*chat[:6], {"role": "assistant", "content": "x"}, chat[-1]]
    assert list(requests.responses_request(json.dumps(body).encode(), *of).jobs[0].prompt) == model.chat(one)


_PIECES = st.sampled_from(
    ["<think>", "</think>", "<tool_call>", "</tool_call>", '{"name": "f", "arguments": {"a": "é"}}', "\n", " ", "a",
     "{", "<", "</", "think>", "é"]
)  # fmt: skip


@settings(deadline=None)
@given(text=st.lists(_PIECES, max_size=12).map("".join), sizes=st.lists(st.integers(1, 9), min_size=40), data=st.data())
def test_an_answer_comes_back_as_the_message_of_chat_completions(text, sizes, data):
    """Any text in any parts. The whole answer is that of the stream, and no mark is shown."""
    opened = data.draw(st.booleans())
    content, calls = parsed_calls(text)
    cuts = [sum(sizes[:n]) for n in range(len(sizes))]
    parts = [text[a:b] for a, b in zip(cuts, [*cuts[1:], None], strict=True)]
    for made in (MessagesReply("m", opened), ResponsesReply("m", opened, {})):
        stream, events = CallStream(), [*made.begin(Usage(3))]
        for part in parts:
            events += made.add(stream.add(part))
        rest, _ = stream.finish()
        events += made.finish(rest, calls, "stop", None, Usage(3, 2))
        body = json.loads(json.dumps(made.body))
        user = {"role": "user", "content": "q"}
        if isinstance(made, MessagesReply):
            (_, back) = messages_api.messages_of([user, {"role": "assistant", "content": body["content"]}], None)
            shown = "".join(e["delta"].get("text", "") for e in events if e["type"] == "content_block_delta")
            assert shown == "".join(block["text"] for block in body["content"] if block["type"] == "text")
        else:
            (_, back) = responses_api.messages_of([user, *body["output"]], None)
            assert [event["sequence_number"] for event in events] == [*range(len(events))]
            shown = "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta")
            assert shown == "".join(i["content"][0]["text"] for i in body["output"] if i["type"] == "message")
        assert back["content"] == content
        if content:
            one = Thoughts(opened).add(content, last=True)
            thought = "".join(part for kind, part in one if kind == "thought")
            deltas = [event["delta"] for event in events if event["type"] == "response.reasoning_text.delta"]
            deltas += [e["delta"].get("thinking", "") for e in events if e["type"] == "content_block_delta"]
            assert "".join(deltas) == thought
        found = [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in back.get("tool_calls", [])]
        assert found == [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in calls]
        if content.lstrip().startswith(THINK) and content.count("</think>") == 1:
            assert "</think>" not in shown


@pytest.mark.parametrize("content", ["<think>\na </thi\n</think>\n\nx </think> y", "<think>never ends </th", "<thin"])
def test_a_mark_may_come_in_pieces(content):
    def split(pieces):
        thoughts = Thoughts(False)
        found = [part for i, piece in enumerate(pieces) for part in thoughts.add(piece, i + 1 == len(pieces))]
        groups = itertools.groupby(found, key=lambda part: part[0])
        return [(kind, "".join(text for _, text in group)) for kind, group in groups]

    assert split(list(content)) == split([content])


def test_thoughts_of_other_servers():
    assert unsealed("EqQBCg==", "hm") == unsealed("tunix-like:?", "hm") == "<think>\nhm\n</think>\n\n"
    assert unsealed(sealed("<think>x \ud800"), "") == "<think>x \ud800"


def test_limits_stops_and_tools_that_are_off(model):
    ask = {"model": NAME, "messages": [USER], "extra_body": {"temperature": 0}}
    cut = model.anthropic.messages.create(max_tokens=3, **ask)
    assert cut.stop_reason == "max_tokens" and [each.type for each in cut.content] == ["thinking", "text"]
    stop = model.anthropic.messages.create(max_tokens=40, stop_sequences=["me", "zz"], **ask)
    assert (stop.stop_reason, stop.stop_sequence, stop.content[-1].text) == ("stop_sequence", "me", "Let ")
    none = model.anthropic.messages.create(max_tokens=40, tools=[CUSTOM], tool_choice={"type": "none"}, **ask)
    assert none.stop_reason == "end_turn" and "<tool_call>" in none.content[-1].text
    assert model.prompts(requests.messages_request)[2] == model.chat([USER], ())
    model.bodies.clear()
    short = model.openai.responses.create(model=NAME, input=QUESTION, max_output_tokens=3, temperature=0)
    assert short.status == "incomplete" and short.incomplete_details.reason == "max_output_tokens"
    assert (short.output_text, short.temperature, short.max_output_tokens) == ("Let me add.", 0, 3)
    free = model.openai.responses.create(model=NAME, input=QUESTION, tools=[TOOL], tool_choice="none", temperature=0)
    assert "<tool_call>" in free.output_text
    assert model.prompts(requests.responses_request)[1] == model.chat([USER], ())


def test_harmless_fields_are_accepted(model):
    model.anthropic.messages.create(
        model=NAME, messages=[USER], max_tokens=3, metadata={"user_id": "u"}, service_tier="auto",
        extra_body={"seed": 3, "top_k": 5, "top_p": 0.9, "thinking": {"type": "enabled", "budget_tokens": 1024}},
    )  # fmt: skip
    model.openai.responses.create(
        model=NAME, input=QUESTION, metadata={"a": "b"}, store=False, user="u", truncation="disabled", top_p=0.9,
        include=["reasoning.encrypted_content"], reasoning={"summary": "auto"}, parallel_tool_calls=True,
        prompt_cache_key="k", text={"format": {"type": "text"}}, background=False, previous_response_id=None,
    )  # fmt: skip


MESSAGE = {"max_tokens": 3, "messages": [USER]}


def said(**fields):
    return {"max_tokens": 3, "messages": [fields]}


@pytest.mark.parametrize(
    ("route", "body", "part"),
    [
        ("responses", {}, "input: Field required"),
        ("responses", {"input": []}, "input"),
        ("responses", {"input": "a", "previous_response_id": "r"}, "previous_response_id: answers are not stored"),
        ("responses", {"input": "a", "conversation": "c"}, "conversation: answers are not stored"),
        ("responses", {"input": [{"type": "item_reference", "id": "x"}]}, "answers are not stored"),
        ("responses", {"input": [{"type": "computer_call"}]}, "input[0].type: 'computer_call' is not supported"),
        ("responses", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content"),
        ("responses", {"input": [{"role": "im_end", "content": "a"}]}, "input[0].role"),
        ("responses", {"input": [{"type": "function_call", "name": "f", "call_id": "c", "arguments": "["}]}, "JSON"),
        ("responses", {"input": [{"type": "function_call_output", "output": "5"}]}, "input[0].call_id"),
        ("responses", {"input": "a", "tools": [{"type": "web_search"}]}, "tools[0].type: got 'web_search'"),
        ("responses", {"input": "a", "tool_choice": "required"}, "tool_choice"),
        ("responses", {"input": "a", "background": True}, "background"),
        ("responses", {"input": "a", "reasoning": {"effort": "high"}}, "reasoning.effort"),
        ("responses", {"input": "a", "text": {"format": {"type": "json_object"}}}, "text: this parameter"),
        ("responses", {"input": "a", "include": ["message.output_text.logprobs"]}, "include"),
        ("responses", {"input": "a", "n": 2}, "n: "),
        ("responses", {"input": "a", "max_tokens": 2}, "max_tokens: there is no such parameter"),
        ("responses", {"input": "a", "max_output_tokens": 5000}, "max_output_tokens"),
        ("messages", {"messages": [USER]}, "max_tokens: Field required"),
        ("messages", MESSAGE | {"messages": []}, "messages"),
        ("messages", MESSAGE | {"n": 2}, "n: "),
        ("messages", MESSAGE | {"tool_choice": {"type": "any"}}, "tool_choice.type: got 'any'"),
        ("messages", MESSAGE | {"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
        ("messages", MESSAGE | {"mcp_servers": [{}]}, "mcp_servers"),
        ("messages", MESSAGE | {"temprature": 1}, "temprature: there is no such parameter"),
        ("messages", MESSAGE | {"system": [{"type": "image"}]}, "system: only parts"),
        ("messages", said(role="user", content=[{"type": "image"}]), "messages[0].content: only parts of type text"),
        ("messages", said(role="assistant", content=[{"type": "redacted_thinking"}]), "messages[0].content[0].type"),
        ("messages", said(role="user", content=[{"type": "tool_result", "content": "5"}]), "tool_use_id"),
        ("messages", said(role="tool", content="5"), "messages[0].role: got 'tool'"),
        ("messages/count_tokens", {"messages": 3}, "messages: it must be a list"),
        ("messages/count_tokens", {"messages": [USER | {"content": "a" * 300_000}]}, "more than 131072 tokens"),
    ],
)
def test_invalid_requests_are_rejected_in_the_form_of_the_protocol(model, route, body, part):
    answer = model.post(f"/v1/{route}", body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert part in error["message"] and error["type"] == "invalid_request_error"
    assert (answer.json().get("type") == "error") == route.startswith("messages")


def test_errors_of_the_clients(thinking, monkeypatch):
    model = Served(*thinking)
    ask = {"messages": [USER], "max_tokens": 3}
    with pytest.raises(anthropic.NotFoundError, match="the model 'other' does not exist"):
        model.anthropic.messages.create(model="other", **ask)
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        model.openai.responses.create(model=NAME, input="a", previous_response_id="resp_1")
    assert httpx.get(f"{model.url}/v1/messages").json()["error"]["type"] == "invalid_request_error"
    monkeypatch.setattr(model.server.batcher.runner, "advance", lambda *given: 1 / 0)
    with pytest.raises(anthropic.InternalServerError):
        model.anthropic.messages.create(model=NAME, **ask)
    with pytest.raises(anthropic.APIStatusError, match="its log says why"):
        list(model.anthropic.messages.create(model=NAME, stream=True, **ask))
    events = model.post("/v1/responses", {"input": "a", "stream": True}).text.split("\n\n")
    assert events[-2].startswith("event: error\n") and "its log says why" in events[-2]


def test_a_key_in_the_header_of_either_client():
    weights, tokenizer = served.speaker(["a"], template())
    with served.running(weights, tokenizer, longest=200, key="secret") as (url, _):
        ask = {"model": NAME, "messages": [USER], "max_tokens": 2}
        for named in ({"api_key": "secret"}, {"auth_token": "secret"}):
            client = anthropic.Anthropic(base_url=url, max_retries=0, **named)
            assert client.messages.create(**ask).content[0].text == "a"
        with pytest.raises(anthropic.AuthenticationError, match="the API key is missing or wrong"):
            anthropic.Anthropic(base_url=url, max_retries=0, api_key="no").messages.create(**ask)
        assert openai.OpenAI(base_url=f"{url}/v1", api_key="secret").responses.create(input="b").output_text == "a"


def test_reused_tokens_are_reported():
    weights, tokenizer = served.speaker(["a"], template())
    with served.running(weights, tokenizer, longest=2000) as (url, server):
        long = {"messages": [{"role": "user", "content": "x" * 900}], "max_tokens": 2}
        first, second = (httpx.post(f"{url}{app.MESSAGES}", json=long, timeout=60).json()["usage"] for _ in range(2))
        assert first["cache_read_input_tokens"] == 0 < second["cache_read_input_tokens"]
        assert second["input_tokens"] + second["cache_read_input_tokens"] == first["input_tokens"]
        assert server.metrics.value("reused_prompt_tokens_total") == second["cache_read_input_tokens"]
        other = {"input": long["messages"], "max_output_tokens": 2}
        usage = httpx.post(f"{url}/v1/responses", json=other, timeout=60).json()["usage"]
        assert usage["input_tokens_details"]["cached_tokens"] == second["cache_read_input_tokens"]
        text = httpx.get(f"{url}/metrics").text
        assert re.search(r'requests_total{route="/v1/messages",status="200"} 2', text)
