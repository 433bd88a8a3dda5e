"""Fixtures that start stand-ins for vLLM servers and build engines that use them."""

import pytest

from tests.rollout.engines.stand_in import StandIn
from tests.training.small_learner import TOKENIZER, make_model
from tunix_like import RolloutConfig
from tunix_like.models.loading import export_model
from tunix_like.rollout.engines import fleet
from tunix_like.rollout.engines.vllm import VLLMEngine


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "model"
    export_model(make_model(), TOKENIZER, folder)
    return folder


@pytest.fixture
def serve(model_folder, monkeypatch):
    """Starts stand-in servers. A server that failed is contacted again after a short time."""
    monkeypatch.setattr(fleet, "POLL_SECONDS", 0.05)
    servers = []

    def start(**settings):
        servers.append(StandIn(model_folder, TOKENIZER, **settings))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


@pytest.fixture
def connect(tmp_path):
    """Builds engines from servers and closes them after the test."""
    engines = []

    def build(*servers, max_gap=1e-4, model=None, **settings):
        lengths = {"max_prompt_length": 8, "max_tokens_to_generate": 4} | settings
        urls = [server if isinstance(server, str) else server.url for server in servers]
        rollout = RolloutConfig(
            engine="vllm", urls=urls, **{"wait_for_servers_seconds": 60.0, "request_timeout_seconds": 10.0} | lengths
        )
        engines.append(VLLMEngine(model or make_model(), TOKENIZER, rollout, tmp_path / "weights", max_gap=max_gap))
        return engines[-1]

    yield build
    for engine in engines:
        engine.close()
