"""Tests `tunix-like train` with servers: the whole command, and its resumption with servers at other addresses."""

import re
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


def test_dry_run_asks_the_servers(serve, capsys):
    """Each server has a line with its model and its length; nothing on it changes. A server that the run could not use
    gives its reason there, and the status 2."""
    good, short = serve(), serve()
    good.limit, short.limit = 4096, 8
    argv = ["train", YAML, *SMALL, "rollout.engine=vllm", "--dry-run"]
    assert cli.main([*argv, f"rollout.urls=[{good.url}]"]) == 0
    (line,) = re.findall(r"server: (.*)", capsys.readouterr().out)
    assert good.url in line and "vLLM 0.32.0" in line and "model model" in line and "4096" in line
    assert not good.asked and good.version == "default" and "/collective_rpc" not in good.routes
    nobody = "http://127.0.0.1:9"
    assert cli.main([*argv, f"rollout.urls=[{good.url}, {short.url}, {nobody}]"]) == 2
    said, error = capsys.readouterr()
    lines = re.findall(r"server: (.*)", said)
    assert len(lines) == 3 and "--max-model-len 8" in lines[1] and "cannot connect" in lines[2]
    assert error.startswith("error: dry run: 2 of 3") and error.count("\n") == 1
    assert re.search(rf"engine: vllm.*{good.url}.*{nobody}", said)
