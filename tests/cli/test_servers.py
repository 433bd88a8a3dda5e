"""Tests `tunix-like train` with servers: the whole command, and its resumption with servers at other addresses."""

from pathlib import Path

import pytest

from tests.rollout.engines.stand_in import StandIn
from tunix_like.cli import main as cli
from tunix_like.config.load import load
from tunix_like.models.loading import export_model
from tunix_like.runs import build

pytestmark = pytest.mark.slow

YAML = str(Path(__file__).resolve().parents[2] / "examples" / "maze.yaml")
SMALL = (
    "model.config.hidden_size=16", "model.config.intermediate_size=16", "model.config.num_hidden_layers=1",
    "data.batch_size=8", "data.train_size=50", "data.eval_size=8", "algorithm.num_generations=4", "sft.max_steps=2",
    "sft.batch_size=8", "eval.batch_size=8", "eval.max_problems=4", "training.checkpoint_every_n_steps=1",
)  # fmt: skip


@pytest.fixture
def serve(tmp_path):
    parts = build.assemble(load(YAML, SMALL))
    export_model(parts.model, parts.tokenizer, tmp_path / "model")
    servers = []

    def start():
        servers.append(StandIn(tmp_path / "model", parts.tokenizer))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


def test_run_is_resumed_with_servers_at_another_address(serve, tmp_path, capsys):
    """The example answer at the end is sampled in the process, because the connections are closed then."""
    for steps, server in ((1, serve()), (2, serve())):
        settings = "rollout.engine=vllm", f"rollout.urls=[{server.url}]", f"training.output_dir={tmp_path / 'run'}"
        assert cli.main(["train", YAML, *SMALL, *settings, f"training.max_steps={steps}"]) == 0
        assert server.asked, "this server sampled"
        assert "the first held-out problem with the greedy answer of the model:" in capsys.readouterr().out
