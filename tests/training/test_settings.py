"""Tests what can be changed after a learner was constructed: the rewards by `set_rewards`, and no other setting."""

import jax
import pytest

from tests.training.small_learner import (
    ROWS,
    TOKENIZER,
    assert_same,
    long_or_short,
    make,
    make_model,
    params_of,
    varied,
)
from tunix_like import MaxRLLearner, RLTrainingConfig, RolloutConfig, SFTConfig, SFTTrainer, UserError


@pytest.fixture(scope="module")
def learner():
    return make()


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("reward_fns", "set_rewards"),
        ("reward_weights", "set_rewards"),
        ("rewards", "set_rewards"),
        ("reward_fn", "'reward_fns'"),
        ("traning_config", "'training_config'"),
        ("eval_config", "construct"),
        ("algo", "construct"),
    ],
)
def test_an_attribute_without_effect_is_refused(learner, name, hint):
    with pytest.raises(AttributeError, match=name) as caught:
        setattr(learner, name, [varied])
    assert hint in str(caught.value)
    assert [function for _, function, _ in learner.rewards] == [long_or_short]


def test_an_sft_trainer_refuses_too():
    lengths = RolloutConfig(max_prompt_length=8, max_tokens_to_generate=4)
    given = {"tokenizer": TOKENIZER, "sft_config": SFTConfig(max_steps=1), "rollout_config": lengths}
    trainer = SFTTrainer(model=make_model(), **given)
    with pytest.raises(AttributeError, match="rollout_config"):
        trainer.rollout_configs = None


def test_a_subclass_of_the_user_has_attributes_of_its_own():
    class Own(MaxRLLearner):
        def __init__(self, *, pace=1, **arguments):
            super().__init__(**arguments)
            self.seen, self.pace = 0, pace

        def step(self, number):
            self.seen, self.newest = self.seen + 1, number
            return super().step(number)

    learner = make(learner=Own)
    learner.train(ROWS, batch_size=4)
    assert (learner.seen, learner.newest) == (2, 2)
    learner.note, learner.pace = "mine", 2
    with pytest.raises(AttributeError, match="set_rewards"):
        learner.reward_fns = [varied]


@pytest.mark.slow
def test_new_rewards_between_calls_equal_a_learner_that_had_them_and_keep_programs():
    """The oracle: a function that itself switches after the first call of `train`."""
    chosen = [long_or_short]

    def switched(prompts, completions, answer):
        return chosen[0](prompts, completions, answer)

    changed, oracle = make(), make(reward=switched)
    rows = []
    for learner in (changed, oracle):
        learner.train(ROWS, batch_size=4)
    changed.set_rewards({"one": varied, "two": long_or_short}, [1.0, 0.0])
    chosen[0] = varied
    rows = [learner.train(ROWS, batch_size=4) for learner in (changed, oracle)]
    assert_same(params_of(changed.model), params_of(oracle.model))
    assert rows[0]["train/rewards/one"] == rows[0]["train/rewards/mean"] == rows[1]["train/rewards/mean"]
    assert rows[0]["train/perf/update_programs"] == rows[1]["train/perf/update_programs"]


@pytest.mark.parametrize("given", [([],), ([varied], [1.0, 2.0]), ([varied], [-1.0])])
def test_new_rewards_are_checked_as_in_the_constructor(learner, given):
    with pytest.raises(UserError, match="reward_"):
        learner.set_rewards(*given)
    assert [function for _, function, _ in learner.rewards] == [long_or_short]


def test_the_text_of_a_learner_its_tokenizer_and_an_evaluation_says_what_they_are(learner):
    size = sum(leaf.size for leaf in jax.tree.leaves(params_of(learner.model)))
    assert all(part in repr(learner) for part in ("MaxRLLearner", f"{size:,}", "long_or_short"))
    assert f"{TOKENIZER.vocab_size} tokens" in repr(learner.tokenizer)
    found = learner.evaluate(ROWS[:3])
    text = repr(found)
    assert f"3 problems, {found.rewards.shape[1]} samples" in text
    assert f"pass@1 {found.metrics['eval/pass@1']:.3g}" in text
    assert max(len(repr(each)) for each in (learner, learner.tokenizer, found)) < 300


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["training", "sft"])
def test_a_run_whose_steps_are_done_says_so_and_names_the_key(kind, tmp_path, caplog):
    if kind == "training":
        learner = make(output_dir=str(tmp_path / "run"))
        train = lambda: learner.train(ROWS, batch_size=4)  # noqa: E731
    else:
        parts = {"tokenizer": TOKENIZER, "rollout_config": RolloutConfig(max_prompt_length=8, max_tokens_to_generate=4)}
        parts["training_config"] = RLTrainingConfig(output_dir=str(tmp_path / "run"))
        trainer = SFTTrainer(model=make_model(), sft_config=SFTConfig(max_steps=2, batch_size=4), **parts)
        train = lambda: trainer.train(ROWS)  # noqa: E731
    train()
    assert not [record for record in caplog.records if "max_steps" in record.message]
    train()
    (said,) = [record.message for record in caplog.records if "max_steps" in record.message]
    assert f"{kind}.max_steps" in said and "2 of 2" in said
