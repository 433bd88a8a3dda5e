"""Tests the servers of one engine: weight updates during the repair of a server, and servers that another run uses."""

import asyncio
import dataclasses
import threading

import jax
import pytest

from tests.rollout.engines.stand_in import until
from tests.training.small_learner import TOKENIZER, make_model, params_of
from tunix_like import RolloutConfig, UserError
from tunix_like.errors import EngineLost
from tunix_like.rollout.engines.vllm import VLLMEngine
from tunix_like.types import Request, SamplingParams


def sampled(engine, version):
    requests = [Request([5, 6], number, 2) for number in range(4)]
    return list(engine.generate(version, requests, jax.random.key(0), SamplingParams()))


def other_version(answer):
    answer["choices"][0]["weight_versions"][0]["version"] = "of another run"
    return answer


def test_weights_that_change_during_the_repair_of_a_server(serve, connect):
    """A server that still receives the previous weights is compared with the new weights only after it has loaded
    them."""
    quick, slow = serve(), serve()
    engine, changed = connect(quick, slow), threading.Event()
    version = engine.place(params_of(make_model()))
    connection = engine._fleet.servers[1]
    reload = connection.reload

    async def late(folder, version):
        await asyncio.to_thread(changed.wait, 30)
        await reload(folder, version)

    connection.reload, slow.faults = late, [other_version]
    assert len(sampled(engine, version)) == 8
    logprobs, asked = engine.probe.logprobs, len(slow.asked)

    def watched(params):
        found = logprobs(params)
        changed.set()
        assert until(lambda: len(slow.asked) > asked)  # the comparison with the previous weights
        return found

    engine.probe.logprobs = watched
    version = engine.place(params_of(make_model(seed=1)))
    assert len(sampled(engine, version)) == 8
    assert slow.version == quick.version == version


def test_server_that_another_run_uses_raises(serve, connect):
    server = serve()
    engine = connect(server)
    version = engine.place(params_of(make_model()))
    server.faults = [other_version] * 200
    with pytest.raises(EngineLost, match=r"\['of another run'\] instead of .*; give each run servers of its own"):
        sampled(engine, version)


@pytest.mark.slow
def test_error_of_a_weight_update_names_the_reason(serve, connect):
    """The error is of the type that saves the run. Afterwards the previous weights are sent to the servers again."""
    server = serve()
    engine = connect(server, wait_for_servers_seconds=5.0)
    before = params_of(make_model())
    engine.place(before)

    def refuse(folder):
        raise OSError("no such folder")

    loads, server._load = server._load, refuse
    with pytest.raises(EngineLost, match=rf"{server.url} \(/collective_rpc answered with status 500"):
        engine.place(params_of(make_model(seed=1)))
    server._load = loads
    version = engine.place(before)
    assert server.version == version
    assert len(sampled(engine, version)) == 8


@pytest.mark.parametrize("truncation", [{"top_p": 0.9}, {"top_k": 20}])
def test_truncation_with_a_temperature_is_rejected(serve, tmp_path, truncation):
    """vLLM returns log-probabilities before both operations or after both. Training needs those after the temperature
    only, so the combination is rejected."""
    servers = {"engine": "vllm", "urls": [serve().url], "max_prompt_length": 8, "max_tokens_to_generate": 4}
    rollout = RolloutConfig(**servers, **truncation)
    VLLMEngine(make_model(), TOKENIZER, rollout, tmp_path / "weights").close()
    rollout = dataclasses.replace(rollout, temperature=0.8)
    with pytest.raises(UserError, match=f"rollout.{next(iter(truncation))}: .* set rollout.temperature=1, or omit"):
        VLLMEngine(make_model(), TOKENIZER, rollout, tmp_path / "weights")
