"""Tests the data of a learner: messages, containers of every kind, long prompts, held-out rows, and tokenizers."""

import pytest

from tests.parameters import others_slow
from tests.tiny_model import letters_backend
from tunix_like import (
    EvalConfig,
    MaxRLConfig,
    MaxRLLearner,
    RLTrainingConfig,
    RolloutConfig,
    Tokenizer,
    UserError,
)
from tunix_like.data import reverse_text, stream

from .small_learner import (
    ROWS,
    SGD,
    SOURCES,
    TEXTS,
    TOKENIZER,
    NotASequence,
    assert_same,
    collect,
    long_or_short,
    make,
    make_model,
    params_of,
    plain,
)

CHAT = "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"


def test_messages_go_through_the_chat_template():
    tokenizer = Tokenizer(
        letters_backend(), bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", chat_template=CHAT
    )
    seen = []

    def score(prompts, completions, answer):
        seen.extend(prompts)
        return long_or_short(prompts, completions, answer)

    messages = [{"prompt": [{"role": "user", "content": text}], "answer": text[::-1]} for text in TEXTS]
    learner = make(reward=score, max_steps=1, tokenizer=tokenizer)
    collect(learner, messages)
    assert set(seen) <= {f"{text}>" for text in TEXTS}
    with pytest.raises(UserError, match="no chat template"):
        make().train(messages)
    with pytest.raises(UserError, match="it must be an object with a role"):
        learner.train([{"prompt": [{"content": "ab"}]}])


@pytest.mark.parametrize("kind", others_slow(SOURCES, "MapDataset", "generator"))
def test_one_pass_over_any_kind_of_data(kind):
    """With max_steps=None every row is used once, whatever container the rows are in, and an evaluation runs at the
    end."""
    seen = []

    def score(prompts, completions, answer):
        seen.extend(prompts[::4])
        return long_or_short(prompts, completions, answer)

    rows = collect(make(reward=score, max_steps=None), SOURCES[kind]())
    assert [row["step"] for row in rows] == [1, 2]
    assert sorted(seen) == sorted(row["prompt"] for row in ROWS)
    ordered = [row["prompt"] for row in ROWS]
    assert (seen == ordered) == ("Map" not in kind and kind != "tuple"), "sequences are shuffled, streams are not"


@pytest.mark.slow
def test_iterable_is_reread_but_a_generator_ends():
    assert len(collect(make(max_steps=3), NotASequence())) == 3
    assert len(collect(make(max_steps=3), plain(ROWS))) == 2


def test_without_shuffling_rows_come_in_order():
    seen = []

    def score(prompts, completions, answer):
        seen.extend(prompts[::4])
        return long_or_short(prompts, completions, answer)

    collect(make(reward=score, max_steps=3), shuffle=False)
    assert seen == [row["prompt"] for row in [*ROWS, *ROWS[:4]]]


@pytest.mark.slow
def test_small_and_empty_data():
    row = collect(make(max_steps=1), ROWS[:3], batch_size=8)[0]
    assert row["step"] == 1
    with pytest.raises(UserError, match="the training data is empty"):
        make().train([])
    with pytest.raises(UserError, match="fewer than 4 usable prompts.*lower the batch size"):
        make().train(plain(ROWS[:3]), batch_size=4)
    for bad, message in ((7, "got int"), ({"prompt": "ab>"}, "needs a 'prompt' column.*it is a str")):
        with pytest.raises(UserError, match=message):
            make().train(bad)
    with pytest.raises(UserError, match="needs a 'prompt' column .*it has question"):
        make().train([{"question": "ab"}])


@pytest.mark.slow
def test_long_prompts_are_skipped_and_counted(caplog):
    long = [{"prompt": "a" * 9, "answer": "a"}, {"prompt": "abcdefgh>", "answer": "b"}]
    seen = []

    def score(prompts, completions, answer):
        seen.extend(prompts)
        return long_or_short(prompts, completions, answer)

    assert len(collect(make(reward=score, max_steps=None), [*ROWS, *long])) == 2
    assert max(map(len, seen)) == 3 and "10 training prompts, 2 of them longer than 8 tokens" in caplog.text
    with pytest.raises(UserError, match="all 2 training prompts are longer than rollout.max_prompt_length=8; raise it"):
        make().train(long)
    with pytest.raises(UserError, match="training row 8 .* set data.overlong_prompts=skip"):
        make().train([*ROWS, *long], overlong_prompts="error")


@pytest.mark.slow
def test_long_prompts_after_the_checked_rows_are_skipped(monkeypatch):
    monkeypatch.setattr(stream, "SCANNED_ROWS", len(ROWS))
    rows = [*ROWS, {"prompt": "abcdefgh>", "answer": "b"}]
    assert len(collect(make(max_steps=None), rows)) == 2
    with pytest.raises(UserError, match=f"training row {len(ROWS)} .* set data.overlong_prompts=skip"):
        make(max_steps=4).train(rows, batch_size=4, overlong_prompts="error")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "number"),
    [(ROWS[:3], 3), pytest.param([*ROWS[:5], {"prompt": "abcdefgh>", "answer": "b"}], 5, marks=pytest.mark.slow)],
)
def test_batch_larger_than_the_data_logs_a_warning(caplog, rows, number):
    make(max_steps=1).train(rows, batch_size=6)
    warning = f"data.batch_size: 6 prompts per step, but there are only {number} training rows"
    assert caplog.text.count(warning) == 1 and f"; {number} are used" in caplog.text
    caplog.clear()
    make(max_steps=1).train(rows, batch_size=number)
    assert "data.batch_size" not in caplog.text


@pytest.mark.slow
def test_long_evaluation_prompts_are_counted(caplog):
    held_out = [ROWS[0], reverse_text.record("abcdefghijkl"), *ROWS[1:3]]
    learner = make(max_steps=1, eval_config=EvalConfig(samples=2, batch_size=8))
    rows = collect(learner, eval_ds=held_out)
    assert [row["eval/skipped_prompts"] for row in rows if "eval/pass@1" in row] == [1, 1]
    warning = "4 evaluation prompts, 1 of them longer than 8 tokens and skipped"
    assert caplog.text.count(warning) == 1
    assert learner.evaluate(held_out).metrics["eval/skipped_prompts"] == 1 and caplog.text.count(warning) == 2
    with pytest.raises(UserError, match=r"evaluation row 1 .* set data.overlong_prompts=skip"):
        learner.evaluate(held_out, overlong_prompts="error")
    with pytest.raises(UserError, match=r"evaluation row 1 .* set data.overlong_prompts=skip"):
        learner.train(ROWS, held_out, batch_size=4, overlong_prompts="error")


@pytest.mark.slow
def test_a_tokenizer_of_transformers(tmp_path):
    import transformers

    TOKENIZER.save(tmp_path)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    arguments = {
        "reward_fns": long_or_short,
        "algo_config": MaxRLConfig(num_generations=4),
        "rollout_config": RolloutConfig(max_prompt_length=8, max_tokens_to_generate=4),
        "training_config": RLTrainingConfig(max_steps=1, actor_optimizer=SGD),
    }
    results = []
    for tokenizer in (theirs, TOKENIZER):
        model = make_model()
        MaxRLLearner(model=model, tokenizer=tokenizer, **arguments).train(ROWS, batch_size=4)
        results.append(params_of(model))
    assert_same(*results)
    with pytest.raises(UserError, match="tokenizer: object cannot be used"):
        MaxRLLearner(model=make_model(), tokenizer=object(), **arguments)


@pytest.mark.slow
def test_held_out_prompts_among_training_prompts_log_a_warning(caplog):
    settings = {"max_steps": 1, "eval_config": EvalConfig(samples=1, batch_size=8)}
    make(**settings).train(ROWS, [ROWS[1], ROWS[3], reverse_text.record("zzz")], batch_size=4)
    assert caplog.text.count("2 of 3 held-out prompts are also in the training data") == 1
    caplog.clear()
    make(**settings).train(ROWS[:6], ROWS[6:], batch_size=4)
    assert "held-out" not in caplog.text
