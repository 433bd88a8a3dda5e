"""Tests `rollout.engine`: engines of the user's file, their arguments, and keys that an engine does not read."""

from __future__ import annotations

import pytest

import tunix_like
from tunix_like.config.load import load
from tunix_like.config.schema import RolloutConfig
from tunix_like.errors import UserError
from tunix_like.rollout.engines.registry import ENGINES, check_engine, find_engine, register_engine
from tunix_like.runs.describe import describe
from tunix_like.runs.recipe import assemble

ENGINE = """
import jax, numpy as np
from pathlib import Path
from tunix_like.types import Sample

class Uniform:
    row_steps = 0

    def __init__(self, setup, length, *, log="calls.txt"):
        self.max_prompt_length, self.vocab_size = setup.rollout.max_prompt_length, setup.model.config.vocab_size
        self.length, self.log = length, setup.folder / log

    def place(self, params):
        return params

    def generate(self, params, requests, key, sampling):
        self.log.open("a").write("generate ")
        logprobs = np.full(self.length, -np.log(self.vocab_size))
        for index, request in enumerate(requests):
            key = jax.random.fold_in(key, request.number)
            for sample in range(request.samples):
                tokens = jax.random.randint(jax.random.fold_in(key, sample), self.length, 0, self.vocab_size)
                yield Sample(index, sample, np.asarray(tokens), logprobs, False)

    def close(self):
        self.log.open("a").write("close")

def nothing(setup):
    return []
"""

RUN = (
    "model.init=random",
    "model.config={model_type: llama, hidden_size: 16, intermediate_size: 16, num_hidden_layers: 1, "
    "num_attention_heads: 2, num_key_value_heads: 1, max_position_embeddings: 64, tie_word_embeddings: true}",
    "data.name=reverse_text",
    "data.batch_size=8",
    "data.eval_size=8",
    "eval.samples=2",
    "eval.batch_size=8",
    "algorithm.advantage_estimator=rloo",
    "algorithm.num_generations=4",
    "rollout.max_prompt_length=16",
    "rollout.max_tokens_to_generate=4",
    "training.max_steps=2",
    "training.max_logprob_gap=null",
)


@pytest.fixture
def settings(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(ENGINE)
    monkeypatch.chdir(tmp_path)
    return (*RUN, "rollout.engine=mine.py:Uniform", "training.output_dir=run")


@pytest.mark.slow
def test_an_engine_of_the_user_samples_a_run_and_is_closed(settings, tmp_path):
    row = tunix_like.run(load(None, [*settings, "rollout.engine_arguments={length: 3}"]))
    assert row["train/completions/mean_length"] == 3 and row["step"] == 2
    assert (tmp_path / "run" / "calls.txt").read_text() == "generate " * 4 + "close", "2 steps and 2 evaluations"


@pytest.mark.slow
def test_an_engine_without_responder_is_rejected_with_an_environment_before_sft(settings):
    given = ["data.name=guess", "rollout.eos_tokens=[1]", "environment.name=guess", "sft.max_steps=1"]
    with pytest.raises(UserError, match="engine Uniform: `generate` has no parameter `responder`"):
        tunix_like.run(load(None, [*settings, "rollout.engine_arguments={length: 3}", *given]))


def test_the_description_names_the_engine(settings):
    parts = assemble(load(None, [*settings, "rollout.engine_arguments={length: 3}"]), abstract=True)
    assert dict(describe(parts))["engine"] == "mine.py:Uniform"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"engine": "vlm"}, "rollout.engine: the engine 'vlm' is unknown. Did you mean 'vllm'. Valid: local, vllm"),
        ({"engine": "none.py:Engine"}, "rollout.engine: Engine 'none.py:Engine': the file .*none.py does not exist"),
        ({"engine": "mine.py:Other"}, "rollout.engine: .* has no function 'Other'; it has: .*nothing"),
        ({"engine": "mine.py:Uniform"}, "rollout.engine_arguments: .* needs a value for length"),
        (
            {"engine_arguments": {"size": 1}},
            "rollout.engine_arguments: .*local. has no parameter 'size'",
        ),
        (
            {"engine": "mine.py:Uniform", "engine_arguments": {"length": 1, "url": ""}},
            "has no parameter 'url'; it has: length, log",
        ),
        (
            {"engine": "mine.py:Uniform", "engine_arguments": {"length": 1}, "urls": ["http://a"]},
            "rollout.urls: it needs rollout.engine=vllm",
        ),
    ],
)
def test_unknown_names_and_keys_are_rejected(settings, given, message):
    with pytest.raises(UserError, match=message):
        check_engine(RolloutConfig(**given))


def test_a_result_that_is_no_engine_is_rejected_before_sft(settings):
    with pytest.raises(UserError, match="rollout.engine=mine.py:nothing: got list; give an object with place"):
        tunix_like.run(load(None, [*settings, "rollout.engine=mine.py:nothing", "sft.max_steps=1"]))


def test_registered_names(monkeypatch):
    monkeypatch.setattr("tunix_like.rollout.engines.registry.ENGINES", dict(ENGINES))
    make = register_engine("mine", reads=("urls",))(lambda setup: None)
    assert find_engine("mine").make is make
    with pytest.raises(UserError, match="rollout.urls: rollout.engine=mine needs the addresses"):
        check_engine(RolloutConfig(engine="mine"))
    check_engine(RolloutConfig(engine="mine", urls=["http://a"]))
    for name in ("local", "a:b"):
        with pytest.raises(UserError, match=f"engine '{name}'"):
            register_engine(name)(make)
