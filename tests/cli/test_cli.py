"""Tests the command line in real processes. Many tests check one short run and its results."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import types
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file

import tunix_like
from tests.cli.calls import SCRIPT, SMALL, YAML, call
from tunix_like.cli import main as cli
from tunix_like.cli import screen
from tunix_like.config.load import load
from tunix_like.config.schema import Config
from tunix_like.data import load_source
from tunix_like.errors import UserError
from tunix_like.runs.build import Parts
from tunix_like.runs.checks import check_config
from tunix_like.runs.folder import run_folder
from tunix_like.storage import run_lock
from tunix_like.storage.metrics import rows as metric_rows

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
RUN = "runs/reverse_text-maxrl-s0"
COMMANDS = (
    "init", "train", "sft", "eval", "generate", "export", "report", "replay", "advantages", "check-rewards", "doctor",
    "serve", "sweep", "runs",
)  # fmt: skip
MANY = """
import contextlib, io, json, sys
from tunix_like.cli.main import main
results = []
for argv in json.load(sys.stdin):
    out, error = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        try:
            code = main(argv)
        except SystemExit as stopped:
            code = stopped.code
    results.append([code, out.getvalue(), error.getvalue()])
print(json.dumps(results))
"""


def call_many(*commands, cwd):
    """Runs several commands in one process, so that the imports are done once. Returns `[(code, stdout, stderr),
    ...]`."""
    done = subprocess.run(
        [sys.executable, "-c", MANY], input=json.dumps(commands), cwd=cwd, capture_output=True, text=True, timeout=300,
        check=True,
    )  # fmt: skip
    return [tuple(result) for result in json.loads(done.stdout.splitlines()[-1])]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """The working directory of the commands of the shared run."""
    return tmp_path_factory.mktemp("cli")


@pytest.fixture(scope="module")
def first(home):
    """The standard output of the shared run: 4 supervised steps and 3 steps of MaxRL, in its default folder."""
    return call(SCRIPT, "train", YAML, *SMALL, cwd=home).stdout


@pytest.fixture(scope="module")
def made(home, first):
    """The results of commands on the shared run, all in one process: (code, stdout, stderr) by name."""
    commands = {
        "eval": ["eval", RUN],
        "eval again": ["eval", RUN, "eval.samples=4", "eval.k=[2]"],
        "eval checkpoint": ["eval", f"{RUN}/checkpoints/3"],
        "eval sft": ["eval", f"{RUN}/sft_checkpoints/4", "eval.max_problems=3"],
        "generate": ["generate", RUN, "--prompt", "abc>", "rollout.temperature=0"],
        "generate greedy": ["generate", RUN, "--prompt", "abc>", "--greedy"],
        "generate sampled": ["generate", RUN, "--prompt", "abc>", "rollout.temperature=0.5", "rollout.top_p=0.9"],
        "generate row": ["generate", RUN, "--row", "2", "--greedy"],
        "generate empty": ["generate", RUN, "--prompt", "abc>", f"rollout.eos_tokens={list(range(13))}"],
        "export": ["export", RUN, "exported"],
        "eval exported": [
            "eval", "exported", "data.name=reverse_text", "data.eval_size=8", "data.train_size=50", "eval.samples=4",
            "eval.batch_size=8", "rollout.max_prompt_length=16", "rollout.max_tokens_to_generate=8",
        ],
        "eval without data": ["eval", "exported"],
        "generate exported": [
            "generate", "exported", "--prompt", "abc>", "--greedy", "rollout.max_prompt_length=16",
            "rollout.max_tokens_to_generate=8",
        ],
        "export of an export": ["export", "exported", "twice"],
        "doctor": ["doctor"],
        "no such run": ["eval", "runs/nothing"],
        "no such step": ["eval", f"{RUN}/checkpoints/2"],
    }  # fmt: skip
    return dict(zip(commands, call_many(*commands.values(), cwd=home), strict=True))


def test_output_of_a_run(first):
    for piece in (
        "learner: MaxRLLearner (maxrl)",
        "loss: ppo_clip, aggregation token-mean, KL none (beta 0)",
        "batch: 8 prompts x 4 completions = 32 per step, 1 optimizer update(s)",
        "devices: one device\n",
        f"folder: {RUN}",
        "training: 50 prompts",
        "evaluation: 8 prompts",
    ):
        assert piece in first, first
    assert re.search(r"prompt: '\w+>'\n +ids: \[1, \d+, .*4\]\n", first), "one rendered prompt with its ids"
    for step in (1, 2, 3):
        assert re.search(
            rf"^train {step}/3  reward \d\.\d+  pass@1 .*length .*loss .*tok/s [\d,]+ .* s \(", first, re.M
        )
    assert re.search(r"^sft 4/4 ", first, re.M)
    table = first[first.index("MaxRLLearner, 8 held-out problems, 4 samples each") :]
    assert re.search(r"step 0.*step 3", table) and re.search(r"pass@4 .*%.*%", table)
    assert f"run folder: {RUN} (tunix-like eval | generate | export | report {RUN})" in table


def test_config_of_the_run_contains_all_values(home, first):
    """config.yaml loads as the config of the run, with the defaults of the learner."""
    config = load(home / RUN / "config.yaml")
    asked = load(YAML, SMALL)
    for section in ("model", "data", "rollout", "optimizer", "sft", "eval", "training", "mesh"):
        assert getattr(config, section) == getattr(asked, section), section
    algorithm = config.algorithm
    assert (algorithm.loss_agg_mode, algorithm.policy_loss_fn, algorithm.epsilon) == ("token-mean", "ppo_clip", 0.2)
    assert config.rewards.functions == [{"name": "exact_match", "weight": 1.0}]
    raw = yaml.safe_load((home / RUN / "config.yaml").read_text())
    assert set(raw) == set(yaml.safe_load((ROOT / "tunix_like" / "config" / "base_config.yaml").read_text()))


METRICS = (
    [f"rewards/{name}" for name in ("mean", "min", "max", "std", "exact_match")]
    + [f"completions/{name}" for name in ("mean_length", "max_length", "min_length", "clipped_ratio")]
    + [f"advantage/{name}" for name in ("abs_mean", "max", "min", "nonzero_frac")]
    + [f"time/{name}" for name in ("data", "rollout", "reward", "update", "other")]
    + ["is_ratio/mean", "is_ratio/max", "pg_clipfrac", "entropy", "loss", "grad_norm", "learning_rate"]
    + ["step_time_sec", "pass@1", "reward/unscored_frac", "groups/mixed_frac", "perf/update_programs"]
    + [f"perf/{name}" for name in ("generation_tokens_per_sec", "training_tokens_per_sec", "programs_compiled")]
    + [f"perf/{name}" for name in ("compile_sec", "rollout_occupancy", "update_occupancy", "update_operations")]
)


def test_metrics_of_the_run(home, first):
    rows = metric_rows(home / RUN)[:8]
    assert [row.get("sft/step") for row in rows] == [1, 2, 3, 4, None, None, None, None]
    assert [row.get("step") for row in rows] == [None] * 4 + [0, 1, 2, 3]
    assert all(
        {"sft/loss", "sft/grad_norm", "sft/learning_rate", "sft/step_time_sec"} <= row.keys() for row in rows[:4]
    )
    for row in rows[5:]:
        missing = {f"train/{name}" for name in METRICS} - row.keys()
        assert not missing
        empty = row["train/update/rows_left_out_frac"] == 1  # means over the tokens of the update are null then
        assert all(
            isinstance(value, int | float) or (value is None and empty) or name.startswith("train/pass_rate/")
            for name, value in row.items()
        ), row
        assert 0 <= row["train/completions/clipped_ratio"] <= 1 <= row["train/completions/min_length"] <= 8
    assert rows[7]["train/perf/update_programs"] == rows[5]["train/perf/update_programs"] == 1
    for row in (rows[4], rows[7]):
        assert {"eval/pass@1", "eval/pass@4", "eval/rewards/mean", "eval/unscored_frac"} <= row.keys()
    assert "eval/pass@1" not in rows[5] and "eval/pass@1" not in rows[6]


def test_rollouts_of_the_run(home, first):
    files = sorted(path.name for path in (home / RUN / "rollouts").glob("*.jsonl"))
    assert files[:2] == ["step_000001.jsonl", "step_000002.jsonl"]
    rows = [json.loads(line) for line in (home / RUN / "rollouts" / files[0]).read_text().splitlines()]
    assert len(rows) == 32
    fields = {"step", "problem", "sample", "prompt", "completion", "length", "reward", "estimator_reward", "advantage"}
    fields |= {"reward/exact_match", "finished"}
    assert all(set(row) == fields for row in rows)
    assert [(row["problem"], row["sample"]) for row in rows] == [(p, s) for p in range(8) for s in range(4)]
    assert all(row["reward"] == float(row["completion"] == row["prompt"][-2::-1]) for row in rows)
    rewards = np.reshape([row["reward"] for row in rows], (8, 4))
    advantages = np.reshape([row["advantage"] for row in rows], (8, 4))
    np.testing.assert_allclose(advantages, tunix_like.compute_advantages(rewards, "maxrl"), rtol=1e-6)


def numbers(table):
    """Returns the rows of a printed table: name -> first value."""
    return dict(re.findall(r"[│|] +([\w@/]+) +[│|] +([\d.]+%?) ", table))


def test_evaluation(home, made):
    code, said, _ = made["eval"]
    assert code == 0 and f"{RUN}/checkpoints/3: 8 problems, 4 samples each" in said
    last = next(row for row in metric_rows(home / RUN) if row.get("step") == 3)
    assert numbers(said)["pass@1"] == f"{last['eval/pass@1']:.1%}"
    assert numbers(said)["mean_length"] == f"{last['eval/mean_length']:.3g}", "the same draws as the run's own"
    assert numbers(made["eval checkpoint"][1]) == numbers(said)
    assert "pass@2" in numbers(made["eval again"][1]) and "pass@1" not in numbers(made["eval again"][1])
    code, said, _ = made["eval sft"]
    assert code == 0 and f"{RUN}/sft_checkpoints/4: 3 problems" in said


def test_export_loads_in_transformers(home, made):
    import torch
    import transformers

    assert made["export"][0] == 0 and f"{RUN}/checkpoints/3" in made["export"][1]
    folder = home / "exported"
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model, tokenizer = tunix_like.load_model(folder)
    tokens = np.random.default_rng(0).integers(0, tokenizer.vocab_size, (2, 12))
    with torch.no_grad():
        expected = theirs(torch.tensor(tokens)).logits.numpy()
    np.testing.assert_allclose(model(jnp.asarray(tokens)), expected, rtol=0, atol=1e-4)
    assert np.abs(expected).max() > 0.05, "logits near zero would agree whatever the weights"
    other = transformers.AutoTokenizer.from_pretrained(folder)
    for text in ("abc>", "h>", "hgfedcba>", ""):
        assert other(text)["input_ids"] == tokenizer.encode(text)
    assert other.decode([5, 6, 7]) == tokenizer.decode([5, 6, 7]) == "abc"
    assert theirs.generation_config.eos_token_id == tokenizer.eos_ids[0] == other.eos_token_id


def test_commands_accept_an_exported_model(home, made):
    code, said, _ = made["eval exported"]
    assert code == 0 and numbers(said) == numbers(made["eval"][1]), "the weights, the data and the draws are the same"
    code, _, error = made["eval without data"]
    assert code == 2 and "data.name=" in error
    assert made["generate exported"][:2] == made["generate"][:2] == made["generate greedy"][:2]
    assert made["generate"][0] == 0 and re.fullmatch(r"[a-h<>unk]+\n", made["generate"][1])
    assert made["export of an export"][0] == 0
    one, two = (load_file(home / name / "model.safetensors") for name in ("exported", "twice"))
    assert one.keys() == two.keys() and all(np.array_equal(one[name], two[name]) for name in one)


def test_generate_prints_its_sampling_on_standard_error(home, made):
    """Only the completion is on standard output. Greedy sampling is the argmax of the plain forward pass, token by
    token."""
    for name in ("generate", "generate greedy"):
        assert "greedy: the most likely token at every position" in made[name][2] and "--greedy" not in made[name][2]
    code, said, error = made["generate sampled"]
    assert code == 0 and re.fullmatch(r"[a-h<>unk]*\n", said)
    assert "sampled at temperature 0.5, top-p 0.9, seed 0; --greedy takes the most likely token" in error
    note = "the completion is empty"
    assert made["generate empty"][:2] == (0, "\n") and note in made["generate empty"][2] and note not in error
    model, tokenizer = tunix_like.load_model(home / "exported")
    tokens = list(tokenizer.encode("abc>"))
    prompt = len(tokens)
    while len(tokens) < prompt + 8 and tokens[-1] not in tokenizer.eos_ids:
        tokens.append(int(model(jnp.array([tokens]))[0, -1].argmax()))
    ended = tokens[-1] in tokenizer.eos_ids
    assert made["generate greedy"][1] == tokenizer.decode(tokens[prompt : len(tokens) - ended]) + "\n"


def test_generate_of_a_row_prints_prompt_answer_and_reward(home, made):
    """Standard output still has the completion only. The data of reverse_text are the oracle of prompt and reward."""
    code, said, error = made["generate row"]
    row = load_source(load(home / RUN / "config.yaml").data).eval[1]
    prompt, _, answer, reward = error.strip().splitlines()[-4:]
    assert code == 0 and re.fullmatch(r"[a-h<>unk]*\n", said)
    assert prompt == f"prompt: {row['prompt']}" and answer == f"column answer: {row['prompt'][-2::-1]}"
    assert float(reward.split()[1]) == float(said.strip() == row["prompt"][-2::-1]) and "exact_match" in reward


def test_completions_of_evaluations_are_kept(home, first):
    """For each evaluation of RL and of SFT there is one file, whose rewards have the mean of the metric."""
    found = {}
    for row in metric_rows(home / RUN):
        step, folder = (row["step"], "eval") if "step" in row else (row["sft/step"], "sft_eval")
        if (mean := row.get("eval/rewards/mean", row.get("sft/eval/rewards/mean"))) is not None:
            found[home / RUN / "rollouts" / folder / f"step_{step:06d}.jsonl"] = mean
    assert {file.parent.name for file in found} >= {"eval"} and all(file.is_file() for file in found)
    for file, mean in found.items():
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        assert np.mean([row["reward"] for row in rows]) == pytest.approx(mean)
        assert all(row["reward"] == float(row["completion"] == row["prompt"][-2::-1]) for row in rows)


def test_doctor_and_missing_runs_and_checkpoints(made):
    code, said, _ = made["doctor"]
    assert code == 0 and all(name in said for name in ("jax", "flax", "device 0", "a compiled program", "GiB"))
    code, _, error = made["no such run"]
    assert code == 2 and error.startswith("error: runs/nothing")
    code, _, error = made["no such step"]
    assert code == 2 and "no checkpoint of step 2; there are: [3]" in error


@pytest.fixture(scope="module")
def resumed(home, made):
    """The output of the command of the shared run, repeated unchanged, and then with two more steps."""
    again = call(sys.executable, "-m", "tunix_like", "train", YAML, *SMALL, cwd=home)
    before = (home / RUN / "metrics.jsonl").read_text()
    more = call(SCRIPT, "train", YAML, *SMALL, "training.max_steps=5", cwd=home)
    return again, before, more.stdout, more.stderr


def test_finished_run_prints_its_table_and_how_to_continue(resumed, first):
    result, before, _, _ = resumed
    again = result.stdout
    assert not re.search(r"^(train|sft) \d", again, re.M), "nothing was trained"
    (said,) = [line for line in result.stderr.splitlines() if "finished" in line]
    assert "training.max_steps" in said and "step 3 of 3" in said
    table = again[again.index("MaxRLLearner, 8 held-out") :]
    assert table == first[first.index("MaxRLLearner, 8 held-out") :]
    assert "raise training.max_steps" in table and "another training.output_dir" in table
    assert len(before.splitlines()) == 8


def test_higher_max_steps_continues_the_run(home, resumed):
    _, before, more, error = resumed
    assert re.findall(r"^train (\d)/5 ", more, re.M) == ["4", "5"] and "sft 4/4" not in more
    assert "the schedule uses the new number" in error, "the schedule follows the new value, and the log says so"
    text = (home / RUN / "metrics.jsonl").read_text()
    assert text.startswith(before), "what was there stays as it was"
    steps = [row["step"] for row in metric_rows(home / RUN) if "step" in row]
    assert steps == [0, 1, 2, 3, 4, 5]
    assert load(home / RUN / "config.yaml").training.max_steps == 5
    assert re.search(r"step 0 .*step 5", more)


def make_parts(source) -> Parts:
    """Returns parts of which only config and source are read."""
    return Parts(Config(), int, source, None, None, [], None)


def test_final_table_counts_the_evaluated_problems(tmp_path, capsys):
    parts = make_parts(types.SimpleNamespace(eval=range(10)))
    for skipped, title in ((3, "7 held-out problems (3 prompts skipped)"), (0, "10 held-out problems,")):
        row = {"step": 1, "eval/pass@1": 0.5, "eval/avg@3": 0.4, "eval/skipped_prompts": skipped}
        (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row | {'step': step})}\n" for step in (0, 1)))
        screen.closing_table(tmp_path, parts)
        said = capsys.readouterr().out
        assert title in said and "3 samples each" in said and parts.config.eval.samples != 3


def test_final_table_promises_only_the_intervals_that_it_has(tmp_path, capsys):
    row = {"step": 1, "eval/rewards/accuracies": 0.5}
    for intervals in ({}, {"eval/low/rewards/accuracies": 0.2, "eval/high/rewards/accuracies": 0.7}):
        rows = (row | intervals | {"step": step} for step in (0, 1))
        (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in rows))
        screen.closing_table(tmp_path, make_parts(types.SimpleNamespace(eval=range(10))))
        said = capsys.readouterr().out
        assert ("with 95% intervals" in said) == bool(intervals) == ("[0.2, 0.7]" in said) and "10 held-out" in said


def test_final_table_leaves_out_what_is_zero_everywhere(tmp_path, capsys):
    """Rates of failures only: a pass rate of 0 is a result."""
    first = {"step": 0, "eval/pass@1": 0.0, "eval/pass@1/hard": 0.0, "eval/error_frac": 0.0}
    first |= {"eval/timeout_frac": 0.0, "eval/skipped_prompts": 0}
    last = first | {"step": 1, "eval/timeout_frac": 0.5}
    (tmp_path / "metrics.jsonl").write_text(f"{json.dumps(first)}\n{json.dumps(last)}\n")
    screen.closing_table(tmp_path, make_parts(types.SimpleNamespace(eval=range(10))))
    said = capsys.readouterr().out
    assert "pass@1 " in said and "pass@1/hard" in said and "timeout_frac" in said
    assert "error_frac" not in said and "skipped_prompts" not in said


def test_run_without_evaluation_prints_how_to_continue(tmp_path, capsys):
    screen.closing_table(tmp_path, make_parts(None))
    said = capsys.readouterr().out
    assert "no evaluation" in said and f"run folder: {tmp_path}" in said


def run_main(capsys, *argv):
    code = cli.main(list(argv))
    return code, *capsys.readouterr()


def test_resumption_with_another_config_is_rejected(home, first, monkeypatch, capsys):
    monkeypatch.chdir(home)
    before = {path: path.stat().st_mtime_ns for path in (home / RUN).rglob("*")}
    changes = "algorithm.num_generations=8", "optimizer.b2=0.9", "training.max_steps=9"
    code, _, error = run_main(capsys, "train", YAML, *SMALL, *changes)
    assert code == 2 and error.startswith(f"error: {RUN} holds a run with another config")
    assert "algorithm.num_generations: 4 -> 8" in error and "optimizer.b2: 0.99 -> 0.9" in error
    fixed, free = error.split("These keys differ too, which is allowed:")
    assert "training.output_dir=" in fixed and "max_steps" not in fixed
    named = re.search(r"training.output_dir='(.*)'", fixed)[1]
    assert run_folder(load(YAML, [f"training.output_dir={named}", *changes]), YAML, "") == Path(f"{RUN}-8")
    assert free.strip() in ("training.max_steps: 3 -> 9", "training.max_steps: 5 -> 9")
    assert {path: path.stat().st_mtime_ns for path in (home / RUN).rglob("*")} == before


def test_running_run_is_not_changed_by_another_command(home, first, monkeypatch, capsys):
    """Covers a second command with another config, which must not be written. Commands that only read are allowed."""
    monkeypatch.chdir(home)
    monkeypatch.setattr(run_lock, "BEAT_SECONDS", 0.1)
    lock = home / RUN / "run.lock"

    def files():
        return {path: path.stat().st_mtime_ns for path in (home / RUN).rglob("*") if path != lock}

    before, there, end = files(), threading.Event(), threading.Event()

    def hold():
        with run_lock.owned(home / RUN):
            there.set()
            end.wait()

    owner = threading.Thread(target=hold)
    owner.start()
    try:
        there.wait()
        code, _, error = run_main(capsys, "train", YAML, *SMALL, "training.max_steps=9")
        assert code == 2 and f"error: {home / RUN} is in use by process {os.getpid()} on " in error
        assert files() == before
        assert run_main(capsys, "export", RUN, str(home / "looked at"))[0] == 0
    finally:
        end.set()
        owner.join()


def test_export_of_a_damaged_checkpoint_fails_with_a_message(home, first, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(home / RUN, "run")
    for step in Path("run/checkpoints").iterdir():  # another test may have continued the run
        next((step / "state/d").iterdir()).write_bytes(b"0")
    for what, words in (("run/checkpoints/3", "this checkpoint is damaged: state/d/"), ("run", "every checkpoint is")):
        code, _, error = run_main(capsys, "export", what, "out")
        assert code == 2 and words in error and not Path("out").exists()


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("maxrl", "maxrl"),
        ("reinforce_pp", "reinforce_pp"),
        ("sft", "sft"),
        ("own/my.estimators.py:best", "best"),
        ("../own/my estimators.py:best_1", "best_1"),
        ("package.module.best", "best"),
        ("package.module:best", "best"),
    ],
)
def test_default_folder_of_a_run(kind, name):
    """If the estimator is named by its location, the run has the name of the function, in one folder below runs/."""
    config = load(None, ["training.seed=3"])
    assert run_folder(config, "somewhere/a.b.yaml", kind) == Path("runs") / f"a.b-{name}-s3"
    assert run_folder(config, "gsm8k/qwen3_0.6b", kind) == Path("runs") / f"qwen3_0.6b-{name}-s3"
    assert run_folder(load(None, ["training.output_dir=out"]), "a.yaml", kind) == Path("out")


def test_runs_of_a_sweep_have_folders_of_their_own():
    """Two configs that differ in one key get two folders from one template, named by the value."""

    def folder(*overrides):
        given = ["training.output_dir=runs/lr{optimizer.learning_rate}-{data.path}-{nothing}", "data.path=a/b"]
        return run_folder(load(None, [*given, *overrides]), "a.yaml", "maxrl")

    assert folder("optimizer.learning_rate=1e-4") == Path("runs/lr0.0001-a_b-{nothing}")
    assert folder("optimizer.learning_rate=0.25") == Path("runs/lr0.25-a_b-{nothing}")
    with pytest.raises(UserError, match=r"training\.output_dir: \{training\.sed\}.*training\.seed"):
        folder("training.output_dir=runs/{training.sed}")


OWN = """
def best(rewards, *, scored, lengths, k, beta=0.3, epsilon=1e-6, kl_tau=7.0):
    return rewards - rewards.mean(axis=1, keepdims=True)
"""


def test_parameters_of_a_user_defined_estimator_are_not_config_keys(tmp_path, monkeypatch, capsys):
    """`beta` and `epsilon` of the estimator are not the config keys of the KL and of the clip range, which keep their
    values. The file is found relative to the working directory, and its function names the run."""
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(OWN)
    argv = [*SMALL, "algorithm.advantage_estimator=own.py:best", "algorithm.estimator_params={k: 2, kl_tau: 1.0}"]
    asked = load(YAML, argv)
    config, learner = check_config(asked)
    algorithm = config.algorithm
    assert learner is tunix_like.CustomLearner and algorithm.estimator_params == {"k": 2, "kl_tau": 1.0}
    assert (algorithm.beta, algorithm.epsilon, algorithm.k, algorithm.kl_tau) == (0.0, 0.2, None, None)
    assert check_config(config)[0] == config, "a run's own config.yaml means the same run"
    code, said, _ = run_main(capsys, "train", YAML, *argv, "--dry-run")
    assert code == 0 and "learner: CustomLearner (own.py:best)" in said and "KL none (beta 0)" in said
    assert "folder: runs/reverse_text-best-s0\n" in said


def test_dry_run_writes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code, said, _ = run_main(capsys, "train", YAML, *SMALL, "--dry-run", "algorithm.advantage_estimator=rloo")
    assert code == 0 and "RLOOLearner" in said and "reinforce, aggregation seq-mean-token-sum" in said
    assert said.rstrip().endswith("nothing was trained.") and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help(command, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main([*command.split(), "--help"])
    said = capsys.readouterr().out
    assert stopped.value.code == 0 and said.startswith("usage: tunix-like") and "example: tunix-like" in said
    assert f"example: tunix-like {command}" in said
    if not command:
        assert all(re.search(rf"\n    {name}\s", said) for name in COMMANDS)
        assert all(f"{status} " in said.partition("exit status: ")[2] for status in documented_statuses())


def documented_statuses():
    """Returns the first column of the table in docs/reliability.md."""
    section = (ROOT / "docs" / "reliability.md").read_text().partition("## Exit status")[2].partition("\n## ")[0]
    found = re.findall(r"^\| (\d+)", section, re.MULTILINE)
    assert len(found) >= 5
    return found


def test_version(capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"tunix-like {tunix_like.__version__}\n"


def test_help_test_covers_every_command():
    actions = cli.build_parser()._subparsers._group_actions
    assert sorted(COMMANDS) == sorted(actions[0].choices)


def test_bad_usage(capsys):
    for argv in ([], ["trian"], ["train"], ["generate"]):
        with pytest.raises(SystemExit) as stopped:
            cli.main(argv)
        assert stopped.value.code == 2 and "usage:" in capsys.readouterr().err


def test_sft_command(home, first):
    said = call(SCRIPT, "sft", YAML, *SMALL, "sft.stop_at_success=0.9", cwd=home).stdout
    folder = "runs/reverse_text-sft-s0"
    assert f"tunix-like eval {folder}" in said and re.search(r"^sft 4/4 .*eval/pass@1", said, re.M)
    assert [row["sft/step"] for row in metric_rows(home / folder)] == [1, 2, 3, 4]
    assert not (home / folder / "checkpoints").exists()
    losses = [[row["sft/loss"] for row in metric_rows(home / name) if "sft/loss" in row] for name in (folder, RUN)]
    assert losses[0] == losses[1], "the same steps as the first phase of a whole run"


READERLESS = """
import json, os, sys
from tunix_like.cli.main import main
codes = []
for argv, place in json.load(sys.stdin):
    if place is None:
        reader, writer = os.pipe()
        os.close(reader)
    else:
        writer = os.open(place, os.O_WRONLY)
    os.dup2(writer, 1)
    os.close(writer)
    try:
        codes.append(main(argv))
    except SystemExit as stopped:
        codes.append(stopped.code)
print(json.dumps(codes), file=sys.stderr)
"""


def test_commands_with_unwritable_standard_output(home, made):
    """The files of the commands are written first. If the reader of the output has ended, the commands end without a
    message, also at the exit of the interpreter. If the disk is full, they print one line."""
    small = ["eval.samples=1", "eval.k=[1]"]
    commands = [
        (["advantages", "1,0,0,0"], None),
        (["doctor"], None),
        (["eval", RUN, "--out", "unread.jsonl", *small], None),
        (["report", RUN, "--out", "unread.html"], None),
        (["generate", RUN, "--prompt", "abc>"], None),
        (["train", YAML, *SMALL, "--dry-run"], None),
        (["advantages", "1,0,0,0"], "/dev/full"),
    ]
    done = subprocess.run(
        [sys.executable, "-c", READERLESS], cwd=home, input=json.dumps(commands), capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    *said, codes = done.stderr.splitlines()
    assert json.loads(codes) == [141] * 6 + [74] and done.returncode == 0
    before = ["template:", "prompt:", "ids:", "sampled at"]  # `eval` and `generate` write to standard error too
    assert [line.split()[0] for line in said[:3]] == before[:3] and said[3].startswith(before[3])
    del said[:4]
    assert [line for line in said if not line.startswith("INFO")] == [
        "error: standard output cannot be written (No space left on device): redirect it to another file."
    ]
    assert len((home / "unread.jsonl").read_text().splitlines()) == 8 and (home / "unread.summary.json").exists()
    assert "</html>" in (home / "unread.html").read_text()
