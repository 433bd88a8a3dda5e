"""Tests that user errors give a one-line message that names the key, file or row and a remedy: before anything is
compiled or written if the error is detectable without completions, else without loss of data."""

from __future__ import annotations

import gzip
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from flax import nnx
from safetensors.numpy import load_file, save_file

import tunix_like
from tests.parameters import others_slow
from tests.runs.mistakes import MISTAKES, NORM, OWN, REVERSE, REVERSED
from tests.tiny_model import HF
from tunix_like.cli import main as cli
from tunix_like.config.load import load, save
from tunix_like.data import reverse_text
from tunix_like.models.loading import save_model
from tunix_like.rollout.sampler import Sampler
from tunix_like.runs import build as runs
from tunix_like.runs import checks
from tunix_like.runs.folder import claim
from tunix_like.storage.metrics import rows as metric_rows
from tunix_like.text.tokenizer import Tokenizer

OWN_DATA = """
model: {path: model}
data: {name: jsonl, path: good.jsonl, batch_size: 8}
algorithm: {advantage_estimator: maxrl, num_generations: 4}
rollout: {max_prompt_length: 8, max_tokens_to_generate: 4}
training: {max_steps: 1, output_dir: out}
"""
ESTIMATORS = """
def good(rewards, *, scored, lengths, power=1.0):
    return rewards

def blind(rewards, *, lengths):
    return rewards

def branches(rewards, *, scored, lengths):
    return rewards if rewards.max() > 0 else -rewards

def means(rewards, *, scored, lengths):
    return rewards.mean(axis=1)

def loss(logprobs, old_logprobs, advantages, mask):
    return (-logprobs * advantages).sum(-1), {}

def scalar(logprobs, old_logprobs, advantages, mask):
    return (-logprobs * advantages).sum()

def alone(logprobs, old_logprobs, advantages, mask):
    return -logprobs * advantages

def nothing(logprobs, old_logprobs, advantages, mask):
    -logprobs * advantages

def empty(logprobs, old_logprobs, advantages, mask):
    return None, {}

def triple(logprobs, old_logprobs, advantages, mask):
    return -logprobs * advantages, {}, 1

def no_advantage(rewards, *, scored, lengths):
    rewards - 1
"""
REWARDS = """
def short(prompts, completions):
    return [1.0]

def negative(prompts, completions):
    return [-1.0 for _ in completions]

def needs_gold(completions, gold):
    return [1.0 for _ in completions]

def yields(prompts, completions, **columns):
    yield 1.0
"""


def jsonl(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


GOOD = [{"prompt": f"{a}{b}>", "answer": f"{b}{a}"} for a in "abcd" for b in "efgh"]
FILES = {
    "own.yaml": OWN_DATA,
    "unknown_key.yaml": "algorithm: {num_generation: 4}\n",
    "wrong_type.yaml": "data: {batch_size: four}\n",
    "no_space.yaml": "algorithm: {num_generations:4}\n",
    "no_space_below.yaml": "algorithm:\n  k:4\n",
    "no_section.yaml": "learning_rate: 1\n",
    "torn.yaml": "data: [\n",
    "good.jsonl": jsonl(GOOD),
    "torn.jsonl": jsonl(GOOD[:2]) + '{"prompt": "ab>", "answer"\n',
    "no_prompt.jsonl": jsonl([*GOOD[:2], {"question": "ab", "answer": "ba"}]),
    "no_answer.jsonl": jsonl([{"prompt": "ab>"}] * 12),
    "empty.jsonl": "",
    "one_long.jsonl": jsonl([*GOOD, {"prompt": "abcdefgh>", "answer": "a"}]),
    "all_long.jsonl": jsonl([{"prompt": "abcdefgh>", "answer": "a"}] * 12),
    "rewards.py": REWARDS,
    "estimators.py": ESTIMATORS,
    "broken.py": "def reward(:\n",
    "not_a_run/notes.txt": "precious",
    "no_config/tokenizer.json": "{}",
    "run_without_checkpoint/config.yaml": OWN_DATA,
    "run_without_checkpoint/model/config.json": "{}",
    "cut/config.yaml": "model: {path: mod",
    "emptied/config.yaml": "",
    "emptied/model/config.json": "{}",
    "emptied/checkpoints/1/_CHECKPOINT_METADATA": "{}",
    "emptied/checkpoints/1/state/_METADATA": "{}",
    "run/checkpoints/1/_CHECKPOINT_METADATA": "{}",
    "run/checkpoints/1/state/_METADATA": "{}",
}
MODELS = ("model", "missing_tensor", "mis_shaped", "small_vocabulary", "odd_field", "no_weights",
          "pickled", "headless", "two_heads", "other_tokenizer", "other_words")  # fmt: skip


def fewer_words():
    """The tokenizer of a model with 11 tokens."""
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(11)}, unk_token="w0"))
    return Tokenizer(backend, eos_token="w1")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with files for every kind of mistake, and models: complete, without a tensor, with a wrong shape, too
    small."""
    place = tmp_path_factory.mktemp("bad")
    for name, text in FILES.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text)
    model, _ = tunix_like.load_model(HF, init="random")
    params = nnx.to_pure_dict(nnx.split(model)[1])
    for name in MODELS:
        save_model(params, model.config, reverse_text.tokenizer(), place / name)
    tensors = load_file(place / "model" / "model.safetensors")
    save_file({k: v for k, v in tensors.items() if k != NORM}, place / "missing_tensor" / "model.safetensors")
    save_file(tensors | {NORM: np.ones(9, np.float32)}, place / "mis_shaped" / "model.safetensors")
    (place / "no_weights" / "model.safetensors").unlink()
    for name, change in (("small_vocabulary", {"vocab_size": 12}), ("odd_field", {"hidden_act": "gelu"})):
        file = place / name / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | change))
    (place / "pickled" / "model.safetensors").rename(place / "pickled" / "pytorch_model.bin")
    file = place / "headless" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tie_word_embeddings": False}))
    head = tensors["model.embed_tokens.weight"] + 1
    save_file(tensors | {"lm_head.weight": head}, place / "two_heads" / "model.safetensors")
    (place / "other_tokenizer" / "generation_config.json").write_text('{"eos_token_id": 12}')
    fewer_words().save(place / "other_tokenizer")
    (place / "other_words" / "generation_config.json").write_text('{"eos_token_id": 1}')
    fewer_words().save(place / "other_words")
    (place / "packed.jsonl").write_bytes(gzip.compress(FILES["good.jsonl"].encode()))
    (place / "packed.yaml").write_bytes(gzip.compress(OWN_DATA.encode()))
    (place / "splits").mkdir()
    for name in ("round.jsonl", "round.yaml", "splits/train.jsonl"):  # each is a link to itself
        (place / name).symlink_to((place / name).name)
    (place / "nul.yaml").write_text('training: {output_dir: "a\\0b"}\n')
    (place / "to_nowhere.jsonl").symlink_to("nowhere.jsonl")
    for name in ("pipe.jsonl", "pipe.yaml"):
        os.mkfifo(place / name)
    save(load(place / "own.yaml"), place / "run" / "config.yaml")
    return place


@pytest.fixture
def forbid_sampling_and_training(monkeypatch):
    """Forbids sampling and training steps, which would be compiled."""
    monkeypatch.setattr(Sampler, "generate", lambda *_, **__: pytest.fail("sampled"))
    monkeypatch.setattr("tunix_like.step.train_step.train_step", lambda *_, **__: pytest.fail("compiled a step"))


def listing(folder):
    """Returns the files below a folder and their times, without the bytecode that Python writes next to modules."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.parent.name != "__pycache__")
    return {str(path): path.stat().st_mtime_ns for path in files}


@pytest.mark.parametrize(
    "name", others_slow(MISTAKES, *(name for name in MISTAKES if name != "adapters larger than the memory"))
)
def test_error_is_one_line_before_anything_is_compiled(name, place, monkeypatch, capsys, forbid_sampling_and_training):
    monkeypatch.chdir(place)
    argv, words = MISTAKES[name]
    before = listing(place)
    code = cli.main(list(argv))
    error = capsys.readouterr().err
    assert code == 2 and error.startswith("error: ") and "Traceback" not in error
    for word in words:
        assert word in error, error
    assert listing(place) == before, "a mistake leaves no trace"


@pytest.mark.parametrize("name", ["010", "2026-11-21", "1:30"])
def test_saved_config_is_read_back_unchanged(name, place, monkeypatch, capsys, forbid_sampling_and_training, tmp_path):
    """The resumption reads values that `save` writes without quotes as the same text, and the message names only the
    changed key."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(place / "run", "run")
    shutil.copy(place / "good.jsonl", name)
    shutil.copy(place / "own.yaml", "own.yaml")
    given = [f"data.path={name}", "training.output_dir=run", f"model.path={place / 'model'}"]
    save(checks.check_config(load("own.yaml", given))[0], "run/config.yaml")
    assert f"path: {name}\n" in Path("run/config.yaml").read_text()
    assert cli.main([*OWN, *given, "optimizer.learning_rate=1e-3"]) == 2
    said = capsys.readouterr().err
    assert "optimizer.learning_rate: 1e-06 -> 0.001" in said and "data.path" not in said, said


def test_killed_start_keeps_the_old_config(tmp_path, monkeypatch):
    """If the process is killed while it writes, the old file remains. A partial file in an empty folder does not
    prevent the next start."""
    file = tmp_path / "run" / "config.yaml"
    file.parent.mkdir()
    save(load(None), file)
    before = file.read_text(), file.stat().st_mtime_ns
    save(load(None), file)
    assert (file.read_text(), file.stat().st_mtime_ns) == before, "the same is not written again"
    monkeypatch.setattr(os, "replace", lambda *_: pytest.fail("killed"))
    with pytest.raises(pytest.fail.Exception):
        save(load(None, ["training.seed=7"]), file)
    monkeypatch.undo()
    assert (file.read_text(), file.stat().st_mtime_ns) == before and len(listing(file.parent)) == 1
    file.rename(file.with_name(".config.yaml.1.part"))  # as a killed process leaves it
    parts = runs.assemble(load(REVERSE, ["training.seed=7"]), abstract=True)
    claim(file.parent, parts)
    assert load(file).training.seed == 7


def test_a_long_prompt_is_skipped_and_counted(place, monkeypatch, capsys, forbid_sampling_and_training):
    monkeypatch.chdir(place)
    code = cli.main([*OWN, "--dry-run", "data.path=one_long.jsonl", "data.eval_size=2"])
    said = capsys.readouterr().out
    assert code == 0
    assert "training: 15 prompts\n" in said
    assert "evaluation: 2 prompts, 1 of them longer than 8 tokens and skipped" in said


def test_sft_without_answers(place, monkeypatch, capsys, forbid_sampling_and_training, tmp_path):
    monkeypatch.chdir(place)
    argv = [
        "train",
        "own.yaml",
        "data.path=no_answer.jsonl",
        "sft.max_steps=5",
        f"training.output_dir={tmp_path / 'x'}",
    ]
    assert cli.main([*argv, "rewards.functions=[{name: rewards.py:short}]"]) == 2
    assert "SFT needs an 'answer' column; the rows have prompt" in capsys.readouterr().err


SMALL = (
    "model.config.hidden_size=16",
    "model.config.num_hidden_layers=1",
    "sft.max_steps=0",
    "data.batch_size=8",
    "algorithm.num_generations=2",
    "eval.batch_size=4",
    "eval.max_problems=4",
    "training.max_steps=2",
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reward", "word"),
    [
        ("short", "'rewards.py:short' returned 1 values for 4 completions"),
        ("negative", "non-negative rewards only"),
    ],
)
def test_invalid_reward_stops_the_run_and_keeps_the_completions(reward, word, place, monkeypatch, capsys, tmp_path):
    """An error that is detectable only with completions stops the run at once and keeps these completions."""
    monkeypatch.chdir(place)
    folder = tmp_path / "run"
    code = cli.main([*REVERSED, *SMALL, f"rewards.functions=[{{name: rewards.py:{reward}}}]",
                     f"training.output_dir={folder}"])  # fmt: skip
    error = capsys.readouterr().err
    assert code == 2 and word in error
    # The first evaluation calls the reward function first. It may return negative numbers, which MaxRL does not accept.
    kept = folder / "rollouts" / ("eval/step_000000.jsonl" if reward == "short" else "step_000001.jsonl")
    assert str(kept) in error
    assert len([json.loads(line) for line in kept.read_text().splitlines()]) == 16
    assert [row["step"] for row in metric_rows(folder)] == ([] if reward == "short" else [0])
    again = cli.main([*REVERSED, *SMALL, "--dry-run", f"training.output_dir={folder}"])
    assert again == 0, "a dry run looks at nothing on disk"
