"""Tests the engine with a real vLLM server, which is installed separately from this library
(`docs/contributing.md`)."""

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
import urllib.request

import jax
import numpy as np
import pytest
from flax import nnx

from tests.training.small_learner import ROWS, TOKENIZER, collect, make, varied
from tunix_like import EnvironmentConfig, LoraConfig, RolloutConfig, add_lora, load_model
from tunix_like.models.loading import export_model
from tunix_like.models.lora import join_params, part_params
from tunix_like.rollout.engines.server import WrongAnswer
from tunix_like.rollout.engines.vllm import VLLMEngine
from tunix_like.types import Request, SamplingParams

VLLM = os.environ.get("TUNIX_LIKE_VLLM") or shutil.which("vllm")
HF = {
    "model_type": "qwen2",
    "vocab_size": 13,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,  # a head dimension of 32 is the smallest that vLLM supports on a CPU
    "num_key_value_heads": 1,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,  # vLLM on a CPU does not reload a tied matrix
}
GAP = 1e-4

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(VLLM is None, reason="no vLLM: set TUNIX_LIKE_VLLM to its executable"),
]


def model(adapters=False):
    made = load_model(HF, init="random", seed=0)[0]
    return add_lora(made, LoraConfig(rank=4)) if adapters else made


class Real:
    """A vLLM server, with `adapters` one that can load adapters; `kill` ends all of its processes."""

    def __init__(self, folder, log, adapters):
        self.folder, self.log, self.adapters = folder, log, adapters
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.start()

    def start(self, wait=True):
        settings = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
        options = ["--dtype", "float32", "--max-model-len", "1024", "--enforce-eager", "--enable-scale-out"]
        options += ["--block-size", "32"]  # the prefix cache has whole blocks only
        if self.adapters:
            settings["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "True"
            options += ["--enable-lora", "--max-lora-rank", "8"]
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("JAX", "XLA"))}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [VLLM, "serve", self.folder, *options, "--host", "127.0.0.1", "--port", str(self.port)],
                stdout=log,
                stderr=log,
                env=environment | settings,
                start_new_session=True,
            )
        if wait:
            limit = time.monotonic() + 300
            while not self.healthy():
                assert time.monotonic() < limit and self.process.poll() is None, self.log.read_text()[-3000:]
                time.sleep(1)

    def healthy(self):
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return answer.status == 200
        except OSError:
            return False

    def kill(self):
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="module", params=[False, True], ids=["whole weights", "adapters"])
def server(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("vllm")
    export_model(model(), TOKENIZER, folder / "model")
    made = Real(folder / "model", folder / "log", request.param)
    yield made
    made.kill()


@pytest.fixture
def engine(server, tmp_path):
    rollout = RolloutConfig(
        engine="vllm",
        urls=[server.url],
        max_prompt_length=48,
        max_tokens_to_generate=24,
        request_timeout_seconds=60.0,
        wait_for_servers_seconds=300.0,
    )
    made = VLLMEngine(model(server.adapters), TOKENIZER, rollout, tmp_path / "weights", max_gap=GAP)
    yield made
    made.close()


def learner(engine, **settings):
    rollout = RolloutConfig(max_prompt_length=16, max_tokens_to_generate=24)
    return make(
        model=model(engine._adapters_only),
        reward=varied,
        rollout=rollout,
        engine=engine,
        **{"max_logprob_gap": GAP, "max_steps": 3} | settings,
    )


def test_each_step_is_sampled_with_its_own_weights(engine):
    """The sampler's log-probabilities equal the trainer's after every update."""
    rows = collect(learner(engine), batch_size=4)
    assert len(rows) == 3 and all(row["train/logprob_gap/max"] < GAP for row in rows)
    assert rows[0]["train/loss"] != rows[2]["train/loss"]


def test_no_cache_of_earlier_weights_is_used(engine, server):
    """A prompt of more than one block is sampled with several versions. Requests that run during an update are aborted
    if they name an adapter, whose folder is removed; otherwise they report several versions."""
    prompt, key = list(range(3, 13)) * 4, jax.random.key(0)
    graphdef, state = nnx.split(model(server.adapters))
    logprobs = jax.jit(lambda params, tokens: jax.nn.log_softmax(nnx.merge(graphdef, params)(tokens[None])[0]))
    running, connection = [], engine._fleet.servers[0]
    reload = connection.reload

    async def reload_while_busy(folder, version):
        if not version.endswith("-1"):
            running.extend(asyncio.create_task(_versions(connection)) for _ in range(16))
            await asyncio.sleep(0.1)
        await reload(folder, version)

    connection.reload = reload_while_busy
    for number in range(3):
        trained, frozen = part_params(nnx.to_pure_dict(state))
        params = join_params(jax.tree.map(lambda leaf, n=number: leaf + 0.05 * n, trained), frozen)
        version = engine.place(params)
        (sample,) = engine.generate(version, [Request(prompt, 0, 1)], key, SamplingParams())
        tokens = np.array([*prompt, *sample.tokens])
        expected = np.asarray(logprobs(params, tokens))[np.arange(len(prompt) - 1, len(tokens) - 1), sample.tokens]
        np.testing.assert_allclose(sample.logprobs, expected, atol=GAP)
    engine._wait(asyncio.wait(running))
    versions = [len(task.result()) for task in running]
    assert len(versions) == 32 and (not any(versions) if server.adapters else max(versions) > 1)


async def _versions(connection):
    """Returns the versions with which a long completion was sampled; none if it was aborted."""
    try:
        parameters = {"max_tokens": 800, "stop_token_ids": [], "ignore_eos": True, "logprobs": 0}
        return (await connection.sample([5, 6], parameters)).versions
    except WrongAnswer:
        return []


class Asks:
    """An environment with two turns, whose observation is text that the prompt does not contain."""

    def reset(self, **columns):
        self.turns = 0

    def step(self, completion):
        self.turns += 1
        return "abc", float(len(completion) % 2), self.turns == 2, {}


def test_logprobs_of_several_turns_match_the_trainer(engine):
    made = make(
        model=model(engine._adapters_only), reward=(), engine=engine,
        rollout=RolloutConfig(max_prompt_length=16, max_tokens_to_generate=24),
        environment=Asks, environment_config=EnvironmentConfig(max_turns=2), max_steps=2, max_logprob_gap=GAP,
    )  # fmt: skip
    rows = collect(made, batch_size=4)
    assert all(row["train/logprob_gap/max"] < GAP for row in rows) and rows[0]["train/turns/max"] == 2


@pytest.mark.parametrize("when", ["generating", "reloading"])
def test_killed_server_is_used_again_with_the_current_weights(server, engine, when, caplog):
    """The restarted server has the initial weights. No completion is sampled with them."""
    made = learner(engine, max_steps=3)
    fleet_server = engine._fleet.servers[0]
    place, reload, killers = engine.place, fleet_server.reload, []

    def kill():
        server.kill()
        server.start(wait=False)

    def then_kill(params):
        version = place(params)
        if when == "generating" and made.done == 1 and not killers:
            killers.append(threading.Timer(0.05, kill))
            killers[0].start()
        return version

    async def killed_reload(folder, version):
        if when == "reloading" and version.endswith("-2") and not killers:
            killers.append(threading.Thread(target=kill))
            killers[0].start()
        await reload(folder, version)

    engine.place, fleet_server.reload = then_kill, killed_reload
    rows = collect(made, batch_size=8)
    killers[0].join()
    assert len(rows) == 3 and all(row["train/logprob_gap/max"] < GAP for row in rows)
    assert "used again" in caplog.text


def test_server_with_stale_weights_raises(engine, monkeypatch):
    """The server reads older weights than those of the step. The comparison of log-probabilities raises an error."""
    from tunix_like.errors import UserError

    made = learner(engine)
    writes, save = [], engine._publish

    def stale(write, expected):
        writes.append(write)
        return save(writes[0], expected)

    monkeypatch.setattr(engine, "_publish", stale)
    with pytest.raises(UserError, match="other log-probabilities"):
        made.train(ROWS, batch_size=4)
    assert len(writes) == 2
