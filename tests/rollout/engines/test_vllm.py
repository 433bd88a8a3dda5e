"""Tests the HTTP engine against a stand-in server: which weights sample which step, and the handling of server
failures."""

import asyncio
import contextlib
import threading

import numpy as np
import pytest
from flax import nnx

from tests.parameters import others_slow
from tests.rollout.engines.stand_in import until
from tests.tiny_model import HF
from tests.training.small_learner import ROWS, TOKENIZER, collect, differ, make, make_model, params_of, varied
from tests.training.test_environments import Vowels
from tunix_like import EnvironmentConfig, EvalConfig, LoraConfig, RolloutConfig, UserError, load_model
from tunix_like.config.load import load
from tunix_like.errors import EngineLost
from tunix_like.models.lora import add_lora
from tunix_like.rollout.engines import fleet
from tunix_like.rollout.engines.registry import EngineSetup, check_engine
from tunix_like.rollout.engines.server import MOST_BYTES, Server, WrongAnswer
from tunix_like.rollout.engines.vllm import ask_servers

START_WITH_LORA = (
    "start it with VLLM_SERVER_DEV_MODE=1 VLLM_ALLOW_RUNTIME_LORA_UPDATING=True vllm serve MODEL --enable-scale-out "
    "--enable-lora --max-lora-rank 8"
)


def adapted(model=None):
    return add_lora(make_model() if model is None else model, LoraConfig(rank=2), 0)


def quantized():
    return load_model(HF, init="random", seed=0, quantize="int8")[0]


@pytest.mark.slow
def test_each_step_is_sampled_with_its_own_weights(serve, connect, tmp_path):
    """Each step is sampled with its own weights. If an evaluation precedes the step, the evaluation has already sent
    them."""
    server = serve()
    engine = connect(server)
    learner = make(
        reward=varied, engine=engine, max_steps=3, eval_config=EvalConfig(samples=2), eval_every_n_steps=1,
        max_logprob_gap=1e-4,
    )  # fmt: skip
    rows = collect(learner, eval_ds=ROWS[:2], batch_size=4)
    assert len(rows) == 4 and all(row["train/logprob_gap/max"] < 1e-4 for row in rows[1:])
    assert server.routes.count("/collective_rpc") == 4, "the weights of each step once"
    assert server.version.endswith("-4") and server.routes.count("/reset_prefix_cache") == 4
    assert [path.name for path in (tmp_path / "weights").iterdir()] == [server.version]
    assert len(set(server.clients)) == len(server.clients), "no connection is used twice: the server may just close it"
    (tmp_path / "weights" / "of another run").mkdir()
    engine.close()
    assert [path.name for path in (tmp_path / "weights").iterdir()] == ["of another run"]


def test_a_group_stays_on_one_server(serve, connect):
    servers = [serve(), serve()]
    learner = make(reward=varied, engine=connect(*servers), max_steps=1)
    collect(learner, batch_size=4)
    groups = [{tuple(body["token_ids"]) for body in server.asked if len(body["token_ids"]) < 8} for server in servers]
    assert len(groups[0]) == len(groups[1]) == 2 and not groups[0] & groups[1]


@pytest.mark.slow
@pytest.mark.parametrize("mode", others_slow(["lockstep", "eager"], "eager"))
def test_several_turns_equal_those_of_the_local_engine(serve, connect, mode):
    """The mask, log-probabilities and rewards equal those of the engine in this process. The prompt of each turn is the
    whole history."""
    server = serve()
    rollout = RolloutConfig(max_prompt_length=16, max_tokens_to_generate=15)
    learner = make(
        reward=(), rollout=rollout, max_steps=2, max_logprob_gap=1e-4,
        engine=connect(server, max_prompt_length=16, max_tokens_to_generate=15),
        environment=Vowels, environment_config=EnvironmentConfig(max_turns=4, max_observation_tokens=40, mode=mode),
    )  # fmt: skip
    rows = collect(learner, batch_size=4)
    assert all(row["train/logprob_gap/max"] < 1e-4 for row in rows)
    assert max(row["train/turns/mean"] for row in rows) > 1
    assert max(len(body["token_ids"]) for body in server.asked) > 16


def drop(answer):
    raise ConnectionError


def shorter(answer):
    answer["choices"][0]["logprobs"]["content"].pop()
    return answer


def longer(answer):
    choice = answer["choices"][0]
    choice["token_ids"] = choice["token_ids"] * 5
    choice["logprobs"]["content"] = choice["logprobs"]["content"] * 5
    return answer


def unequal(value):
    def fault(answer):
        answer["choices"][0]["logprobs"]["content"][0]["logprob"] = value
        return answer

    return fault


def unknown_token(answer):
    choice = answer["choices"][0]
    choice["token_ids"][0] = choice["logprobs"]["content"][0]["token_id"] = 13
    return answer | {"choices": [choice | {"finish_reason": "length"}]} if len(choice["token_ids"]) == 1 else answer


def endless(answer):
    answer["choices"][0]["finish_reason"] = "abort"
    return answer


def other_version(answer):
    answer["choices"][0]["weight_versions"] = [
        {"version": answer["choices"][0]["weight_versions"][0]["version"], "start": 0, "end": 1},
        {"version": "default", "start": 1, "end": 2},
    ]
    return answer


FAULTS = {
    "connection": drop,
    "status 500": lambda _: 500,
    "status 429": lambda _: 429,
    "no JSON": lambda _: "<html>",
    "nested JSON": lambda _: "[" * 100_000,
    "NaN": unequal(float("nan")),
    "infinite": unequal(float("-inf")),
    "large integer": unequal(10**400),
    "infinite in float32": unequal(-1e300),
    "above 0": unequal(0.5),
    "another object": lambda _: {"choices": []},
    "too few log-probabilities": shorter,
    "too many tokens": longer,
    "token outside the vocabulary": unknown_token,
    "no end": endless,
    "two versions": other_version,
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_faulty_answer_is_requested_again(serve, connect, fault):
    """A faulty answer is not trained on: the log-probabilities of all samples equal those of the trainer."""
    server = serve()
    engine = connect(server)
    learner = make(reward=varied, engine=engine, max_steps=1, max_logprob_gap=1e-4)
    place = engine.place

    def then_fail(params):
        version = place(params)
        server.faults[:] = [lambda answer: answer, fault]
        return version

    engine.place = then_fail
    rows = collect(learner, batch_size=4)
    assert not server.faults and rows[0]["train/logprob_gap/max"] < 1e-4


def test_answer_that_is_faulty_every_time_raises(serve, connect):
    server = serve()
    engine = connect(server)
    learner = make(reward=varied, engine=engine, max_steps=1)
    place = engine.place
    engine.place = lambda params: (place(params), server.faults.extend([shorter] * 100))[0]
    with pytest.raises(EngineLost, match=rf"rollout.urls: the server {server.url}: its answer has \d tokens"):
        learner.train(ROWS, batch_size=4)


@pytest.mark.slow
def test_request_that_fails_every_time_raises(serve, connect):
    """The server is healthy and loads weights, but the prompt of one row makes it fail. The same request is not sent
    for ever, and a short series of failures does not end the run."""
    server = serve()
    engine = connect(server)
    learner = make(reward=varied, engine=engine, max_steps=1)
    server.failures, sample = 10, server._sample

    def fail(body):
        if not body["sampling_params"]["logprobs"] and server.failures:
            server.failures -= 1
            return 500
        return sample(body)

    server._sample = fail
    assert len(collect(learner, batch_size=4)) == 1 and not server.failures
    server.failures, failing = 1000, make(reward=varied, engine=engine, max_steps=1)
    with pytest.raises(EngineLost, match=rf"rollout.urls: the server {server.url}: .* status 500"):
        failing.train(ROWS, batch_size=4)
    assert server.failures > 0


def test_one_failure_of_each_server_does_not_end_the_run(serve, connect, monkeypatch):
    """As when the network is lost for a moment: the number of servers does not matter."""
    monkeypatch.setattr(fleet, "MOST_FAILED", 1)
    servers = [serve(), serve()]
    for server in servers:
        server.left, sample = 1, server._sample

        def fail(body, server=server, sample=sample):
            if not body["sampling_params"]["logprobs"] and server.left:
                server.left -= 1
                return 500
            return sample(body)

        server._sample = fail
    assert len(collect(make(reward=varied, engine=connect(*servers), max_steps=1), batch_size=4)) == 1
    assert not any(server.left for server in servers)


@pytest.mark.slow
def test_answer_without_an_end_is_read_only_in_part():
    sent = []

    async def answer(reader, writer):
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            while sum(sent) < 3 * MOST_BYTES:
                writer.write(b" " * 2**20)
                await writer.drain()
                sent.append(2**20)
        writer.close()

    async def ask():
        listening = await asyncio.start_server(answer, "127.0.0.1")
        server = Server(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}", 30.0)
        async with listening:
            with pytest.raises(WrongAnswer, match="/inference/v1/generate answered with more than"):
                await server.sample([1], {"max_tokens": 1, "stop_token_ids": []})
            await server.close()

    asyncio.run(ask())
    assert sum(sent) < 2 * MOST_BYTES


def test_request_that_the_server_rejects_raises(serve, connect):
    server = serve()
    engine = connect(server)
    learner = make(reward=varied, engine=engine, max_steps=1)
    place = engine.place
    engine.place = lambda params: (place(params), server.faults.append(lambda _: 400))[0]
    with pytest.raises(UserError, match=r"/inference/v1/generate answered with status 400: .*as told"):
        learner.train(ROWS, batch_size=4)


@pytest.mark.slow
def test_restarted_server_gets_the_weights_of_the_step(serve, connect, caplog):
    """The restarted server has other weights, and is not used before it has loaded those of the step. If there is a
    second server, it continues to sample."""
    for count in (1, 2):
        servers = [serve() for _ in range(count)]
        engine = connect(*servers)
        learner = make(reward=varied, engine=engine, max_steps=2, max_logprob_gap=1e-4)
        killed = servers[0]
        killed.delay = 0.5
        place, stops = engine.place, []

        def kill(killed=killed):
            assert until(lambda: len(killed.asked) > 8)
            killed.stop()
            killed.delay = 0.0
            killed.start()

        def then_kill(params, place=place, stops=stops, kill=kill):
            version = place(params)
            if not stops:
                stops.append(threading.Thread(target=kill))
                stops[0].start()
            return version

        engine.place = then_kill
        rows = collect(learner, batch_size=4)
        stops[0].join()
        assert len(rows) == 2 and all(row["train/logprob_gap/max"] < 1e-4 for row in rows)
        assert killed.version.endswith("-2")
        assert ("no server is left" in caplog.text) == (count == 1)
        caplog.clear()


@pytest.mark.slow
def test_request_to_a_slow_server_times_out(serve, connect, caplog):
    slow, quick = serve(), serve()
    engine = connect(slow, quick, request_timeout_seconds=1.0)
    place = engine.place
    engine.place = lambda params: (place(params), setattr(slow, "delay", 5.0))[0]
    learner = make(reward=varied, engine=engine, max_steps=1, max_logprob_gap=1e-4)
    collect(learner, batch_size=4)
    assert "did not answer within 1 s" in caplog.text


@pytest.mark.slow
def test_loss_of_all_servers_saves_the_run(serve, connect, tmp_path):
    """The state before the step is saved. The resumed run continues from it with the same prompts as the uninterrupted
    run."""
    server = serve()
    seen = []

    def reward(prompts, completions, answer):
        seen.append(list(prompts))
        return varied(prompts, completions, answer)

    settings = {"reward": reward, "output_dir": str(tmp_path / "run"), "max_steps": 4, "checkpoint_every_n_steps": 100}
    learner = make(engine=connect(server, wait_for_servers_seconds=2.0), **settings)
    stopped = []
    learner._listeners[0] = lambda row, total: row["step"] == 2 and (server.stop(), stopped.append(1))
    with pytest.raises(EngineLost, match=r"no server has answered for 2 s \(rollout.wait_for_servers_seconds\)"):
        learner.train(ROWS, batch_size=2)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir() if path.name.isdigit()] == ["2"]
    server.start()
    again = make(engine=connect(server), **settings)
    rows = collect(again, batch_size=2)
    assert [row["step"] for row in rows] == [3, 4]
    drawn = [prompts[0] for prompts in seen]
    whole = make(reward=reward, max_steps=4)
    seen.clear()
    whole.train(ROWS, batch_size=2)
    assert drawn == [prompts[0] for prompts in seen], "the same prompts as in an uninterrupted run"


@pytest.mark.slow
def test_engine_lost_in_an_evaluation_keeps_the_completed_step(serve, connect, tmp_path):
    """The last step before the evaluation is complete: its row of metrics and its checkpoint are written."""
    server = serve()
    learner = make(
        reward=varied, output_dir=str(tmp_path / "run"), max_steps=2,
        engine=connect(server, wait_for_servers_seconds=2.0),
        eval_config=EvalConfig(samples=2), eval_every_n_steps=1, metric_fns=[lambda *_, **__: server.stop() or {}],
    )  # fmt: skip
    with pytest.raises(EngineLost):
        learner.train(ROWS, ROWS[:2], batch_size=4)
    server.start()
    steps = [line for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines() if '"step": 1' in line]
    assert len(steps) == 1 and (tmp_path / "run" / "checkpoints" / "1").exists()


def test_server_with_other_weights_raises(serve, connect, tmp_path):
    """The log-probabilities of the other model differ, and no completion is sampled with it."""
    server = serve()
    server._load = lambda folder: None  # the server ignores the request to load weights
    engine = connect(server)
    learner = make(reward=varied, engine=engine, max_steps=2)
    with pytest.raises(UserError, match=r"other log-probabilities .* differ by \S+ nats .*training.max_logprob_gap: "):
        learner.train(ROWS, batch_size=4)
    assert len(server.asked) == 4 + 16 + 4, "one step with the weights of the folder, and two comparisons"


def test_token_outside_the_vocabulary_raises(serve, connect):
    """The first comparison detects a token id that is not in the vocabulary of this model."""
    server = serve()
    learner = make(reward=varied, engine=connect(server), max_steps=1)

    def unknown(answer):
        choice = answer["choices"][0]
        entry = choice["logprobs"]["content"][0] | {"token_id": 99}
        entry["top_logprobs"] = [{"token_id": 99, "logprob": -1.0}]
        choice["token_ids"], choice["logprobs"]["content"] = [99], [entry]
        return answer | {"choices": [choice | {"finish_reason": "length"}]}

    server.faults[:] = [unknown] * 4
    with pytest.raises(UserError, match="they differ by inf nats on average"):
        learner.train(ROWS, batch_size=4)


def test_server_that_is_not_vllm_is_rejected(serve, connect, monkeypatch):
    server = serve()
    server.limit = None
    server.vllm = None
    server.missing = ("/version",)
    with pytest.raises(UserError, match="/version answered with status 404"):
        connect(server)
    server.missing, server.vllm, server.tokens_of = (), "0.32", lambda text: 5
    with pytest.raises(UserError, match=r"its answers are not those of vLLM \(TypeError"):
        connect(server)


@pytest.mark.slow
@pytest.mark.parametrize("lora_rank", [8, None])
def test_adapters_are_sent_alone_or_merged(serve, connect, tmp_path, caplog, lora_rank):
    """A server that can load adapters gets only these. Another server gets the merged weights, and one line says so."""
    server = serve(lora_rank=lora_rank)
    model = adapted()
    learner = make(model=model, reward=varied, engine=connect(server, model=model), max_steps=3, max_logprob_gap=1e-4)
    before, rows = params_of(model), collect(learner, batch_size=4)
    said = [record.message for record in caplog.records if "completions were cut" not in record.message]
    assert differ(before, params_of(model)) and all(row["train/logprob_gap/max"] < 1e-4 for row in rows)
    (folder,) = (tmp_path / "weights").iterdir()
    assert folder.name == server.version and server.version.endswith("-3")
    assert {row["train/perf/weights_sent_bytes"] for row in rows} == {sum(f.stat().st_size for f in folder.iterdir())}
    assert all(row["train/perf/weights_sent_sec"] > 0 for row in rows)
    if lora_rank:
        assert "/collective_rpc" not in server.routes and list(server.adapters) == [server.version]
        assert {file.name for file in folder.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
        assert {body["model"].rpartition("-")[2] for body in server.asked} == {"1", "2", "3"} and not said
    else:
        assert server.routes.count("/collective_rpc") == 3 and not any("model" in body for body in server.asked)
        assert said == [
            "rollout.urls: each step sends the whole weights and not only the adapters, because of the server "
            f"{server.url}: it was started without --enable-lora; {START_WITH_LORA}"
        ]


@pytest.mark.parametrize("model", [make_model, lambda: adapted(quantized())], ids=["whole model", "quantised base"])
def test_whole_weights_are_sent_to_a_server_that_can_load_adapters(serve, connect, caplog, model):
    """Without adapters, or if the base on the server is not that of the trainer, which is quantised."""
    server, model = serve(lora_rank=8), model()
    engine = connect(server, model=model)
    version = engine.place(nnx.to_pure_dict(nnx.split(model)[1]))
    assert server.version == version and "/collective_rpc" in server.routes and not server.adapters
    assert not [record for record in caplog.records if record.name == "tunix_like"]


UNABLE = {
    "rank": ({"lora_rank": 1}, "it was started with --max-lora-rank 1, and lora.rank is 2"),
    "no updates": (
        {"lora_rank": 8, "updates": False},
        "it was started without VLLM_ALLOW_RUNTIME_LORA_UPDATING=True",
    ),
}


@pytest.mark.parametrize(("settings", "why"), UNABLE.values(), ids=UNABLE)
def test_one_server_that_cannot_load_adapters_makes_all_get_whole_weights(serve, connect, caplog, settings, why):
    able, unable = serve(lora_rank=8), serve(**settings)
    model = adapted()
    engine = connect(able, unable, model=model)
    version = engine.place(params_of(model))
    assert able.version == unable.version == version and not able.adapters and not unable.adapters
    assert f"because of the server {unable.url}: {why}; {START_WITH_LORA}" in caplog.text


def test_server_with_whole_weights_of_another_run_gets_no_adapters_alone(serve, connect, caplog):
    """An adapter would be added to these weights. Before the run, whole weights replace them; later it is an error."""
    server, model = serve(lora_rank=8), adapted()
    engine = connect(server, model=model)
    engine.place(params_of(model))
    server.version = "of-another-run"
    with pytest.raises(UserError, match="holds whole weights that another run has sent; start it again"):
        engine.place(params_of(model))
    again = connect(server, model=model)
    assert "it holds whole weights that a run has sent" in caplog.text
    assert again.place(params_of(model)) == server.version and "/collective_rpc" in server.routes


def test_base_that_is_not_that_of_the_run_raises(serve, connect):
    server, model = serve(lora_rank=8), adapted(make_model(seed=1))
    learner = make(model=model, reward=varied, engine=connect(server, model=model), max_steps=1)
    with pytest.raises(UserError, match="other log-probabilities .* must hold the weights on which they are trained"):
        learner.train(ROWS, batch_size=4)


@pytest.mark.slow
def test_restarted_server_gets_the_adapters_of_the_step(serve, connect, caplog):
    """A request that names an adapter that the server lost is not an error of the run, and is not sampled without the
    adapter."""
    servers, model = [serve(lora_rank=8), serve(lora_rank=8)], adapted()
    engine = connect(*servers, model=model)
    learner = make(model=model, reward=varied, engine=engine, max_steps=3, max_logprob_gap=1e-4)
    place = engine.place

    def then_restart(params):
        version = place(params)
        if version.endswith("-2"):
            servers[0].stop()
            servers[0].start()
        return version

    engine.place = then_restart
    rows = collect(learner, batch_size=4)
    assert len(rows) == 3 and all(row["train/logprob_gap/max"] < 1e-4 for row in rows)
    assert "it does not have the adapter" in caplog.text
    assert all(list(server.adapters) == [server.version] for server in servers)


def test_server_restarted_without_lora_raises(serve, connect):
    server, model = serve(lora_rank=8), adapted()
    engine = connect(server, model=model)
    engine.place(params_of(model))
    server.stop()
    server.lora_rank = None
    server.start()
    with pytest.raises(UserError, match=f"cannot be used: it was started without --enable-lora; {START_WITH_LORA}"):
        engine.place(params_of(model))


@pytest.mark.slow
def test_server_that_does_not_see_the_adapter_folder_raises(serve, connect):
    """The server is asked again until the time limit, because a shared disk can show the folder late."""
    server, model = serve(lora_rank=8), adapted()
    engine, attempts = connect(server, model=model, wait_for_servers_seconds=2.0), []
    server._load_adapter = lambda body: attempts.append(body) or 404
    with pytest.raises(EngineLost, match=r"it cannot load the adapter in .*weights/.*-1: status 404"):
        engine.place(params_of(model))
    assert len(attempts) > 1


def test_dry_run_says_whether_adapters_are_sent_alone(serve, tmp_path):
    servers, model = [serve(lora_rank=8), serve()], adapted()
    rollout = RolloutConfig(
        engine="vllm", urls=[server.url for server in servers], max_prompt_length=8, max_tokens_to_generate=4
    )
    answers = dict(ask_servers(EngineSetup(model, TOKENIZER, rollout, tmp_path)))
    assert answers[servers[0].url] == "vLLM 0.32.0, model model, up to 512 tokens"
    assert "; whole weights, not only adapters: it was started without --enable-lora" in answers[servers[1].url]


UNFIT = {
    "old": ({"version": "0.31.1"}, "it runs vLLM 0.31.1; use 0.32 or later"),
    "without updates": (
        {"missing": ("/weight_info",)},
        "no route to update weights; start it with VLLM_SERVER_DEV_MODE=1",
    ),
    "without tokens": (
        {"missing": ("/inference/v1/generate",)},
        "no route /inference/v1/generate; start it with VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --enable-scale-out",
    ),
    "too short": ({"max_model_len": 11}, "--max-model-len 11; max_prompt_length and .* need 12"),
    "with a key": ({"key": "secret"}, "it requires an API key; set the environment variable VLLM_API_KEY"),
}


@pytest.mark.parametrize(("settings", "message"), UNFIT.values(), ids=UNFIT)
def test_unusable_servers_are_rejected(serve, connect, settings, message):
    server = serve(**settings)
    with pytest.raises(
        UserError, match=rf"^rollout.urls: the server {server.url} cannot be used: .*{message}"
    ) as error:
        connect(server)
    assert "\n" not in str(error.value)


def test_server_with_another_tokenizer_is_rejected(serve, connect):
    server = serve()
    server.tokens_of = lambda text: [5, 6]
    with pytest.raises(UserError, match=r"it has another tokenizer: .* \[5, 6\] there"):
        connect(server)


@pytest.mark.slow
def test_key_of_the_environment_variable_is_sent(serve, connect, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    learner = make(reward=varied, engine=connect(serve(key="secret")), max_steps=1)
    assert np.isfinite(collect(learner, batch_size=4)[0]["train/loss"])


def test_unreachable_server_is_rejected(connect):
    with pytest.raises(
        UserError, match=r"http://127.0.0.1:9 cannot be used: cannot connect \(.*\)\. Start it, or remove it"
    ):
        connect("http://127.0.0.1:9")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("127.0.0.1:8000", "give an address such as http://127.0.0.1:8000"),
        ("http://[::1", "give an address such as http://127.0.0.1:8000"),
        ("http://a:80x", "give an address such as http://127.0.0.1:8000"),
        ("http://a:8000/v1", r"^rollout.urls: got 'http://a:8000/v1'; give the address of the server without /v1"),
        ("http://me:secret@127.0.0.1:8000", "contains a user name or a key; set the environment variable VLLM_API_KEY"),
    ],
)
def test_invalid_addresses_are_rejected(url, message):
    """They are rejected when the config is read."""
    with pytest.raises(UserError, match=message) as error:
        RolloutConfig(engine="vllm", urls=[url])
    assert ":secret" not in str(error.value)


def test_api_key_in_the_config_is_rejected(tmp_path):
    """It is rejected, and the message does not contain it."""
    file = tmp_path / "a.yaml"
    file.write_text("rollout:\n  api_key: secret-1\n")
    for given in ((None, ["rollout.api_key=secret-1"]), (file, [])):
        with pytest.raises(UserError, match="rollout.api_key: .* set an environment variable .*VLLM_API_KEY") as error:
            load(*given)
        assert "secret-1" not in str(error.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"engine": "vllm"}, "rollout.urls: rollout.engine=vllm needs the addresses"),
        ({"urls": ["http://a"]}, "rollout.urls: it needs rollout.engine=vllm"),
        ({"weights_folder": "a"}, "rollout.weights_folder: it needs rollout.engine=vllm"),
    ],
)
def test_invalid_settings_are_rejected(settings, message):
    with pytest.raises(UserError, match=message):
        check_engine(RolloutConfig(**settings))
