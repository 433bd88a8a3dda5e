"""Tests models, data and exports in object storage: in memory, and if they are installed (`docs/contributing.md`), with
emulators of S3 and of Google Cloud Storage in processes of their own."""

from __future__ import annotations

import json
from pathlib import Path

import fsspec
import jax
import numpy as np
import pytest
from flax import nnx

from tests.buckets import KINDS, bucket_in, objects
from tests.tiny_model import HF
from tests.training.small_learner import ROWS, TOKENIZER
from tunix_like.cli import main as cli
from tunix_like.errors import UserError
from tunix_like.models.loading import export_model, load_model
from tunix_like.runtime import object_storage
from tunix_like.runtime.object_storage import local_copy, upload


@pytest.fixture(scope="module", params=KINDS)
def bucket(request, tmp_path_factory):
    """Returns the address of an empty bucket."""
    with bucket_in(request.param, tmp_path_factory.mktemp("bucket")) as url:
        yield url


def params_of(model):
    return jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.split(model)[1]))


def test_a_model_is_exported_and_loaded(bucket):
    one, two = (load_model(HF, init="random", seed=seed)[0] for seed in (1, 2))
    url = f"{bucket}/models/tiny"
    export_model(one, TOKENIZER, url)
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(objects(url))
    loaded, tokenizer = load_model(url)
    jax.tree.map(np.testing.assert_array_equal, params_of(loaded), params_of(one))
    assert tokenizer.encode("abc") == TOKENIZER.encode("abc")
    with pytest.raises(UserError, match=f"{url} has objects: give another address, or --overwrite"):
        export_model(two, TOKENIZER, url)
    export_model(two, TOKENIZER, f"{url}/", overwrite=True)
    jax.tree.map(np.testing.assert_array_equal, params_of(load_model(url)[0]), params_of(two))


def test_an_interrupted_upload_is_no_model(bucket, tmp_path, monkeypatch):
    """The file that marks a model is deleted first and written last."""
    url = f"{bucket}/models/broken"
    for name in ("a.safetensors", "config.json", "z.txt"):
        (tmp_path / name).write_text(name)
    upload(tmp_path, url, ("config.json",))
    assert objects(url) == ["a.safetensors", "config.json", "z.txt"]
    system, _ = fsspec.core.url_to_fs(url)
    put, calls = system.put_file, []

    def lose(source, *arguments):
        calls.append(Path(source).name)
        if len(calls) == 2:
            raise OSError("the connection was reset")
        return put(source, *arguments)

    monkeypatch.setattr(system, "put_file", lose)
    with pytest.raises(UserError, match=f"{url} cannot be written: .*the connection was reset"):
        upload(tmp_path, url, ("config.json",))
    assert calls == ["a.safetensors", "z.txt"] and objects(url) == ["a.safetensors"]


def test_copies_are_kept_until_an_object_changes(bucket, monkeypatch):
    url = f"{bucket}/data/rows.jsonl"
    system, path = fsspec.core.url_to_fs(url)
    system.pipe_file(path, b"one")
    first = local_copy(url, "data.path")
    monkeypatch.setattr(object_storage, "_download", None)
    assert local_copy(url, "data.path") == first and first.read_bytes() == b"one"
    monkeypatch.undo()
    system.pipe_file(path, b"two")
    second = local_copy(url, "data.path")
    assert second != first and second.read_bytes() == b"two" and first.read_bytes() == b"one"


def test_a_run_reads_model_and_data_and_exports(bucket, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    export_model(load_model(HF, init="random")[0], TOKENIZER, f"{bucket}/start")
    system, path = fsspec.core.url_to_fs(f"{bucket}/rows")
    rows = "\n".join(json.dumps({"prompt": row["prompt"], "answer": row["answer"]}) for row in ROWS).encode()
    for split in ("train", "test"):
        system.pipe_file(f"{path}/{split}.jsonl", rows)
    (tmp_path / "run.yaml").write_text(f"model: {{path: '{bucket}/start'}}")
    command = ["train", "run.yaml", "algorithm.advantage_estimator=rloo", "data.name=jsonl", f"data.path={bucket}/rows",
               "data.batch_size=8", "rollout.max_prompt_length=8", "rollout.max_tokens_to_generate=4", "eval.samples=1",
               "training.max_steps=1", "training.output_dir=run"]  # fmt: skip
    assert cli.main(command) == 0
    assert cli.main(["export", "run", f"{bucket}/end"]) == 0
    assert f"to {bucket}/end" in capsys.readouterr().out
    end = load_model(f"{bucket}/end")[0]
    assert set(params_of(end)) == set(params_of(load_model(f"{bucket}/start")[0]))
    assert cli.main(["export", "run", f"{bucket}/end"]) == 2
    assert "has objects" in capsys.readouterr().err


def test_mistakes(bucket, monkeypatch):
    with pytest.raises(UserError, match=f"model.path: {bucket}/none: there is no such object"):
        load_model(f"{bucket}/none")
    with pytest.raises(UserError, match="model.path: .*no-bucket"):
        load_model(bucket.replace("bucket", "no-bucket") + "/none")
    package = {"s3": "s3fs", "gs": "gcsfs"}[bucket[:2]]

    def missing(url):
        raise ImportError(f"Install {package}")

    monkeypatch.setattr(fsspec.core, "url_to_fs", missing)
    with pytest.raises(UserError, match=f"needs the package {package}; run pip install"):
        load_model(f"{bucket}/none")
