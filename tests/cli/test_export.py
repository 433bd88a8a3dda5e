"""Tests which folders an export may replace, that it is complete or absent, its file permissions, and the page of a
report."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

import tunix_like
from tests.tiny_model import HF
from tunix_like import LoraConfig, UserError
from tunix_like.cli import eval as eval_command
from tunix_like.cli import main as cli
from tunix_like.data import reverse_text
from tunix_like.models import loading, lora
from tunix_like.models.loading import save_model
from tunix_like.report import page
from tunix_like.storage import output_folder

pytestmark = pytest.mark.slow

TOKENIZER = reverse_text.tokenizer()
FILES = [
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
]


@pytest.fixture(scope="module")
def model():
    return tunix_like.load_model(HF, init="random")[0]


@pytest.fixture(scope="module")
def adapted(model):
    return tunix_like.add_lora(model, LoraConfig(rank=2))


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_file_permissions_of_an_export_follow_the_umask(tmp_path, model, adapted):
    before = os.umask(0o027)
    try:
        tunix_like.export_model(model, TOKENIZER, tmp_path / "deep" / "out")
        tunix_like.save_adapter(adapted, tmp_path / "adapter")
    finally:
        os.umask(before)
    assert sorted(os.listdir(tmp_path / "deep" / "out")) == FILES and os.listdir(tmp_path / "deep") == ["out"]
    assert sorted(os.listdir(tmp_path / "adapter")) == ["adapter_config.json", "adapter_model.safetensors"]
    for path in tmp_path.rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o750 if path.is_dir() else 0o640), path


@pytest.mark.parametrize("what", ["model", "adapter"])
def test_non_empty_folder_is_replaced_only_with_the_option(tmp_path, model, adapted, what):
    out = tmp_path / "out"

    def write(**options):
        if what == "adapter":
            tunix_like.save_adapter(adapted, out, **options)
        else:
            tunix_like.export_model(model, TOKENIZER, out, **options)

    out.mkdir(mode=0o700)  # an empty folder is used, with its mode
    write()
    written, mode = contents(out), stat.S_IMODE(out.stat().st_mode)
    assert mode == 0o700
    foreign = ["model-00001-of-00002.safetensors", "model.safetensors.index.json", "pytorch_model.bin"]
    for name in foreign:
        (out / name).write_text("of another model")
    kept = contents(out)
    with pytest.raises(UserError, match=r"out is not empty .*--overwrite"):
        write()
    assert contents(out) == kept
    write(overwrite=True)
    assert contents(out) == written and os.listdir(tmp_path) == ["out"]


def test_failed_write_keeps_the_old_folder(tmp_path, model, monkeypatch):
    out = tmp_path / "out"
    tunix_like.export_model(model, TOKENIZER, out)
    kept = contents(out)

    def full(*args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(loading, "write_json", full)  # after the weights
        with pytest.raises(UserError, match=f"{out}: cannot write .*No space left"):
            tunix_like.export_model(model, TOKENIZER, out, overwrite=True)
        with pytest.raises(UserError, match="No space left"):
            tunix_like.export_model(model, TOKENIZER, tmp_path / "new")
    assert contents(out) == kept and os.listdir(tmp_path) == ["out"]

    renamed = Path.rename

    def second(path, target):  # the new folder cannot replace the old one
        return full() if path.name.endswith(".part") else renamed(path, target)

    monkeypatch.setattr(Path, "rename", second)
    with pytest.raises(UserError, match=f"{out}: cannot be written"):
        tunix_like.export_model(model, TOKENIZER, out, overwrite=True)
    assert contents(out) == kept and os.listdir(tmp_path) == ["out"]


def test_files_of_a_mounted_folder_are_replaced_in_place(tmp_path, model, monkeypatch):
    """A volume of a container can be neither replaced nor renamed."""
    out = tmp_path / "out"
    out.mkdir()
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == out)
    place = out.stat().st_ino
    tunix_like.export_model(model, TOKENIZER, out)
    (out / "pytorch_model.bin").write_text("of another model")
    tunix_like.export_model(model, TOKENIZER, out, overwrite=True)
    assert sorted(os.listdir(out)) == FILES and out.stat().st_ino == place and os.listdir(tmp_path) == ["out"]


def make_run(folder):
    """Writes the files of a run without content."""
    (folder / "checkpoints" / "3" / "state").mkdir(parents=True)
    (folder / "checkpoints" / "3" / "_CHECKPOINT_METADATA").write_text("{}")
    (folder / "model").mkdir()
    for name in ("config.yaml", "metrics.jsonl", "model/config.json"):
        (folder / name).write_text("{}")


@pytest.mark.parametrize(
    ("out", "said"),
    [
        ("run", "is the folder of a run"),
        ("run/model", "belongs to the run"),
        ("run/checkpoints", "contains checkpoints"),
        ("run/checkpoints/3", "contains checkpoints"),
        ("run/checkpoints/4", "contains checkpoints"),
        ("bare", "is the folder of a run"),
        ("link", "is the folder of a run"),
        ("nested", "contains the folder original"),
        ("linked", "contains the link model.safetensors"),
        ("notes", "contains no config.json"),
        ("file", "is a file"),
        ("base", "is the model to export"),
    ],
)
def test_folders_that_are_never_replaced(tmp_path, monkeypatch, capsys, out, said):
    """The error does not depend on the options, and is raised before a model is loaded."""
    make_run(tmp_path / "run")
    for name in ("bare", "nested/original", "linked", "notes", "base"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "link").symlink_to("run")
    for name in ("bare/metrics.jsonl", "nested/config.json", "linked/config.json", "notes/a.txt", "base/config.json"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "linked" / "model.safetensors").symlink_to("config.json")
    (tmp_path / "file").write_text("")
    monkeypatch.chdir(tmp_path)
    kept = contents(tmp_path)
    for options in ([], ["--overwrite"], ["--overwrite", "--adapter"]):
        assert cli.main(["export", "base", out, *options]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"error: {out}") and error.count("\n") == 1
        assert said in error and "--overwrite" not in error, error
        assert contents(tmp_path) == kept


def test_export_of_a_folder(tmp_path, model, monkeypatch, capsys):
    """An export does not replace the folder from which its model was loaded. Its end-of-sequence ids include those of
    `rollout.eos_tokens`."""
    monkeypatch.chdir(tmp_path)
    save_model(nnx.to_pure_dict(nnx.split(model)[1]), model.config, TOKENIZER, "base")
    assert cli.main(["export", "base", "out", "rollout.eos_tokens=[5]"]) == 0
    ends = json.loads(Path("out/generation_config.json").read_text())["eos_token_id"]
    assert ends == [5, TOKENIZER.eos_id]
    assert cli.main(["export", "base", "out"]) == 2 and "--overwrite" in capsys.readouterr().err
    assert cli.main(["export", "base", "out", "--overwrite"]) == 0
    loaded, _ = tunix_like.load_model("out")
    same = lambda one, two: np.testing.assert_array_equal(np.asarray(one), np.asarray(two))  # noqa: E731
    jax.tree.map(same, nnx.state(loaded), nnx.state(model))
    with pytest.raises(UserError, match="is the model to export"):
        tunix_like.export_model(loaded, TOKENIZER, tmp_path / "out", overwrite=True)
    with pytest.raises(UserError, match="is the model to export"):
        tunix_like.save_adapter(tunix_like.add_lora(loaded, LoraConfig(rank=2)), "out", overwrite=True)


def test_report_replaces_only_reports(tmp_path, monkeypatch):
    monkeypatch.setattr(page, "read_runs", lambda folders: [])
    text = page.build([], [], tmp_path)
    monkeypatch.setattr(page, "build", lambda runs, gradients, folder: text)
    out = tmp_path / "report.html"
    page.write([], str(out), None, None)
    out.write_text(text[:-100] + "an older page")
    page.write([], str(out), None, None)
    assert out.read_text(encoding="utf-8") == text
    config = tmp_path / "config.yaml"
    config.write_text("mine")
    with pytest.raises(UserError, match=r"--out .*config\.yaml: .*not a report"):
        page.write([], str(config), None, None)
    assert config.read_text() == "mine"

    def full(self, text, encoding=None):
        self.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(UserError, match="No space left"):
        page.write([], str(out), None, None)
    assert out.read_text(encoding="utf-8") == text and sorted(os.listdir(tmp_path)) == ["config.yaml", "report.html"]


def test_both_files_of_an_evaluation_are_written_or_none(tmp_path, monkeypatch):
    files = eval_command.out_files(tmp_path / "kept" / "a.jsonl")
    write_text = Path.write_text

    def full(self, text, encoding=None):
        if "summary" in self.name:
            raise OSError(28, "No space left on device")
        return write_text(self, text, encoding)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", full)
        with pytest.raises(UserError, match=r"--out .*a\.jsonl: cannot be written.*No space left"):
            eval_command._write(files, [{"problem": 0}], {})
    assert os.listdir(tmp_path / "kept") == []
    eval_command._write(files, [{"problem": 0}], {})
    assert sorted(os.listdir(tmp_path / "kept")) == ["a.jsonl", "a.summary.json"]


def test_file_names_that_identify_a_run_are_those_of_a_run():
    from tunix_like.storage import metrics

    assert metrics.FILE in output_folder.RUN_FILES and lora.ADAPTER_CONFIG in output_folder.MODEL_FILES
