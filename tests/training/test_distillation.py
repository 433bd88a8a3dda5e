"""Tests learners with a teacher: its term of the loss, its prompts, and runs of every kind."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tokenizers
from flax import nnx

import tunix_like
from tests.parameters import others_slow
from tests.tiny_model import HF
from tunix_like import (
    DistillationConfig,
    DistillationLearner,
    LoraConfig,
    MaxRLConfig,
    MaxRLLearner,
    OptimizerConfig,
    TeacherConfig,
    UserError,
    add_lora,
)
from tunix_like.cli import main as cli
from tunix_like.compile.programs import make_plan, programs_of
from tunix_like.config.load import load
from tunix_like.config.schema import MeshConfig
from tunix_like.data import reverse_text
from tunix_like.models.sharding import build_mesh
from tunix_like.step.train_step import StepSpec, TeacherInputs, TeacherSpec, TrainState, train_step
from tunix_like.storage.metrics import rows as metric_rows
from tunix_like.text.tokenizer import Tokenizer
from tunix_like.training.companions import make_reference
from tunix_like.training.teacher import check_tokenizers, taught_prompt
from tunix_like.types import GroupBatch, Problem

from .repeated_prompts import (
    BATCH,
    EVERYONE,
    GRAPHDEF,
    LAYOUTS,
    LENGTHS,
    MASK,
    PARAMS,
    PLAIN,
    PROMPTS,
    SIZE,
    STEPS,
    VOCABULARY,
    data_of,
    difference,
    keep_gradient,
    make_objective,
    row_values,
)
from .repeated_prompts import (
    make_model as make_decoder,
)
from .small_learner import (
    ROWS,
    TOKENIZER,
    assert_same,
    collect,
    differ,
    long_or_short,
    make,
    make_model,
    params_of,
    watch_sampler,
)
from .test_environments import LENGTHS as TURN_LENGTHS
from .test_environments import TURNS, Vowels

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

# --- the step ---------------------------------------------------------------------------------------------------------

TEACHER = make_decoder(5, hidden_size=24, num_layers=1, num_heads=3, num_kv_heads=1, vocab_size=VOCABULARY + 3)
"""Another width, depth and number of heads, and a vocabulary with padding."""
LONGER = np.array([4, 8, 2], np.int32)
TAUGHT = np.random.default_rng(7).integers(0, VOCABULARY, (PROMPTS, 9)).astype(np.int32)
"""The prompts that the teacher sees, with these lengths."""
SETTINGS = TeacherConfig(path="x", divergence="jsd", beta=0.3, coef=1.7)


def next_tokens(graphdef, params, prompts, prompt_lengths):
    """Returns the distributions `[P G T V]` of the plain model for each token, after its own copy of the prompt."""
    width = prompts.shape[1] + STEPS
    rows, real = np.zeros((2, PROMPTS * SIZE, width), np.int32)
    place = np.zeros((PROMPTS * SIZE, STEPS), np.int32)
    for row, (p, i) in enumerate(np.ndindex(PROMPTS, SIZE)):
        length = int(prompt_lengths[p])
        tokens = [*prompts[p, :length], *BATCH.completion_tokens[p, i, : LENGTHS[p, i]]]
        rows[row, : len(tokens)], real[row, : len(tokens)] = tokens, 1
        place[row] = np.minimum(length + np.arange(STEPS), width - 1)
    logits = nnx.merge(graphdef, params)(jnp.asarray(rows), jnp.asarray(real))[..., :VOCABULARY]
    every = np.arange(len(rows))[:, None]
    return jax.nn.softmax(logits, axis=-1)[every, place - 1].reshape(PROMPTS, SIZE, STEPS, VOCABULARY)


def step_gradient(layout, objective, teacher=TEACHER[1], spec=None, **options):
    spec = StepSpec(GRAPHDEF, objective, keep_gradient, PLAIN._replace(logits_chunk=7, **options), teacher=spec)
    data = data_of(layout)._replace(teacher=TeacherInputs(teacher, TAUGHT, LONGER))
    state, metrics, _ = jax.jit(lambda state, data: train_step(spec, state, data))(TrainState(PARAMS, PARAMS), data)
    return state.opt_state, metrics


@pytest.mark.slow
@pytest.mark.parametrize("layout", others_slow([LAYOUTS[2], LAYOUTS[6]], LAYOUTS[2]))
def test_divergence_in_the_loss_equals_that_of_repeated_prompts(layout):
    """The second layout also has stacked layers that are recomputed, as on accelerators."""
    objective, other = make_objective(teacher=SETTINGS), layout == LAYOUTS[6]
    spec = TeacherSpec(TEACHER[0], 0.3)
    found, metrics = step_gradient(layout, objective, spec=spec, stacked=other, remat=other)
    q = next_tokens(*TEACHER, TAUGHT, LONGER)

    def divergences(params):
        p = next_tokens(GRAPHDEF, params, BATCH.prompt_tokens, BATCH.prompt_lengths)
        m = 0.3 * q + 0.7 * p
        return (0.3 * q * jnp.log(q / m) + 0.7 * p * jnp.log(p / m)).sum(-1)

    def loss(params):
        advantages, weights = (values[..., None] for values in row_values(objective, EVERYONE))
        p = next_tokens(GRAPHDEF, params, BATCH.prompt_tokens, BATCH.prompt_lengths)
        own = jnp.take_along_axis(jnp.log(p), jnp.asarray(BATCH.completion_tokens)[..., None], axis=-1)[..., 0]
        return (weights * MASK * (-advantages * own + 1.7 * divergences(params))).sum()

    value, expected = jax.jit(jax.value_and_grad(loss))(PARAMS)
    assert difference(found, expected) < 1e-5 and metrics["loss"] == pytest.approx(float(value), rel=1e-5)
    # Unscored completions have no weight, but are counted in the metrics.
    assert metrics["teacher/divergence"] == pytest.approx(float(divergences(PARAMS)[MASK].mean()), rel=1e-5)
    known = jnp.take_along_axis(jnp.log(q), jnp.asarray(BATCH.completion_tokens)[..., None], axis=-1)[..., 0]
    assert metrics["teacher/logprob"] == pytest.approx(float(known[MASK].mean()), rel=1e-5)


@pytest.mark.slow
def test_the_policy_as_its_own_teacher_has_no_gradient_by_the_teachers_side():
    """With the current weights, the gradient is the same as with a copy of the weights."""
    objective, spec = make_objective(teacher=SETTINGS), TeacherSpec(GRAPHDEF, 0.3)
    (one, _), (other, _) = (step_gradient(LAYOUTS[2], objective, teacher, spec) for teacher in (None, PARAMS))
    assert difference(one, other) < 1e-6


# --- prompts ----------------------------------------------------------------------------------------------------------


def test_prompts_of_a_teacher():
    row = {"hint": "<b>", "none": None, "n": 3}
    assert taught_prompt("{prompt} {hint}/{n:02}", "ask {hint}", row, "row 0") == "ask {hint} <b>/03"
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    assert taught_prompt("{hint}{prompt}", chat, row, "row 0") == [chat[0], {"role": "user", "content": "<b>u"}]
    data = taught_prompt("<b>{prompt}{hint}", "<b>", row, "row 0")
    assert data == "<b><b><b>" and data.values == [(6, 9)], "only the column is data"
    with pytest.raises(UserError, match=r"teacher.prompt '\{none\}': row 4: KeyError: 'none'; .* columns hint, n, and"):
        taught_prompt("{none}", "", row, "row 4")
    with pytest.raises(UserError, match="row 1 has no message of the user"):
        taught_prompt("{prompt}", chat[:1], row, "row 1")


# --- learners ---------------------------------------------------------------------------------------------------------

DIVERGENCES = {"reverse_kl": {}, "jsd": {"divergence": "jsd"}}
KINDS = [f"{kind}, {divergence}" for kind in ("a model", "self") for divergence in DIVERGENCES]
SEES_ANSWER = {"path": "self", "prompt": "{prompt}{answer}", "max_prompt_length": 14}


def distilled(divergence="reverse_kl", *, teacher=None, settings=None, **arguments):
    """Returns a learner without rewards."""
    given = DIVERGENCES[divergence] | ({} if settings is None else settings)
    teacher = make_model(3) if settings is None and teacher is None else teacher
    algo = arguments.pop("algo", DistillationConfig(num_generations=4))
    return make(
        algo, **{"learner": DistillationLearner, "reward": (), "teacher": teacher} | arguments,
        teacher_config=TeacherConfig(**given),
    )  # fmt: skip


def exact(model, teacher, out, divergence, prompts=None):
    """Returns the mean divergence over the sampled tokens, from the whole distributions of the plain models, and the
    mean log-probability by the teacher. For `reverse_kl` the divergence is estimated by the sampled tokens."""
    sums = np.zeros(3)
    for p, i in np.ndindex(*out.lengths.shape):
        n = out.lengths[p, i]
        tokens = out.tokens[p, i, :n]
        both = []
        for each, prompt in ((model, prompts[p][0]), (teacher, prompts[p][1])):
            logits = each(jnp.asarray([*prompt, *tokens])[None])[0, len(prompt) - 1 : -1]
            both.append(np.asarray(jax.nn.log_softmax(logits), np.float64))
        ours, theirs = both
        mask = np.ones(n, bool) if out.token_mask is None else out.token_mask[p, i, :n]
        own, known = (x[np.arange(n), tokens] for x in both)
        m = np.log((np.exp(ours) + np.exp(theirs)) / 2)
        jsd = (np.exp(theirs) * (theirs - m) + np.exp(ours) * (ours - m)).sum(-1) / 2
        value = jsd if divergence == "jsd" else own - known
        sums += value[mask].sum(), known[mask].sum(), mask.sum()
    return sums[:2] / sums[2]


@pytest.mark.slow
@pytest.mark.parametrize("case", others_slow(KINDS, "a model, jsd", "self, reverse_kl"))
def test_metrics_are_those_of_the_plain_models(case):
    """The policy alone and its teacher see the same completions after their own prompts."""
    kind, divergence = case.split(", ")
    settings = {"a model": None, "self": SEES_ANSWER}[kind]
    made = distilled(divergence, settings=settings, max_steps=1)
    model = make_model()
    teacher = make_model(3) if kind == "a model" else model
    sampled = watch_sampler(made)
    row = collect(made, shuffle=False)[0]
    prompts = [
        [TOKENIZER.encode_prompt(row["prompt"] + end, False)[1] for end in ("", row["answer"] * (kind == "self"))]
        for row in ROWS[:4]
    ]
    expected = exact(model, teacher, sampled[0], divergence, prompts)
    assert abs(expected[0]) > 1e-3
    found = row["train/teacher/divergence"], row["train/teacher/logprob"]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)
    assert row["train/loss"] == pytest.approx(expected[0], rel=1e-4, abs=1e-6), "token-mean, ratio 1"
    assert differ(params_of(model), made.params)


@pytest.mark.slow
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_learns_the_teacher_without_rewards(divergence):
    made = distilled(divergence, max_steps=40, actor_optimizer=OptimizerConfig(learning_rate=0.03))
    rows = collect(made, ROWS, ROWS[:2])
    assert not any(name.startswith("eval/") for row in rows for name in row), "nothing to evaluate by"
    first, last = (np.mean([row["train/teacher/divergence"] for row in part]) for part in (rows[:5], rows[-5:]))
    assert last < 0.6 * first
    assert "rewards none" in repr(made)


@pytest.mark.slow
@pytest.mark.parametrize("divergence", others_slow(DIVERGENCES, "reverse_kl"))
def test_an_equal_teacher_changes_nothing(divergence):
    for settings, teacher in (({"path": "self", "prompt": "{prompt}"}, None), (None, make_model())):
        made = distilled(divergence, settings=settings, teacher=teacher, actor_optimizer=optax.sgd(1.0), max_steps=1)
        row = collect(made)[0]
        assert abs(row["train/teacher/divergence"]) < 1e-6 and row["train/grad_norm"] < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("divergence", others_slow(DIVERGENCES, "reverse_kl"))
def test_a_teacher_adds_its_gradient_to_that_of_the_rewards(divergence):
    """One step of SGD of both is the sum of the steps of each."""
    settings = DIVERGENCES[divergence] | {"coef": 0.3}
    algo = MaxRLConfig(num_generations=4)
    both = {"teacher": make_model(3), "teacher_config": TeacherConfig(**settings)}
    alone = both | {"learner": DistillationLearner, "algo": DistillationConfig(num_generations=4)}
    start, ends = params_of(make_model()), []
    for arguments in ({"algo": algo} | both, {"algo": algo}, alone):
        made = make(**{"learner": MaxRLLearner, "reward": long_or_short, "max_steps": 1} | arguments)
        collect(made)
        ends.append(jax.tree.map(np.subtract, params_of_learner(made), start))
    together, by_rewards, by_teacher = ends
    assert min(float(optax.tree.norm(each)) for each in ends) > 1e-3
    # The learner of rewards alone leaves out groups of equal rewards, but counts their tokens.
    assert difference(together, jax.tree.map(np.add, by_rewards, by_teacher)) < 1e-5


def params_of_learner(made):
    return jax.tree.map(np.asarray, made.params)


@pytest.mark.slow
def test_unscored_completions_are_distilled_without_an_estimator():
    nothing = lambda prompts, completions, **columns: [None] * len(completions)  # noqa: E731
    rows = collect(distilled(reward=nothing))
    assert len(rows) == 2 and rows[0]["train/grad_norm"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_several_turns(divergence):
    """Only sampled tokens count, not those of the environment."""
    made = distilled(divergence, rollout=TURN_LENGTHS, environment=Vowels, environment_config=TURNS, max_steps=1)
    sampled = watch_sampler(made)
    row = collect(made, shuffle=False)[0]
    out = sampled[0]
    assert not out.token_mask.all()
    prompts = [[TOKENIZER.encode_prompt(row["prompt"], False)[1]] * 2 for row in ROWS[:4]]
    expected = exact(make_model(), make_model(3), out, divergence, prompts)
    found = row["train/teacher/divergence"], row["train/teacher/logprob"]
    np.testing.assert_allclose(found, expected, rtol=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("divergence", others_slow(DIVERGENCES, "jsd"))
def test_mesh_equals_a_single_device(divergence):
    """The teacher is sharded like the policy. Its vocabulary is padded to another size."""
    wide = HF | {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 16}
    teacher = {**wide, "hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 24}
    ends, losses = [], []
    for mesh in (None, build_mesh(MeshConfig(shape=[2, 2, 2], axis_names=["data", "fsdp", "tp"]))):
        made = distilled(
            divergence, mesh=mesh, model=tunix_like.load_model(wide, init="random", mesh=mesh)[0],
            teacher=tunix_like.load_model(teacher, init="random", seed=3, mesh=mesh)[0], max_steps=2,
            settings={"prompt": "{prompt}{answer}", "max_prompt_length": 14},
        )  # fmt: skip
        losses.append([row["train/loss"] for row in collect(made)])
        ends.append(jax.tree.map(np.asarray, made.params))
    np.testing.assert_allclose(*losses, rtol=1e-4)
    start = params_of(tunix_like.load_model(wide, init="random")[0])
    moved = [jax.tree.map(np.subtract, end, start) for end in ends]
    assert difference(*moved) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("divergence", others_slow(DIVERGENCES, "jsd"))
def test_adapters_learn_from_their_base_with_another_prompt(divergence):
    """New adapters have the weights of the base: the current and the initial weights are equal in the first step and
    differ in the second."""
    rows = {}
    for weights in ("current", "initial"):
        model = add_lora(make_model(), LoraConfig(rank=4))
        made = distilled(divergence, model=model, settings=SEES_ANSWER | {"weights": weights}, max_steps=2)
        frozen = jax.tree.map(np.asarray, made.frozen)
        rows[weights] = [row["train/teacher/divergence"] for row in collect(made)]
        assert_same(frozen, jax.tree.map(np.asarray, made.frozen))
        assert (made.teachers.default.params is None) == (weights == "current")
    assert rows["current"][0] == pytest.approx(rows["initial"][0], rel=1e-5)
    assert rows["current"][1] != pytest.approx(rows["initial"][1], rel=1e-4)


def test_rows_that_are_skipped_are_not_checked():
    made = distilled(settings=SEES_ANSWER)
    rows = [*ROWS, reverse_text.record("abcdefghijklmnop")]
    made.teachers.check_rows(rows, 8, made._objective(1))
    with pytest.raises(UserError, match="training row 8: it has 34 tokens"):
        made.teachers.check_rows(rows, 64, made._objective(1))


def test_a_prompt_that_an_environment_changes_is_refused():
    """The teacher's own prompt would lack the first observation."""
    made = distilled(settings=SEES_ANSWER, rollout=TURN_LENGTHS, environment=Vowels, environment_config=TURNS)
    problem = Problem(0, "ab>", TOKENIZER.encode_prompt("ab>", False)[1], {"answer": "ba"}, "ab>")
    batch = GroupBatch(*[np.zeros((1, 1), np.int32)] * len(GroupBatch._fields))
    everyone = np.ones(1, bool)
    assert made.teachers.default.batch(batch, [problem], everyone).prompt_lengths == 6
    opened = dataclasses.replace(problem, text="ab>a", tokens=TOKENIZER.encode_prompt("ab>a", False)[1])
    with pytest.raises(UserError, match="teacher.prompt: prompt 'ab>a': the environment has changed it"):
        made.teachers.default.batch(batch, [opened], everyone)


@pytest.mark.slow
def test_several_updates_use_the_same_advantages():
    """Two updates of half of the prompts each, with the log-probabilities before the first."""
    rows = collect(distilled(mini_batch_size=2, max_steps=1))
    whole = collect(distilled(max_steps=1))
    for name in ("train/teacher/divergence", "train/teacher/logprob"):
        assert rows[0][name] == pytest.approx(whole[0][name], rel=1e-5)
    assert rows[0]["train/is_ratio/max"] > 1.0001 > whole[0]["train/is_ratio/max"]
    assert np.isfinite(collect(distilled("jsd", mini_batch_size=2, max_steps=1))[0]["train/loss"])


def test_a_teacher_may_be_the_trained_model_itself():
    """Its weights are copied, because updates delete those of the policy."""
    model = make_model()
    made = distilled(model=model, teacher=model)
    assert make_reference(made, None).params is not made.params
    assert [row["step"] for row in collect(made)] == [1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["a model, reverse_kl", "a model, jsd", "self, jsd", "initial, reverse_kl"])
def test_resumes_bitwise(kind, tmp_path):
    name, divergence = kind.split(", ")
    settings = {"a model": None, "self": SEES_ANSWER, "initial": SEES_ANSWER | {"weights": "initial"}}[name]

    def train(folder, **changes):
        made = distilled(
            divergence, settings=settings, max_steps=4, output_dir=str(folder), checkpoint_every_n_steps=1,
            max_checkpoints_to_keep=4, actor_optimizer=OptimizerConfig(learning_rate=1e-2), **changes,
        )  # fmt: skip
        collect(made)
        rows = [{k: v for k, v in row.items() if "teacher" in k or "loss" in k} for row in metric_rows(folder)]
        return rows, jax.tree.map(np.asarray, made.params)

    rows, whole = train(tmp_path / "whole")
    assert len({row["train/teacher/divergence"] for row in rows}) == 4
    shutil.copytree(tmp_path / "whole", tmp_path / "part")
    for step in (3, 4):
        shutil.rmtree(tmp_path / "part" / "checkpoints" / str(step))
    again, end = train(tmp_path / "part")
    assert again == rows
    assert_same(end, whole)
    if settings is None:
        shutil.rmtree(tmp_path / "part" / "checkpoints" / "4")
        with pytest.raises(UserError, match="Different settings.*\n.*teacher.model"):
            train(tmp_path / "part", teacher=make_model(4))


# --- mistakes ---------------------------------------------------------------------------------------------------------

WRONG = {
    "no teacher": (
        dict(settings={}),
        "teacher.path: the estimator 'distillation' has no rewards, so it needs a teacher",
    ),
    "no model": (dict(settings={"path": "folder"}), "teacher: give the model of 'folder' itself"),
    "a model of self": (dict(teacher=True, settings=SEES_ANSWER), "teacher: teacher_config.path='self' takes no model"),
    "no settings": (dict(settings={"coef": 2.0}), "teacher.coef: it needs teacher.path"),
    "no prompt": (
        dict(settings={"path": "self"}),
        "teacher.prompt: teacher.path=self needs what the teacher sees more",
    ),
    "self quantized": (dict(settings=SEES_ANSWER | {"quantize": "int8"}), "teacher.quantize: teacher.path=self"),
    "weights": (dict(settings={"path": "x", "weights": "initial"}), "teacher.weights: only teacher.path=self reads it"),
    "beta": (dict(settings={"path": "x", "beta": 0.5}), "teacher.beta: only teacher.divergence=jsd reads it"),
    "range": (dict(settings={"divergence": "jsd", "beta": 1.5}), "teacher.beta: got 1.5; it must be at most 1"),
    "long": (
        dict(settings=SEES_ANSWER | {"max_prompt_length": 61}),
        "teacher.max_prompt_length .* is 65, .* 64 positions",
    ),
    "longer rows": (
        dict(settings=SEES_ANSWER | {"max_prompt_length": 5}),
        "teacher.prompt: training row 0: it has . tokens; the limit is 5. Raise teacher.max_prompt_length",
    ),
    "column": (
        dict(settings=SEES_ANSWER | {"prompt": "{hint}"}),
        "teacher.prompt '{hint}': training row 0: KeyError: 'hint'; the row has the columns answer, text, and {prompt}",
    ),
    "vocabulary": (
        dict(teacher="small"),
        "teacher.path: it has a vocabulary of 11 tokens .vocab_size., and the",
    ),
    "reward model": (dict(teacher="reward model"), "teacher.path: it is a reward model"),
    "not quantised": (
        dict(teacher=True, settings={"path": "x", "quantize": "int8"}),
        "teacher.quantize: the model has",
    ),
    "dynamic sampling": (
        dict(algo=DistillationConfig(num_generations=4, dynamic_sampling=True)),
        "algorithm.dynamic_sampling: the estimator 'distillation' does not read rewards",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_mistakes_are_rejected_before_any_compilation(name):
    arguments, message = WRONG[name]
    teachers = {"small": lambda: tunix_like.load_model(HF | {"vocab_size": 11}, init="random")[0], True: make_model}
    teachers["reward model"] = lambda: tunix_like.add_scalar_head(make_model())
    if arguments.get("teacher"):
        arguments = arguments | {"teacher": teachers[arguments["teacher"]]()}
    with pytest.raises(UserError, match=message):
        made = distilled(**arguments)
        made.step = None  # no step runs
        made.train(ROWS, batch_size=4)


def test_tokenizers_must_agree():
    ours = reverse_text.tokenizer()
    check_tokenizers(None, ours, "teacher.path")
    check_tokenizers(reverse_text.tokenizer(), ours, "teacher.path")
    backend = ours._backend.to_str().replace('"a":', '"Z":')

    with pytest.raises(
        UserError, match="teacher.path: its tokenizer is not that of the policy: token .* 'Z' there and 'a'"
    ):
        other = Tokenizer(tokenizers.Tokenizer.from_str(backend), eos_token=ours.token(ours.eos_id))
        check_tokenizers(other, ours, "teacher.path")


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_command_trains_with_a_folder_and_resumes(tmp_path, monkeypatch, capsys):
    """SFT makes the teacher. The policy, of another size, learns from rows without an answer, so without rewards, and
    then beside rewards of the teacher's own task."""
    monkeypatch.chdir(tmp_path)
    yaml = str(EXAMPLES / "debug" / "reverse_text.yaml")
    few = ["sft.max_steps=3", "data.batch_size=8", "eval.max_problems=8", "eval.samples=2", "eval.k=[1]"]
    assert cli.main(["sft", yaml, *few, "training.output_dir=run"]) == 0
    assert cli.main(["export", "run", "teacher"]) == 0
    capsys.readouterr()
    (tmp_path / "rows.jsonl").write_text('{"prompt": "ab"}\n{"prompt": "cd"}\n' * 4)
    taught = ["train", yaml, *few[1:], "sft.max_steps=0", "model.config.hidden_size=16",
              "model.config.num_hidden_layers=1", "teacher.path=teacher", "teacher.quantize=int8",
              "teacher.divergence=jsd"]  # fmt: skip
    alone = [*taught, "algorithm.advantage_estimator=distillation", "data.name=jsonl", "data.path=rows.jsonl",
             "model.tokenizer=teacher", "training.output_dir=alone"]  # fmt: skip
    for steps in (2, 3):
        assert cli.main([*alone, f"training.max_steps={steps}"]) == 0
        said = capsys.readouterr().out
        assert "teacher: teacher in int8, jsd (beta 0.5), coef 1" in said and "rewards:" not in said
    rows = [row for row in metric_rows(tmp_path / "alone") if "train/loss" in row]
    assert [row["step"] for row in rows] == [1, 2, 3] and all(row["train/teacher/divergence"] > 0 for row in rows)
    assert cli.main([*taught, "training.output_dir=beside", "training.max_steps=1"]) == 0
    row = [row for row in metric_rows(tmp_path / "beside") if "train/loss" in row][-1]
    assert row["train/teacher/divergence"] > 0 and "eval/pass@1" in row
    assert cli.main([*alone, "training.max_steps=4", "teacher.coef=2.0"]) == 2
    assert "teacher.coef: 1.0 -> 2.0" in capsys.readouterr().err
    assert (
        cli.main(["eval", "alone", "data.name=reverse_text", "data.path=null", "model.tokenizer=null", *few[2:]]) == 0
    )
    (tmp_path / "rows").mkdir()
    for name in ("train", "test"):
        shutil.copy(tmp_path / "rows.jsonl", tmp_path / "rows" / f"{name}.jsonl")
    assert cli.main(["eval", "alone", "data.path=rows"]) == 2
    assert "rewards.functions: this run (distillation) had no rewards" in capsys.readouterr().err


@pytest.mark.slow
def test_programs_for_absent_devices():
    """The programs of a run with a teacher are traced from shapes."""
    yaml = str(EXAMPLES / "debug" / "reverse_text.yaml")
    teacher = {"teacher.path=self", "teacher.prompt={prompt}{answer}", "teacher.max_prompt_length=24"}
    for divergence, names in (("jsd", ["update"]), ("reverse_kl", ["update", "logprobs", "teacher"])):
        config = load(yaml, [*teacher, f"teacher.divergence={divergence}", "teacher.weights=initial"])
        made = {each.name: each for each in programs_of(make_plan(config, None))}
        assert list(made)[: len(names)] == names
        for name in names:
            made[name].lower()
