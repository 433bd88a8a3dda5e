"""Tests `tunix-like eval` on a tiny model: standard output, the file of the problems, and the summary."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import tunix_like
from tests.tiny_model import HF
from tunix_like.cli import eval as eval_command
from tunix_like.cli import main as cli
from tunix_like.config.schema import DataConfig
from tunix_like.data import load_source, reverse_text
from tunix_like.models.loading import save_model

REWARD = """
def early(prompts, completions, **columns):
    return [float("nan") if c[:1] == "h" else float(c[:1] < "d") for c in completions]
"""
SETTINGS = ("data.name=reverse_text", "data.eval_size=6", "data.train_size=9", "eval.samples=4", "eval.batch_size=6",
            "rollout.max_prompt_length=8", "rollout.max_tokens_to_generate=4", "rewards.workers=0",
            "rewards.functions=[{name: early.py:early}, {name: exact_match}]")  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with a model of random weights, and a reward that such a model sometimes gets."""
    place = tmp_path_factory.mktemp("eval")
    (place / "early.py").write_text(REWARD)
    model, _ = tunix_like.load_model(HF, init="random")
    save_model(nnx.to_pure_dict(nnx.split(model)[1]), model.config, reverse_text.tokenizer(), place / "model")
    return place


def said_by(capsys, *argv: str) -> str:
    code = cli.main(["eval", *argv])
    out, error = capsys.readouterr()
    assert code == 0, error
    return out


def read(place: Path, name: str) -> tuple[list[dict], dict]:
    lines = (place / f"{name}.jsonl").read_text(encoding="utf-8").removesuffix("\n").split("\n")
    return [json.loads(line) for line in lines], json.loads((place / f"{name}.summary.json").read_text())


def test_written_values_equal_the_measured_values(place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    said = said_by(capsys, "model", *SETTINGS, "--out", "kept/a.jsonl")
    assert "wrote every problem to kept/a.jsonl, the summary to kept/a.summary.json" in said
    rows, summary = read(place, "kept/a")
    held_out = load_source(DataConfig(name="reverse_text", eval_size=6, train_size=9)).eval
    assert [row["prompt"] for row in rows] == [each["prompt"] for each in held_out]
    rewards = np.array([row["rewards"] for row in rows], float)
    for row, source in zip(rows, held_out, strict=True):
        assert row["columns"] == {name: value for name, value in source.items() if name != "prompt"}
        right = [c.strip() == source["answer"] for c in row["completions"]]
        expected = [None if c[:1] == "h" else (c[:1] < "d") + r for c, r in zip(row["completions"], right, strict=True)]
        assert row["rewards"] == expected and row["answers"] == [c.strip() for c in row["completions"]]
        assert row["succeeded"] == [None if reward is None else reward >= 1 for reward in expected]
    assert list(rows[0]["values"]) == ["pass@1", "pass@2", "pass@4", "avg@4", "maj@1", "maj@2", "maj@4"]
    assert 0 < np.nanmean(rewards) < 1, "something succeeds and something fails"
    metrics = summary["metrics"]
    for name in rows[0]["values"]:
        known = [row["values"][name] for row in rows if row["values"][name] is not None]
        assert metrics[f"eval/{name}"] == pytest.approx(np.mean(known))
        if len(known) > 1:
            low, high = (metrics[f"eval/{name}/{end}"] for end in ("low", "high"))
            assert 0 <= low <= metrics[f"eval/{name}"] <= high <= max(1, np.nanmax(rewards))
    assert metrics["eval/avg@4"] == pytest.approx(np.mean([np.nanmean(each) for each in rewards]))
    low, high = metrics["eval/pass@1/low"] * 100, metrics["eval/pass@1/high"] * 100
    assert re.search(rf"pass@1 +[│|] +{metrics['eval/pass@1']:.1%} \[{low:.1f}, {high:.1f}\]", said)
    assert (summary["origin"], summary["data"], summary["split"]) == ("model", "reverse_text", "test")
    assert (summary["problems"], summary["samples"], summary["temperature"]) == (6, 4, 1.0)


@pytest.mark.slow
def test_the_rows_of_a_split(place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    said_by(capsys, "model", *SETTINGS, "data.split=train", "eval.max_problems=5", "--out", "train.jsonl")
    train = load_source(DataConfig(name="reverse_text", eval_size=6, train_size=9)).train
    rows, summary = read(place, "train")
    assert [row["prompt"] for row in rows] == [each["prompt"] for each in train][:5] and summary["split"] == "train"


@pytest.mark.slow
def test_prompts_that_are_too_long(place, monkeypatch, capsys, caplog):
    """The title, the table, the summary and a warning contain the count. data.overlong_prompts=error makes the row an
    error."""
    monkeypatch.chdir(place)
    short = [*SETTINGS, "data.text_length=8", "data.eval_size=9", "rollout.max_prompt_length=5"]
    held_out = load_source(DataConfig(name="reverse_text", eval_size=9, train_size=9, text_length=8)).eval
    fits = [number for number, row in enumerate(held_out) if len(row["prompt"]) <= 5]  # one token per character
    count = len(held_out) - len(fits)
    assert fits[0] > 0 and 0 < count < 9
    said = said_by(capsys, "model", *short, "--out", "short.jsonl")
    rows, summary = read(place, "short")
    assert [row["problem"] for row in rows] == fits, "problems have the numbers of their rows"
    assert summary["skipped_prompts"] == summary["metrics"]["eval/skipped_prompts"] == count
    assert f"model: {len(fits)} problems ({count} prompts skipped), 4 samples each" in said
    assert re.search(rf"skipped_prompts +[│|] +{count} ", said)
    assert f"9 evaluation prompts, {count} of them longer than 5 tokens and skipped" in caplog.text
    assert f"A skipped {count} prompts, B {count}" in said_by(capsys, "--compare", "short.jsonl", "short.jsonl")
    assert cli.main(["eval", "model", *short, "data.overlong_prompts=error"]) == 2
    assert "evaluation row 0 (counted from 0): its prompt has" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--out", "a.json"), ["--out a.json", "a name that ends in .jsonl"]),
        (("--out", "there.jsonl"), ["there.summary.json exists already", "delete it"]),
        (("--out", "early.py/a.jsonl"), ["early.py is not a writable folder"]),
        (("data.split=valid",), ["data.eval_split is not read by data.name=reverse_text"]),
    ],
)
def test_bad_input(place, monkeypatch, capsys, argv, words):
    from tunix_like.rollout.sampler import Sampler

    monkeypatch.chdir(place)
    monkeypatch.setattr(Sampler, "generate", None)
    (place / "there.summary.json").write_text("{}")
    assert cli.main(["eval", "model", *SETTINGS, *argv]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and all(word in error for word in words), error


@pytest.mark.slow
def test_comparison_of_a_model_with_a_file(place, monkeypatch, capsys):
    """An evaluation of the model with the settings of the file has the same values. With fewer samples it still shares
    metrics."""
    monkeypatch.chdir(place)
    said_by(capsys, "model", *SETTINGS, "--out", "before.jsonl")
    said = said_by(capsys, "--compare", "before.jsonl", "model", *SETTINGS)
    assert "A: before.jsonl\nB: model\n6 problems" in said
    lines = re.findall(r"(\S+@\d) +[│|].*[│|] +(\S+) \[(\S+), (\S+)\] +[│|] +(\d) / (\d)", said)
    assert {name for name, *_ in lines} == {"pass@1", "pass@2", "pass@4", "avg@4", "maj@1", "maj@2", "maj@4"}
    assert all(float(each[1].strip("%")) == 0 and each[4:] == ("0", "0") for each in lines)


def test_k_of_the_run_beyond_the_number_of_samples(place, monkeypatch, capsys):
    """If an override reduces the number of samples, larger values of k are left out, or replaced by the powers of two.
    An explicit k that is too large is an error."""
    monkeypatch.chdir(place)
    found = eval_command.open_trained("model", [*SETTINGS, "eval.samples=2"], need_data=True)
    for k, kept, said in (([1, 2, 3, 4], [1, 2], "3, 4"), ([4], None, "4")):
        config = dataclasses.replace(found.config, eval=dataclasses.replace(found.config.eval, k=k))
        changed = eval_command._with_fitting_k(found._replace(config=config), ["eval.samples=2"])
        assert changed.config.eval.k == kept
        assert f"eval.k of the run: {said} left out, above eval.samples=2" in capsys.readouterr().out
    assert cli.main(["eval", "model", *SETTINGS, "eval.samples=2", "eval.k=[1, 4]"]) == 2
    assert "eval.k: got 4" in capsys.readouterr().err


@pytest.mark.slow
def test_presets(place, monkeypatch, capsys):
    """Greedy sampling takes the token of the largest logit at every position. Overrides take precedence over a
    preset."""
    monkeypatch.chdir(place)
    said = said_by(capsys, "model", *SETTINGS[:2], *SETTINGS[4:], "--preset", "greedy", "--out", "greedy.jsonl")
    rows, summary = read(place, "greedy")
    assert "6 problems, 1 sample each" in said and summary["temperature"] == 0
    model, tokenizer = tunix_like.load_model(place / "model")
    for row in rows[:2]:
        tokens = tokenizer.encode(row["prompt"])
        drawn: list[int] = []
        while len(drawn) < 4 and not set(drawn) & set(tokenizer.eos_ids):
            drawn.append(int(model(jnp.asarray([tokens + drawn]))[0, -1].argmax()))
        assert row["completions"] == [tokenizer.decode(drawn)]
    settings = [word for word in SETTINGS if "samples" not in word]
    said_by(capsys, "model", *settings, "eval.samples=2", "eval.top_p=0.5", "--preset", "sampled", "--out", "two.jsonl")
    rows, summary = read(place, "two")
    assert (summary["samples"], summary["top_p"], summary["temperature"]) == (2, 0.5, 1.0)
    assert [name for name in rows[0]["values"] if "pass" in name] == ["pass@1", "pass@2"]
