"""Tests the messages for optional packages that cannot be imported: they say why, as a package can be broken."""

import json
import subprocess
import sys

PROGRAM = """
import json
from types import SimpleNamespace

import tunix_like
from tunix_like.cli.export import _check_push
from tunix_like.config.schema import DataConfig, TeacherConfig
from tunix_like.data import load_source
from tunix_like.openenv.session import require_websockets
from tunix_like.errors import UserError
from tunix_like.rollout.engines import ENGINES
from tunix_like.runtime.object_storage import opened
from tunix_like.runtime.processes import start_pathways
from tunix_like.storage.prometheus import MetricsServer
from tunix_like.training.companions import make_teacher

server = TeacherConfig(path="http://127.0.0.1:1")
calls = [
    lambda: tunix_like.rewards.Judge("http://127.0.0.1:1", "Good."),
    lambda: tunix_like.load_model("owner/name"),
    lambda: load_source(DataConfig(name="hub", path="owner/name")),
    lambda: _check_push("owner/name", "out"),
    lambda: ENGINES["vllm"].make(None),
    lambda: make_teacher(SimpleNamespace(model=None, rollout_config=tunix_like.RolloutConfig()), None, server, False),
    lambda: opened("gs://bucket/folder", "model.path"),
    require_websockets,
    start_pathways,
    MetricsServer(None, None, "checkpoints").open,
]
for call in calls:
    try:
        call()
    except UserError as error:
        print(json.dumps(str(error)))
"""


def test_the_error_of_an_import_is_kept(tmp_path):
    packages = ("aiohttp", "huggingface_hub", "datasets", "gcsfs", "websockets", "pathwaysutils", "prometheus_client")
    for name in packages:
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('{name}: its library is missing')")
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{PROGRAM}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    said = [json.loads(line) for line in done.stdout.splitlines()]
    asked = ["aiohttp", "huggingface_hub", "datasets", "huggingface_hub", "aiohttp", "aiohttp", *packages[3:]]
    assert len(said) == len(asked), done.stderr
    for message, name in zip(said, asked, strict=True):
        assert f"{name}: its library is missing" in message and "tunix-like[" in message
