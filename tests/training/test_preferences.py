"""Tests learning from pairs: the losses against float64 formulas and autodiff of the plain forward pass, with packing,
several turns, adapters and a mesh; resumption, evaluations, and rows that are refused."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.nnx.traversals import flatten_mapping

import tunix_like
from tests.callbacks import OnRow
from tests.tiny_model import HF
from tunix_like import (
    DPOLearner,
    LoraConfig,
    OptimizerConfig,
    PreferenceConfig,
    RLTrainingConfig,
    RolloutConfig,
    UserError,
    add_scalar_head,
)
from tunix_like.algorithms.preferences import PairObjective, PairSums
from tunix_like.compile.costs import Counter
from tunix_like.config.schema import MeshConfig
from tunix_like.data import reverse_text
from tunix_like.data.source import with_prompt
from tunix_like.data.stream import render
from tunix_like.models.lora import add_lora
from tunix_like.models.sharding import build_mesh
from tunix_like.step import train_step
from tunix_like.step.forward import CHUNKS, SETS, ForwardOptions
from tunix_like.step.train_step import StepPrograms, StepSpec, TrainState, step_inputs
from tunix_like.storage.metrics import rows as metric_rows
from tunix_like.training.sft import _Likelihood
from tunix_like.types import GroupBatch

TOKENIZER = reverse_text.tokenizer()
ROWS = [
    {"prompt": f"{text}>", "chosen": text[::-1], "rejected": wrong}
    for text, wrong in zip(
        ["ab", "cde", "efgh", "gh", "bad", "dc", "feed", "hg"], ["a", "cdefa", "h", "abcd", "b", "dcdc", "e", "gggggg"],
        strict=True,
    )
]  # fmt: skip
ROLLOUT = RolloutConfig(max_prompt_length=8, max_tokens_to_generate=8)
LOSSES = {
    "sigmoid": PreferenceConfig(beta=0.3),
    "smoothed": PreferenceConfig(beta=0.3, label_smoothing=0.1),
    "free": PreferenceConfig(beta=0.3, reference_free=True),
    "ipo": PreferenceConfig(loss="ipo", beta=0.3),
    "orpo": PreferenceConfig(loss="orpo", beta=0.3),
}


def make_model(seed=0, **changed):
    return tunix_like.load_model(HF | changed, init="random", seed=seed)[0]


def params_of(model):
    return jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.split(model)[1]))


def make(preference=LOSSES["sigmoid"], *, model=None, learner=DPOLearner, **given):
    own = {name: given.pop(name) for name in ("ref_model", "mesh", "evaluate") if name in given}
    tokenizer, rollout = given.pop("tokenizer", TOKENIZER), given.pop("rollout", ROLLOUT)
    settings = {"max_steps": 2, "actor_optimizer": OptimizerConfig(learning_rate=1e-2)} | given
    made = learner(
        model=make_model() if model is None else model, tokenizer=tokenizer, preference_config=preference,
        rollout_config=rollout, training_config=RLTrainingConfig(**settings),
        **own,
    )  # fmt: skip
    return made


def collect(learner, rows=ROWS, held_out=None, **given):
    found = []
    watch = OnRow(lambda row: found.append(dict(row)))
    learner.train(rows, held_out, **{"batch_size": 4, "shuffle": False, "callbacks": [watch]} | given)
    return found


def log_sums(model, prompts, answers):
    """Returns sum and number of the log-probabilities of each answer's tokens (`[tokens, mask]`), from whole sequences
    of the plain forward pass."""
    out, counts = [], []
    for prompt, (answer, mask) in zip(prompts, answers, strict=True):
        tokens = jnp.array([[*prompt, *answer]])
        logprobs = jax.nn.log_softmax(model(tokens))[0]
        own = logprobs[jnp.arange(len(prompt) - 1, tokens.shape[1] - 1), jnp.array(answer)]
        out.append(jnp.where(jnp.array(mask), own, 0).sum())
        counts.append(sum(mask))
    return jnp.stack(out), np.array(counts, np.float32)


def plain_loss(config, chosen, rejected, ref):
    """The definitions of `algorithms/preferences.py`, without numerical care. `chosen` and `rejected` are sums of
    log-probabilities and numbers of tokens."""
    (c, nc), (r, nr) = chosen, rejected
    beta, smooth = config.beta, config.label_smoothing
    if config.loss == "orpo":
        odds = [m - jnp.log(1 - jnp.exp(m)) for m in (c / nc, r / nr)]
        return -c.sum() / nc.sum() + beta * jnp.log1p(jnp.exp(odds[1] - odds[0])).mean()
    c, r = c - ref[0], r - ref[1]
    if config.loss == "ipo":
        return ((c / nc - r / nr - 1 / (2 * beta)) ** 2).mean()
    margin = beta * (c - r)
    return ((1 - smooth) * jnp.log1p(jnp.exp(-margin)) + smooth * jnp.log1p(jnp.exp(margin))).mean()


def naive(learner, config, reference, rows=ROWS[:4]):
    """Returns `params -> loss`, with whole sequences of the plain forward pass, each prompt computed twice."""
    encoder = learner._answers
    prompts = [learner.tokenizer.encode_prompt(row["prompt"], False)[1] for row in rows]
    pairs = [[encoder.encode(row["prompt"], row[name], row) for row in rows] for name in ("chosen", "rejected")]
    ref = [jnp.zeros(len(rows)) if reference is None else log_sums(reference, prompts, each)[0] for each in pairs]

    def loss(params):
        model = nnx.merge(learner.graphdef, params)
        return plain_loss(config, *(log_sums(model, prompts, each) for each in pairs), ref)

    return loss


def gradient_of(learner, rows=ROWS[:4], **given):
    """Trains one step by gradient descent with rate 1 and returns the row of metrics, and old minus new weights."""
    before = params_of(learner.model)
    row = collect(learner, rows, **{"batch_size": len(rows)} | given)[-1]
    return row, before, jax.tree.map(lambda old, new: old - np.asarray(new), before, params_of(learner.model))


def distance(one, other):
    return optax.tree.norm(jax.tree.map(jnp.subtract, one, other)) / optax.tree.norm(other)


@pytest.mark.parametrize("name", LOSSES)
def test_formulas_in_float64(name):
    """The pair loss and its derivatives equal the definition in double precision, also far from 0."""
    config = LOSSES[name]
    objective = PairObjective(config.loss, config.beta, config.label_smoothing)
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 40, (2, 50)).astype(np.float64)
    logps, ref = (-rng.gamma(2.0, 1.0, (2, 50)) * lengths for _ in range(2))
    ref = ref * (not config.reference_free)

    def ours(logps):
        each = [PairSums(*(jnp.asarray(x[i], jnp.float32) for x in (logps, ref, lengths))) for i in (0, 1)]
        loss = objective.pairs(*each)[0].mean()
        return loss - (logps[0].sum() / lengths[0].sum() if config.loss == "orpo" else 0.0)

    value, slope = jax.value_and_grad(ours)(jnp.asarray(logps, jnp.float32))

    def exact(c, r):
        with jax.enable_x64(True):
            given = [(jnp.asarray(x), jnp.asarray(n)) for x, n in ((c, lengths[0]), (r, lengths[1]))]
            return float(plain_loss(config, *given, jnp.asarray(ref)))

    assert float(value) == pytest.approx(exact(*logps), rel=2e-6)
    for i, j in ((0, 3), (1, 7), (0, 11)):
        ends = []
        for sign in (1, -1):
            moved = logps.copy()
            moved[i, j] += sign * 1e-4
            ends.append(exact(*moved))
        assert float(slope[i, j]) == pytest.approx((ends[0] - ends[1]) / 2e-4, rel=1e-4, abs=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in ("smoothed", "free") else ()) for name in LOSSES]
)
def test_loss_metrics_and_gradient_equal_those_of_whole_sequences(name):
    """Pairs of different lengths in several chunks; the reference is another model."""
    config = LOSSES[name]
    free = config.loss == "orpo" or config.reference_free
    other = None if free else make_model(seed=1)
    learner = make(config, max_steps=1, ref_model=other, actor_optimizer=optax.sgd(1.0), train_micro_batch_size=3)
    row, before, got = gradient_of(learner)
    loss = naive(learner, config, other)
    value, expected = jax.value_and_grad(loss)(jax.tree.map(jnp.asarray, before))
    assert row["train/loss"] == pytest.approx(float(value), rel=1e-5)
    assert distance(got, expected) < 2e-5
    assert row["train/rewards/margins"] == pytest.approx(
        row["train/rewards/chosen"] - row["train/rewards/rejected"], abs=1e-6
    )
    assert 4 * row["train/rewards/accuracies"] == pytest.approx(round(4 * row["train/rewards/accuracies"]), abs=1e-6)
    assert row["train/logps/chosen"] < 0


@pytest.mark.slow
def test_first_loss_of_dpo_is_log_2_and_the_reference_is_the_initial_model():
    rows = collect(make(max_steps=8), held_out=ROWS)
    first, last = rows[1], rows[-1]
    assert first["train/loss"] == pytest.approx(math.log(2), rel=1e-6) and first["train/rewards/margins"] == 0
    assert rows[0]["eval/loss"] == pytest.approx(math.log(2), rel=1e-6)
    assert last["eval/loss"] < 0.6 and last["eval/rewards/accuracies"] == 1 and last["eval/rewards/margins"] > 0.2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sigmoid", "orpo"])
def test_evaluation_equals_the_loss_of_the_next_step(name):
    """In batches of which the last is padded."""
    rows = collect(make(LOSSES[name], max_steps=2), ROWS, ROWS[:5], batch_size=8)
    again = collect(make(LOSSES[name], max_steps=2), ROWS[:5], ROWS[:5], batch_size=5)
    for made in (rows, again):
        assert {key for key in made[0] if "/" in key} == {
            key.replace("train/", "eval/") for key in made[1] if "logps" in key or "rewards" in key or "odds" in key
        } | {"eval/loss"}
    for key in (key for key in again[0] if "/" in key):
        assert again[0][key] == pytest.approx(again[1][key.replace("eval/", "train/")], rel=1e-5, abs=1e-6), key
        assert rows[0][key] == pytest.approx(again[0][key], rel=1e-5, abs=1e-6)


SAID = [{"role": role, "content": text} for role, text in (("assistant", "ab"), ("user", "c>"), ("assistant", "de"))]


@pytest.mark.slow
def test_only_the_assistants_tokens_count_in_several_turns():
    rows = [
        {"prompt": "ab>", "chosen": SAID, "rejected": "abc"},
        {"prompt": "cd>", "chosen": "dc", "rejected": SAID[:1]},
    ]
    learner = make(LOSSES["ipo"], max_steps=1, actor_optimizer=optax.sgd(1.0), rollout=ROLLOUT)
    config = LOSSES["ipo"]
    row, before, got = gradient_of(learner, rows)
    mask = learner._answers.encode("ab>", SAID, {}).sampled
    assert sum(mask) < len(mask) <= 8
    loss = naive(learner, config, make_model(), rows)
    value, expected = jax.value_and_grad(loss)(jax.tree.map(jnp.asarray, before))
    assert row["train/loss"] == pytest.approx(float(value), rel=1e-5)
    assert distance(got, expected) < 2e-5


@pytest.mark.slow
def test_adapters_train_against_the_base_without_a_copy():
    model = add_lora(make_model(), LoraConfig(rank=2), 0)
    learner = make(model=model, max_steps=3)
    reference = jax.tree.leaves(learner.reference.params)
    frozen = jax.tree.leaves(learner.frozen)
    assert [id(leaf) for leaf in reference] == [id(leaf) for leaf in frozen]
    rows = collect(learner)
    assert rows[0]["train/loss"] == pytest.approx(math.log(2), rel=1e-6) and rows[-1]["train/loss"] < math.log(2)


@pytest.mark.slow
def test_mesh_of_8_devices_equals_one_device():
    wide = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 16}
    found = []
    for shape in (None, [2, 2, 2]):
        mesh = None if shape is None else build_mesh(MeshConfig(shape=shape, axis_names=["data", "fsdp", "tp"]))
        learner = make(model=make_model(**wide), mesh=mesh, max_steps=2, train_micro_batch_size=2)
        rows = collect(learner, held_out=ROWS[:3], batch_size=8)
        found.append(([row.get("train/loss", row.get("eval/loss")) for row in rows], params_of(learner.model)))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-5)
    assert distance(found[1][1], found[0][1]) < 1e-4


@pytest.mark.slow
def test_a_pair_costs_less_than_065_of_two_sequences():
    """Matrix operations of the compiled step and of the reference's log-probabilities: prompts of 512 tokens, and
    completions of 64."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "max_position_embeddings": 1024}
    model = make_model(**sizes)
    lengths = RolloutConfig(max_prompt_length=512, max_tokens_to_generate=64)
    learner = make(model=model, rollout=lengths, actor_optimizer=optax.sgd(1.0))
    text = "abcdefgh" * 100
    rows = [{"prompt": text[:510], "chosen": text[:63], "rejected": text[1:64]}] * 4
    learner._prepare([*rows, *rows], None, 4, False, "error")
    pairs = learner._batch([render(row, TOKENIZER) for row in rows])
    assert pairs.prompt_tokens.shape == (4, 512) and (pairs.completion_lengths == 64).all()

    def split(x):  # [P, 2, ...] -> [2 P, 1, ...]
        return None if x is None else x.reshape(-1, 1, *x.shape[2:])

    twice = {name: np.repeat(getattr(pairs, name), 2, axis=0) for name in ("prompt_tokens", "prompt_lengths")}
    single = GroupBatch(**{name: split(x) for name, x in pairs._asdict().items()} | twice)

    def operations(objective, batch, packed):
        spec = StepSpec(learner.graphdef, objective, optax.sgd(1.0), ForwardOptions(1.0, 1024, False))
        programs = StepPrograms(spec)
        reference = programs.logprobs.lower(learner.graphdef, learner.params, batch, packed)
        ref = np.zeros(batch.completion_tokens.shape, np.float32)
        inputs = step_inputs(batch, np.ones(len(batch.scored), bool), packed, ref_logprobs=ref)
        state = TrainState(learner.params, optax.sgd(1.0).init(learner.params))
        trips = {SETS: float(packed.sets), CHUNKS: float(packed.chunks.sum() / packed.sets)}
        total = 0.0
        for lowered in (reference, programs.train_step.lower(state, inputs, {})):
            counter = Counter(lowered.compile().as_text(), trips)
            total += counter.total().operations
            assert not counter.unknown
        return total

    pair = operations(learner.objective, pairs, learner._placed(pairs)[1])
    packed = learner.planner.pack(single, single.scored, 8)
    separate = operations(_Likelihood(), single, packed)
    tokens = 4 * 2 * (512 + 64)
    weights = sum(leaf.size for path, leaf in flatten_mapping(learner.params).items() if path[-1] == "kernel")
    assert separate > 8 * tokens * weights, "forward and backward pass, and that of the reference, are all counted"
    assert pair < 0.65 * separate


@pytest.mark.slow
def test_resumed_run_equals_the_uninterrupted_run(tmp_path):
    def trained(folder, steps):
        learner = make(max_steps=steps, output_dir=str(tmp_path / folder), checkpoint_every_n_steps=1)
        collect(learner, shuffle=True, held_out=ROWS[:2])
        return params_of(learner.model), [row.get("train/loss") for row in metric_rows(tmp_path / folder)]

    whole, losses = trained("whole", 5)
    trained("parts", 2)
    parts, again = trained("parts", 5)
    jax.tree.map(np.testing.assert_array_equal, parts, whole)
    assert [loss for loss in again if loss] == [loss for loss in losses if loss]
    with pytest.raises(UserError, match=r"(?s)another run.*preference.beta: 0.3 -> 0.5"):
        collect(make(PreferenceConfig(beta=0.5), max_steps=5, output_dir=str(tmp_path / "parts")), shuffle=True)
    for changes, key in (
        ({"actor_optimizer": OptimizerConfig(learning_rate=0.5)}, "optimizer.learning_rate"),
        ({"ref_model": make_model(seed=8)}, "ref_model"),
    ):
        with pytest.raises(UserError, match=f"(?s)another run.*{key}"):
            collect(make(max_steps=5, output_dir=str(tmp_path / "parts"), **changes), shuffle=True)


def test_second_call_without_a_folder_and_one_epoch():
    two, whole = make(max_steps=1), make(max_steps=None)
    for _ in range(2):
        collect(two)
    rows = collect(whole)
    assert [row["step"] for row in rows] == [1, 2]
    jax.tree.map(np.testing.assert_array_equal, params_of(two.model), params_of(whole.model))


def test_implicit_prompts():
    user, first = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
    good, bad = ({"role": "assistant", "content": text} for text in ("yes", "no"))
    row = with_prompt({"chosen": [user, first, user, good], "rejected": [user, first, user, bad], "other": 1})
    assert row == {"prompt": [user, first, user], "chosen": [good], "rejected": [bad], "other": 1}
    tail = [user, good]
    longer = with_prompt({"chosen": [user, first, *tail], "rejected": [user, first]})
    assert longer == {"prompt": [user], "chosen": [first, *tail], "rejected": [first]}
    with pytest.raises(UserError, match="must begin with the same messages"):
        with_prompt({"chosen": [user, good], "rejected": [good]})


GOOD = ROWS[0]
BAD = {
    "no 'rejected', but prompt, chosen": [{"prompt": "a>", "chosen": "a"}],
    "'rejected' column; training row 1 .* has None": [GOOD, {"prompt": "a>", "chosen": "a"}],
    "'chosen' column; training row 1 .* has ''": [GOOD, GOOD | {"chosen": ""}],
    "'chosen' column; training row 1 .* has 7": [GOOD, GOOD | {"chosen": 7}],
    r"row 1 \(counted from 0\): chosen and rejected are equal": [GOOD, GOOD | {"rejected": GOOD["chosen"]}],
    r"row 1 \(counted from 0\): column 'chosen': .*begin and end with a message of the assistant": [
        GOOD, GOOD | {"chosen": SAID[:2]},
    ],
    r"row 0 \(counted from 0\): column 'chosen' must be a list of messages": [{"chosen": "a", "rejected": "b"}],
    "training data is empty": [],
}  # fmt: skip


@pytest.mark.parametrize("message", BAD)
def test_bad_rows_are_named_before_a_compile(message, monkeypatch):
    monkeypatch.setattr(train_step, "train_step", None)
    with pytest.raises(UserError, match=message):
        collect(make(), BAD[message])
    if "training row" in message:
        with pytest.raises(UserError, match=message.replace("training", "evaluation")):
            collect(make(), ROWS, BAD[message])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"preference": PreferenceConfig(loss="ipo", label_smoothing=0.1)}, "preference.label_smoothing: .*'ipo'"),
        ({"preference": PreferenceConfig(loss="orpo", reference_free=True)}, "preference.reference_free"),
        ({"preference": PreferenceConfig(center_rewards=0.1)}, "preference.center_rewards"),
        ({"mini_batch_size": 2}, "training.mini_batch_size"),
        ({"preference": LOSSES["orpo"], "ref_model": make_model()}, "ref_model: the loss 'orpo' needs no reference"),
        ({"ref_model": add_scalar_head(make_model())}, "ref_model: it is a reward model"),
    ],
)  # fmt: skip
def test_settings_without_effect_are_refused(given, message):
    with pytest.raises(UserError, match=message):
        make(**given)
