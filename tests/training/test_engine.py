"""Tests that the completions of a user's engine are validated before they are used."""

import numpy as np
import pytest

from tests.training.small_learner import ROWS, make, varied
from tunix_like import EvalConfig, UserError


class Changed:
    """The in-process engine of a learner, with samples that `change` modifies."""

    max_prompt_length = 8

    def __init__(self, change):
        self.inner, self.change = make().engine, change

    @property
    def row_steps(self):
        return self.inner.row_steps

    def place(self, params):
        return params

    def generate(self, *arguments):
        yield from self.change(list(self.inner.generate(*arguments)))


def with_fields(**fields):
    """Returns a function that replaces fields of completion 2 of request 1 by functions of the sample."""

    def change(samples):
        for sample in samples:
            chosen = (sample.request, sample.sample) == (1, 2)
            yield sample._replace(**{name: f(sample) for name, f in fields.items()}) if chosen else sample

    return change


def put(field, value, place=0):
    """Returns a function that sets one entry of a field."""

    def changed(sample):
        values = getattr(sample, field).copy()
        values[place] = value
        return values

    return with_fields(**{field: changed})


def long(kind, length):
    return lambda sample: np.zeros(length, kind)


WRONG = {
    "no sample": (lambda samples: map(tuple, samples), r"must yield tunix_like\.types\.Sample; it yielded a tuple"),
    "twice": (lambda samples: [*samples, samples[3]], "completion . of request . came twice or was not requested"),
    "not requested": (with_fields(sample=lambda _: 4), "completion 4 of request 1 came twice or was not requested"),
    "too few": (lambda samples: samples[:-2], "2 completions were not yielded; the first is completion . of request"),
    "float tokens": (
        with_fields(tokens=lambda sample: sample.tokens * 1.0),
        r"completion 2 of request 1: `tokens` must be a one-dimensional array of integers; .* shape \[\d\] .* float64",
    ),
    "two dimensions": (
        with_fields(tokens=lambda sample: sample.tokens[None]),
        r"`tokens` must be a one-dimensional array of integers; it has the shape \[1, \d\]",
    ),
    "integer finished": (with_fields(finished=lambda _: 1), "`finished` must be True or False; it is 1"),
    "fewer log-probabilities": (
        with_fields(tokens=long(int, 3), logprobs=long(float, 2)),
        r"`logprobs` must have one entry per token \(3\); it has 2",
    ),
    "integer log-probabilities": (
        with_fields(tokens=long(int, 2), logprobs=long(int, 2)),
        "`logprobs` must be a one-dimensional array of floating-point numbers; .* int64",
    ),
    "longer than the limit": (
        with_fields(tokens=long(int, 5), logprobs=long(float, 5)),
        "it has 5 tokens; the limit of a completion is 4",
    ),
    "a short mask": (
        with_fields(tokens=long(int, 2), logprobs=long(float, 2), token_mask=long(bool, 3)),
        r"`token_mask` must have one entry per token \(2\); it has 3",
    ),
    "a mask of numbers": (
        with_fields(tokens=long(int, 2), logprobs=long(float, 2), token_mask=long(int, 2)),
        "`token_mask` must be a one-dimensional array of booleans",
    ),
    "a segment that starts later": (
        with_fields(segment_start=lambda sample: np.ones(len(sample.tokens), int)),
        "`segment_start` must be .*; token 0 has 1",
    ),
    "a segment that is taken up again": (
        with_fields(tokens=long(int, 4), logprobs=long(float, 4), segment_start=lambda _: np.array([0, 0, 2, 0])),
        "`segment_start` must be .*; token 3 has 0",
    ),
    "a segment that starts in the middle of another": (
        with_fields(tokens=long(int, 4), logprobs=long(float, 4), segment_start=lambda _: np.array([0, 0, 1, 1])),
        "`segment_start` must be .*; token 2 has 1",
    ),
    "a short list of segments": (
        with_fields(tokens=long(int, 2), logprobs=long(float, 2), segment_start=long(int, 3)),
        r"`segment_start` must have one entry per token \(2\); it has 3",
    ),
    "no token of the model": (put("tokens", 13), "`tokens` must be token ids between 0 and 12; token 0 has 13"),
    "a negative token": (put("tokens", -1), "`tokens` must be token ids between 0 and 12; token 0 has -1"),
    "NaN": (put("logprobs", np.nan), "`logprobs` must be finite log-probabilities; token 0 has nan"),
    "an infinity": (put("logprobs", -np.inf), "`logprobs` must be finite log-probabilities; token 0 has -inf"),
}


@pytest.mark.parametrize(("change", "message"), WRONG.values(), ids=WRONG)
def test_invalid_results_are_rejected(change, message):
    """In training and in an evaluation, one message names the class of the engine and the field."""
    for use in (lambda learner: learner.train(ROWS, batch_size=4), lambda learner: learner.evaluate(ROWS[:4])):
        learner = make(engine=Changed(change), eval_config=EvalConfig(samples=4))
        with pytest.raises(UserError, match=f"^engine Changed: .*{message}"):
            use(learner)


def test_lists_and_empty_completions_are_accepted():
    """Numbers can be in lists, and a completion can have no tokens."""

    def lists(samples):
        for sample in samples:
            empty = (sample.request, sample.sample) == (0, 1)
            tokens, logprobs = ([], []) if empty else (sample.tokens.tolist(), sample.logprobs.tolist())
            yield sample._replace(tokens=tokens, logprobs=logprobs)

    learner = make(reward=varied, engine=Changed(lists))
    assert np.isfinite(learner.train(ROWS, batch_size=4)["train/loss"])


@pytest.mark.parametrize("most", [0.1, None])
def test_log_probabilities_of_other_weights_raise(most):
    """The message states what the engine must return, and the key that disables the comparison."""
    engine = Changed(lambda samples: [each._replace(logprobs=each.logprobs - 0.5) for each in samples])
    learner = make(reward=varied, engine=engine, max_logprob_gap=most)
    if most is None:
        assert learner.train(ROWS, batch_size=4)["train/logprob_gap/mean"] == pytest.approx(0.5, abs=1e-4)
        return
    with pytest.raises(UserError, match="in its argument `params`.*max_logprob_gap=None.*set model.attention=plain"):
        learner.train(ROWS, batch_size=4)
