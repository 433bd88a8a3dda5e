"""Tests the card of an export against its run, and the upload with the real client of the hub, to a server that keeps
what it gets."""

from __future__ import annotations

import base64
import contextlib
import json

import pytest
import yaml
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from tests.cli.calls import SCRIPT, SMALL, YAML, call
from tests.serving import served
from tunix_like.runtime.console import figure
from tunix_like.storage.metrics import rows

pytestmark = pytest.mark.slow


@contextlib.contextmanager
def hub():
    """Yields the address of a hub, and the files that were committed by their names."""
    files, created = {}, []

    async def create(http: Request) -> JSONResponse:
        body = await http.json()
        created.append(body)
        return JSONResponse({"url": f"{http.base_url}{body['organization']}/{body['name']}"})

    async def preupload(http: Request) -> JSONResponse:
        names = [file["path"] for file in (await http.json())["files"]]
        kept = [{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in names]
        return JSONResponse({"files": kept})

    async def commit(http: Request) -> JSONResponse:
        for line in (await http.body()).splitlines():
            entry = json.loads(line)
            if entry["key"] == "file":
                files[entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
        return JSONResponse({"commitUrl": f"{http.base_url}me/maze/commit/1", "commitOid": "1", "success": True})

    async def other(http: Request) -> JSONResponse:
        return JSONResponse({"id": "me/maze", "siblings": [], "warnings": [], "errors": []})

    app = Starlette(
        routes=[
            Route("/api/repos/create", create, methods=["POST"]),
            Route("/api/models/me/maze/preupload/main", preupload, methods=["POST"]),
            Route("/api/models/me/maze/commit/main", commit, methods=["POST"]),
            Route("/{path:path}", other, methods=["GET", "POST"]),
        ]
    )
    with served.listening(app) as url:
        yield url, files, created


def test_card_and_upload(tmp_path, monkeypatch):
    overrides = [*SMALL, "eval.samples=4", "eval.k=[1, 4]", "eval.batch_size=8"]
    call(SCRIPT, "train", YAML, *overrides, "training.output_dir=run", cwd=tmp_path, JAX_PLATFORMS="cpu")
    monkeypatch.chdir(tmp_path)
    with hub() as (url, files, created):
        push = ("export", "run", "out", "--push", "me/maze")
        environment = {"HF_ENDPOINT": url, "HF_TOKEN": "hf_x", "HF_HUB_OFFLINE": "0"}
        done = call(SCRIPT, *push, cwd=tmp_path, **environment)
        assert "--yes" in done.stdout and not created and not files
        call(
            SCRIPT, *push[:-1], "hf://me/maze", "--overwrite", "--yes", "--license", "mit", cwd=tmp_path, **environment
        )
        assert [(each["name"], each["organization"], each["visibility"]) for each in created] == [
            ("maze", "me", "private")
        ]
        assert files == {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    card = files["README.md"].decode()
    head = yaml.safe_load(card.split("---")[1])
    assert head["license"] == "mit" and "license_name" not in head
    assert head["library_name"] == "transformers" and "maxrl" in head["tags"]
    first, last = (next(row for row in rows("run") if row.get("step") == step) for step in (0, 3))
    for name in ("pass@1", "pass@4"):
        expected = [figure(name, *(row[f"eval/{end}{name}"] for end in ("", "low/", "high/"))) for row in (first, last)]
        assert f"| {name} | {expected[0]} | {expected[1]} |" in card
    algorithm = [line for line in card.splitlines() if line.startswith("| `algorithm.")]
    assert algorithm == ["| `algorithm.advantage_estimator` | maxrl |", "| `algorithm.num_generations` | 4 |"]
    assert "| `data.train_size` | 50 |" in card and str(tmp_path) not in card
    assert files["curve.png"].startswith(b"\x89PNG")
    assert "OWNER/NAME" in call(SCRIPT, "export", "run", "other", "--push", "maze", cwd=tmp_path, code=2).stderr


def test_the_card_of_supervised_fine_tuning_claims_nothing_else(tmp_path):
    call(SCRIPT, "sft", YAML, *SMALL, "training.output_dir=run", cwd=tmp_path, JAX_PLATFORMS="cpu")
    call(SCRIPT, "export", "run", "out", cwd=tmp_path)
    card = (tmp_path / "out" / "README.md").read_text()
    assert yaml.safe_load(card.split("---")[1])["tags"] == ["tunix_like", "sft"]
    assert "supervised fine-tuning, 4 steps of 8 examples, on the data reverse_text" in card
    assert "maxrl" not in card and "| `sft.batch_size` | 8 |" in card


def test_a_failed_upload_keeps_the_export(tmp_path):
    call(SCRIPT, "train", YAML, *SMALL, "training.output_dir=run", cwd=tmp_path, JAX_PLATFORMS="cpu")
    nowhere = {"HF_ENDPOINT": "http://127.0.0.1:1", "HF_TOKEN": "hf_x", "HF_HUB_OFFLINE": "0"}
    done = call(SCRIPT, "export", "run", "out", "--push", "me/maze", "--yes", cwd=tmp_path, code=2, **nowhere)
    assert "out is complete" in done.stderr and (tmp_path / "out" / "model.safetensors").exists()


WORLD = """
class World:
    def __init__(self, api_key): pass
    def reset(self, **row): pass
    def step(self, text): return "", float(len(text) % 2), True
"""


def test_secrets_of_a_configuration_are_in_its_run_only_where_a_resume_needs_them(tmp_path):
    home = tmp_path / "SECRET1"
    home.mkdir()
    (home / "reward.py").write_text("def score(completions, **_):\n    return [len(c) % 2 for c in completions]\n")
    (home / "world.py").write_text(WORLD)
    (home / "call.py").write_text("import tunix_like\n\nclass Call(tunix_like.Callback):\n"
                                  "    def __init__(self, webhook):\n        pass\n")  # fmt: skip
    given = [f"rewards.functions=[{{name: '{home}/reward.py:score'}}]", f"environment.name={home}/world.py:World"]
    given += ["environment.arguments={api_key: SECRET2}", "training.output_dir=run"]
    given += [f"training.callbacks=[{{name: '{home}/call.py:Call', webhook: 'https://x/SECRET3'}}]"]
    call(SCRIPT, "train", YAML, *SMALL, *given, cwd=tmp_path, JAX_PLATFORMS="cpu")
    call(SCRIPT, "report", "run", cwd=tmp_path)
    call(SCRIPT, "export", "run", "out", cwd=tmp_path, JAX_PLATFORMS="cpu")
    files = [path for folder in ("run", "out") for path in (tmp_path / folder).rglob("*") if path.is_file()]
    found = {path.relative_to(tmp_path).as_posix() for path in files if b"SECRET" in path.read_bytes()}
    assert {name for name in found if not name.endswith("meta/metadata")} == {"run/config.yaml"}
    assert "train/rewards/reward.py:score" in {name for row in rows(tmp_path / "run") for name in row}
