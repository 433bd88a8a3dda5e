"""Tests models in GGUF: a model of transformers, written as llama.cpp's converter writes it, is read with the same
logits; its tokenizer, its errors, and the paths that name a file."""

import shutil
import sys

import jax.numpy as jnp
import numpy as np
import pytest

import tunix_like
from tests.models.gguf_models import FAMILIES, WORDS, written
from tunix_like.errors import UserError
from tunix_like.models.loading import load_abstract, load_config
from tunix_like.text.gguf_tokenizer import gguf_tokenizer

gguf = pytest.importorskip("gguf")


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_equal_those_of_the_written_model(name, tmp_path, monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setenv("TUNIX_LIKE_CACHE", str(tmp_path / "cache"))
    theirs = written(tmp_path / "model.gguf", name)
    ours, tokenizer = tunix_like.load_model(tmp_path / "model.gguf", dtype=jnp.float32)
    ids = np.random.default_rng(0).integers(0, len(WORDS), (2, 24))
    with torch.no_grad():
        expected = theirs(torch.from_numpy(ids)).logits.numpy()
    np.testing.assert_allclose(ours(jnp.asarray(ids)), expected, atol=2e-4)
    assert tokenizer.eos_ids == (1,) and tokenizer.chat_template
    _, _, checked = load_abstract(tmp_path / "model.gguf")
    assert "match" in checked


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_kinds_of_rounding(kind, tmp_path, monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setenv("TUNIX_LIKE_CACHE", str(tmp_path / "cache"))
    theirs = written(tmp_path / "model.gguf", "llama", kind)
    ours, _ = tunix_like.load_model(tmp_path, dtype=jnp.float32)  # the only file of the folder
    ids = np.arange(12)[None]
    with torch.no_grad():
        np.testing.assert_allclose(ours(jnp.asarray(ids)), theirs(torch.from_numpy(ids)).logits.numpy(), atol=2e-4)


def test_paths_that_name_a_file(tmp_path, monkeypatch):
    monkeypatch.setenv("TUNIX_LIKE_CACHE", str(tmp_path / "cache"))
    package = tmp_path / "site" / "some_weights" / "data"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("raise SystemExit('was imported')")
    written(package / "a.gguf", "qwen3")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert load_config("package:some_weights") == load_config(package / "a.gguf") == load_config(package)
    assert "some_weights" not in sys.modules
    shutil.copy(package / "a.gguf", package / "b.gguf")
    for path in ("package:some_weights", package):
        with pytest.raises(UserError, match="several"):
            load_config(path)
    # A newer file of the same name is read anew.
    written(package / "a.gguf", "qwen2")
    assert load_config(package / "a.gguf").qkv_bias


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("package:no_such_package", "Check the name, or install it"),
        ("package:os.path", "Check the name"),
        ("package:json", "has no .gguf file"),
        ("text.gguf", "cannot be read as GGUF"),
        ("cut.gguf", "cannot be read as GGUF"),
        ("mamba.gguf", "'mamba' is not supported"),
        ("yarn.gguf", "'longrope' is not supported"),
    ],
)
def test_what_is_no_model_is_one_line(path, said, tmp_path, monkeypatch):
    monkeypatch.setenv("TUNIX_LIKE_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.gguf").write_text("hello")
    written(tmp_path / "yarn.gguf", "qwen3", change={"qwen3.rope.scaling.type": "longrope"})
    (tmp_path / "cut.gguf").write_bytes((tmp_path / "yarn.gguf").read_bytes()[:4000])
    writer = gguf.GGUFWriter(tmp_path / "mamba.gguf", "mamba")
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    with pytest.raises(UserError, match=said):
        tunix_like.load_model(path)


def test_sentence_piece_merges_follow_the_scores():
    """The order of merges decides: `ab` + `c` scores more than `a` + `bc`."""
    tokens = ["<unk>", "<s>", "</s>", "▁", "a", "b", "c", "bc", "ab", "abc", "▁abc"]
    scores = [0.0, 0, 0, -9, -9, -9, -9, -3, -2, -4, -5]
    fields = {"model": "llama", "tokens": tokens, "scores": scores, "token_type": [2, 3, 3] + [1] * 8}
    made = gguf_tokenizer({f"tokenizer.ggml.{key}": value for key, value in fields.items()} | IDS)
    assert [made.token(i) for i in made.encode("abc")] == ["<s>", "▁abc"]
    assert [made.token(i) for i in made.encode("bcab")] == ["<s>", "▁", "bc", "ab"]
    assert made.decode(made.encode("ab bc")) == "ab bc"


IDS = {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2}


@pytest.mark.parametrize(
    ("pre", "given", "begins"), [("llama-bpe", None, 1), ("llama-bpe", False, 0), ("qwen2", None, 0)]
)
def test_the_beginning_token_is_added_as_by_llama_cpp(pre, given, begins):
    fields = {
        "model": "gpt2",
        "pre": pre,
        "tokens": ["<s>", "a"],
        "merges": [],
        "token_type": [3, 1],
        "bos_token_id": 0,
    }
    fields |= {} if given is None else {"add_bos_token": given}
    made = gguf_tokenizer({f"tokenizer.ggml.{key}": value for key, value in fields.items()})
    assert made.encode("a") == [0] * begins + [1]


def test_an_unknown_pre_tokenizer_leaves_the_model_usable(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("TUNIX_LIKE_CACHE", str(tmp_path / "cache"))
    written(tmp_path / "a.gguf", "qwen3")
    reader = gguf.GGUFReader(tmp_path / "a.gguf", "r+")
    reader.fields["tokenizer.ggml.pre"].parts[-1][:] = np.frombuffer(b"smallm", np.uint8)
    del reader
    model, tokenizer = tunix_like.load_model(tmp_path / "a.gguf")
    assert tokenizer is None and model.config.qk_norm and "model.tokenizer" in caplog.text
    caplog.clear()
    tunix_like.load_model(tmp_path / "a.gguf")
    assert "smallm" in caplog.text
