"""Tests supervised fine-tuning: the loss, the end of training, the requirements on rows, and resumption."""

import functools
import os
import signal
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import tunix_like
from tests.callbacks import OnRow
from tests.data.test_chat import make_tokenizer
from tests.tiny_model import HF as TINY
from tests.tiny_model import letters_backend
from tunix_like import (
    MaxRLLearner,
    OptimizerConfig,
    RLTrainingConfig,
    RolloutConfig,
    SFTConfig,
    SFTTrainer,
    Tokenizer,
    UserError,
)
from tunix_like.algorithms.losses import aggregation_weights
from tunix_like.config.schema import Config
from tunix_like.data import reverse_text
from tunix_like.data.stream import render
from tunix_like.errors import NotSaved
from tunix_like.runs import recipe
from tunix_like.runs.build import Parts
from tunix_like.runtime import processes
from tunix_like.step.forward import ForwardOptions
from tunix_like.step.packing import Layout, pack
from tunix_like.step.train_step import StepSpec, gradient, step_inputs
from tunix_like.storage.checkpoints import Checkpoints
from tunix_like.storage.metrics import rows as metric_rows
from tunix_like.training.loop import Stopped
from tunix_like.training.sft import _Likelihood

TEXTS = ["ab", "cde", "efgh", "gh", "bad", "dc", "feed", "hg"]
ROWS = [reverse_text.record(text) for text in TEXTS]
HF = TINY | {"tie_word_embeddings": False}
TOKENIZER = reverse_text.tokenizer()
ROLLOUT = RolloutConfig(max_prompt_length=8, max_tokens_to_generate=8)


def make_model():
    return tunix_like.load_model(HF, init="random")[0]


def params_of(model):
    return jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.split(model)[1]))


def make(max_steps=2, *, rollout=ROLLOUT, evaluate=None, sft=None, model=None, tokenizer=TOKENIZER, **training):
    settings = {"batch_size": 8, "max_steps": max_steps, "optimizer": OptimizerConfig(learning_rate=1e-2)}
    return SFTTrainer(
        model=make_model() if model is None else model,
        tokenizer=tokenizer,
        sft_config=SFTConfig(**settings | (sft or {})),
        rollout_config=rollout,
        training_config=RLTrainingConfig(**training),
        evaluate=evaluate,
    )


def naive_nll(model, rows, limit=8, bos=True):
    """Returns the mean of -log p over the answers' tokens and their end-of-sequence token, by the plain forward
    pass."""
    eos = TOKENIZER.eos_ids[0]
    prompts = [TOKENIZER.encode(row["prompt"], add_special_tokens=bos) for row in rows]
    answers = [[*TOKENIZER.encode(row["answer"], add_special_tokens=False), eos][:limit] for row in rows]
    tokens = np.zeros((len(rows), 16), int)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        tokens[row, : len(prompt) + len(answer)] = prompt + answer
    logprobs = nnx.jit(lambda model, tokens: jax.nn.log_softmax(model(tokens)))(model, tokens)
    counted = [
        logprobs[row, len(prompt) + i - 1, token]
        for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
        for i, token in enumerate(answer)
    ]
    return -jnp.mean(jnp.stack(counted))


def test_loss_equals_the_likelihood_and_the_model_is_updated():
    model = make_model()
    before, expected = params_of(model), float(naive_nll(model, ROWS))
    rows = []
    last = make(model=model, train_micro_batch_size=3).train(
        ROWS, callbacks=[OnRow(lambda row: rows.append(dict(row)))]
    )
    assert [row["sft/step"] for row in rows] == [1, 2]
    assert rows[0]["sft/loss"] == pytest.approx(float(expected), rel=1e-5)
    assert rows[0]["sft/learning_rate"] == pytest.approx(1e-2) and "sft/grad_norm" in rows[0]
    assert last == rows[-1] and last["sft/loss"] < expected
    after = params_of(model)
    assert not np.array_equal(before["norm"]["scale"], after["norm"]["scale"])
    assert last["sft/loss"] > naive_nll(model, ROWS), "the model handed in is the one that was trained"


@pytest.mark.slow
def test_a_second_call_without_a_folder_continues():
    """Two calls of two steps equal one of four: rows, moments and learning rates."""
    rows, model, whole = [], make_model(), make_model()
    two = make(model=model, sft={"batch_size": 3})
    for _ in range(2):
        two.train(ROWS, callbacks=[OnRow(lambda row: rows.append(dict(row)))])
    make(4, model=whole, sft={"batch_size": 3}).train(ROWS)
    assert [row["sft/step"] for row in rows] == [1, 2, 3, 4]
    jax.tree.map(np.testing.assert_array_equal, params_of(model), params_of(whole))


@pytest.mark.slow
def test_long_answers_are_cut_without_an_end():
    rollout = RolloutConfig(max_prompt_length=8, max_tokens_to_generate=3)
    row = make(1, rollout=rollout).train(ROWS)
    assert row["sft/loss"] == pytest.approx(float(naive_nll(make_model(), ROWS, limit=3)), rel=1e-5)


def test_end_token_of_an_answer():
    """It is `rollout.eos_tokens`; otherwise the tokenizer's own token, also with id 0; otherwise the first that ends a
    completion."""
    backend = letters_backend()
    pad = Tokenizer(backend, bos_token="<bos>", eos_token="<pad>", eos_ids=[2, 0])
    assert make(tokenizer=pad)._answer(render(ROWS[0], TOKENIZER)).tokens == [6, 5, 0]
    assert make(tokenizer=Tokenizer(backend, eos_ids=[3, 2]))._answer(render(ROWS[0], TOKENIZER)).tokens == [6, 5, 3]
    rollout = RolloutConfig(max_prompt_length=8, max_tokens_to_generate=8, eos_tokens=[9])
    assert make(tokenizer=pad, rollout=rollout)._answer(render(ROWS[0], TOKENIZER)).tokens == [6, 5, 9]


def test_control_tokens_in_an_answer_are_plain_text(tmp_path):
    """The answer's letters are encoded as transformers does, and the only end token is the one that is added."""
    tokenizer = make_tokenizer("qwen", list("<|im_end>ab"), ["ab"], 16)
    answer = "a<|im_end|>b"
    prompt = render({"prompt": "ab", "answer": answer}, tokenizer)
    model = tunix_like.load_model(HF | {"vocab_size": tokenizer.vocab_size}, init="random")[0]
    rollout = RolloutConfig(max_prompt_length=8, max_tokens_to_generate=16)
    found = make(model=model, tokenizer=tokenizer, rollout=rollout)._answer(prompt).tokens
    tokenizer.save(tmp_path)
    from transformers import AutoTokenizer

    letters = AutoTokenizer.from_pretrained(tmp_path)(answer, split_special_tokens=True)["input_ids"]
    assert len(letters) == len(answer) and found == [*letters, tokenizer.eos_id]


def test_gradient_equals_that_of_the_answers_likelihood():
    """Prompt tokens do not contribute to the loss: the gradient of every parameter equals that of `naive_nll`."""
    trainer = make()
    batch = trainer._batch([render(row, TOKENIZER) for row in ROWS])
    eos = TOKENIZER.eos_ids[0]
    letters = TOKENIZER.encode("edc", add_special_tokens=False)
    np.testing.assert_array_equal(batch.completion_tokens[1, 0], [*letters, eos, 0, 0, 0, 0])
    np.testing.assert_array_equal(batch.completion_lengths[:3, 0], [3, 4, 5])

    graphdef, _ = nnx.split(trainer.model)
    packed = pack(batch.completion_lengths, batch.scored, batch.completion_tokens.shape[2], Layout(3, 3, 1, True))
    data = step_inputs(batch, np.ones(len(ROWS), bool), packed)
    weights = aggregation_weights("token-mean", *map(jnp.asarray, (batch.completion_lengths, batch.scored)), 1)
    spec = StepSpec(graphdef, _Likelihood(), optax.identity(), ForwardOptions(1.0, 1024, False))
    run = functools.partial(gradient, spec)
    got, _ = jax.jit(run)(trainer.params, data, jnp.asarray(batch.rewards)[..., None], weights, packed.sets)
    expected = jax.jit(jax.grad(lambda params: naive_nll(nnx.merge(graphdef, params), ROWS)))(trainer.params)
    distance = optax.tree.norm(jax.tree.map(jnp.subtract, got, expected)) / optax.tree.norm(expected)
    assert distance < 1e-5


@pytest.mark.slow
def test_stops_at_success(caplog):
    calls = []

    def evaluate(params, step):
        assert params["norm"]["scale"].size
        calls.append(step)
        return {"eval/pass@1": 0.2 * len(calls)}

    sft = {"stop_at_success": 0.4, "eval_every_n_steps": 3}
    with caplog.at_level("INFO", "tunix_like"):
        last = make(20, evaluate=evaluate, sft=sft).train(ROWS)
    assert "sft stopped at step 6 of 20 because success 0.4 >= stop_at_success 0.4" in caplog.messages
    assert (last["sft/step"], last["sft/eval/pass@1"], calls) == (6, 0.4, [3, 6])
    calls.clear()
    caplog.clear()
    last = make(4, evaluate=evaluate).train(ROWS)
    assert not any("stopped" in message for message in caplog.messages)
    assert calls == [4] and last["sft/step"] == 4, "without a target only the end is evaluated"


@pytest.mark.slow
def test_resumed_run_equals_the_uninterrupted_run(tmp_path):
    whole = make(6, output_dir=str(tmp_path / "whole"), checkpoint_every_n_steps=2)
    whole.train(ROWS)
    make(3, output_dir=str(tmp_path / "parts"), checkpoint_every_n_steps=2).train(ROWS)
    second, began = make(6, output_dir=str(tmp_path / "parts")), []
    second.train(ROWS, callbacks=[OnRow(lambda row: began.append(row["sft/step"]))])
    assert began == [4, 5, 6]
    jax.tree.map(np.testing.assert_array_equal, params_of(second.model), params_of(whole.model))
    assert [row["sft/loss"] for row in metric_rows(tmp_path / "parts")] == [
        row["sft/loss"] for row in metric_rows(tmp_path / "whole")
    ]
    assert sorted(path.name for path in tmp_path.joinpath("parts").iterdir()) == [
        "metrics.jsonl",
        "sft_checkpoints",
        "tensorboard",
        "trace.json",
    ]
    with pytest.raises(UserError, match="(?s)another run.*  seed: 0 -> 1\n.*another output_dir"):
        make(6, output_dir=str(tmp_path / "parts"), seed=1).train(ROWS)


@pytest.mark.parametrize(
    ("schedule", "warns"), [("constant", False), pytest.param("cosine", True, marks=pytest.mark.slow)]
)
def test_changed_length_logs_a_warning_if_the_schedule_depends_on_it(schedule, warns, tmp_path, caplog):
    sft = {"optimizer": OptimizerConfig(learning_rate=1e-2, schedule=schedule)}
    make(1, sft=sft, output_dir=str(tmp_path)).train(ROWS)
    assert "in the checkpoint: the schedule" not in caplog.text
    make(2, sft=sft, output_dir=str(tmp_path)).train(ROWS)
    assert ("the number of steps is now 2 and was 1 in the checkpoint" in caplog.text) is warns


def test_damaged_checkpoint_is_replaced_by_the_previous_one(tmp_path, caplog):
    make(3, output_dir=str(tmp_path), checkpoint_every_n_steps=1).train(ROWS)
    (file,) = (tmp_path / "sft_checkpoints" / "3" / "state" / "d").iterdir()
    file.write_bytes(file.read_bytes()[:-1])
    again, began = make(3, output_dir=str(tmp_path)), []
    again.train(ROWS, callbacks=[OnRow(lambda row: began.append(row["sft/step"]))])
    assert began == [3] and "step 2 is used instead" in caplog.text


def test_early_stop_is_kept_after_a_restart(tmp_path):
    sft = {"stop_at_success": 0.5, "eval_every_n_steps": 2}
    first = make(20, evaluate=lambda params, step: {"eval/pass@1": 1.0}, sft=sft, output_dir=str(tmp_path))
    assert first.train(ROWS)["sft/step"] == 2
    again = make(20, evaluate=lambda params, step: pytest.fail("evaluated again"), sft=sft, output_dir=str(tmp_path))
    assert again.train(ROWS)["sft/step"] == 2
    jax.tree.map(np.testing.assert_array_equal, params_of(again.model), params_of(first.model))


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"sft": {"optimizer": OptimizerConfig(learning_rate=1e-3)}}, "optimizer.learning_rate"),
        ({"rollout": RolloutConfig(max_prompt_length=8, max_tokens_to_generate=7)}, "lengths"),
    ],
    ids=["rate", "lengths"],
)
def test_other_settings_do_not_resume(change, key, tmp_path):
    make(2, output_dir=str(tmp_path)).train(ROWS)
    with pytest.raises(UserError, match=key):
        make(3, output_dir=str(tmp_path), **change).train(ROWS)
    assert make(3, output_dir=str(tmp_path)).train(ROWS)["sft/step"] == 3


def test_checkpoint_of_an_earlier_version_resumes(tmp_path, monkeypatch):
    """It stored neither the optimizer nor the lengths."""
    save = Checkpoints.save

    def earlier(self, step, state, iterator, meta):
        identity = {name: value for name, value in meta["identity"].items() if name not in ("optimizer", "lengths")}
        return save(self, step, state, iterator, meta | {"identity": identity})

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "save", earlier)
        make(2, output_dir=str(tmp_path)).train(ROWS)
    assert make(3, output_dir=str(tmp_path)).train(ROWS)["sft/step"] == 3


@pytest.fixture
def command(monkeypatch, tmp_path):
    """Fine-tuning as the commands run it, with a trainer that only records its arguments and raises `ends`."""
    seen = SimpleNamespace(made=None, trained=None, ends=None)

    def made(**arguments):
        seen.made = arguments
        return SimpleNamespace(train=train)

    def train(rows, **arguments):
        seen.trained = arguments
        if seen.ends is not None:
            raise seen.ends

    monkeypatch.setattr(recipe, "SFTTrainer", made)
    source = SimpleNamespace(train=ROWS, eval=[])
    seen.parts = Parts(
        Config(sft=SFTConfig(max_steps=1)), MaxRLLearner, source, None, None, [("length", len, 1.0)], None
    )
    seen.run = lambda follows: recipe.fine_tune(seen.parts, tmp_path, [], another_follows=follows)
    return seen


def test_command_continues_with_the_next_phase_after_a_failed_save(command):
    """A failed save does not stop the command, since the next phase saves too. A signal stops it."""
    for follows in (True, False):
        assert command.run(follows) is None and command.trained["another_follows"] == follows
    command.ends = NotSaved("step 1")
    assert command.run(True) is command.ends
    command.ends.stopped = True
    with pytest.raises(NotSaved, match="step 1"):
        command.run(True)


def test_evaluation_of_a_command_gets_its_step(command, monkeypatch, tmp_path):
    """The first of several processes writes the completions. The evaluator is closed at the end."""
    asked, closed = [], []

    def evaluator(params, *, rollouts, step):
        asked.append((params, rollouts, step))
        return SimpleNamespace(metrics={"eval/pass@1": 0.5})

    evaluator.close = lambda: closed.append(True)
    command.parts.source.eval = ROWS
    monkeypatch.setattr(Parts, "evaluator", lambda self, config: evaluator)
    for first, folder in ((True, tmp_path / "rollouts" / "sft_eval"), (False, None)):
        monkeypatch.setattr(processes, "is_first", lambda first=first: first)
        command.run(False)
        assert command.made["evaluate"]("weights", 25) == {"eval/pass@1": 0.5}
        assert asked.pop() == ("weights", folder, 25) and closed.pop()


def test_signal_in_the_last_step_stops_before_another_phase():
    term = [OnRow(lambda row: os.kill(os.getpid(), signal.SIGTERM))]
    assert make(1).train(ROWS, callbacks=term)["sft/step"] == 1
    with pytest.raises(Stopped):
        make(1).train(ROWS, callbacks=term, another_follows=True)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"prompt": "ab>"}], "needs an 'answer' column; the rows have prompt"),
        ([{"prompt": "ab>", "answer": 7}], "in the 'answer' column.*'ab>' has 7"),
        ([{"prompt": "ab>", "answer": "ba"}, {"prompt": "cd>", "answer": None}], "'cd>' has None"),
        ([{"prompt": "ab>", "answer": ""}], "'ab>' has ''"),
        ([], "the training data is empty"),
        ([{"prompt": "abcdefgh>", "answer": "x"}], "longer than rollout.max_prompt_length=8; raise it"),
    ],
)
def test_unusable_rows_are_rejected(rows, message):
    with pytest.raises(UserError, match=message):
        make().train(rows)


def test_chat_and_data_smaller_than_a_batch():
    template = "{% for m in messages %}{{ m.content }}{% endfor %}>"
    chat = Tokenizer(
        letters_backend(), bos_token="<bos>", eos_token="<eos>", pad_token="<pad>",
        chat_template=template,
    )  # fmt: skip
    last = make(1, tokenizer=chat).train([{"prompt": [{"role": "user", "content": "ab"}], "answer": "ba"}] * 3)
    # A rendered chat contains its special tokens, so none are added here.
    expected = naive_nll(make_model(), [{"prompt": "ab>", "answer": "ba"}], bos=False)
    assert last["sft/loss"] == pytest.approx(float(expected), rel=1e-5)
