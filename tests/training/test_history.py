"""Tests `environment.history=template`: the model's input is what the chat template renders, and training uses the same
input."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest
import tokenizers

import tunix_like
from tests.environments.test_history import OPENED, QWEN3, build_thinking
from tests.tiny_model import HF
from tunix_like import EnvironmentConfig, EnvStepResult, EvalConfig, MaxRLConfig, RolloutConfig, Tokenizer, UserError
from tunix_like.config.schema import MeshConfig
from tunix_like.data.stream import render
from tunix_like.models.sharding import build_mesh

from . import small_learner
from .small_learner import assert_same, make, watch_sampler

LETTERS = ["<eos>", ">", *"abcdefgh"]
KEEPS = "{% for m in messages %}{{ m.content }}{{ '<eos>' if m.role == 'assistant' else '>' }}{% endfor %}"
REWRITES = KEEPS.replace("m.content }}", "m.content.split('>')[-1] if m.role == 'assistant' else m.content }}")
"""Keeps only the part of a turn after its last `>`, as other templates remove thoughts."""
LENGTHS = RolloutConfig(max_prompt_length=16, max_tokens_to_generate=64)
ROWS = [{"prompt": [{"role": "user", "content": text}], "answer": text[::-1]} for text in ("ab", "cd", "ef", "gh")] * 2


def letters(template: str) -> Tokenizer:
    """Every id has a text, and every text has one encoding."""
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({t: i for i, t in enumerate(LETTERS)}, unk_token=">"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("."), behavior="isolated")
    backend.decoder = tokenizers.decoders.Fuse()
    backend.add_special_tokens(["<eos>"])
    return Tokenizer(backend, eos_token="<eos>", chat_template=template)


class Three:
    """Has three turns. The reward is the number of turns with a `>`."""

    def reset(self, answer: str, **columns) -> None:
        self.answer, self.turns = answer, 0

    def step(self, completion: str) -> EnvStepResult:
        self.turns += 1
        return EnvStepResult(self.answer, float(">" in completion), self.turns == 3)


def learner(history="template", template=REWRITES, algo=None, lengths=LENGTHS, **arguments):
    tokenizer = arguments.pop("tokenizer", None) or letters(template)
    model, _ = tunix_like.load_model(
        HF | {"vocab_size": tokenizer.vocab_size, "max_position_embeddings": 512}, init="random", seed=0
    )
    config = EnvironmentConfig(max_turns=4, max_observation_tokens=60, history=history)
    algo = algo or MaxRLConfig(num_generations=4, truncation_order=1)
    given = {"environment": Three, "environment_config": config} | arguments
    return make(algo, model=model, tokenizer=tokenizer, rollout=lengths, reward=(), **given)


def collect(made, data=ROWS, **arguments):
    return small_learner.collect(made, data, **arguments)


def turns_of(mask: np.ndarray) -> list[tuple[int, int]]:
    """Returns the ranges of sampled tokens."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(int), [0]])))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def seen_contexts(made) -> tuple[list, list]:
    """Returns the prompts of the first rollout as token ids, and the completions."""
    prompts, generate = [], made.engine.generate
    made.engine.generate = lambda params, requests, *rest: (
        prompts.extend(request.tokens for request in requests) or generate(params, requests, *rest)
    )
    return prompts, watch_sampler(made)


def check_contexts(made, theirs, rows) -> int:
    """Compares the sampler's input at each turn with transformers. Returns the number of turns after the first."""
    prompts, sampled = seen_contexts(made)
    collect(made, rows, batch_size=len(rows))
    out, later = sampled[0], 0
    whole = [(render(row, made.tokenizer).tokens, row) for row in rows]
    for p, i in np.ndindex(*out.lengths.shape):
        (row,) = (row for tokens, row in whole if tokens[: len(prompts[p])] == list(prompts[p]))
        messages = list(row["prompt"])
        for number, (start, end) in enumerate(turns_of(out.token_mask[p, i])):
            context = [*prompts[p], *out.tokens[p, i, out.segment_start[p, i, start] : start].tolist()]
            assert context == theirs(messages), (p, i, number)
            text = made.tokenizer.decode(out.tokens[p, i, start:end].tolist())
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": row["answer"]}]
            later += number > 0
    return later


@pytest.mark.slow
@pytest.mark.parametrize("case", ["thoughts", "opened thoughts", pytest.param("no thoughts", marks=pytest.mark.slow)])
def test_each_turn_sees_what_transformers_renders(case):
    """Uses Qwen3's template. All tokens are sampled, since the weights are random."""
    ours, theirs = build_thinking(OPENED if case == "opened thoughts" else QWEN3)
    variables = {"enable_thinking": False} if case == "no thoughts" else {}
    ours = ours.with_template_variables(variables)
    ends = [ours.eos_id, *range(20, 200, 3)]
    lengths = RolloutConfig(max_prompt_length=64, max_tokens_to_generate=200, eos_tokens=ends)
    rows = [{"prompt": [{"role": "user", "content": f"Question {i}"}], "answer": "next"} for i in range(4)]
    made = learner(tokenizer=ours, lengths=lengths, max_steps=1)

    def rendered(messages):
        return theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False, **variables)

    assert check_contexts(made, rendered, rows) >= 16


@pytest.mark.slow
def test_context_of_letters_follows_the_template():
    made = learner(max_steps=1)
    tokenizer = made.tokenizer
    assert check_contexts(made, lambda messages: tokenizer.encode_prompt(messages, True)[1], ROWS[:4]) >= 8


@pytest.mark.slow
def test_the_tools_of_a_row_are_in_every_context():
    made = learner(max_steps=1, template="{% for tool in tools or [] %}{{ tool.name }}>{% endfor %}" + REWRITES)
    tools = [{"name": "ef"}]
    rows = [{**row, "tools": json.dumps(tools)} for row in ROWS[:4]]
    assert (
        check_contexts(made, lambda messages: made.tokenizer.encode_prompt(messages, True, tools=tools)[1], rows) >= 8
    )
    assert all(made.tokenizer.decode(render(row, made.tokenizer).tokens).startswith("ef>") for row in rows)


@pytest.mark.slow
def test_sampler_and_trainer_use_the_same_context():
    made = learner()
    sampled = watch_sampler(made)
    rows = collect(made)
    assert sampled[0].segment_start is not None
    for row in rows:
        assert row["train/logprob_gap/max"] < 1e-4
        assert row["train/turns/rewritten"] > 0.2 and row["train/loss"] != 0
    kept = collect(learner(history="sampled"))
    assert "train/turns/rewritten" not in kept[0]


@pytest.mark.slow
def test_template_that_keeps_the_history_equals_the_sampled_history():
    """Weights and metrics are bitwise those of the sampled history."""
    one, other = learner("sampled", KEEPS), learner("template", KEEPS)
    expected, found = collect(one), collect(other)
    assert_same(one.params, other.params)
    for row, same in zip(found, expected, strict=True):
        assert row.pop("train/turns/rewritten") == 0 and row["train/turns/mean"] > 1.2
        for name in ("loss", "grad_norm", "entropy", "rewards/mean", "logprob_gap/mean", "completions/mean_length"):
            assert row[f"train/{name}"] == same[f"train/{name}"], name


@pytest.mark.slow
def test_resumed_run_is_bitwise_equal(tmp_path):
    whole = learner(max_steps=4)
    collect(whole)
    for steps in (2, 4):
        part = learner(max_steps=steps, output_dir=str(tmp_path), checkpoint_every_n_steps=1,
                       log_rollouts_every_n_steps=1)  # fmt: skip
        collect(part)
    assert_same(part.params, whole.params)
    with pytest.raises(UserError, match="history"):
        collect(learner("sampled", max_steps=5, output_dir=str(tmp_path)))
    rows = [json.loads(line) for line in (tmp_path / "rollouts" / "step_000001.jsonl").read_text().splitlines()]
    several = [row for row in rows if len(row["segments"]) > 1]
    assert several and all(row["segments"][0] == 0 and row["segments"][-1] < row["length"] for row in rows)
    for row in several:  # the last segment: the rest of the history, then the last turn
        said = [turn["content"] for turn in row["turns"]]
        assert row["completion"].startswith(said[0].split(">")[-1]) and row["completion"].endswith(
            said[-1] if row["turns"][-1]["role"] == "assistant" else said[-2]
        )


@pytest.mark.slow
def test_mesh_training_equals_one_device():
    one, many = learner(), learner(mesh=build_mesh(MeshConfig(shape=[8, 1])))
    expected, found = (collect(each, batch_size=8) for each in (one, many))
    assert [row["train/turns/rewritten"] for row in found] == [row["train/turns/rewritten"] for row in expected]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), one.params, many.params)


@pytest.mark.slow
def test_several_updates_a_reference_and_evaluation():
    """Log-probabilities of the trainer before the updates, and of the reference, are computed on the same segments."""
    algo = MaxRLConfig(num_generations=4, truncation_order=1, num_iterations=2, beta=0.1)
    made = learner(algo=algo, max_steps=1, eval_config=EvalConfig(samples=2, batch_size=3))
    (row,) = collect(made)
    assert row["train/kl"] == pytest.approx(0, abs=1e-6) or row["train/kl"] > 0
    found = made.evaluate(ROWS[:4])
    assert found.metrics["eval/turns/rewritten"] > 0 and len(found.texts) == 4


def test_invalid_settings_are_rejected_before_compilation():
    opens = "{{ 'a' if messages | length > 1 else 'b' }}" + KEEPS
    message = r"environment\.history=template: .* does not begin with the prompt.* environment\.history=sampled"
    with pytest.raises(UserError, match=message):
        collect(learner(template=opens))
    with pytest.raises(UserError, match=r"environment\.history=template: it needs a chat template"):
        collect(learner(), [{"prompt": "ab", "answer": "b"}] * 4)


@pytest.mark.slow
def test_engine_that_does_not_restart_rows_is_rejected():
    class Deaf:
        """A responder that does not restart rows."""

        def __init__(self, own):
            self.lockstep, self.opening, self.submit, self.own = own.lockstep, own.opening, own.submit, own

        def replies(self, wait):
            return [reply._replace(restart=False) for reply in self.own.replies(wait)]

    class Own:
        max_prompt_length, row_steps = 16, 0

        def place(self, params):
            return inner.place(params)

        def generate(self, params, requests, key, sampling, responder):
            yield from inner.generate(params, requests, key, sampling, Deaf(responder))

    inner = learner().engine
    with pytest.raises(UserError, match=r"engine Own: .* supports `Reply\.restart` and `Responder\.opening`"):
        collect(learner(engine=Own()))


@pytest.mark.slow
def test_a_trajectory_whose_prompt_changes_is_unscored():
    """The other trajectories continue."""
    sometimes = (
        "{% for m in messages %}{% if loop.first and messages[-1].content == 'dc' %}a{% endif %}"
        + (KEEPS.split("{% for m in messages %}")[1])
    )
    row = collect(learner(template=sometimes, max_steps=1), ROWS[:4])[0]
    assert 0 < row["train/reward/error_frac"] <= 0.25
