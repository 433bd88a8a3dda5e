"""Tests several data sources in one run: shares and order of their rows, their rewards and estimators, errors, and a
small run of four sources from the command line."""

from __future__ import annotations

import collections
import contextlib
import fractions
import json
import logging
import random
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import tunix_like
from tunix_like.config.load import load
from tunix_like.config.schema import Config, DataConfig, RewardsConfig
from tunix_like.config.sources import template_variables
from tunix_like.data import load_source, mix
from tunix_like.data.mix import Interleaved, Repeated, epoch_counts
from tunix_like.data.stream import prompt_batches
from tunix_like.errors import UserError
from tunix_like.rewards import REWARDS, close_pools
from tunix_like.rewards.pool import PooledFunction
from tunix_like.rollout.rollouts import score_completions
from tunix_like.runs import build as runs
from tunix_like.runs import checks, reward_functions
from tunix_like.runs.trained import open_trained
from tunix_like.storage.metrics import rows as metric_rows
from tunix_like.types import Problem

SMALL = {"name": "maze", "maze_size": 7, "train_size": 30, "eval_size": 6, "label": "small"}
LARGE = {"name": "maze", "maze_size": 9, "train_size": 50, "eval_size": 12, "label": "large"}


def of(*entries, **keys):
    return load_source(DataConfig(name="mix", sources=[dict(entry) for entry in entries], **keys))


def count(rows):
    return collections.Counter(row["data_source"] for row in rows)


def test_shares_of_sources_match_their_weights():
    """The number of rows of each source matches its weight to within one row. All rows of a source occur equally often
    to within one. No smaller epoch has these properties."""
    for seed in range(30):
        rng = random.Random(seed)
        sizes = [rng.randint(1, 40) for _ in range(rng.randint(1, 5))]
        weights = [rng.choice([1, 2, 7, 0.3, 10.5]) for _ in sizes]
        counts = epoch_counts(sizes, weights)
        scale = max(size / weight for size, weight in zip(sizes, weights, strict=True))
        for size, weight, found in zip(sizes, weights, counts, strict=True):
            assert found >= size and abs(found - scale * weight) <= 0.5 + 1e-9
            times = collections.Counter(Repeated(range(size), found))
            assert set(times) == set(range(size)) and max(times.values()) - min(times.values()) <= 1
        assert any(found == size for size, found in zip(sizes, counts, strict=True))
        assert epoch_counts(sizes, [None] * len(sizes)) == sizes


def test_rows_of_each_source_are_evenly_spread():
    """The rows are ordered by the fractions (j + 1/2) / n, ties by source. Any prefix has the shares of the whole."""
    for seed in range(20):
        rng = random.Random(seed)
        sizes = [rng.randint(0, 30) for _ in range(rng.randint(1, 4))] + [rng.randint(1, 30)]
        rows = Interleaved([[(i, j) for j in range(size)] for i, size in enumerate(sizes)])
        places = sorted((fractions.Fraction(2 * j + 1, 2 * n), i, j) for i, n in enumerate(sizes) for j in range(n))
        assert list(rows) == [(i, j) for _, i, j in places] and len(rows) == sum(sizes)
        assert rows[-1] == rows[len(rows) - 1] and rows[2:5] == list(rows)[2:5]
        for cut in range(len(rows) + 1):
            found = collections.Counter(i for i, _ in rows[:cut])
            for i, size in enumerate(sizes):
                assert abs(found[i] - cut * size / len(rows)) <= 1 + len(sizes) / 2
        with pytest.raises(IndexError):
            rows[len(rows)]


def test_a_mix_of_mazes():
    data = of(SMALL | {"weight": 1}, LARGE | {"weight": 4})
    assert count(data.train) == {"small": 30, "large": 120} and count(data.eval) == {"small": 6, "large": 12}
    assert count(data.eval[:9]) == {"small": 3, "large": 6}, "eval.max_problems cuts all alike"
    times = collections.Counter(row["grid"] for row in data.train)
    assert {grid.count("\n") + 1: sorted({times[g] for g in times if len(g) == len(grid)}) for grid in times} == {
        7: [1],
        9: [2, 3],
    }
    alone = load_source(DataConfig(name="maze", maze_size=9, train_size=50, eval_size=12))
    assert [row["grid"] for row in data.eval if row["data_source"] == "large"] == [row["grid"] for row in alone.eval]
    assert {row["grid"] for row in data.train if row["data_source"] == "large"} == {row["grid"] for row in alone.train}
    assert data.reward == "maze" and data.tokenizer.vocab_size == 32
    for row in (data.eval[0], data.eval[1], data.eval[-1]):
        side = {"small": 7, "large": 9}[row["data_source"]]
        assert data.draw(row, row["answer"]).count("\n") == side - 1 and "x" not in data.draw(row, row["answer"])
    assert count(of(SMALL, LARGE).train) == {"small": 30, "large": 50}, "without weights every row once"
    assert list(of(SMALL, LARGE).train) == list(of(SMALL, LARGE).train)


def test_batches_of_a_mix():
    """In one shuffled epoch the shares are exact, the seed determines the order, and a batch contains several
    sources."""
    data = of(SMALL | {"weight": 1}, LARGE | {"weight": 2})

    def epoch(seed, shuffle=True):
        arguments = {"batch_size": 9, "max_prompt_length": 128, "shuffle": shuffle, "forever": False}
        return list(prompt_batches(data.train, data.tokenizer, seed=seed, **arguments))

    def texts(batches):
        return [prompt.text for batch in batches for prompt in batch]

    first = epoch(0)
    assert count(prompt.columns for batch in first for prompt in batch) == {"small": 30, "large": 60}
    assert texts(first) == texts(epoch(0)) != texts(epoch(1)) and sorted(texts(first)) == sorted(texts(epoch(1)))
    assert all(count(prompt.columns for prompt in batch) == {"small": 3, "large": 6} for batch in epoch(0, False))


def test_no_source_trains_on_held_out_rows_of_another(caplog):
    """The long strings include short ones. A row that one source holds out is removed from the training rows of the
    other, and the number of removed rows is logged."""
    short = {"name": "reverse_text", "text_length": 2, "label": "short", "train_size": 200}
    long = {"name": "reverse_text", "text_length": 3, "label": "long", "seed": 1}
    alone = {name: load_source(DataConfig(**{k: v for k, v in each.items() if k != "label"}))
             for name, each in (("short", short), ("long", long))}  # fmt: skip
    held_out = {name: {row["text"] for row in each.eval} for name, each in alone.items()}
    leaking = sum(row["text"] in held_out["short"] for row in alone["long"].train)
    assert leaking > 100 and len(alone["long"].train) == 2000
    with caplog.at_level(logging.WARNING, "tunix_like"):
        data = of(short, long)
    assert not {row["text"] for row in data.train} & (held_out["short"] | held_out["long"])
    assert count(data.train)["long"] == 2000 - leaking
    assert f"data.sources[1] ('long'): dropped {leaking} of 2000 training rows, which another" in caplog.text


def test_mix_without_training_rows_raises_an_error():
    def texts(rows, **keys):
        data = load_source(DataConfig(name="reverse_text", text_length=2, **keys))
        return {row["text"] for row in getattr(data, rows)}

    held_out = texts("eval", eval_size=32, seed=3)
    seed = next(seed for seed in range(50) if texts("train", train_size=1, seed=seed) <= held_out)
    few = {"name": "reverse_text", "label": "few", "text_length": 2, "train_size": 1, "seed": seed}
    many = {"name": "reverse_text", "label": "many", "text_length": 2, "eval_size": 32, "seed": 3}
    with pytest.raises(
        UserError, match=r"data.sources\[0\] .'few'.: another source of name=reverse_text holds out all"
    ):
        of(few, many)


@pytest.fixture
def folder(tmp_path):
    """Word problems in the format of GSM8K, and questions with and without an answer."""
    for split, start in (("train", 0), ("test", 100)):
        (tmp_path / "gsm8k").mkdir(exist_ok=True)
        problems = [{"question": f"{i} + 1?", "answer": f"Add.\n#### {i + 1}"} for i in range(start, start + 4)]
        (tmp_path / "gsm8k" / f"{split}.jsonl").write_text("\n".join(map(json.dumps, problems)))
    questions = [{"prompt": f"Say {i}", "answer": str(i), "data_source": "theirs", "hint": i} for i in range(20)]
    (tmp_path / "questions.jsonl").write_text("\n".join(map(json.dumps, questions)))
    plain = [{"prompt": row["prompt"]} for row in questions]
    (tmp_path / "plain.jsonl").write_text("\n".join(map(json.dumps, plain)))
    return tmp_path


def test_rewards_by_source(folder, caplog):
    """The function of its own source scores each row. A column that a source lacks is None in its rows."""
    words = {"name": "gsm8k", "path": str(folder / "gsm8k")}
    asked = {"name": "jsonl", "path": str(folder / "questions.jsonl"), "eval_size": 4}
    with caplog.at_level(logging.WARNING, "tunix_like"):
        data = of(words, asked)
    assert "data.sources[1]: the column 'data_source' of its rows is replaced by the label 'jsonl'" in caplog.text
    assert data.tokenizer is None and data.draw is None and data.reward == "by_source"
    assert count(data.train) == {"gsm8k": 4, "jsonl": 16}
    assert {tuple(sorted(row)) for row in [*data.train, *data.eval]} == {
        ("answer", "data_source", "gold", "hint", "prompt", "question", "source_reward")
    }
    assert {(row["hint"] is None, row["gold"] is None) for row in data.train} == {(True, False), (False, True)}

    config = Config(data=DataConfig(name="mix", sources=[words, asked]))
    functions = reward_functions.reward_functions(config, data)
    assert [(name, weight) for name, _, weight in functions] == [("by_source", 1.0)]
    assert isinstance(functions[0][1], PooledFunction), "math-verify is asked in a worker"
    problems = [Problem(i, row["prompt"], [1], {k: v for k, v in row.items() if k != "prompt"})
                for i, row in enumerate(data.train)]  # fmt: skip
    texts = []
    for row in data.train:
        right = row["gold"] if row["data_source"] == "gsm8k" else row["answer"]
        texts += [f"So it is #### {right}", str(right), "no"]
    scores = score_completions(functions, problems, texts, 3)
    expected = [[1, 0, 0] if row["data_source"] == "gsm8k" else [0, 1, 0] for row in data.train]
    assert scores.total.reshape(-1, 3).tolist() == expected and scores.scored.all()
    close_pools([functions[0][1]])

    named = Config(data=config.data, rewards=RewardsConfig(functions=[{"name": "exact_match"}]))
    scores = score_completions(reward_functions.reward_functions(named, data), problems, texts, 3)
    assert scores.total.reshape(-1, 3)[:, 1].tolist() == [float(r["data_source"] == "jsonl") for r in data.train]


def test_reward_whose_column_a_source_lacks_raises_an_error(folder):
    """The error is raised before a model is loaded, both for a named function and for the function of a source."""
    words = {"name": "gsm8k", "path": str(folder / "gsm8k")}
    plain = {"name": "jsonl", "path": str(folder / "plain.jsonl"), "label": "plain"}
    config = Config(data=DataConfig(name="mix", sources=[words, plain]))
    with pytest.raises(UserError, match="data source 'plain': Reward function 'by_source' needs an argument 'answer'"):
        reward_functions.reward_functions(config, load_source(config.data))
    for name, ok in (("gsm8k", False), ("takes_all", True), ("asks_for_source", True)):
        given = Config(data=config.data, rewards=RewardsConfig(functions=[{"name": name}]))
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(REWARDS, "takes_all", lambda completions, gold=None: [0.0] * len(completions))
            patch.setitem(REWARDS, "asks_for_source", lambda completions, data_source: [0.0] * len(completions))
            if ok:
                reward_functions.reward_functions(given, load_source(given.data))
                continue
            with pytest.raises(
                UserError, match="data source 'plain': Reward function 'gsm8k' needs an argument 'gold'"
            ):
                reward_functions.reward_functions(given, load_source(given.data))


def test_by_source_passes_the_rows_of_each_source(monkeypatch):
    """`by_source` passes only the rows of a source, in one call. None stays None, and an error names the failing
    function."""
    calls = []

    def one(prompts, completions, x):
        calls.append((prompts, completions, x))
        return [None if text == "?" else 10.0 for text in completions]

    def two(completions, **columns):
        calls.append((completions, columns))
        return [20.0] * len(completions)

    monkeypatch.setitem(REWARDS, "one", one)
    monkeypatch.setitem(REWARDS, "two", two)
    columns = {"source_reward": ["two", "one", "two", "one"], "x": [0, 1, 2, 3]}
    problem = [Problem(i, f"p{i}", [1], {k: v[i] for k, v in columns.items()}) for i in range(4)]
    functions = [("by_source", REWARDS["by_source"], 1.0)]
    scores = score_completions(functions, problem, ["a", "?", "c", "d"], 1)
    np.testing.assert_array_equal(scores.total, [20, np.nan, 20, 10])
    assert calls == [(["a", "c"], {"prompts": ["p0", "p2"], "x": [0, 2]}), (["p1", "p3"], ["?", "d"], [1, 3])]
    monkeypatch.setitem(REWARDS, "two", lambda completions: [1.0])
    scores = score_completions(functions, problem[:2], ["a", "?", "c", "d"], 2)
    assert "'two' returned 1 values for 2 completions" in scores.first_failure
    assert scores.errors.tolist() == [True, True, False, False]
    monkeypatch.setitem(REWARDS, "two", lambda completions: [1.0 if text == "a" else "x" for text in completions])
    scores = score_completions(functions, problem, ["a", "?", "c", "d"], 1)
    assert scores.errors.tolist() == [False, False, True, False] and scores.total[[0, 3]].tolist() == [1, 10]
    assert "'two': value 0, 'x', is not a number" in scores.first_failure


TEXT = {"name": "reverse_text"}
BAD = {
    "no list": ([], ["data.sources: data.name=mix needs a list of sources"]),
    "unknown key": (
        [TEXT, SMALL | {"maze_sise": 9}],
        ["data.sources[1].maze_sise: unknown", "Did you mean 'maze_size'"],
    ),
    "a key of the run": (
        [TEXT | {"batch_size": 4}],
        ["data.sources[0].batch_size", "set it as data.batch_size, beside data.sources"],
    ),
    "no name": ([{"maze_size": 9}], ["data.sources[0].name is missing"]),
    "a mix in a mix": ([{"name": "mix"}], ["data.sources[0].name=mix: a mix cannot contain a mix"]),
    "unknown source": ([{"name": "mase"}], ["data.sources[0] ('mase')", "data.name=mase is unknown", "'maze'"]),
    "wrong type": ([TEXT | {"text_length": "x"}], ["data.sources[0].text_length: got 'x' (string)", "integer or null"]),
    "out of range": ([TEXT, SMALL | {"maze_size": 3}], ["data.sources[1].maze_size: got 3; it must be at least 5"]),
    "weight": ([TEXT | {"weight": 0}], ["data.sources[0].weight: got 0.0; it must be above 0"]),
    "weight of the wrong type": ([TEXT | {"weight": "much"}], ["data.sources[0].weight", "expected: number or null"]),
    "k": ([TEXT | {"k": 0}], ["data.sources[0].k: got 0; it must be at least 1"]),
    "empty label": ([TEXT | {"label": " "}], ["data.sources[0].label: got ' ', an empty text"]),
    "two of a name": (
        [SMALL, TEXT, TEXT],
        ["data.sources[2]: data.sources[1] has the label 'reverse_text' too", "set `label`"],
    ),
    "some weights": (
        [SMALL | {"weight": 1}, LARGE],
        ["data.sources[1].weight is unset", "set it in every entry, or in none"],
    ),
    "a key it does not read": (
        [SMALL, TEXT | {"maze_size": 9}],
        ["data.sources[1] ('reverse_text')", "data.maze_size is not read"],
    ),
    "what the source says": ([SMALL | {"maze_size": 8}], ["data.sources[0] ('small')", "must be odd"]),
    "two tokenizers": (
        [SMALL, TEXT],
        ["data.sources[0] (maze) has its own tokenizer", "data.sources[1] (reverse_text) has a different tokenizer"],
    ),
    "a tokenizer beside the model's": (
        [{"name": "jsonl", "path": "questions.jsonl"}, SMALL],
        ["data.sources[1] (maze) has its own", "data.sources[0] (jsonl) needs the tokenizer of the model"],
    ),
    "a tremendous weight": (
        [SMALL | {"weight": 1e9}, LARGE | {"weight": 1}],
        ["5e+10 rows", "at most 50000000", "(30, 50)"],
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_entries(case, folder, monkeypatch):
    monkeypatch.chdir(folder)
    entries, parts = BAD[case]
    with pytest.raises(UserError) as error:
        of(*entries)
    assert not [part for part in parts if part not in str(error.value)], str(error.value)


def test_keys_next_to_data_sources():
    assert len(of(SMALL, batch_size=4, shuffle=False, overlong_prompts="error").train) == 30
    for name, value in {"seed": 1, "train_size": 5, "maze_size": 9, "path": "x", "split": "dev"}.items():
        with pytest.raises(UserError, match=f"data.{name} is set beside data.sources.*into the entries"):
            of(SMALL, **{name: value})
    with pytest.raises(UserError, match="data.sources is read by data.name=mix only, not by maze; set data.name=mix"):
        load_source(DataConfig(sources=[SMALL]))


def test_sources_must_agree_on_chat_template_args():
    """chat_template_args belong to the tokenizer, and all sources share one tokenizer."""
    entries = [{"name": "jsonl", "label": "a", "chat_template_args": {"enable_thinking": False}}]
    entries += [{"name": "jsonl", "label": "b", "chat_template_args": {"enable_thinking": False}}]
    assert template_variables(DataConfig(name="mix", sources=entries)) == {"enable_thinking": False}
    assert template_variables(DataConfig(chat_template_args={"x": 1})) == {"x": 1} and not template_variables(
        DataConfig()
    )
    del entries[1]["chat_template_args"]
    with pytest.raises(UserError, match=r"data.sources\[1\].chat_template_args is {}, but data.sources\[0\]"):
        template_variables(DataConfig(name="mix", sources=entries))


# Four sources of strings. odd.py defines their rewards. The parameters are the limits of the estimators at G = 4.
YAML = """
model:
  init: random
  config: {model_type: qwen2, hidden_size: 16, intermediate_size: 16, num_hidden_layers: 1, num_attention_heads: 2,
           num_key_value_heads: 1, max_position_embeddings: 16, tie_word_embeddings: true}
data:
  name: mix
  batch_size: 8
  sources:
    - {name: reverse_text, label: by_maxpo, train_size: 6, eval_size: 4, weight: 1, advantage_estimator: maxpo, k: 2}
    - {name: reverse_text, label: by_grpo, train_size: 6, eval_size: 8, weight: 1, advantage_estimator: grpo, ddof: 0}
    - {name: reverse_text, label: order_1, train_size: 6, eval_size: 4, seed: 1, weight: 1, truncation_order: 1}
    - {name: reverse_text, label: plain, train_size: 6, eval_size: 4, seed: 2, weight: 2}
algorithm: {advantage_estimator: maxrl, num_generations: 4}
rollout: {max_prompt_length: 8, max_tokens_to_generate: 4}
rewards: {functions: [{name: odd.py:odd}], success_threshold: 0.5}
optimizer: {learning_rate: 1.0e-2}
sft: {max_steps: 2, batch_size: 4}
eval: {samples: 4, k: [1, 2], batch_size: 8, max_problems: 15}
training: {max_steps: 4, log_rollouts_every_n_steps: 1, checkpoint_every_n_steps: 2}
"""
ODD = """
def odd(prompts, completions, data_source, answer):
    assert all(answer) and set(data_source) <= {"by_maxpo", "by_grpo", "order_1", "plain"}
    return [0.0 if len(text) % 2 else 0.25 * (sum(map(ord, text)) % 4) for text in completions]
"""
ESTIMATORS = {
    "by_maxpo": ("maxpo", {"k": 2}),
    "by_grpo": ("grpo", {"ddof": 0}),
    "order_1": ("maxrl", {"truncation_order": 1}),
    "plain": ("maxrl", {}),
}


EXAMPLE = str(Path(__file__).resolve().parents[2] / "examples" / "debug" / "mixed.yaml")
TINY = ("model.config.num_hidden_layers=1", "model.config.hidden_size=16", "model.config.intermediate_size=16",
        "data.batch_size=4", "sft.max_steps=2", "sft.batch_size=4", "training.max_steps=3", "eval.max_problems=6",
        "eval.batch_size=6")  # fmt: skip
COMMANDS = (
    ("whole", ["train", "mixed.yaml"]),
    ("half", ["train", "mixed.yaml", "training.output_dir=halves", "training.max_steps=2"]),
    ("other half", ["train", "mixed.yaml", "training.output_dir=halves"]),
    ("eval", ["eval", "halves"]),
    ("example", ["train", EXAMPLE, *TINY, "training.output_dir=example"]),
)
PROGRAM = """
import contextlib, io, json, sys
from tunix_like.cli.main import main
said = {}
for name, argv in json.load(sys.stdin):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(argv) == 0
    said[name] = " ".join(out.getvalue().split())
json.dump(said, open("said.json", "w"))
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with the uninterrupted run and the same run in two parts, all done by one process."""
    place = tmp_path_factory.mktemp("mix")
    (place / "mixed.yaml").write_text(YAML)
    (place / "odd.py").write_text(ODD)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], input=json.dumps(COMMANDS), cwd=place, stderr=subprocess.PIPE, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return place


@pytest.fixture(scope="module")
def said(home):
    return json.loads((home / "said.json").read_text())


RUN = "runs/mixed-maxrl-s0"


def groups(folder, step):
    """Returns (source, rewards, advantages) of every group of a step."""
    found = collections.defaultdict(list)
    for line in (folder / "rollouts" / f"step_{step:06d}.jsonl").read_text().splitlines():
        row = json.loads(line)
        found[row["problem"], row["data_source"]].append((row["reward"], row["advantage"]))
    return [(source, *map(np.array, zip(*pairs, strict=True))) for (_, source), pairs in found.items()]


@pytest.mark.slow
def test_each_group_uses_the_estimator_of_its_source(home):
    """Compares with compute_advantages on the rewards of each group. The update has one compilation and one loss for
    all."""
    found = collections.defaultdict(list)
    for step in (1, 2, 3, 4):
        for source, rewards, advantages in groups(home / RUN, step):
            found[source].append((rewards, advantages))
    assert found.keys() == ESTIMATORS.keys()
    for source, pairs in found.items():
        rewards, advantages = map(np.array, zip(*pairs, strict=True))
        for other, (name, params) in ESTIMATORS.items():
            expected = tunix_like.compute_advantages(rewards, name, **params)
            if other == source:
                np.testing.assert_allclose(advantages, expected, rtol=1e-5, atol=1e-6)
            else:
                assert np.abs(advantages - expected).max() > 0.01, "another estimator would have been noticed"
    rows = [row for row in metric_rows(home / RUN) if row.get("step")]
    assert [row["train/perf/update_programs"] for row in rows] == [1.0] * 4
    assert all(row["train/grad_norm"] > 0 for row in rows)


@pytest.mark.slow
def test_output_lists_the_sources_with_their_estimators(home, said):
    assert (
        "sources: by_maxpo 20% (maxpo, k 2); by_grpo 20% (grpo, ddof 0); order_1 20% (maxrl, truncation_order 1); "
        "plain 40% (maxrl) loss: ppo_clip, aggregation token-mean"
    ) in said["whole"]
    assert "training: 30 prompts" in said["whole"] and "1 x odd.py:odd" in said["whole"]
    for label in ESTIMATORS:
        assert f"pass@1/{label}" in said["eval"] and f"pass@2/{label}" in said["eval"]
    assert load(home / RUN / "config.yaml").data == load(home / "mixed.yaml").data


@pytest.mark.slow
def test_the_mix_example_runs(home, said):
    """Two maze sizes have different estimators, the maze reward and the maze drawings."""
    text = said["example"]
    assert "sources: small 33% (maxpo, k 4); large 67% (maxrl)" in text and "rewards: 1 x maze" in text
    assert "training: 600 prompts" in text and "evaluation: the first 6 of 48 prompts" in text and "██S " in text
    rows = [row for row in metric_rows(home / "example") if "step" in row]
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert all(np.isfinite(row["train/loss"]) for row in rows[1:])
    assert {"eval/pass@1/small", "eval/pass@4/large"} <= rows[3].keys()


@pytest.mark.slow
def test_metrics_of_each_source(home):
    """The metrics of each source match values computed from the stored completions."""
    rows = {row["step"]: row for row in metric_rows(home / RUN) if "step" in row}
    for step in (1, 2, 3, 4):
        of_source = collections.defaultdict(list)
        for source, rewards, _ in groups(home / RUN, step):
            of_source[source] += rewards.tolist()
        named = {name.rpartition("/")[2] for name in rows[step] if name.startswith("train/pass@1/")}
        assert named == set(of_source)
        for source, rewards in of_source.items():
            assert rows[step][f"train/rewards/mean/{source}"] == pytest.approx(np.mean(rewards))
            assert rows[step][f"train/pass@1/{source}"] == pytest.approx(np.mean(np.array(rewards) >= 0.5))
    # 15 of the 20 held-out rows are evaluated: three each of by_maxpo, order_1 and plain, and six of by_grpo.
    share = {"by_maxpo": 3, "by_grpo": 6, "order_1": 3, "plain": 3}
    for row in (rows[0], rows[4]):
        for k in (1, 2):
            whole = sum(row[f"eval/pass@{k}/{label}"] * size for label, size in share.items()) / 15
            assert row[f"eval/pass@{k}"] == pytest.approx(whole)


@pytest.mark.slow
def test_resumed_run_equals_the_uninterrupted_run_bitwise(home):
    """Two steps and a resumption for two more equal four steps: weights, rows of metrics, completions and
    advantages."""
    whole, halves = (open_trained(str(home / name)).params for name in (RUN, "halves"))
    jax.tree.map(np.testing.assert_array_equal, whole, halves)
    timed = ("time/", "perf/", "step_time")
    kept = [
        [
            {key: value for key, value in row.items() if not any(word in key for word in timed)}
            for row in metric_rows(place)
        ]
        for place in (home / RUN, home / "halves")
    ]
    steps = [[row for row in rows if row.get("step")] for rows in kept]
    assert [row["step"] for row in steps[0]] == [1, 2, 3, 4]
    without = [[{k: v for k, v in row.items() if "eval/" not in k} for row in rows] for rows in steps]
    assert without[0] == without[1]
    for step in (3, 4):
        one, two = ((home / name / "rollouts" / f"step_{step:06d}.jsonl").read_text() for name in (RUN, "halves"))
        assert one == two


def checked(home, *overrides):
    with contextlib.chdir(home):
        return checks.check_config(load("mixed.yaml", overrides))


ENTRY = "data.sources=[{name: reverse_text, label: a}, {name: reverse_text, label: b, %s}]"
BAD_ESTIMATORS = {
    "advantage_estimator: maxpoo": r"data.sources\[1\].advantage_estimator: unknown estimator 'maxpoo'. Did you mean",
    "advantage_estimator: maxpo": r"data.sources\[1\].k: the estimator 'maxpo' requires it",
    "advantage_estimator: maxpo, k: 4": r"data.sources\[1\].k: got 4; 'maxpo' needs 1 <= k <= 3",
    "advantage_estimator: grpo, k: 2": r"data.sources\[1\].k: the estimator 'grpo' does not read it",
    "truncation_order: 9": r"data.sources\[1\].truncation_order: got 9; 'maxrl' needs",
    "advantage_estimator: none.py:mine": r"data.sources\[1\].advantage_estimator 'none.py:mine': the file .* not exist",
    "label: a": "data.sources.1.: data.sources.0. has the label 'a' too",
}


@pytest.mark.slow
@pytest.mark.parametrize("given", BAD_ESTIMATORS)
def test_bad_estimators(given, home):
    """The error is raised when the config is checked, before any data is read."""
    override = ENTRY.replace("label: b, %s", given) if given == "label: a" else ENTRY % given
    with pytest.raises(UserError, match=BAD_ESTIMATORS[given]):
        checked(home, override)


def test_every_source_needs_usable_prompts_and_answers_for_sft(folder):
    """A source whose prompts are all too long would be dropped silently. A source without answers would fail during
    SFT."""
    data = of(SMALL, LARGE)
    mix.check_parts(data, data.tokenizer, 94, needs_answer=True)  # <bos>, 9 x 10 cells and line ends, 3 marks
    with pytest.raises(
        UserError, match="data source 'large': all of its training prompts are empty or longer than .*=93; raise"
    ):
        mix.check_parts(data, data.tokenizer, 93, needs_answer=True)
    with pytest.raises(
        UserError, match="data source 'large': all of its training prompts are empty or longer than .*=93; raise"
    ):
        runs.assemble(load(EXAMPLE, ["rollout.max_prompt_length=93"]))
    words = {"name": "gsm8k", "path": str(folder / "gsm8k")}
    plain = {"name": "jsonl", "path": str(folder / "plain.jsonl")}
    mix.check_parts(of(words, plain), data.tokenizer, 100, needs_answer=False)
    with pytest.raises(UserError, match="data source 'jsonl': its rows have no column 'answer', which SFT trains on"):
        mix.check_parts(of(words, plain), data.tokenizer, 100, needs_answer=True)
