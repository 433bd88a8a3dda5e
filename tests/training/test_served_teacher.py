"""Tests a teacher on a server: a stand-in with this library's decoder, and a real vLLM server if there is one."""

from __future__ import annotations

import json
import threading
import time

import jax
import numpy as np
import pytest
from flax import nnx

from tests.parameters import others_slow
from tests.rollout.engines.stand_in import StandIn
from tests.rollout.engines.test_real_vllm import HF, VLLM, Real
from tunix_like import DistillationConfig, DistillationLearner, RolloutConfig, TeacherConfig, UserError, load_model
from tunix_like.cli import main as cli
from tunix_like.errors import EngineLost
from tunix_like.models.loading import export_model
from tunix_like.training import served_teacher

from .repeated_prompts import MASK
from .small_learner import ROWS, TOKENIZER, collect, make, make_model
from .test_environments import LENGTHS as TURN_LENGTHS
from .test_environments import TURNS, Vowels
from .test_segments import BATCH_OF_SEGMENTS, GRAPHDEF, PARAMS, segment_logprobs


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("teacher")
    export_model(make_model(3), TOKENIZER, folder)
    return folder


@pytest.fixture
def server(folder):
    made = StandIn(folder, TOKENIZER)
    yield made
    made.stop()


def learner(teacher, **arguments):
    """Returns a learner whose teacher is a model, or the model of a server."""
    served = isinstance(teacher, str)
    settings = TeacherConfig(**({"path": teacher} if served else {}) | arguments.pop("settings", {}))
    return make(
        DistillationConfig(num_generations=4), learner=DistillationLearner, reward=(), teacher_config=settings,
        **({} if served else {"teacher": teacher}), **{"max_steps": 3} | arguments,
    )  # fmt: skip


KINDS = {
    "a teacher alone": {},
    "another prompt": {"settings": {"prompt": "{prompt}{answer}", "max_prompt_length": 14}},
    "several turns": {"rollout": TURN_LENGTHS, "environment": Vowels, "environment_config": TURNS},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", others_slow(KINDS, "another prompt"))
def test_a_run_equals_that_with_the_model_in_memory(kind, server):
    ends = []
    for teacher in (make_model(3), server.url):
        made = learner(teacher, **KINDS[kind])
        rows = collect(made)
        ends.append((rows, jax.tree.map(np.asarray, made.params)))
    for name in ("loss", "teacher/divergence", "teacher/logprob", "grad_norm"):
        np.testing.assert_allclose(*([row[f"train/{name}"] for row in end[0]] for end in ends), rtol=1e-4, atol=1e-6)
    assert abs(ends[0][0][0]["train/teacher/divergence"]) > 1e-3
    for one, two in zip(*(jax.tree.leaves(end[1]) for end in ends), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-3, atol=2e-5)


@pytest.mark.slow
def test_each_segment_follows_the_prompt(server):
    """Completions with rewritten histories: the log-probabilities are those of separate rows for each segment."""
    server.model = nnx.merge(GRAPHDEF, PARAMS)
    made = learner(server.url)
    rows = np.ones(BATCH_OF_SEGMENTS.scored.shape, bool)
    rows[0, 1] = False
    found = made.teachers.default.logprobs(made, BATCH_OF_SEGMENTS, rows)
    expected = np.where(MASK & rows[..., None], np.asarray(segment_logprobs(PARAMS)[0]), 0.0)
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.slow
def test_failures_are_repeated_and_a_restart_is_waited_for(server, folder):
    expected = collect(learner(make_model(3), max_steps=2))
    broken = {"choices": [{"prompt_logprobs": [None]}]}
    server.faults += [lambda answer: 503, lambda answer: "no JSON", lambda answer: broken]
    made = learner(server.url, max_steps=2)
    server.stop()
    threading.Timer(1.5, server.start).start()
    found = collect(made)
    assert not server.faults
    for one, two in zip(expected, found, strict=True):
        assert one["train/teacher/logprob"] == pytest.approx(two["train/teacher/logprob"], rel=1e-5)


@pytest.mark.slow
def test_patience_begins_with_the_first_failure(server, monkeypatch):
    """A batch may take longer than the patience with failures, which one late failure does not exhaust."""
    monkeypatch.setattr(served_teacher, "_WAIT_SECONDS", 1.5)
    monkeypatch.setattr(served_teacher, "_REQUESTS", 1)
    server.delay = 0.15
    server.faults += [lambda answer: answer] * 14 + [lambda answer: 503]
    assert len(collect(learner(server.url, max_steps=1))) == 1
    assert not server.faults


@pytest.mark.slow
def test_a_lost_server_ends_the_run_with_its_state_saved(server, tmp_path, monkeypatch):
    """The run continues with the same command when the server is back."""
    monkeypatch.setattr(served_teacher, "_WAIT_SECONDS", 0.5)
    whole = collect(learner(server.url, max_steps=4, output_dir=str(tmp_path / "whole")))
    made = learner(server.url, max_steps=4, output_dir=str(tmp_path / "run"))
    scores, calls = made.teachers.default.logprobs, []

    def stop_at_the_third_step(*arguments):
        calls.append(arguments)
        if len(calls) == 3:
            server.stop()
        return scores(*arguments)

    made.teachers.default.logprobs = stop_at_the_third_step
    with pytest.raises(EngineLost, match="teacher.path: the server .* has failed for 0.5 s"):
        collect(made)
    server.start()
    rest = collect(learner(server.url, max_steps=4, output_dir=str(tmp_path / "run")))
    assert [row["step"] for row in rest] == [3, 4]
    assert [row["train/teacher/logprob"] for row in rest] == [row["train/teacher/logprob"] for row in whole[2:]]


MISTAKES = {
    "a divergence over the vocabulary": ({"divergence": "jsd"}, {}, "teacher.divergence: jsd needs all"),
    "quantised": ({"quantize": "int8"}, {}, "teacher.quantize: teacher.path is a server"),
    "another temperature": (
        {},
        {"rollout": RolloutConfig(max_prompt_length=8, max_tokens_to_generate=4, temperature=0.7)},
        "rollout.temperature: got 0.7",
    ),
    "a key in the address": ({"path": "http://user:key@host"}, {}, "VLLM_API_KEY"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_rejected(name, server):
    settings, arguments, message = MISTAKES[name]
    path = settings.get("path", server.url)
    with pytest.raises(UserError, match=message):
        learner(path, settings=settings, **arguments)


def test_servers_that_do_not_fit(server, folder):
    for options, message in (
        ({"max_model_len": 8}, "--max-model-len 8"),
        ({"key": "secret"}, "VLLM_API_KEY"),
    ):
        other = StandIn(folder, TOKENIZER, **options)
        with pytest.raises(UserError, match=f"teacher.path: the server .*{message}"):
            learner(other.url)
        other.stop()
    with pytest.raises(UserError, match=f"teacher.path: the server {other.url} cannot be used: cannot connect"):
        learner(other.url)
    server.tokens_of = lambda text: [1, 2, 3]
    with pytest.raises(UserError, match="another tokenizer"):
        learner(server.url)


@pytest.mark.slow
def test_the_command(server, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    export_model(make_model(), TOKENIZER, tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"prompt": row["prompt"]}) for row in ROWS))
    (tmp_path / "run.yaml").write_text("model: {path: model}")
    command = ["train", "run.yaml", f"teacher.path={server.url}", "algorithm.advantage_estimator=distillation",
               "data.name=jsonl", "data.path=rows.jsonl", "data.batch_size=8", "rollout.max_prompt_length=8",
               "rollout.max_tokens_to_generate=6", "training.max_steps=2", "training.output_dir=run"]  # fmt: skip
    assert cli.main([*command, "--dry-run"]) == 0
    assert f"{server.url}, reverse_kl" in capsys.readouterr().out
    assert cli.main(command) == 0
    assert cli.main([*command, "rollout.temperature=0.5"]) == 2


@pytest.mark.slow
@pytest.mark.skipif(VLLM is None, reason="no vLLM: set TUNIX_LIKE_VLLM to its executable")
def test_a_real_server_gives_the_log_probabilities_of_the_model(tmp_path):
    teacher = load_model(HF, init="random", seed=3)[0]
    export_model(teacher, TOKENIZER, tmp_path / "model")
    real = Real(tmp_path / "model", tmp_path / "log", False)
    try:
        began = time.monotonic()
        ends = [collect(learner(each, max_steps=2)) for each in (teacher, real.url)]
        assert time.monotonic() - began < 300
    finally:
        real.kill()
    for one, two in zip(*ends, strict=True):
        for name in ("teacher/logprob", "teacher/divergence", "loss"):
            assert one[f"train/{name}"] == pytest.approx(two[f"train/{name}"], abs=1e-4)
