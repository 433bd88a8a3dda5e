"""Tests models, data, runs and exports in object storage: in memory, and if they are installed
(`docs/contributing.md`), with emulators of S3 and of Google Cloud Storage in processes of their own."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import fsspec
import jax
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFile

from tests.buckets import KINDS, InMemory, bucket_in, objects
from tests.tiny_model import HF
from tests.training.small_learner import ROWS, TOKENIZER, assert_same, differ, make, params_of
from tunix_like import load_model
from tunix_like.cli import main as cli
from tunix_like.config.schema import DataConfig
from tunix_like.data import load_source
from tunix_like.errors import UserError
from tunix_like.models.loading import export_model
from tunix_like.runtime import object_storage
from tunix_like.runtime.object_storage import local_copy, upload
from tunix_like.storage.mirror import local_folder
from tunix_like.storage.output_folder import check_target
from tunix_like.storage.run_lock import owned


@pytest.fixture
def memory(tmp_path):
    with bucket_in("memory", tmp_path) as url:
        yield url


def load_rows(address):
    return load_source(DataConfig(name="jsonl", path=str(address)))


@pytest.fixture(scope="module", params=KINDS)
def bucket(request, tmp_path_factory):
    """Returns the address of an empty bucket."""
    with bucket_in(request.param, tmp_path_factory.mktemp("bucket")) as url:
        yield url


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


@pytest.mark.slow
def test_a_run_is_in_a_bucket_with_its_model_and_data(bucket, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    export_model(load_model(HF, init="random")[0], TOKENIZER, f"{bucket}/start")
    system, path = fsspec.core.url_to_fs(f"{bucket}/rows")
    rows = "\n".join(json.dumps({"prompt": row["prompt"], "answer": row["answer"]}) for row in ROWS).encode()
    for split in ("train", "test"):
        system.pipe_file(f"{path}/{split}.jsonl", rows)
    (tmp_path / "reward.py").write_text(
        "def odd(prompts, completions, **_):\n    return [len(c) % 2 for c in completions]"
    )
    (tmp_path / "run.yaml").write_text(f"model: {{path: '{bucket}/start'}}")
    command = ["train", "run.yaml", "algorithm.advantage_estimator=rloo", "data.name=jsonl", f"data.path={bucket}/rows",
               "data.batch_size=8", "rollout.max_prompt_length=8", "rollout.max_tokens_to_generate=4", "eval.samples=1",
               "rewards.functions=[{name: reward.py:odd}]",
               "training.max_steps=2", "training.checkpoint_every_n_steps=1", "training.log_rollouts_every_n_steps=1",
               "training.eval_every_n_steps=1", f"training.output_dir={bucket}/runs/one"]  # fmt: skip
    run = f"{bucket}/runs/one"
    assert cli.main([*command, "training.max_steps=0"]) == 2 and objects(run) == []
    assert cli.main(command) == 0
    assert f"run folder: {run} (" in capsys.readouterr().out
    assert {"config.yaml", "metrics.jsonl", "rollouts/step_000002.jsonl"} <= set(objects(run))
    for name, source in {"newest": run, "second": f"{run}/checkpoints/2", "first": f"{run}/checkpoints/1/"}.items():
        assert cli.main(["export", source, f"{bucket}/{name}"]) == 0
        assert f"wrote {run}/checkpoints/{1 if name == 'first' else 2} to {bucket}/{name}" in capsys.readouterr().out
    newest, second, first = (params_of(load_model(f"{bucket}/{name}")[0]) for name in ("newest", "second", "first"))
    assert_same(newest, second)
    assert differ(newest, first)
    assert_same(params_of(load_model(run)[0]), newest)
    assert cli.main(["export", run, f"{bucket}/newest"]) == 2
    assert "has objects" in capsys.readouterr().err
    assert cli.main(["eval", run, "--best", "training.best_metric=eval/mean_length"]) == 0
    assert re.search(rf"{run}/checkpoints/[12]: ", capsys.readouterr().out)
    assert cli.main(["report", run]) == 0
    assert f"wrote {run}/report.html" in capsys.readouterr().out and "report.html" in objects(run)
    assert cli.main(["export", f"{run}/checkpoints/7", f"{bucket}/seven"]) == 2
    assert f"{run}: no checkpoint checkpoints/7; there are: checkpoints/1, checkpoints/2" in capsys.readouterr().err


@pytest.mark.slow
def test_a_learner_resumes_on_another_host(bucket, tmp_path, monkeypatch):
    """Its result is that of an uninterrupted run."""
    whole, run = make(max_steps=4), f"{bucket}/runs/learner"
    whole.train(ROWS, batch_size=4)
    make(max_steps=2, output_dir=run, checkpoint_every_n_steps=1).train(ROWS, batch_size=4)
    monkeypatch.setenv("TUNIX_LIKE_CACHE", str(tmp_path))
    resumed = make(max_steps=4, output_dir=run, checkpoint_every_n_steps=1)
    resumed.train(ROWS, batch_size=4)
    assert_same(params_of(resumed.model), params_of(whole.model))
    assert_same(params_of(load_model(run)[0]), params_of(whole.model))


LEADING_OUT = [
    "..", "../..", "../../..", "../" * 20 + "tmp", "a/..", "a/../..", "a/../../..", "./..", ".././..", "..//..",
    "rollouts/..", "rollouts/../../../..", "model/../../x", "checkpoints/1/../../../x", "checkpoints/1/state/../..",
    "run.lock/../../x", "..\n/..", "../.ssh", "../../home/user", "a/b/c/../../../../d",
    ".", "./a", "a/.", "a/./b", "", "a/", "a//b", "/a", "//a", "///", "rollouts//eval", "model//", "{}", "{}/x",
]  # fmt: skip
"""Folders in the names of objects below an address; `{}` is an absolute path of this machine."""


def report_of(url):
    if cli.main(["report", url]):
        raise UserError("the command says why")


def output_to(url):
    with owned(url):
        pass


@pytest.mark.parametrize("name", LEADING_OUT)
@pytest.mark.parametrize("reads", [report_of, load_model, output_to, load_rows], ids=lambda reads: reads.__name__)
def test_names_of_objects_do_not_lead_out_of_the_folder(bucket, reads, name, tmp_path, monkeypatch, capsys):
    url, file = f"{bucket}/{tmp_path.name}/run", "rows.jsonl" if reads is load_rows else "config.json"
    for folder in ("cache/a/b", "temporary/a/b"):
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.setenv("TUNIX_LIKE_CACHE", str(tmp_path / "cache/a/b"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary/a/b"))
    system, root = fsspec.core.url_to_fs(url)
    name = f"{'rollouts/' * (reads is report_of)}{name.format(tmp_path)}/{file}"
    if isinstance(system, InMemory):
        system.store[f"{root}/{name}"] = MemoryFile(system, name, b"hostile")
    elif bucket.startswith("gs") or "\n" in name:
        pytest.skip("the emulator cannot store this name")
    else:
        system.pipe_file(f"{root}/{name}", b"hostile")
    system.pipe_file(f"{root}/metrics.jsonl", b'{"step": 1, "train/rewards/mean": 1}\n')
    with pytest.raises(UserError) as refused:
        reads(url)
    assert "leads out of its folder" in f"{refused.value}{capsys.readouterr().err}"
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not [path for path in files if path.read_bytes() == b"hostile"]


@pytest.mark.parametrize("name", ["...", "..a", "a..", "%2e%2e", "~", "a\\b", " ", "-rf", "\u202e", "é", "..%2f", "*"])
def test_odd_names_of_objects_are_names_of_files(memory, name):
    system, root = fsspec.core.url_to_fs(f"{memory}/odd")
    system.pipe_file(f"{root}/{name}/config.json", name.encode())
    copy = local_copy(f"{memory}/odd", "model.path", ("*.json",))
    assert (copy / name / "config.json").read_bytes() == name.encode()


def may_export(address):
    check_target(address, overwrite=False)


INCOMPLETE = ["s3:/x", "gs:/b/x", "hf:/x", "S3:/x", "gs:x", "s3:", "gs://", "gs:///x", "S3://b/x", Path("gs://b/x")]


@pytest.mark.parametrize("address", INCOMPLETE, ids=str)
@pytest.mark.parametrize("reads", [load_model, local_folder, load_rows, may_export], ids=lambda reads: reads.__name__)
def test_incomplete_addresses_are_no_folders_of_this_machine(reads, address, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="begin with gs://BUCKET or s3://BUCKET|give hf://OWNER/NAME"):
        reads(address)
    assert not any(tmp_path.iterdir())


def test_mistakes(bucket, monkeypatch, capsys):
    with pytest.raises(UserError, match=f"model.path: {bucket}/none: there is no such object"):
        load_model(f"{bucket}/none")
    for reads in (load_model, local_folder):  # `az:` would become a folder of this machine
        with pytest.raises(UserError, match="az://bucket/none: .*gs://BUCKET or s3://"):
            reads("az://bucket/none")
    with pytest.raises(UserError, match="model.path: .*no-bucket"):
        load_model(bucket.replace("bucket", "no-bucket") + "/none")
    package = {"s3": "s3fs", "gs": "gcsfs"}[bucket[:2]]

    def missing(url):
        raise ImportError(f"Install {package}")

    monkeypatch.setattr(fsspec.core, "url_to_fs", missing)
    with pytest.raises(UserError, match=f"needs the package {package} .*{package}.*; run pip install"):
        load_model(f"{bucket}/none")
    run = f"training.output_dir={bucket}/run"
    assert cli.main(["train", "examples/debug/reverse_text.yaml", "--dry-run", run]) == 2
    assert f"training.output_dir: {bucket}/run needs the package {package}" in capsys.readouterr().err


def test_a_bucket_that_does_not_exist_is_named(monkeypatch, capsys):
    class Absent(fsspec.AbstractFileSystem):
        def find(self, path, **options):
            raise FileNotFoundError("b/absent/o")  # as gcsfs

    monkeypatch.setitem(sys.modules["fsspec.registry"]._registry, "s3", Absent)
    argv = ["train", "examples/debug/reverse_text.yaml", "training.output_dir=s3://absent/run", "--dry-run"]
    assert cli.main(argv) == 2
    assert re.search("training.output_dir: s3://absent/run .*bucket does not exist", capsys.readouterr().err)
    assert cli.main(["runs", "s3://absent/runs"]) == 2
    assert "local folders" in capsys.readouterr().err
