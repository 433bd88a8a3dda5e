"""Tests text generation from Python, and `load_model` of run folders, against evaluations and the command."""

import jax
import numpy as np
import pytest

import tunix_like
from tests.training.small_learner import ROWS, TOKENIZER, assert_same, make, params_of
from tunix_like import EvalConfig, RolloutConfig, UserError
from tunix_like.cli.main import main

PROMPTS = [row["prompt"] for row in ROWS]
LENGTHS = {"max_prompt_length": 8, "max_tokens_to_generate": 4}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A trained learner and its run folder with checkpoints of steps 1 and 2."""
    folder = tmp_path_factory.mktemp("generation") / "run"
    settings = {"output_dir": str(folder), "checkpoint_every_n_steps": 1}
    learner = make(eval_config=EvalConfig(samples=1, temperature=0.0), **settings)
    learner.train(ROWS, batch_size=4)
    return learner, folder


@pytest.mark.slow
def test_greedy_texts_are_those_of_an_evaluation_and_of_the_command(run, capsys):
    learner, folder = run
    expected = [texts[0] for texts in learner.evaluate(ROWS).texts]
    assert learner.generate(PROMPTS, temperature=0) == expected
    assert tunix_like.generate(learner.model, TOKENIZER, PROMPTS, temperature=0, **LENGTHS) == expected
    capsys.readouterr()
    overrides = [f"rollout.{name}={value}" for name, value in LENGTHS.items()]
    assert main(["generate", str(folder), "--prompt", PROMPTS[1], "--greedy", *overrides]) == 0
    assert capsys.readouterr().out == expected[1] + "\n"


def test_samples_depend_on_the_seed_and_the_position_and_not_on_the_other_prompts(run):
    learner, _ = run
    one = learner.generate(PROMPTS[:1] * 16, seed=3)
    assert len(set(one)) > 1
    assert one == learner.generate(PROMPTS[:1] * 16, seed=3) != learner.generate(PROMPTS[:1] * 16, seed=4)
    assert learner.generate(PROMPTS[:1], seed=3) == one[:1]
    assert learner.generate([]) == []


@pytest.mark.parametrize(
    ("prompts", "settings", "named"),
    [
        ("ab>", {}, "prompts: got str"),
        (["ab>", "abababababab>"], {}, r"prompts\[1\].*max_prompt_length"),
        ([[]], {}, "messages"),
        (["ab>"], {"temprature": 0}, "'temperature'"),
        (["ab>"], {"top_p": 0}, "top_p"),
        (["ab>"], {"max_tokens_to_generate": 10**6}, "max_tokens_to_generate"),
    ],
)
def test_wrong_calls_name_the_argument(run, prompts, settings, named):
    with pytest.raises(UserError, match=named):
        run[0].generate(prompts, **settings)


@pytest.mark.parametrize("place", ["", "checkpoints/2"])
def test_a_run_folder_and_its_checkpoints_are_loaded(run, place):
    learner, folder = run
    model, tokenizer = tunix_like.load_model(folder / place)
    assert_same(params_of(model), params_of(learner.model))
    assert tokenizer.encode("ab>") == TOKENIZER.encode("ab>")


def test_an_earlier_checkpoint_has_other_weights_and_can_be_trained(run):
    learner, folder = run
    model, tokenizer = tunix_like.load_model(str(folder / "checkpoints" / "1"))
    same = jax.tree.map(np.array_equal, params_of(model), params_of(learner.model))
    assert not all(jax.tree.leaves(same))
    resumed = make(model=model, tokenizer=tokenizer, max_steps=1, rollout=RolloutConfig(**LENGTHS))
    assert resumed.train(ROWS, batch_size=4)["step"] == 1


def test_a_run_without_the_checkpoint_is_named(run):
    with pytest.raises(UserError, match="no checkpoint of step 7"):
        tunix_like.load_model(run[1] / "checkpoints" / "7")
    with pytest.raises(UserError, match="init"):
        tunix_like.load_model(run[1], init="random")
