"""An engine of the user: its completions are checked before anything reads them."""

import numpy as np
import pytest

from tests.training.small_learner import ROWS, assert_same, collect, make, params_of, varied
from tunix_like import EvalConfig, UserError
from tunix_like.types import Completions


class Changed:
    """The in-process engine of a learner, whose results `change` replaces."""

    max_prompt_length = 8

    def __init__(self, change):
        self.inner, self.change = make().engine, change

    @property
    def row_steps(self):
        return self.inner.row_steps

    def place(self, params):
        return params

    def generate(self, *arguments):
        return self.change(self.inner.generate(*arguments))


def put(field, value, place=(0, 0, 0)):
    """Returns a function that sets one entry of a field."""

    def change(out):
        values = getattr(out, field).copy()
        values[place[: values.ndim]] = value
        return out._replace(**{field: values})

    return change


WRONG = {
    "no Completions": (tuple, r"must return a tunix_like\.types\.Completions; it returned .* type tuple"),
    "a list": (lambda out: out._replace(lengths=out.lengths.tolist()), "`lengths` must be a numpy array; .* type list"),
    "float tokens": (lambda out: out._replace(tokens=out.tokens * 1.0), "`tokens` must contain integers; .* float64"),
    "integer finished": (
        lambda out: out._replace(finished=out.finished.astype(int)),
        "`finished` must contain booleans; its dtype is int64",
    ),
    "flat tokens": (
        lambda out: out._replace(tokens=out.tokens.reshape(-1, out.tokens.shape[-1])),
        r"`tokens` must have the shape \[prompts, completions per prompt, tokens\] = \[4, 4, 'T'\]; it has \[16, 4\]",
    ),
    "too few prompts": (
        lambda out: Completions(*(values[:2] for values in out)),
        r"`tokens` must have the shape .* = \[4, 4, 'T'\]; it has \[2, 4, 4\]",
    ),
    "too few lengths": (
        lambda out: out._replace(lengths=out.lengths[:, :3]),
        r"`lengths` must have the shape \[prompts, completions per prompt\] = \[4, 4\]; it has \[4, 3\]",
    ),
    "narrow log-probabilities": (
        lambda out: out._replace(logprobs=out.logprobs[..., :2]),
        r"`logprobs` must have the shape .* = \[4, 4, 4\]; it has \[4, 4, 2\]",
    ),
    "a negative length": (put("lengths", -1, (1, 2, 0)), "`lengths` must be .* completion 2 of prompt 1 has -1"),
    "longer than its array": (
        lambda out: put("lengths", 4, (0, 0, 0))(
            out._replace(tokens=out.tokens[..., :3], logprobs=out.logprobs[..., :3], token_mask=None)
        ),
        r"`lengths` must be between 0 and 3 \(width of `tokens`: 3, limit of a completion: 4 tokens\); .* has 4",
    ),
    "longer than the limit": (
        lambda out: put("lengths", 5)(
            out._replace(
                tokens=np.pad(out.tokens, [(0, 0), (0, 0), (0, 2)]),
                logprobs=np.zeros((4, 4, 6), np.float32),
                token_mask=None,
            )
        ),
        r"`lengths` must be between 0 and 4 \(width of `tokens`: 6, limit of a completion: 4 tokens\); .* has 5",
    ),
    "a mask beyond the length": (
        lambda out: put("lengths", 1, (1, 2, 0))(put("token_mask", True, (1, 2, 3))(out)),
        "`token_mask` must be True only for tokens of the completion; completion 2 of prompt 1",
    ),
    "no token of the model": (put("tokens", 13), "`tokens` must be token ids between 0 and 12; .*, token 0 has 13"),
    "a negative token": (put("tokens", -1), "`tokens` must be token ids between 0 and 12; .* has -1"),
    "NaN": (put("logprobs", np.nan), "`logprobs` must be finite log-probabilities .*; .* prompt 0, token 0 has nan"),
    "an infinity": (put("logprobs", -np.inf), "`logprobs` must be finite log-probabilities .* has -inf"),
}


@pytest.mark.parametrize(("change", "message"), WRONG.values(), ids=WRONG)
def test_wrong_results_are_refused(change, message):
    """In training and in an evaluation, by one message with the class of the engine and the field."""
    for use in (lambda learner: learner.train(ROWS, batch_size=4), lambda learner: learner.evaluate(ROWS[:4])):
        learner = make(engine=Changed(change), eval_config=EvalConfig(samples=4))
        with pytest.raises(UserError, match=f"^engine Changed: .*{message}"):
            use(learner)


def test_what_is_beyond_a_length_is_not_read():
    """NaN and token ids of no token there change no bit of a run."""

    def garbage(out):
        beyond = np.arange(out.tokens.shape[-1]) >= out.lengths[..., None]
        assert beyond.any()
        return out._replace(
            tokens=np.where(beyond, -1, out.tokens), logprobs=np.where(beyond, np.nan, out.logprobs).astype(np.float32)
        )

    own, plain = make(reward=varied, engine=Changed(garbage)), make(reward=varied)
    assert collect(own)[-1]["train/loss"] == collect(plain)[-1]["train/loss"]
    assert_same(params_of(own.model), params_of(plain.model))


@pytest.mark.parametrize("most", [0.1, None])
def test_log_probabilities_of_other_weights(most):
    """The message names what the engine must return, and the key that disables the comparison."""
    engine = Changed(lambda out: out._replace(logprobs=out.logprobs - 0.5))
    learner = make(reward=varied, engine=engine, max_logprob_gap=most)
    if most is None:
        assert learner.train(ROWS, batch_size=4)["train/logprob_gap/mean"] == pytest.approx(0.5, abs=1e-4)
        return
    with pytest.raises(UserError, match="under its argument `params`.*max_logprob_gap=None.*set model.attention=plain"):
        learner.train(ROWS, batch_size=4)
