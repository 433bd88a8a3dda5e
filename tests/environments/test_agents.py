"""Tests agents that speak the protocols of OpenAI's responses and Anthropic's messages through the endpoint of
training. The agents use the clients of OpenAI and Anthropic."""

from __future__ import annotations

import json

import pytest

from tests.environments.agents_program import RESULT, SCHEMA, SYSTEM
from tests.environments.test_verifiers import TOKENIZER
from tests.parameters import others_slow
from tests.serving import served
from tests.serving.conversations import OPENED, THOUGHT_AND_CALL, template
from tests.tiny_model import HF
from tests.training.small_learner import collect, make
from tunix_like import load_model
from tunix_like.config.schema import EnvironmentConfig, RolloutConfig
from tunix_like.environments.agent_calls import Call, answer_of, refusal_of
from tunix_like.environments.arguments import make_player
from tunix_like.environments.chat_messages import RequestError
from tunix_like.types import Problem, Turn
from tunix_like.verifiers import process as verifiers_process
from tunix_like.verifiers.environments import VerifiersEnvironments
from tunix_like.verifiers.tasks import record
from tunix_like.workers import process
from tunix_like.workers.routes import CHAT, MESSAGES, RESPONSES

QUESTION = "2 + 3?"


@pytest.fixture
def program(monkeypatch):
    """Makes `VerifiersProcess` run the program `agents_program.py`, which uses both clients."""
    pytest.importorskip("openai")
    pytest.importorskip("anthropic")
    start = process.Process.__init__
    name = "tests.environments.agents_program"
    monkeypatch.setattr(process.Process, "__init__", lambda self, _, *rest: start(self, name, *rest))
    monkeypatch.setattr(verifiers_process.importlib.util, "find_spec", lambda name: True)


@pytest.mark.parametrize("opened", others_slow([False, True], False), ids=["thought", "opened"])
@pytest.mark.parametrize("stream", others_slow([False, True], True), ids=["whole", "stream"])
@pytest.mark.parametrize("protocol", ["responses", "messages"])
def test_a_tool_loop_keeps_the_sampled_tokens(program, protocol, stream, opened):
    """The oracle is the rendering of the same conversation as messages of chat completions."""
    words = OPENED if opened else THOUGHT_AND_CALL
    _, tokenizer = served.speaker(words, template(opened))
    made = VerifiersEnvironments({"path": "agents"}, timeout_seconds=60.0)
    player = make_player(made, EnvironmentConfig(max_turns=3), tokenizer, RolloutConfig())
    assert player is not None
    system, user = {"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}
    function = {"name": "add", "parameters": SCHEMA}
    render = lambda messages: tokenizer.with_template_variables(  # noqa: E731
        {"tools": [{"type": "function", "function": function}]}
    ).encode_prompt(messages, True)[1]
    prompt = render([system, user])
    task = {"protocol": protocol, "stream": stream, "tools": True, "turns": 3, "question": QUESTION}
    trajectories = player.start([Problem(0, "", prompt, {"task": task}, "")], 1, 4000)
    assert [*trajectories.problems[0].tokens, *trajectories.opening(0, 0)] == prompt
    turn = [*(tokenizer.encode(word, add_special_tokens=False)[0] for word in words), tokenizer.eos_ids[0]]
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 3}}}
    content = "".join(words).partition("\n<tool_call>")[0]
    messages, seen = [system, user], list(prompt)
    for _ in range(2):
        trajectories.submit([Turn(0, 0, turn, truncated=False)])
        (reply,) = trajectories.replies(wait=True)
        assert reply.tokens is not None, trajectories.episodes()
        messages += [
            {"role": "assistant", "content": content, "tool_calls": [call]},
            {"role": "tool", "content": RESULT},
        ]
        assert not reply.restart and render(messages) == [*seen, *turn, *reply.tokens]
        seen += [*turn, *reply.tokens]
    trajectories.submit([Turn(0, 0, [*turn[:3], turn[-1]], truncated=False)])
    trajectories.replies(wait=True)
    (episode,) = trajectories.episodes()
    assert episode.failure is None and episode.reward == len("Let me add.") and episode.rewritten == 0
    assert episode.info["counted"] == (len(prompt) if protocol == "messages" else 0)
    made.close()


@pytest.mark.parametrize(
    ("route", "body", "named"),
    [
        (RESPONSES, {"input": "a", "previous_response_id": "r"}, "previous_response_id: got r; it is not supported"),
        (RESPONSES, {"input": "a", "tool_choice": "required"}, "tool_choice"),
        (RESPONSES, {"input": [{"type": "item_reference", "id": "x"}]}, "not stored"),
        (RESPONSES, {"messages": []}, "input: it must be a list"),
        (MESSAGES, {"messages": [{"role": "user", "content": "a"}], "stop_sequences": ["x"]}, "stop_sequences"),
        (
            MESSAGES,
            {"messages": [{"role": "user", "content": "a"}], "tool_choice": {"type": "any"}},
            "tool_choice.type",
        ),
        (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages\\[0\\].content"),
    ],
)
def test_unsupported_requests_are_rejected(route, body, named):
    with pytest.raises(RequestError, match=named):
        Call.of(0, route, body)


@pytest.mark.parametrize("depth", [200, 900, 100_000])
def test_deeply_nested_requests_are_rejected(depth):
    """Chat templates and the code around them call themselves for inner values."""
    deep = '{"a":' * depth + "1" + "}" * depth
    user = {"role": "user", "content": "a"}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": deep}}
    body = {"messages": [user, {"role": "assistant", "content": "", "tool_calls": [call]}]}
    with pytest.raises(RequestError, match="nested more than 100 levels deep|must be an object"):
        Call.of(0, CHAT, body)
    if depth < 1000:
        tool = {"type": "function", "function": {"name": "f", "parameters": json.loads(deep)}}
        with pytest.raises(RequestError, match="nested more than 100 levels deep"):
            Call.of(0, CHAT, {"messages": [user], "tools": [tool]})


def test_fields_of_answers_and_refusals():
    user = {"role": "user", "content": "a"}
    call = Call.of(3, MESSAGES, {"messages": [user], "max_tokens": 9, "temperature": 0.3, "system": "s"})
    body = answer_of(call, "so", "length", (5, 2))["body"]
    assert body["stop_reason"] == "max_tokens" and body["model"] == "policy"
    assert (body["usage"]["input_tokens"], body["usage"]["output_tokens"]) == (5, 2)
    body = answer_of(Call.of(3, RESPONSES, {"input": [user]}), "so", "length", (5, 2))["body"]
    assert body["status"] == "incomplete" and body["usage"]["total_tokens"] == 7
    assert refusal_of(3, MESSAGES, 400, "full")["body"]["type"] == "error"
    assert json.loads(json.dumps(refusal_of(3, RESPONSES, 400, "full")["body"]))["error"]["message"] == "full"


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["responses", "messages"])
def test_the_trained_tokens_are_those_that_the_clients_got(program, protocol):
    """A token that is changed on its way through a client would have another log-probability in the update."""
    model = load_model(HF | {"vocab_size": TOKENIZER.vocab_size}, init="random", seed=0)[0]
    learner = make(
        reward=(),
        tokenizer=TOKENIZER,
        environment=VerifiersEnvironments({"path": "agents"}, timeout_seconds=60.0),
        model=model,
        success_threshold=4.0,
        rollout=RolloutConfig(max_prompt_length=16, max_tokens_to_generate=48),
    )
    task = {"protocol": protocol, "stream": True, "tools": False, "turns": 2, "question": "ab"}
    chat = [{"role": "user", "content": "ab"}]
    rows = collect(learner, [record({"data": task, "messages": chat}) for _ in range(4)])
    assert all(row["train/logprob_gap/max"] < 1e-4 for row in rows)
    assert max(row["train/turns/mean"] for row in rows) > 1 and max(row["train/grad_norm"] for row in rows) > 0
