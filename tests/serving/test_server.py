"""Tests the server with the OpenAI client and plain HTTP. The sampler of the trainer is the oracle of the answers."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import re
import time

import httpx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.process import ROOT
from tests.serving import conversations, served
from tunix_like.environments.chat_messages import RequestError
from tunix_like.rollout.requests import collect
from tunix_like.rollout.sampler import Sampler
from tunix_like.serving import app
from tunix_like.serving.app import MOST_BYTES, error_response
from tunix_like.types import Request, SamplingParams

openai = pytest.importorskip("openai")

NAME, GREEDY = served.NAME, SamplingParams(0.0)
CALL = ["Let me add.", "\n\n", "<tool_call>", '{"name": "add", ', '"arguments": {"a": 2, "b": 3}}', "</tool_call>"]
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def letters():
    return served.letters()


@pytest.fixture(scope="module")
def address(letters):
    with served.running(*letters) as (url, _):
        yield url


@pytest.fixture(scope="module")
def client(address):
    return openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)


def post(address, path, body, **more):
    return httpx.post(f"{address}{path}", json=body, timeout=60, **more)


def expected(letters, text, max_tokens, n=1, seed=0, sampling=GREEDY):
    """Returns tokens and log-probabilities of the sampler, by completion."""
    weights, tokenizer = letters
    made = Sampler(weights.graphdef, weights.eos_ids, max_prompt_length=200, max_tokens=max_tokens)
    prompt = tokenizer.encode_prompt(text, False)[1]
    requests = [Request(prompt, 0, n)]
    out = collect(made.generate(weights.params, requests, jax.random.key(seed), sampling), requests)
    lengths = out.lengths[0].tolist()
    return [(out.tokens[0, i, :k].tolist(), out.logprobs[0, i, :k].tolist()) for i, k in enumerate(lengths)]


def test_the_model_is_listed(client, address):
    (model,) = client.models.list().data
    assert model.id == NAME and model.max_model_len == 200
    assert httpx.get(f"{address}/health").status_code == 200


def test_a_greedy_completion_is_that_of_the_sampler(client, letters):
    (tokens, logprobs) = expected(letters, "abc>", 40)[0]
    out = client.completions.create(
        model=NAME, prompt="abc>", max_tokens=40, temperature=0, logprobs=0, extra_body={"return_token_ids": True}
    )
    (choice,) = out.choices
    assert choice.token_ids == tokens and choice.text == letters[1].decode(tokens)
    np.testing.assert_allclose(choice.logprobs.token_logprobs, logprobs, atol=1e-4)
    assert choice.prompt_token_ids == letters[1].encode_prompt("abc>", False)[1]
    assert out.usage.prompt_tokens == len(choice.prompt_token_ids) and out.usage.completion_tokens == len(tokens)
    assert choice.finish_reason == ("stop" if tokens[-1] in letters[0].eos_ids else "length")
    pieces = zip(choice.logprobs.tokens, choice.logprobs.text_offset, strict=True)
    assert all("".join(choice.logprobs.tokens)[offset:].startswith(piece) for piece, offset in pieces)


def test_sampled_completions_are_those_of_the_sampler(client, letters):
    warm = SamplingParams(0.8, 0.9, 5)
    wanted = expected(letters, "fed>", 30, n=4, seed=11, sampling=warm)
    out = client.completions.create(
        model=NAME, prompt="fed>", max_tokens=30, temperature=0.8, top_p=0.9, n=4, seed=11,
        extra_body={"top_k": 5, "return_token_ids": True},
    )  # fmt: skip
    assert [choice.index for choice in out.choices] == [0, 1, 2, 3]
    assert [choice.token_ids for choice in out.choices] == [tokens for tokens, _ in wanted]
    again = client.completions.create(model=NAME, prompt="fed>", max_tokens=30)
    other = client.completions.create(model=NAME, prompt="fed>", max_tokens=30)
    assert again.choices[0].text != other.choices[0].text, "without a seed, each request has one of its own"


def log_softmax(weights, tokens, first, temperature=1.0):
    """Returns the log-probabilities of the whole vocabulary at each position from `first`, by one forward pass."""
    model = nnx.merge(weights.graphdef, weights.params)
    logits = np.asarray(model(jnp.asarray([tokens]))[0], np.float32)[first - 1 : len(tokens) - 1] / temperature
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sampling", "temperature"), [({"temperature": 0}, 1), ({"temperature": 0.7, "top_p": 0.6}, 0.7)]
)
def test_most_probable_tokens_are_those_of_the_model(client, letters, sampling, temperature):
    """The oracle is a forward pass. A request without them runs beside, and a stream gives the same values."""
    weights, tokenizer = letters
    given = {"model": NAME, "prompt": "abc>", "max_tokens": 70, "seed": 4, "logprobs": 3, **sampling}
    ids = {"extra_body": {"return_token_ids": True}}
    with concurrent.futures.ThreadPoolExecutor() as pool:
        beside = pool.submit(client.completions.create, **(given | {"logprobs": 0, "n": 3}))
        (choice,) = client.completions.create(**given, **ids).choices
        assert all(each.logprobs.top_logprobs is None for each in beside.result().choices)
    prompt = list(choice.prompt_token_ids)
    wanted = log_softmax(weights, prompt + choice.token_ids, len(prompt), temperature)
    assert len(choice.logprobs.top_logprobs) == len(choice.token_ids) == len(wanted)
    for top, token, row in zip(choice.logprobs.top_logprobs, choice.token_ids, wanted, strict=True):
        best = [int(i) for i in np.argsort(-row)[:3]]
        names = {i: tokenizer.decode([i], skip_special_tokens=False) for i in (*best, token)}
        assert list(top)[:3] == [names[i] for i in best] and set(top) == set(names.values())
        np.testing.assert_allclose([top[name] for name in names.values()], row[list(names)], atol=1e-4)
    streamed = [event.choices[0] for event in client.completions.create(**given, **ids, stream=True)]
    tops = [top for event in streamed for top in event.logprobs.top_logprobs]
    assert [list(top) for top in tops] == [list(top) for top in choice.logprobs.top_logprobs]
    for top, other in zip(tops, choice.logprobs.top_logprobs, strict=True):
        np.testing.assert_allclose(list(top.values()), list(other.values()), atol=1e-5)


def test_several_prompts_and_token_ids(client, letters):
    ids = letters[1].encode_prompt("cab>", False)[1]
    given = {"model": NAME, "max_tokens": 20, "temperature": 0}
    several = client.completions.create(prompt=["abc>", "cab>"], **given).choices
    assert [choice.text for choice in several] == [
        client.completions.create(prompt=prompt, **given).choices[0].text for prompt in ("abc>", ids)
    ]
    assert (
        several == client.completions.create(prompt=[letters[1].encode_prompt("abc>", False)[1], ids], **given).choices
    )


@pytest.mark.parametrize("stop", [None, ["zz", "d"], ["c"]])
def test_streamed_parts_add_up_to_the_whole_answer(client, stop):
    given = {
        "model": NAME, "prompt": ["abc>", "fab>"], "max_tokens": 60, "seed": 3, "n": 2, "stop": stop, "logprobs": 0,
        "extra_body": {"return_token_ids": True},
    }  # fmt: skip
    whole = client.completions.create(**given)
    text, tokens, logprobs, reasons = ({index: value for index in range(4)} for value in ("", [], [], None))
    usage = None
    for event in client.completions.create(**given, stream=True, stream_options={"include_usage": True}):
        usage = event.usage or usage
        for choice in event.choices:
            assert reasons[choice.index] is None
            text[choice.index] += choice.text
            tokens[choice.index] = tokens[choice.index] + choice.token_ids
            logprobs[choice.index] = logprobs[choice.index] + choice.logprobs.token_logprobs
            reasons[choice.index] = choice.finish_reason
    for choice in whole.choices:
        assert text[choice.index] == choice.text and tokens[choice.index] == choice.token_ids
        np.testing.assert_allclose(logprobs[choice.index], choice.logprobs.token_logprobs, atol=1e-5)
        assert reasons[choice.index] == choice.finish_reason
    assert usage == whole.usage
    if stop:
        assert any(choice.stop_reason in stop for choice in whole.choices)
        assert not any(each in choice.text for choice in whole.choices for each in stop)


def test_a_stop_string_cuts_the_completion(client, letters):
    given = {"model": NAME, "prompt": "abc>", "max_tokens": 60, "seed": 5, "extra_body": {"return_token_ids": True}}
    whole = client.completions.create(**given).choices[0]
    stop = whole.text[7:9]
    short = client.completions.create(**given, stop=stop).choices[0]
    assert (
        short.text == whole.text[: whole.text.index(stop)]
        and short.finish_reason == "stop"
        and short.stop_reason == stop
    )
    texts = [letters[1].decode(whole.token_ids[:size]) for size in range(len(whole.token_ids) + 1)]
    assert short.token_ids == whole.token_ids[: next(size for size, text in enumerate(texts) if stop in text)]


def test_generate_has_the_fields_of_vllm(address, letters):
    prompt = letters[1].encode_prompt("abc>", False)[1]
    sampling = {"max_tokens": 12, "temperature": 1.0, "seed": 5, "logprobs": 1, "skip_special_tokens": False}
    body = {"model": NAME, "token_ids": prompt, "sampling_params": sampling}
    out = post(address, "/inference/v1/generate", body).json()
    ((tokens, logprobs),) = expected(letters, "abc>", 12, seed=5, sampling=SamplingParams(1.0))
    (choice,) = out["choices"]
    assert choice["token_ids"] == tokens and choice["finish_reason"] in ("stop", "length")
    content = choice["logprobs"]["content"]
    assert [entry["token_id"] for entry in content] == tokens
    np.testing.assert_allclose([entry["logprob"] for entry in content], logprobs, atol=1e-4)
    assert choice["weight_versions"] == [{"version": "7", "start": 0, "end": len(tokens)}]
    ends = post(
        address, "/inference/v1/generate", body | {"sampling_params": sampling | {"stop_token_ids": tokens[3:4]}}
    )
    (choice,) = ends.json()["choices"]
    assert choice["token_ids"] == tokens[: tokens.index(tokens[3]) + 1] and choice["stop_reason"] == tokens[3]


@pytest.mark.slow
def test_many_clients_get_their_own_answers(client, letters):
    """64 concurrent clients with prompts of all lengths. Each answer is the greedy completion of its prompt."""
    rng = np.random.default_rng(0)
    words = ["".join(rng.choice(list("abcdefghij"), rng.integers(1, 60))) + ">" for _ in range(64)]
    sizes = rng.integers(1, 100, 64).tolist()

    def ask(place):
        given = {"model": NAME, "prompt": words[place], "max_tokens": sizes[place], "temperature": 0}
        if place % 3:
            return client.completions.create(**given).choices[0].text
        return "".join(event.choices[0].text for event in client.completions.create(**given, stream=True))

    with concurrent.futures.ThreadPoolExecutor(64) as pool:
        answers = list(pool.map(ask, range(64)))
    for word, size, answer in zip(words, sizes, answers, strict=True):
        assert answer == letters[1].decode(expected(letters, word, 100)[0][0][:size])


OTHERS = {"prompt": "abc>", "max_tokens": 4}


@pytest.mark.parametrize(
    ("path", "body", "part"),
    [
        ("/v1/completions", {}, "prompt"),
        ("/v1/completions", {"prompt": []}, "prompt"),
        ("/v1/completions", {"prompt": [1, "a"]}, "prompt"),
        ("/v1/completions", {"prompt": [0, 13]}, "13 is not a token id; valid: 0 to 12"),
        ("/v1/completions", {"prompt": [-1]}, "-1 is not a token id"),
        ("/v1/completions", {"prompt": [True]}, "prompt"),
        ("/v1/completions", {"prompt": "\ud800"}, "Invalid JSON"),
        ("/v1/completions", OTHERS | {"echo": True}, "echo: this parameter is not supported"),
        ("/v1/completions", OTHERS | {"best_of": 2}, "best_of"),
        ("/v1/completions", OTHERS | {"add_special_tokens": False}, "add_special_tokens"),
        ("/v1/completions", OTHERS | {"logprobs": 21}, "logprobs: Input should be less than or equal to 20"),
        ("/v1/completions", OTHERS | {"frequency_penalty": 0.5}, "frequency_penalty: this parameter is not supported"),
        ("/v1/completions", OTHERS | {"logprobs": True}, "logprobs: Input should be a valid integer"),
        ("/v1/completions", OTHERS | {"temperature": -1}, "temperature: "),
        ("/v1/completions", OTHERS | {"temperature": 1e-9}, "temperature"),
        ("/v1/completions", OTHERS | {"temperature": 10**400}, "temperature"),
        ("/v1/completions", OTHERS | {"temperature": "hot"}, "temperature: Input should be a valid number"),
        ("/v1/completions", OTHERS | {"top_p": 0}, "top_p: Input should be greater than 0"),
        ("/v1/completions", OTHERS | {"top_k": -2}, "top_k"),
        ("/v1/completions", OTHERS | {"seed": 1 << 64}, "seed"),
        ("/v1/completions", OTHERS | {"n": 0}, "n: "),
        ("/v1/completions", OTHERS | {"n": 129}, "n: Input should be less than or equal to 128"),
        ("/v1/completions", {"prompt": ["a>"] * 20, "n": 10}, "20 prompts x 10 completions exceed the limit of 128"),
        ("/v1/completions", {"prompt": "abc>", "max_tokens": 0}, "max_tokens"),
        (
            "/v1/completions",
            {"prompt": "abc>", "max_tokens": 197},
            "has 5 tokens, and with max_tokens=197 the total is 202",
        ),
        ("/v1/completions", {"prompt": [1] * 200}, "has 200 tokens; prompt and completion have at most 200"),
        ("/v1/completions", {"prompt": "a" * 100_000}, "tokens; prompt and completion have at most 200"),
        ("/v1/completions", OTHERS | {"stop": [1]}, "stop"),
        ("/v1/completions", OTHERS | {"stop": ["a"] * 17}, "stop"),
        ("/v1/completions", OTHERS | {"stop": ["a", ""]}, "stop: "),
        ("/v1/completions", OTHERS | {"presence_penalty": 0.5}, "presence_penalty: this parameter is not supported"),
        ("/v1/completions", OTHERS | {"logit_bias": {"3": 1}}, "logit_bias"),
        ("/v1/completions", OTHERS | {"temprature": 0}, "temprature: there is no such parameter"),
        ("/v1/completions", OTHERS | {"stream_options": {"x": 1}}, "stream_options.x: there is no such parameter"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, "no chat template"),
        ("/v1/chat/completions", {"messages": []}, "messages"),
        ("/inference/v1/generate", {"token_ids": [], "sampling_params": {}}, "token_ids: the prompt has no tokens"),
        ("/inference/v1/generate", {"token_ids": [1]}, "sampling_params"),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"logprobs": 2}}, "sampling_params.logprobs"),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"min_p": 0.1}}, "sampling_params.min_p"),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {}, "stream": True}, "stream"),
    ],
)
def test_invalid_requests_are_rejected(address, path, body, part):
    answer = httpx.post(
        f"{address}{path}", content=json.dumps(body), headers={"content-type": "application/json"}, timeout=60
    )
    assert answer.status_code == 400 and part in answer.json()["error"]["message"], answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_half_a_surrogate_pair_in_an_error_message():
    """It passes the JSON parser within the arguments of a tool call, and a chat template may quote it."""
    answer = error_response("/v1/completions", RequestError("the template says: \ud800", "messages"))
    assert answer.status_code == 400 and json.loads(answer.body)["error"]["message"] == "the template says: ?"


def test_default_values_of_unsupported_keys_are_accepted(client):
    answer = client.completions.create(
        model=NAME, prompt="a>", max_tokens=3, presence_penalty=0, frequency_penalty=0.0, logit_bias={}, echo=False,
        best_of=1, user="me", suffix=None, extra_body={"min_p": 0, "repetition_penalty": 1.0, "top_k": -1},
    )  # fmt: skip
    assert 1 <= answer.usage.completion_tokens <= 3 and answer.choices[0].finish_reason in ("stop", "length")


@pytest.mark.parametrize(
    ("content", "kind", "status"),
    [
        (b"{", "application/json", 400),
        (b"[1]", "application/json", 400),
        (b'{"prompt": NaN}', "application/json", 400),
        (b"\xff\xfe\x00", "application/json", 400),
        (b'{"prompt": "a>", "\\ud800": 1}', "application/json", 400),
        (b"[" * 200_000, "application/json", 400),
        (b'{"prompt": "a>"}', "text/plain", 415),
        (b" " * (MOST_BYTES + 1), "application/json", 413),
    ],
)
def test_body_that_is_not_json_is_rejected(address, content, kind, status):
    answer = httpx.post(f"{address}/v1/completions", content=content, headers={"content-type": kind})
    assert answer.status_code == status and answer.json()["error"]["message"]


def test_unknown_routes_methods_and_models_are_rejected(address, client):
    assert httpx.get(f"{address}/v2").status_code == 404
    answer = httpx.get(f"{address}/v1/completions")
    assert answer.status_code == 405 and answer.json()["error"]["code"] == 405
    with pytest.raises(openai.NotFoundError, match="the model 'other' does not exist"):
        client.completions.create(model="other", prompt="a>")


def wait_until(condition):
    until = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def metrics(address):
    text = httpx.get(f"{address}/metrics").text
    return {name: float(value) for name, value in re.findall(r"^(\S+) (\S+)$", text, re.M)}


@pytest.fixture
def slow(letters, monkeypatch):
    """Starts a server with few rows, whose completions take half a minute because each call samples one token."""
    weights, tokenizer = letters

    @contextlib.contextmanager
    def start(rows, **more):
        monkeypatch.setattr("tunix_like.serving.batcher.MOST_STEPS", 1)
        with served.running(weights._replace(eos_ids=()), tokenizer, rows=rows, longest=1500, **more) as (url, server):
            advance = server.batcher.runner.advance
            monkeypatch.setattr(server.batcher.runner, "advance", lambda *given: time.sleep(0.02) or advance(*given))
            assert post(url, "/v1/completions", {"prompt": [1], "max_tokens": 2}).status_code == 200
            yield url, server

    return start


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_disconnects_frees_its_rows(slow, stream):
    with slow(rows=2) as (url, server):
        before = server.metrics.value("generated_tokens_total")
        body = {"prompt": [[1], [2], [3]], "max_tokens": 1400, "stream": stream}
        with contextlib.suppress(httpx.ReadTimeout):
            with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=2) as answer:
                lines = answer.iter_lines()  # closing the stream closes the connection
                next(lines)
                assert stream and server.batcher.running == 2 and server.batcher.waiting == 1
        wait_until(lambda: server.batcher.running == server.batcher.waiting == 0)
        assert not server.queues and 0 < server.metrics.value("generated_tokens_total") - before < 2000


@pytest.mark.slow
def test_full_queue_answers_that_the_client_should_retry(slow):
    with slow(rows=1, max_waiting=2) as (url, server):
        body = {"prompt": "a>", "max_tokens": 1400, "n": 3, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
            lines = answer.iter_lines()  # closing the stream closes the connection
            next(lines)
            refused = post(url, "/v1/completions", OTHERS)
            assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
            assert "2 completions are waiting" in refused.json()["error"]["message"]
            assert metrics(url)["tunix_like_waiting"] == 2 and metrics(url)["tunix_like_running"] == 1
        wait_until(lambda: server.batcher.waiting == 0)
        assert post(url, "/v1/completions", OTHERS).status_code == 200


def test_a_key_is_required(letters):
    with served.running(*letters, key="secret") as (url, _):
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "secret"}):
            for path in ("/v1/models", "/metrics", "/other"):
                assert httpx.get(f"{url}{path}", headers=headers).status_code == 401
            assert post(url, "/v1/completions", OTHERS, headers=headers).status_code == 401
        assert httpx.get(f"{url}/health").status_code == 200
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0)
        assert client.completions.create(model=NAME, **OTHERS).choices[0].text is not None
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=f"{url}/v1", api_key="no", max_retries=0).models.list()


def test_metrics_count_requests_and_tokens(letters):
    with served.running(*letters) as (url, _):
        for _ in range(3):
            assert (
                post(url, "/v1/completions", {"prompt": [1, 2], "max_tokens": 7, "temperature": 0}).status_code == 200
            )
        post(url, "/v1/completions", {"prompt": 3})
        found = metrics(url)
        assert found['tunix_like_requests_total{route="/v1/completions",status="200"}'] == 3
        assert found['tunix_like_requests_total{route="/v1/completions",status="400"}'] == 1
        assert found["tunix_like_prompt_tokens_total"] == 6
        assert 3 <= found["tunix_like_generated_tokens_total"] <= 21
        assert found["tunix_like_request_seconds_count"] == found["tunix_like_first_token_seconds_count"] == 3
        assert found['tunix_like_request_seconds_bucket{le="+Inf"}'] == 3


def test_failure_of_the_batcher_is_answered_with_an_error(letters, monkeypatch):
    with served.running(*letters) as (url, server):
        advance = server.batcher.runner.advance
        monkeypatch.setattr(server.batcher.runner, "advance", lambda *given: 1 / 0)
        assert post(url, "/v1/completions", OTHERS).status_code == 500
        assert '"code":500' in post(url, "/v1/completions", OTHERS | {"stream": True}).text
        monkeypatch.setattr(server.batcher.runner, "advance", advance)
        assert post(url, "/v1/completions", OTHERS).status_code == 200


def test_logits_that_are_nan_are_answered_with_an_error(caplog):
    """The logits are finite for the prompt and the first two tokens. Other requests are answered."""
    (graphdef, params, *rest), tokenizer = served.speaker(["a", "b", "c"])
    first, last = tokenizer.encode("ac", add_special_tokens=False)
    params["embed_tokens"]["embedding"] = params["embed_tokens"]["embedding"].at[last].set(np.inf)
    options = {"max_tokens": 9, "temperature": 0}
    text = {"prompt": "a", "logprobs": 0, **options}
    chat = {"messages": QUESTION, "logprobs": True, **options}
    ids = {"token_ids": [first], "sampling_params": {"logprobs": 1, **options}}
    with served.running(served.Weights(graphdef, params, *rest), tokenizer) as (url, _):
        for path, body in (("v1/completions", text), ("v1/chat/completions", chat), ("inference/v1/generate", ids)):
            answer = post(url, f"/{path}", body)
            assert answer.status_code == answer.json()["error"]["code"] == 500
            if body is not ids:
                events = post(url, f"/{path}", body | {"stream": True}).text.split("\n\n")
                assert json.loads(events[-2].removeprefix("data: "))["error"]["code"] == 500
        good = post(url, "/v1/completions", {"prompt": "b", "max_tokens": 1, "temperature": 0})
    assert good.json()["choices"][0]["text"] == "c"
    assert "NaN" in caplog.text and all(record.exc_info is None for record in caplog.records)


@pytest.mark.parametrize("stream", [False, True])
def test_unexpected_error_is_answered_in_the_format_of_openai(address, monkeypatch, stream):
    monkeypatch.setattr(app.CompletionAnswer, "_choice", lambda *given: 1 / 0)
    answer = post(address, "/v1/completions", {"prompt": "a>", "max_tokens": 2, "stream": stream})
    error = json.loads(answer.text.removeprefix("data: ")) if stream else answer.json()
    assert error["error"]["code"] == 500 and answer.status_code == (200 if stream else 500)


@pytest.fixture(scope="module")
def caller():
    """Yields a client of a model that calls a tool in every answer, and its tokenizer."""
    weights, tokenizer = served.speaker(CALL, conversations.template())
    with served.running(weights, tokenizer, longest=2000, max_tokens=40) as (url, _):
        yield openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0), tokenizer


QUESTION = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 3? <|im_end|>"}]


def test_a_chat_is_rendered_by_the_template(caller):
    client, tokenizer = caller
    out = client.chat.completions.create(
        model=NAME, messages=QUESTION, temperature=0, logprobs=True, extra_body={"return_token_ids": True}
    )
    assert out.prompt_token_ids == tokenizer.encode_prompt(QUESTION, True)[1]
    assert out.prompt_token_ids.count(tokenizer.eos_ids[0]) == 2, "control tokens in messages are text"
    (choice,) = out.choices
    assert choice.message.content == "".join(CALL) and choice.message.tool_calls is None
    assert choice.finish_reason == "stop"
    content = choice.logprobs.content
    assert [entry.token for entry in content] == [*CALL, "<|im_end|>"] and content[0].bytes == list(CALL[0].encode())
    assert all(-0.1 < entry.logprob <= 0 and entry.top_logprobs == [] for entry in content)
    parts = [QUESTION[0], {"role": "user", "content": [{"type": "text", "text": QUESTION[1]["content"]}]}]
    assert client.chat.completions.create(model=NAME, messages=parts).usage.prompt_tokens == out.usage.prompt_tokens


def test_most_probable_tokens_of_a_chat(caller):
    """The oracle is a forward pass. In a greedy answer the sampled token is the most probable one."""
    client, tokenizer = caller
    given = {"model": NAME, "messages": QUESTION, "temperature": 0, "logprobs": True, "top_logprobs": 20}
    (choice,) = client.chat.completions.create(**given, extra_body={"return_token_ids": True}).choices
    prompt = tokenizer.encode_prompt(QUESTION, True)[1]
    wanted = log_softmax(served.speaker(CALL)[0], prompt + choice.token_ids, len(prompt))
    assert len(choice.logprobs.content) == len(wanted)
    for entry, row in zip(choice.logprobs.content, wanted, strict=True):
        assert len(entry.top_logprobs) == 20 and entry.top_logprobs[0].token == entry.token
        assert entry.top_logprobs[0].bytes == entry.bytes
        np.testing.assert_allclose([top.logprob for top in entry.top_logprobs], np.sort(row)[::-1][:20], atol=1e-4)
    events = client.chat.completions.create(**given, stream=True)
    content = [entry for event in events if event.choices[0].logprobs for entry in event.choices[0].logprobs.content]
    assert [len(entry.top_logprobs) for entry in content] == [20] * len(wanted)


def test_tool_calls_are_parsed(caller):
    client, tokenizer = caller
    given = {"model": NAME, "messages": QUESTION, "temperature": 0}
    out = client.chat.completions.create(**given, tools=[TOOL], n=2, extra_body={"return_token_ids": True})
    assert out.prompt_token_ids == tokenizer.with_template_variables({"tools": [TOOL]}).encode_prompt(QUESTION, True)[1]
    for choice in out.choices:
        assert choice.finish_reason == "tool_calls" and choice.message.content == "Let me add."
        (call,) = choice.message.tool_calls
        assert call.function.name == "add" and json.loads(call.function.arguments) == {"a": 2, "b": 3}
    assert out.choices[0].message.tool_calls[0].id != out.choices[1].message.tool_calls[0].id
    none = client.chat.completions.create(**given, tools=[TOOL], tool_choice="none")
    assert none.choices[0].message.tool_calls is None and none.usage == client.chat.completions.create(**given).usage


def test_conversation_continues_after_a_tool_result(caller):
    client, _ = caller
    (choice,) = client.chat.completions.create(model=NAME, messages=QUESTION, tools=[TOOL]).choices
    (call,) = choice.message.tool_calls
    further = [*QUESTION, choice.message, {"role": "tool", "tool_call_id": call.id, "content": "5"}]
    out = client.chat.completions.create(model=NAME, messages=further, tools=[TOOL])
    assert out.choices[0].message.tool_calls


def test_a_streamed_chat_with_tools(caller, monkeypatch):
    monkeypatch.setattr("tunix_like.serving.batcher.MOST_STEPS", 1)
    client, _ = caller
    events = list(client.chat.completions.create(model=NAME, messages=QUESTION, tools=[TOOL], stream=True))
    deltas = [event.choices[0].delta for event in events]
    assert deltas[0].role == "assistant" and "".join(delta.content or "" for delta in deltas) == "Let me add."
    (call,) = [call for delta in deltas for call in delta.tool_calls or ()]
    assert call.index == 0 and call.function.name == "add"
    assert json.loads(call.function.arguments) == {"a": 2, "b": 3}
    assert events[-1].choices[0].finish_reason == "tool_calls" and len(events) > 2
    plain = list(client.chat.completions.create(model=NAME, messages=QUESTION, stream=True, logprobs=True))
    assert "".join(event.choices[0].delta.content or "" for event in plain) == "".join(CALL)
    assert sum(len(event.choices[0].logprobs.content) for event in plain if event.choices[0].logprobs) == len(CALL) + 1


@pytest.mark.parametrize(
    ("changed", "part"),
    [
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs: it needs logprobs"),
        ({"frequency_penalty": 1}, "frequency_penalty: this parameter is not supported; only 0"),
        ({"presence_penalty": -1}, "presence_penalty"),
        ({"tool_choice": "required", "tools": [TOOL]}, "tool_choice: Input should be 'none' or 'auto'"),
        ({"tool_choice": {"type": "function", "function": {"name": "add"}}}, "tool_choice"),
        (
            {"response_format": {"type": "json_object"}},
            'response_format: this parameter is not supported; only {"type"',
        ),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"content": "x"}]}, "messages[0]"),
        ({"messages": [{"role": "im_end", "content": "x"}]}, "messages[0].role"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "type text"),
        ({"max_completion_tokens": 5000}, "max_tokens=5000"),
        ({"extra_body": {"chat_template_kwargs": {"messages": []}}}, "chat_template_kwargs.messages"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]}, "JSON"),
    ],
)
def test_invalid_chats_are_rejected(caller, changed, part):
    with pytest.raises(openai.BadRequestError) as error:
        caller[0].chat.completions.create(**({"model": NAME, "messages": QUESTION} | changed))
    assert part in str(error.value)


def test_example_of_the_documentation_works(address, capsys):
    """Runs the `curl` command of docs/engines.md and compares the body of the answer."""
    text = (ROOT / "docs" / "engines.md").read_text(encoding="utf-8").replace("http://127.0.0.1:8000", address)
    (code,) = re.findall(r"```python\n(.*?)```", text, re.S)
    exec(compile(code, "engines.md", "exec"), {})
    assert capsys.readouterr().out
    (body,) = re.findall(r"-d '(.*?)'", text)
    assert post(address, "/v1/completions", json.loads(body)).status_code == 200


def test_the_limit_of_the_body_is_checked_before_it_is_read(address, monkeypatch):
    monkeypatch.setattr(app, "MOST_BYTES", 1000)
    assert post(address, "/v1/completions", {"prompt": "a" * 2000}).status_code == 413


def test_client_of_the_package_renderers(caller, tmp_path):
    """The client renders a chat, samples by token ids, checks tokens and log-probabilities, and parses the answer."""
    renderers = pytest.importorskip("renderers")
    from renderers.client import generate
    from transformers import PreTrainedTokenizerFast

    client, tokenizer = caller
    tokenizer.save(tmp_path)
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    renderer = renderers.DefaultRenderer(theirs, renderers.DefaultRendererConfig(tool_parser="qwen3"))
    plain = {"model": NAME, "messages": [QUESTION[0], {"role": "user", "content": "2 + 3?"}], "tools": [TOOL]}
    asynchronous = openai.AsyncOpenAI(base_url=str(client.base_url), api_key="none", max_retries=0)

    async def ask():
        given = plain | {"sampling_params": {"max_tokens": 30, "temperature": 1.0, "seed": 1}}
        try:
            return await generate(client=asynchronous, renderer=renderer, **given)
        finally:
            await asynchronous.close()

    found = asyncio.run(ask())
    whole = client.chat.completions.create(
        **plain, logprobs=True, seed=1, max_tokens=30, extra_body={"return_token_ids": True}
    )
    assert found["prompt_ids"] == whole.prompt_token_ids
    assert found["completion_ids"] == whole.choices[0].token_ids
    logprobs = [entry.logprob for entry in whole.choices[0].logprobs.content]
    np.testing.assert_allclose(found["completion_logprobs"], logprobs, atol=1e-5)
    assert found["finish_reason"] == "tool_calls" and found["tool_calls"][0].arguments == {"a": 2, "b": 3}
