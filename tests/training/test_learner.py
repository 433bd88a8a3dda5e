"""The learner from the door a Python user comes in by: data of every kind, nine algorithms, KL, several updates,
estimators of one's own and mixed ones, mistakes, resuming."""

import dataclasses
import functools
import json
import threading
from collections import OrderedDict
from pathlib import Path

import grain.python as grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import tunix_like
from tests.tiny_model import HF, letters_backend
from tunix_like import (
    LEARNERS,
    AlgorithmConfig,
    CustomConfig,
    CustomLearner,
    DrGRPOConfig,
    EvalConfig,
    GRPOConfig,
    GRPOLearner,
    MaxPOConfig,
    MaxRLConfig,
    MaxRLLearner,
    OptimizerConfig,
    RLOOConfig,
    RLOOLearner,
    RLTrainingConfig,
    RolloutConfig,
    Tokenizer,
    UserError,
    register_advantage_estimator,
)
from tunix_like.algorithms.objective import resolve
from tunix_like.algorithms.registry import ADVANTAGE_ESTIMATORS
from tunix_like.data import reverse_text, stream
from tunix_like.storage.metrics import rows as metric_rows
from tunix_like.training import learners
from tunix_like.training.train_step import jit_train_step

TEXTS = ["ab", "cd", "ef", "gh", "ba", "dc", "fe", "hg"]
ROWS = [reverse_text.record(text) for text in TEXTS]
TOKENIZER = reverse_text.tokenizer()
SGD = optax.sgd(0.5)
OWN = ("tokenizer", "engine", "mesh", "metric_fns", "eval_config", "ref_model", "on_row", "reward_weights",
       "source_estimators", "success_threshold")  # fmt: skip


def make_model(seed=0):
    return tunix_like.load_model(HF, init="random", seed=seed)[0]


def params_of(model):
    return jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.split(model)[1]))


def assert_same(one, two):
    jax.tree.map(np.testing.assert_array_equal, one, two)


def differ(one, two):
    return any(not np.array_equal(a, b) for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True))


def long_or_short(prompts, completions, answer):
    """0/1, mixed in most groups of a random model whatever the prompt."""
    return [float(len(completion) % 2) for completion in completions]


def varied(prompts, completions, answer):
    """Different for different completions, so that every estimator has something to say."""
    return [0.25 * sum(map(ord, completion)) % 1 + 0.5 * len(completion) for completion in completions]


def make(algo=None, *, learner=MaxRLLearner, reward=long_or_short, model=None, rollout=None, **training):
    """A learner small in everything; `training` are fields of its RLTrainingConfig, or further arguments of its own."""
    arguments = {name: training.pop(name) for name in OWN if name in training}
    settings = {"max_steps": 2, "actor_optimizer": SGD} | training
    listeners = [arguments.pop("on_row", lambda row, total: None)]
    made = learner(
        model=make_model() if model is None else model,
        tokenizer=arguments.pop("tokenizer", TOKENIZER),
        reward_fns=reward,
        algo_config=MaxRLConfig(num_generations=4) if algo is None else algo,
        rollout_config=rollout or RolloutConfig(max_prompt_length=8, max_tokens_to_generate=4),
        training_config=RLTrainingConfig(**settings),
        on_row=lambda row, total: listeners[0](row, total),
        **arguments,
    )
    made.listeners = listeners  # a test replaces the one that is there
    return made


def collect(learner, data=ROWS, eval_ds=None, **arguments):
    """Trains, and returns all rows of metrics."""
    found = []
    learner.listeners[0] = lambda row, total: found.append(dict(row))
    learner.train(data, eval_ds, **{"batch_size": 4} | arguments)
    return found


def test_four_things_are_enough(monkeypatch, tmp_path):
    """Model, tokenizer, rewards and the number of generations; all else has a default, and no file is written."""
    monkeypatch.chdir(tmp_path)
    asked = []

    def score(prompts, completions, answer, text):
        asked.append((len(prompts), prompts[:5], answer[0] == text[0][::-1]))
        return long_or_short(prompts, completions, answer)

    # 64 positions, so the default lengths (512 + 256) do not fit: the error says which keys to lower.
    arguments = {"model": make_model(), "tokenizer": TOKENIZER, "reward_fns": [score]}
    with pytest.raises(UserError, match="max_prompt_length.*768.*64 positions .max_position_embeddings.. Lower them"):
        MaxRLLearner(**arguments, algo_config=MaxRLConfig(num_generations=4))
    arguments["model"] = tunix_like.load_model(HF | {"max_position_embeddings": 1024}, init="random")[0]
    before = params_of(arguments["model"])
    learner = MaxRLLearner(**arguments, algo_config=MaxRLConfig(num_generations=4))
    last = learner.train([{"prompt": f"{text}>", "answer": text[::-1], "text": text} for text in TEXTS])
    assert last["step"] == 1, "eight rows are one batch of eight, and one pass is one step"
    assert len(asked) == 1 and asked[0][0] == 32 and asked[0][2] and len(set(asked[0][1][:4])) == 1
    assert differ(params_of(arguments["model"]), before), "the model that was handed in is the trained one"
    assert_same(params_of(arguments["model"]), jax.tree.map(np.asarray, learner.params))
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def compiled():
    """Grows by one entry with every program that XLA compiles."""
    programs = []

    def on_event(event, duration, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            programs.append(duration)

    jax.monitoring.register_event_duration_secs_listener(on_event)
    yield programs
    jax.monitoring.unregister_event_duration_listener(on_event)


def test_one_compilation_and_an_estimator_under_tracing(compiled, monkeypatch):
    """Advantage and loss are one program: the estimator is traced into it, once, and never sees a number. It was traced
    before on shapes alone, when the learner was made."""
    seen, counts = [], []
    monkeypatch.setattr("tunix_like.algorithms.registry.ADVANTAGE_ESTIMATORS", dict(ADVANTAGE_ESTIMATORS))

    @register_advantage_estimator("half")
    def half(rewards, *, scored, lengths):
        seen.append([isinstance(x, jax.core.Tracer) for x in (rewards, scored, lengths)])
        return jnp.where(scored, rewards - 0.5, 0.0)

    assert learners.find_learner("half") is CustomLearner
    learner = make(
        CustomConfig(advantage_estimator="half", num_generations=4),
        learner=CustomLearner,
        max_steps=5,
        actor_optimizer=OptimizerConfig(learning_rate=1e-3),
        on_row=lambda row, total: counts.append((row["train/perf/update_programs"], len(compiled))),
    )
    assert seen == [[True, True, True]]
    last = learner.train(ROWS, batch_size=4)
    assert seen == [[True, True, True]] * 2
    assert [traced for traced, _ in counts] == [1.0] * 5
    assert counts[0][1] > 0 and len({programs for _, programs in counts}) == 1, f"compiled after step 1: {counts}"
    assert last["train/advantage/max"] == 0.5 and last["train/advantage/min"] == -0.5


ADAMW = OptimizerConfig(learning_rate=1e-2)


@pytest.mark.parametrize("passes", [False, True])
def test_a_second_call_without_a_folder_continues(compiled, passes):
    """Two calls of two steps are one of four: steps, prompts, random numbers, moments; and nothing compiles again."""
    seen = {"one": [], "two": []}

    def reward_into(name):
        def reward(prompts, completions, answer):
            seen[name].append((list(prompts), list(completions)))
            return varied(prompts, completions, answer)

        return reward

    steps = {"max_steps": None if passes else 2, "actor_optimizer": ADAMW}
    two = make(reward=reward_into("two"), **steps)
    first = collect(two)
    programs = len(compiled)
    second = collect(two)
    assert len(compiled) == programs, "the second call compiles nothing"
    assert [row["step"] for row in first + second] == [1, 2, 3, 4]
    assert {row["train/perf/update_programs"] for row in second} == {1.0}

    one = make(reward=reward_into("one"), max_steps=4, actor_optimizer=ADAMW)
    rows = collect(one)
    assert seen["two"] == seen["one"] and len({completion for _, group in seen["one"] for completion in group}) > 20
    assert_same(params_of(one.model), params_of(two.model))
    assert rows[-1]["train/loss"] == second[-1]["train/loss"]
    assert len(compiled) == programs, "a learner with equal settings compiles nothing"
    collect(two, [*ROWS])
    assert seen["two"][4][0] != seen["two"][3][0] and seen["two"][4][1] != seen["two"][0][1], "other data, new numbers"


class Narrow:
    """The engine of a learner, whose arrays are as wide as its longest completion."""

    def __init__(self, learner):
        self.inner, self.max_prompt_length, self.row_steps = learner.engine, 8, 0

    def generate(self, *arguments):
        out = self.inner.generate(*arguments)
        width = int(out.lengths.max())
        return out._replace(tokens=out.tokens[..., :width], logprobs=out.logprobs[..., :width])


def test_an_engine_of_the_user():
    """With arrays of another width the result is the same."""
    rollout = RolloutConfig(max_prompt_length=8, max_tokens_to_generate=20)
    plain = make(reward=varied, rollout=rollout, actor_optimizer=ADAMW)
    own = make(reward=varied, rollout=rollout, actor_optimizer=ADAMW, engine=Narrow(plain))
    assert collect(own)[-1]["train/loss"] == collect(plain)[-1]["train/loss"]
    assert_same(params_of(own.model), params_of(plain.model))


def test_a_call_that_failed_can_be_repeated():
    """The steps that were done count, even if a function of the user failed after the update; an epoch goes on where it
    was left, and an iterable begins anew."""
    failing = [True]

    def metric(prompts, completions, rewards, advantages, **columns):
        if failing[0]:
            raise RuntimeError("a metric failed")
        return {}

    learner = make(max_steps=None, metric_fns=[metric])
    with pytest.raises(RuntimeError, match="a metric failed"):
        learner.train(ROWS, batch_size=4)
    failing[0] = False
    assert [row["step"] for row in collect(learner)] == [2], "the second half of the epoch"
    assert [row["step"] for row in collect(learner)] == [3, 4], "the next epoch"

    rows = [{"question": "ab"}, *ROWS]
    learner, data = make(max_steps=1), Rows(rows)
    with pytest.raises(UserError, match="prompt"):
        learner.train(data, batch_size=4)
    rows.pop(0)
    assert learner.train(data, batch_size=4)["step"] == 1


class Rows:
    """An iterable that is no sequence."""

    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter(self.rows)


def test_estimators_without_module_or_hash(monkeypatch):
    """As functions made by `exec` or callable dataclasses are."""
    monkeypatch.setattr("tunix_like.algorithms.registry.ADVANTAGE_ESTIMATORS", dict(ADVANTAGE_ESTIMATORS))

    @dataclasses.dataclass
    class Centred:
        __name__ = "centred"

        def __call__(self, rewards, *, scored, lengths):
            return jnp.where(scored, rewards - rewards.mean(axis=1, keepdims=True), 0.0)

    namespace = {}
    exec("def plain(rewards, *, scored, lengths):\n    return rewards * scored", namespace)
    namespace["plain"].__module__ = None
    for name, function in (("centred", Centred()), ("plain", namespace["plain"])):
        register_advantage_estimator(name)(function)
        algo = CustomConfig(advantage_estimator=name, num_generations=4)
        assert make(algo, learner=CustomLearner, max_steps=1).train(ROWS, batch_size=4)["step"] == 1


def test_an_iterator_that_was_read_before_is_named():
    learner = make(max_steps=None)
    rows = iter(ROWS)
    learner.train(rows, batch_size=4)
    with pytest.raises(
        UserError, match="fewer than 4 usable prompts.*If the data is an iterator, check that it was not consumed"
    ):
        learner.train(rows, batch_size=4)


def test_own_functions_share_no_program(monkeypatch):
    """A function of the user may read what has changed since; a second learner traces it again."""
    monkeypatch.setattr("tunix_like.algorithms.registry.ADVANTAGE_ESTIMATORS", dict(ADVANTAGE_ESTIMATORS))
    factor = [1.0]

    @register_advantage_estimator("scaled")
    def scaled(rewards, *, scored, lengths):
        return jnp.where(scored, factor[0], 0.0) + 0 * rewards

    for value in (1.0, 3.0):
        factor[0] = value
        algo = CustomConfig(advantage_estimator="scaled", num_generations=4)
        last = make(algo, learner=CustomLearner, max_steps=1).train(ROWS, batch_size=4)
        assert last["train/advantage/max"] == value


def test_a_step_without_a_counted_token_changes_nothing(tmp_path):
    """With AdamW and weight decay: no momentum moves the weights, and the schedule does not go on. A step whose rewards
    are all equal is an observation, and the optimizer takes it."""
    calls = []

    def reward(prompts, completions, answer):
        calls.append(len(prompts))
        if len(calls) in (2, 3):  # of the second step; a function that fails for all is asked again
            return [None] * len(completions)
        return [1.0] * len(completions) if len(calls) == 5 else varied(prompts, completions, answer)

    weights = []
    optimizer = OptimizerConfig(learning_rate=1e-2, weight_decay=0.1, warmup_steps=4)
    learner = make(
        GRPOConfig(num_generations=4), learner=GRPOLearner, reward=reward, max_steps=5, actor_optimizer=optimizer
    )
    learner.listeners[0] = lambda row, total: weights.append((row, jax.tree.map(np.asarray, learner.state.params)))
    learner.train(ROWS, batch_size=4)
    rows = [row for row, _ in weights]
    empty = [row["train/update/empty"] for row in rows]
    assert sum(empty) == 2 and empty[0] == empty[-1] == 0, (empty, calls)
    rate = 0
    for (_, before), (row, after), was in zip(weights, weights[1:], empty[1:], strict=False):
        assert differ(before, after) == (not was), row["step"]
    for row, was in zip(rows, empty, strict=True):
        assert row["train/learning_rate"] == pytest.approx(1e-2 * min(rate + 1, 4) / 4)
        rate += not was
    assert rows[-1]["train/groups/zero_signal_frac"] == 1 and rows[-1]["train/grad_norm"] == 0


DEFAULTS = {
    "grpo": ("GRPOLearner", "sequence-mean-token-mean", "ppo_clip", "low_var_kl", False),
    "drgrpo": ("DrGRPOLearner", "sequence-mean-token-scale", "ppo_clip", "low_var_kl", False),
    "rloo": ("RLOOLearner", "seq-mean-token-sum", "reinforce", "kl", True),
    "maxrl": ("MaxRLLearner", "token-mean", "ppo_clip", "low_var_kl", False),
    "maxpo": ("MaxPOLearner", "token-mean", "ppo_clip", "low_var_kl", False),
    "pkpo": ("PKPOLearner", "token-mean", "ppo_clip", "low_var_kl", False),
    "passk": ("PassKLearner", "token-mean", "ppo_clip", "low_var_kl", False),
    "opo": ("OPOLearner", "token-mean", "ppo_clip", "low_var_kl", False),
    "reinforce_pp": ("ReinforcePPLearner", "token-mean", "ppo_clip", "low_var_kl", False),
}
NEED_K = ("maxpo", "pkpo", "passk")


def test_what_an_unset_key_means():
    found = {}
    for name, learner in LEARNERS.items():
        algo = resolve(AlgorithmConfig(advantage_estimator=name), learner.config_class)
        found[name] = (learner.__name__, algo.loss_agg_mode, algo.policy_loss_fn, algo.kl_loss_mode, algo.kl_in_reward)
        assert algo.beta == 0.0 and algo.advantage_estimator == name
        assert getattr(tunix_like, learner.__name__) is learner
        assert getattr(tunix_like, learner.__name__.replace("Learner", "Config")) is learner.config_class
    assert found == DEFAULTS
    own = resolve(AlgorithmConfig(advantage_estimator="mine"), CustomConfig)
    assert (own.loss_agg_mode, own.policy_loss_fn, own.kl_in_reward) == ("token-mean", "ppo_clip", False)
    assert resolve(AlgorithmConfig(loss_agg_mode="token-mean"), GRPOConfig).loss_agg_mode == "token-mean"


def watch_advantages(kept):
    """A metric function that keeps every step's advantages, `[groups, completions]`."""

    def keep(prompts, completions, rewards, advantages, **columns):
        kept.append(np.asarray(advantages).reshape(-1, 4))
        return {}

    return keep


def watch_rewards(kept, reward=varied):
    """`reward`, whose values are kept, `[groups, completions]`."""

    def watched(prompts, completions, answer):
        kept.append(np.reshape(reward(prompts, completions, answer), (-1, 4)))
        return kept[-1].reshape(-1)

    return watched


def watch_sampler(learner):
    """All that the learner's sampler gives from now on."""
    caught, generate = [], learner.engine.generate
    learner.engine.generate = lambda *a, **k: caught.append(generate(*a, **k)) or caught[-1]
    return caught


@pytest.mark.parametrize("name", DEFAULTS)
def test_each_learner_trains(name):
    """Two steps of each by its own class; the first step's numbers are those of its estimator, loss and weights."""
    rewards, found = [], []
    k = {"k": 2} if name in NEED_K else {}
    learner = make(
        LEARNERS[name].config_class(num_generations=4, **k),
        learner=LEARNERS[name],
        reward=watch_rewards(rewards, long_or_short if name == "passk" else varied),
        metric_fns=[watch_advantages(found)],
    )
    sampled = watch_sampler(learner)
    before = jax.tree.map(np.asarray, learner.params)
    rows = collect(learner)
    assert [row["step"] for row in rows] == [1, 2]
    assert differ(before, learner.params) and all(np.isfinite(np.hstack(list(row.values()))).all() for row in rows)
    lengths = sampled[0].lengths
    assert len(set(lengths.reshape(-1).tolist())) > 1, "lengths must differ for opo and reinforce_pp"
    expected = tunix_like.compute_advantages(rewards[0], name, lengths=lengths, **k)
    np.testing.assert_allclose(found[0], expected, rtol=1e-5, atol=1e-6)
    assert "train/pg_clipfrac" in rows[0] or name == "rloo"
    assert ("train/is_ratio/mean" in rows[0]) == (name != "rloo")
    assert rows[0]["train/advantage/abs_mean"] == pytest.approx(np.abs(expected).mean(), rel=1e-5)


def naive_loss(name, rewards, lengths, logprobs):
    """Loss of one step of ratio 1 by loops: each learner's sum over tokens as its row of the table says."""
    advantages = tunix_like.compute_advantages(rewards, name)
    groups, size = lengths.shape
    total = 0.0
    for i, j in np.ndindex(groups, size):
        length = lengths[i, j]
        token = -logprobs[i, j, :length] * advantages[i, j] if name == "rloo" else [-advantages[i, j]] * length
        share = {
            "grpo": 1 / (groups * size * length),
            "drgrpo": 1 / (groups * size * 4),
            "rloo": 1 / (groups * size),
            "maxrl": 1 / lengths.sum(),
        }[name]
        total += share * sum(token)
    return total


@pytest.mark.parametrize("name", ["grpo", "drgrpo", "rloo", "maxrl"])
def test_the_loss_is_the_one_of_the_table(name):
    """The reported loss of a step, against loops over tokens; micro-batches of two completions change nothing."""
    rewards = np.array([[1.0, 0, 2, 0], [0, 0, 0, 3], [1, 1, 1, 0], [0, 2, 2, 0]])

    learner = make(
        LEARNERS[name].config_class(num_generations=4),
        learner=LEARNERS[name],
        reward=lambda prompts, completions: rewards.reshape(-1),
        max_steps=1,
        train_micro_batch_size=2,
    )
    caught = watch_sampler(learner)
    row = collect(learner)[0]
    expected = naive_loss(name, rewards, caught[0].lengths, caught[0].logprobs)
    assert len(set(caught[0].lengths.reshape(-1).tolist())) > 1, "lengths must differ, or the weights all look alike"
    assert row["train/loss"] == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_a_config_of_another_learner_is_refused():
    with pytest.raises(UserError, match="RLOOLearner takes a RLOOConfig, got a GRPOConfig"):
        make(GRPOConfig(), learner=RLOOLearner)
    with pytest.raises(UserError, match="algorithm.epsilon: the loss 'reinforce' does not read it"):
        make(RLOOConfig(num_generations=4, epsilon=0.1), learner=RLOOLearner).train(ROWS)
    with pytest.raises(UserError, match="algorithm.k: the estimator 'maxpo' requires it"):
        make(MaxPOConfig(num_generations=4), learner=LEARNERS["maxpo"]).train(ROWS)
    plain = make(AlgorithmConfig(num_generations=4), learner=GRPOLearner)  # the base class takes the learner's defaults
    assert (plain.algo.advantage_estimator, plain.algo.policy_loss_fn) == ("grpo", "ppo_clip")


def raises(prompts, completions, answer):
    raise ZeroDivisionError("oops")


BAD_REWARDS = {
    "too few": (lambda prompts, completions: [1.0] * 3, "returned 3 values for 4 completions"),
    "raising": (raises, "'raises' raised ZeroDivisionError: oops"),
    "text": (lambda prompts, completions: ["1"] * 16, "'1', is not a number"),
    "infinite": (lambda prompts, completions: [float("inf")] * 16, "inf, is not within"),
    "negative": (
        lambda prompts, completions: [1.0, -1.0] * 8,
        "prompt '[a-h]+>' .group 0., completion 1 .* gave -1.: the reward -1 is negative, but the estimator 'maxrl' "
        "accepts non-negative rewards only. Set algorithm.truncation_order, algorithm.binarize=true",
    ),
    "unscored": (lambda prompts, completions: [float("nan")] * 16, "no completion could be scored"),
    "another column": (lambda completions, gold: [1.0] * 16, "needs an argument 'gold'.*they have: answer"),
}


@pytest.mark.parametrize("kind", BAD_REWARDS)
def test_a_bad_reward_stops_at_step_1_with_its_completions_kept(kind, tmp_path):
    reward, message = BAD_REWARDS[kind]
    learner = make(reward=reward, output_dir=str(tmp_path / "run"))
    before = jax.tree.map(np.asarray, learner.params)
    with pytest.raises(UserError, match=message) as error:
        learner.train(ROWS, batch_size=4)
    file = tmp_path / "run" / "rollouts" / "step_000001.jsonl"
    assert str(file) in str(error.value)
    kept = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(kept) == 16 and {"prompt", "completion", "problem", "sample", "step"} <= kept[0].keys()
    assert {row["prompt"] for row in kept} <= {row["prompt"] for row in ROWS}
    assert_same(params_of(learner.model), before)
    assert metric_rows(tmp_path / "run") == []


def test_some_unscored_completions_are_left_out():
    """None and NaN are no zeros: they leave the group's statistics, are counted, and weigh nothing in the loss."""
    kept = []

    def some(prompts, completions, answer):
        return [None if i % 4 == 3 else float(i % 4 == 0) for i in range(len(completions))]

    row = collect(make(reward=some, metric_fns=[watch_advantages(kept)], max_steps=1))[0]
    assert row["train/reward/unscored_frac"] == 0.25 and row["train/rewards/mean"] == pytest.approx(1 / 3)
    np.testing.assert_allclose(kept[0], [[2, -1, -1, 0]] * 4, rtol=1e-6)


@pytest.mark.parametrize(("name", "kinds"), [("maxrl", "non-negative"), ("passk", "binary")])
def test_what_the_estimator_is_given(name, kinds):
    """A negative weight (and for passk DAPO's penalty) makes signed rewards, which it takes once they are binarized;
    the rows of metrics keep what the functions gave."""
    totals, kept = [], []

    def length(prompts, completions, answer):
        totals.append([len(text) / 2 - varied("", [text], "")[0] for text in completions])
        return [len(completion) / 2 for completion in completions]

    arguments = {"learner": LEARNERS[name], "reward": [length, varied], "reward_weights": [1.0, -1.0], "max_steps": 1}
    shaping = {"k": 2, "overlong": "penalty", "overlong_buffer": 2} if name == "passk" else {}
    config = functools.partial(LEARNERS[name].config_class, num_generations=4, **shaping)
    cause = "algorithm.overlong=penalty" if name == "passk" else "reward_weights"
    with pytest.raises(UserError, match=f"{cause}: it makes rewards negative, but {name} .*accepts {kinds} rewards"):
        make(config(), **arguments)
    learner = make(
        config(binarize=True), success_threshold=-0.4, metric_fns=[watch_advantages(kept)], **arguments
    )  # fmt: skip
    sampled = watch_sampler(learner)
    row = collect(learner)[0]
    loss = np.clip((sampled[0].lengths - 2) / 2, 0, 1) if name == "passk" else 0.0
    success = (np.reshape(totals[0], (4, 4)) - loss >= -0.4).astype(float)
    assert 0 < success.mean() < 1
    k = {"k": 2} if name == "passk" else {}
    np.testing.assert_allclose(kept[0], tunix_like.compute_advantages(success, name, **k), rtol=1e-5, atol=1e-6)
    assert row["train/rewards/mean"] == pytest.approx(np.mean(totals[0]))


def test_completions_cut_short_count_in_their_group_but_not_in_the_loss():
    """overlong=mask, against loops: advantages over the whole group, weights over what ended by itself."""
    kept, rewards = [], []
    learner = make(
        DrGRPOConfig(num_generations=4, overlong="mask", loss_agg_mode="token-mean"), learner=LEARNERS["drgrpo"],
        reward=watch_rewards(rewards), max_steps=1, metric_fns=[watch_advantages(kept)],
    )  # fmt: skip
    sampled = watch_sampler(learner)
    row = collect(learner)[0]
    ended, lengths = sampled[0].finished, sampled[0].lengths
    assert 0 < ended.sum() < 16 and ended.any(axis=1).sum() > 1
    np.testing.assert_allclose(kept[0], tunix_like.compute_advantages(rewards[0], "drgrpo"), 1e-5)
    total, tokens = 0.0, 0
    for i, j in np.argwhere(ended):
        total, tokens = total - kept[0][i, j] * lengths[i, j], tokens + lengths[i, j]
    assert row["train/loss"] == pytest.approx(total / tokens, rel=1e-4) and abs(total / tokens) > 1e-3
    assert row["train/overlong/masked_frac"] == row["train/completions/clipped_ratio"] == (~ended).mean()


OWN_ESTIMATORS = """
import jax.numpy as jnp

def mean(rewards, *, scored, lengths, scale=1.0, beta=0.3, epsilon=1e-6):
    return scale * (rewards - rewards.mean(axis=1, keepdims=True))

def first_two(rewards, *, scored, lengths):
    return rewards[:2] - 0.5  # wrong for more groups than the learner traces it with

def broken(rewards, *, scored, lengths):
    best = rewards.max(axis=1, keepdims=True)
    return jnp.where(rewards[:, :1] == best, rewards / 0, mean(rewards, scored=scored, lengths=lengths))
"""


def own(tmp_path, function, **settings):
    (tmp_path / "own.py").write_text(OWN_ESTIMATORS)
    config = CustomConfig(advantage_estimator=f"{tmp_path}/own.py:{function}", num_generations=4, **settings)
    return functools.partial(make, config, learner=CustomLearner, output_dir=str(tmp_path / "run"))


def test_an_estimator_of_ones_own_by_its_file(tmp_path):
    kept = []
    learner = own(tmp_path, "mean", estimator_params={"scale": 2.0})(reward=varied, metric_fns=[watch_advantages(kept)])
    assert collect(learner)[-1]["step"] == 2
    rows = [json.loads(line) for line in (tmp_path / "run/rollouts/step_000001.jsonl").read_text().splitlines()]
    rewards = np.reshape([row["reward"] for row in rows], (4, 4))
    np.testing.assert_allclose(kept[0], 2 * (rewards - rewards.mean(axis=1, keepdims=True)), rtol=1e-4, atol=1e-6)
    for settings, message in {
        "estimator_params.scael: the estimator .*own.py:mean' has no such .*it has: beta, epsilon, scale": {"scael": 1},
    }.items():
        with pytest.raises(UserError, match=settings):
            own(tmp_path, "mean", estimator_params=message)()


BAD_ESTIMATORS = {
    "first_two": "own.py:first_two' returned an array of shape .2, 4. for rewards of shape .4, 4.",
    "broken": "own.py:broken' returned (inf|nan) for completion 0 of group 2 .prompt '(ab|cd|ef|gh|ba|dc|fe|hg)>'.*"
    "with rewards .5.0, 1.0, 0.0, 2.0.*The weights are those before this step",
}


@pytest.mark.parametrize("function", BAD_ESTIMATORS)
def test_a_bad_estimator_changes_no_weight(function, tmp_path):
    """What it returned is found before the weights have moved, in the step where it happens; completions are kept."""
    calls = []

    def good_then_bad(prompts, completions, answer):
        calls.append(len(completions))
        rewards = np.tile([0.0, 1.0, 0.0, 2.0], 4)
        rewards[8] = 5.0 if len(calls) == (2 if function == "broken" else 1) else 0.0
        return rewards.tolist()

    learner = own(tmp_path, function, num_iterations=2)(
        reward=good_then_bad, max_steps=3, mini_batch_size=2, actor_optimizer=optax.adam(0.1),
        checkpoint_every_n_steps=1,
    )  # fmt: skip
    weights = [jax.tree.map(np.asarray, learner.params)]
    learner.listeners[0] = lambda row, total: weights.append(jax.tree.map(np.asarray, learner.params))
    with pytest.raises(UserError, match=BAD_ESTIMATORS[function]) as error:
        learner.train(ROWS, batch_size=4)
    file = tmp_path / "run" / "rollouts" / f"step_00000{len(calls)}.jsonl"
    assert len(calls) == len(weights) == (2 if function == "broken" else 1)
    assert str(file) in str(error.value) and len(file.read_text().splitlines()) == 16
    assert_same(params_of(learner.model), weights[-1])
    assert len(weights) == 1 or differ(*weights)


SOURCES_OF_ROWS = {
    "hard": {"advantage_estimator": "maxpo", "k": 2},
    "easy": {"advantage_estimator": "grpo", "ddof": 0},
    "white": {"advantage_estimator": "reinforce_pp"},
}


def test_every_source_has_its_own_estimator(tmp_path):
    """One batch, one compiled step: each group's advantages are its source's estimator's, the rest the run's own."""
    names = ["hard", "white", "easy", None, "white", "unnamed", "hard", "easy"]
    data = [row | ({} if name is None else {"data_source": name}) for row, name in zip(ROWS, names, strict=True)]
    training = {"reward": lambda prompts, completions: varied(prompts, completions, None), "output_dir": str(tmp_path)}
    learner = make(source_estimators=SOURCES_OF_ROWS, max_steps=1, **training)
    sampled = watch_sampler(learner)
    row = collect(learner, data, batch_size=8, shuffle=False)[0]
    assert row["train/perf/update_programs"] == 1
    rows = [json.loads(line) for line in (tmp_path / "rollouts" / "step_000001.jsonl").read_text().splitlines()]
    assert [row["prompt"] for row in rows[::4]] == [row["prompt"] for row in ROWS]
    rewards, found = (np.reshape([row[name] for row in rows], (8, 4)) for name in ("reward", "advantage"))
    for source in {*names}:
        groups = [place for place, name in enumerate(names) if name == source]
        chosen = dict(SOURCES_OF_ROWS.get(source, {"advantage_estimator": "maxrl"}))
        expected = tunix_like.compute_advantages(rewards[groups], **chosen, lengths=sampled[0].lengths[groups])
        np.testing.assert_allclose(found[groups], expected, rtol=1e-4, atol=1e-5, err_msg=str(source))
    with pytest.raises(UserError, match="(?s)another run.*  source_estimators"):
        make(**training).train(data, batch_size=8, shuffle=False)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"advantage_estimator": "rlo"}, "data source 'easy'.*unknown estimator 'rlo'. Did you mean 'rloo'"),
        ({"advantage_estimator": "maxpo", "k": 4}, "data source 'easy'.k: got 4; 'maxpo' needs 1 <= k <= 3"),
        ({"advantage_estimator": "maxpo"}, "data source 'easy'.k: the estimator 'maxpo' requires it"),
        ({"k": 2}, "data source 'easy'.k: the estimator 'maxrl' does not read it"),
        ("grpo", "source_estimators.'easy'.: expected {'advantage_estimator': .*got 'grpo'"),
    ],
)
def test_a_mistake_in_a_source_names_it(given, message):
    with pytest.raises(UserError, match=message):
        make(source_estimators={"hard": {"advantage_estimator": "rloo"}, "easy": given})


def test_where_the_time_goes(tmp_path, monkeypatch):
    """Shares of useful work from the lengths, the split of the time, what was compiled, a trace; shares of the device's
    peak where it is known."""
    monkeypatch.setattr("tunix_like.training.step_metrics.peak_flops", lambda: 1e9)
    learner = make(max_steps=3, reward=varied, output_dir=str(tmp_path), profile_steps=[2, 2])
    sampled = watch_sampler(learner)
    found = collect(learner, batch_size=8)
    for row, completions in zip(found, sampled, strict=True):
        split = sum(value for name, value in row.items() if name.startswith("train/time/"))
        assert row["step"] == 2 or split == pytest.approx(row["train/step_time_sec"], rel=0.05)  # 2: writes the trace
        lengths = completions.lengths
        assert lengths.mean() / lengths.max() <= row["train/perf/rollout_occupancy"] <= 1
        assert 0.4 <= row["train/perf/update_occupancy"] <= 1
        useful = row["train/perf/update_mfu"] * row["train/time/update"] * 1e9
        assert useful == pytest.approx(row["train/perf/update_operations"], rel=1e-4)
        assert row["train/perf/rollout_mfu"] > 0
    assert found[0]["train/perf/programs_compiled"] > 0 < found[0]["train/perf/compile_sec"]
    assert len(list((tmp_path / "profile").rglob("*.xplane.pb"))) == 1


def test_what_is_compiled_between_two_steps_is_counted():
    """As an evaluation may do, or a checkpoint: it belongs to the step after it."""
    found = []

    def compile_after_2(row, total):
        found.append(row["train/perf/programs_compiled"])
        if row["step"] == 2:
            jax.jit(lambda x: x * 5 - 2)(np.arange(3.0))

    make(max_steps=4, reward=varied, on_row=compile_after_2).train(ROWS, batch_size=4)
    assert found[1:] == [0, 1, 0]


def test_maxima_of_several_updates_are_not_averaged(monkeypatch):
    """The ratio is 1 in the first update of a batch, and the metric is the largest of the second."""
    updates = []

    def recorded(*arguments):
        program = jit_train_step(*arguments)

        def update(*inputs):
            out = program(*inputs)
            updates.append({name: float(value) for name, value in out[1].items()})
            return out

        return update

    monkeypatch.setattr("tunix_like.training.step_programs.jit_train_step", recorded)
    monkeypatch.setattr("tunix_like.training.step_programs._SHARED", OrderedDict())
    algo = GRPOConfig(num_generations=4, num_iterations=2)
    last = make(algo, learner=GRPOLearner, reward=varied, max_steps=1).train(ROWS, batch_size=4)
    first, second = updates
    assert first["is_ratio/max"] == pytest.approx(1) and second["is_ratio/max"] > 1.01
    assert last["train/is_ratio/max"] == second["is_ratio/max"]
    assert last["train/is_ratio/mean"] == pytest.approx((first["is_ratio/mean"] + second["is_ratio/mean"]) / 2)


@pytest.mark.parametrize("updates", [{"num_iterations": 2}, {"mini_batch_size": 2}])
def test_several_updates_of_one_batch(updates):
    """ppo_clip goes through the batch again with the log-probabilities of before the first update: ratios leave 1."""
    algorithm = {name: value for name, value in updates.items() if name == "num_iterations"}
    training = {name: value for name, value in updates.items() if name != "num_iterations"}
    optimizer = optax.sgd(2.0)
    learner = make(
        MaxRLConfig(num_generations=4, epsilon=0.01, **algorithm),
        max_steps=1,
        actor_optimizer=optimizer,
        reward=varied,
        **training,
    )
    row = collect(learner)[0]
    assert row["train/is_ratio/max"] > 1.01 and row["train/pg_clipfrac"] > 0
    assert row["train/perf/update_programs"] == 1
    with pytest.raises(UserError, match="'reinforce' allows one update.*give 2. Use ppo_clip"):
        make(RLOOConfig(num_generations=4, **algorithm), learner=RLOOLearner, **training).train(ROWS, batch_size=4)
    one = collect(make(max_steps=1, reward=varied, actor_optimizer=optimizer))[0]
    assert one["train/is_ratio/max"] == pytest.approx(1.0, abs=1e-6) and one["train/pg_clipfrac"] == 0


LOSSES = {
    "ppo_clip": {},
    "gspo": {"policy_loss_fn": "gspo", "epsilon": 0.02, "epsilon_high": 0.03},
    "dppo": {"policy_loss_fn": "dppo", "dppo_mask_high": 0.02, "dppo_mask_low": 0.02, "kl_tau": 0.1},
    "sampler_is": {"sampler_is": "token", "sampler_is_threshold": 1.15},
}


def naive_token_loss(kind, logprobs, old, rollout, advantages, mask):
    """The loss of every token by its formula; `[G, T]` each, advantages `[G, 1]`."""
    if kind == "dppo":
        ratio, moved = jnp.exp(logprobs - rollout), jnp.exp(logprobs) - jnp.exp(rollout)
        dropped = ((advantages > 0) & (moved > 0.02)) | ((advantages <= 0) & (moved < -0.02))
        return jnp.where(dropped, 0.0, -ratio * advantages) + 0.1 * (logprobs - rollout) ** 2
    ratio, low, high, factor = jnp.exp(logprobs - old), 0.2, 0.2, 1.0
    if kind == "gspo":
        low, high = 0.02, 0.03
        mean = ((logprobs - old) * mask).sum(1, keepdims=True) / mask.sum(1, keepdims=True)
        ratio = jnp.exp(jax.lax.stop_gradient(mean) + logprobs - jax.lax.stop_gradient(logprobs))
    if kind == "sampler_is":
        factor = jnp.minimum(jnp.exp(old - rollout), 1.15)
    return factor * -jnp.minimum(ratio * advantages, jnp.clip(ratio, 1 - low, 1 + high) * advantages)


@functools.partial(jax.jit, static_argnums=0)
def naive_logprobs(graphdef, params, texts, places, targets):
    """By the plain forward of prompt and completion in one row."""
    table = jax.nn.log_softmax(nnx.merge(graphdef, params)(texts))
    return table[jnp.arange(len(texts))[:, None], places, targets]


@functools.partial(jax.jit, static_argnums=0)
def naive_gradient(graphdef, params, texts, places, targets, slope):
    return jax.grad(lambda p: (naive_logprobs(graphdef, p, texts, places, targets) * slope).sum())(params)


@pytest.mark.parametrize("kind", LOSSES)
def test_two_passes_in_two_mini_batches_by_loops(kind):
    """Four updates of one batch, redone with the plain forward: the old log-probabilities are those before the first
    update throughout, the sampler's those of the rollout (made to differ here), advantages are of the whole batch."""
    rewards, asked, rate = [], [], 0.3
    learner = make(
        MaxRLConfig(num_generations=4, num_iterations=2, **LOSSES[kind]),
        reward=watch_rewards(rewards), max_steps=1, mini_batch_size=2, actor_optimizer=optax.sgd(rate),
        max_logprob_gap=None,
    )  # fmt: skip
    generate = learner.engine.generate

    def shifted(params, prompts, *rest):
        out = generate(params, prompts, *rest)
        asked.append((prompts, out._replace(logprobs=out.logprobs + np.array([0.2, -0.2, 0.1, 0.0], np.float32))))
        return asked[-1][1]

    learner.engine.generate = shifted
    params = jax.tree.map(jnp.array, learner.params)
    row = collect(learner)[0]

    prompts, out = asked[0]
    texts, places = np.zeros((16, 8), np.int32), np.zeros((16, 4), np.int32)
    for n in range(16):
        prompt = prompts[n // 4]
        texts[n, : len(prompt)] = prompt
        texts[n, len(prompt) : len(prompt) + 4] = out.tokens[n // 4, n % 4]
        places[n] = len(prompt) - 1 + np.arange(4)
    targets, lengths = out.tokens.reshape(16, 4), out.lengths.reshape(16)
    mask = np.arange(4) < lengths[:, None]
    rollout = jnp.asarray(out.logprobs.reshape(16, 4))
    advantages = tunix_like.compute_advantages(rewards[0], "maxrl").reshape(16, 1)
    old = naive_logprobs(learner.graphdef, params, texts, places, targets)
    for half in (0, 1) * 2:
        inside = mask & (np.arange(16) // 8 == half)[:, None]
        now = naive_logprobs(learner.graphdef, params, texts, places, targets)
        each = functools.partial(naive_token_loss, kind, old=old, rollout=rollout, advantages=advantages, mask=mask)
        slope = jax.grad(lambda x: jnp.where(inside, each(x), 0.0).sum() / inside.sum())(now)  # noqa: B023
        gradient = naive_gradient(learner.graphdef, params, texts, places, targets, slope)
        params = jax.tree.map(lambda p, g: p - rate * g, params, gradient)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), learner.params, params)
    assert row["train/pg_clipfrac"] > 0 or kind in ("ppo_clip", "sampler_is")
    assert row.get("train/sampler_is/mean", 0.9) < 1


def test_kl_in_the_loss_starts_at_zero_against_the_starting_weights():
    learner = make(GRPOConfig(num_generations=4, beta=0.1), learner=GRPOLearner, reward=varied, max_steps=3)
    start = jax.tree.map(np.asarray, learner.params)
    rows = collect(learner)
    assert rows[0]["train/kl"] == pytest.approx(0.0, abs=1e-6)
    assert 0 < rows[1]["train/kl"] < rows[2]["train/kl"], "k3 is never negative, and the policy moves away"
    assert_same(jax.tree.map(np.asarray, learner.reference.params), start)
    assert make(GRPOConfig(num_generations=4), learner=GRPOLearner).reference is None, "beta 0 holds no reference"


def test_the_kl_alone_leads_to_the_reference():
    """Where rewards say nothing, the KL still has a gradient, and it points at the reference."""
    learner = make(
        GRPOConfig(num_generations=4, beta=1.0),
        learner=GRPOLearner,
        ref_model=make_model(seed=7),
        reward=lambda prompts, completions: [0.0] * len(completions),
        max_steps=4,
    )
    rows = collect(learner)
    assert 0 < rows[3]["train/kl"] < 0.9 * rows[0]["train/kl"]
    assert rows[0]["train/loss"] == pytest.approx(rows[0]["train/kl"], rel=0.5)


def test_kl_in_the_reward_with_another_reference():
    """rloo subtracts beta * sum of log-ratios from each reward before the estimator; here by hand."""
    kept = []
    model, reference = make_model(), make_model(seed=7)
    learner = make(
        RLOOConfig(num_generations=4, beta=0.5), learner=RLOOLearner, model=model, ref_model=reference,
        reward=lambda prompts, completions: [0.0] * len(completions),
        metric_fns=[watch_advantages(kept)], max_steps=1,
    )  # fmt: skip
    caught, generate = [], learner.engine.generate
    learner.engine.generate = lambda *a, **k: caught.append((a[1], generate(*a, **k))) or caught[-1][1]
    row = collect(learner)[0]
    prompts, out = caught[0]
    texts = [[*prompts[i], *out.tokens[i, j, : out.lengths[i, j]]] for i, j in np.ndindex(4, 4)]
    tokens = np.array([text + [0] * (16 - len(text)) for text in texts])
    logprobs = np.asarray(jax.jit(lambda x: jax.nn.log_softmax(reference(x)))(tokens))
    kl = np.zeros((4, 4))
    for n, (i, j) in enumerate(np.ndindex(4, 4)):
        for t in range(out.lengths[i, j]):
            place = len(prompts[i]) + t
            kl[i, j] += out.logprobs[i, j, t] - logprobs[n, place - 1, tokens[n, place]]
    np.testing.assert_allclose(kept[0], tunix_like.compute_advantages(-0.5 * kl, "rloo"), rtol=1e-3, atol=1e-4)
    assert row["train/rewards/mean"] == 0.0, "the reported reward is the reward function's"
    assert "train/kl" in row and row["train/kl"] == pytest.approx(kl.sum() / out.lengths.sum(), rel=1e-3, abs=1e-5)


def test_the_model_itself_as_reference():
    model = make_model()
    of = functools.partial(make, GRPOConfig(num_generations=4, beta=0.1), learner=GRPOLearner, model=model)
    learner = of(ref_model=nnx.merge(*nnx.split(model)))  # another model of the same arrays
    where = lambda tree: {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(tree)}  # noqa: E731
    assert not where(learner.reference.params) & where(learner.state.params)
    assert len(collect(of(ref_model=model))) == 2


def test_metric_functions():
    calls = []

    def lengths(prompts, completions, rewards, advantages, answer, **columns):
        calls.append((len(prompts), len(completions), len(rewards), len(advantages), len(answer), sorted(columns)))
        return {"mine/longest": ([len(text) for text in completions], max), "mine/shortest": ([1, 2], min)}

    row = collect(make(metric_fns=[lengths], max_steps=1))[0]
    assert calls == [(16, 16, 16, 16, 16, ["text"])]
    assert 0 < row["train/mine/longest"] <= 4 * len("<unk>") and row["train/mine/shortest"] == 1


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
    with pytest.raises(UserError, match="Message 0 .*'role' and 'content'"):
        learner.train([{"prompt": [{"content": "ab"}]}])


def plain(rows):
    yield from rows


class NotASequence:
    def __iter__(self):
        return iter(ROWS)


SOURCES = {
    "generator": lambda: plain(ROWS),
    "iterable": NotASequence,
    "MapDataset": lambda: grain.MapDataset.source(ROWS),
    "MapDataset with a filter": lambda: grain.MapDataset.source([*ROWS, {"prompt": ""}]).filter(lambda r: r["prompt"]),
    "IterDataset": lambda: grain.MapDataset.source(ROWS).to_iter_dataset(),
    "tuple": lambda: tuple(ROWS),
}


@pytest.mark.parametrize("kind", SOURCES)
def test_one_pass_over_any_kind_of_data(kind):
    """max_steps=None sees every row once, whatever the rows come in, and evaluates at the end."""
    seen = []

    def score(prompts, completions, answer):
        seen.extend(prompts[::4])
        return long_or_short(prompts, completions, answer)

    rows = collect(make(reward=score, max_steps=None), SOURCES[kind]())
    assert [row["step"] for row in rows] == [1, 2]
    assert sorted(seen) == sorted(row["prompt"] for row in ROWS)
    ordered = [row["prompt"] for row in ROWS]
    assert (seen == ordered) == ("Map" not in kind and kind != "tuple"), "sequences are shuffled, streams are not"


def test_an_iterable_is_read_again_but_a_generator_ends():
    assert len(collect(make(max_steps=3), NotASequence())) == 3
    assert len(collect(make(max_steps=3), plain(ROWS))) == 2


def test_without_shuffling_rows_come_in_order():
    seen = []

    def score(prompts, completions, answer):
        seen.extend(prompts[::4])
        return long_or_short(prompts, completions, answer)

    collect(make(reward=score, max_steps=3), shuffle=False)
    assert seen == [row["prompt"] for row in [*ROWS, *ROWS[:4]]]


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


def test_long_prompts_that_the_start_did_not_see(monkeypatch):
    monkeypatch.setattr(stream, "SCANNED_ROWS", len(ROWS))
    rows = [*ROWS, {"prompt": "abcdefgh>", "answer": "b"}]
    assert len(collect(make(max_steps=None), rows)) == 2
    with pytest.raises(UserError, match=f"training row {len(ROWS)} .* set data.overlong_prompts=skip"):
        make(max_steps=4).train(rows, batch_size=4, overlong_prompts="error")


@pytest.mark.parametrize(("rows", "number"), [(ROWS[:3], 3), ([*ROWS[:5], {"prompt": "abcdefgh>", "answer": "b"}], 5)])
def test_a_batch_of_more_rows_than_there_are_is_warned_of(caplog, rows, number):
    make(max_steps=1).train(rows, batch_size=6)
    warning = f"data.batch_size: 6 prompts per step, but there are only {number} training rows"
    assert caplog.text.count(warning) == 1 and f"; {number} are used" in caplog.text
    caplog.clear()
    make(max_steps=1).train(rows, batch_size=number)
    assert "data.batch_size" not in caplog.text


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


def test_held_out_prompts_among_the_training_prompts_are_warned_of(caplog):
    settings = {"max_steps": 1, "eval_config": EvalConfig(samples=1, batch_size=8)}
    make(**settings).train(ROWS, [ROWS[1], ROWS[3], reverse_text.record("zzz")], batch_size=4)
    assert caplog.text.count("2 of 3 held-out prompts are also in the training data") == 1
    caplog.clear()
    make(**settings).train(ROWS[:6], ROWS[6:], batch_size=4)
    assert "held-out" not in caplog.text


def test_evaluation_before_during_and_after():
    learner = make(max_steps=4, eval_every_n_steps=2, eval_config=EvalConfig(samples=4, batch_size=8))
    rows = collect(learner, eval_ds=ROWS)
    assert [row["step"] for row in rows if "eval/pass@1" in row] == [0, 2, 4]
    assert {"eval/pass@1", "eval/pass@4", "eval/rewards/mean", "eval/mean_length"} <= rows[0].keys()
    again = learner.evaluate(ROWS)
    assert again.metrics["eval/pass@1"] == rows[-1]["eval/pass@1"], "the same key draws the same completions"
    assert len(again.texts) == 8 and len(again.texts[0]) == 4


def run_twice(folder, data, first, then, **training):
    """Trains to step `first`, then with a new learner on the same folder to step `then`; its parameters and rows."""
    make(reward=varied, max_steps=first, output_dir=str(folder), **training).train(data(), batch_size=4)
    learner = make(reward=varied, max_steps=then, output_dir=str(folder), **training)
    learner.train(data(), batch_size=4)
    return params_of(learner.model), metric_rows(folder)


def without_times(rows):
    return [{k: v for k, v in row.items() if "time" not in k and "perf" not in k} for row in rows]


@pytest.mark.parametrize("kind", ["list", "generator"])
def test_resumed_is_uninterrupted(kind, tmp_path):
    """6 steps are 3 steps and 3 more, bitwise: weights, optimizer, the place in the data, random numbers, metrics."""
    data = SOURCES | {"list": lambda: ROWS, "generator": lambda: plain(ROWS * 4)}
    settings = {"actor_optimizer": OptimizerConfig(learning_rate=1e-2), "checkpoint_every_n_steps": 2}
    whole = make(reward=varied, max_steps=6, output_dir=str(tmp_path / "whole"), **settings)
    whole.train(data[kind](), batch_size=4)
    params, rows = run_twice(tmp_path / "parts", data[kind], 3, 6, **settings)
    assert_same(params, params_of(whole.model))
    assert without_times(rows) == without_times(metric_rows(tmp_path / "whole")) and len(rows) == 6
    assert differ(params, params_of(make_model()))


def test_a_folder_of_another_run_is_refused(tmp_path):
    make(output_dir=str(tmp_path), max_steps=1).train(ROWS, batch_size=4)
    other = {"seed": {"seed": 5}, "batch_size": {}, "algorithm": {}, "rows": {}}
    for what, training in other.items():
        algo = MaxRLConfig(num_generations=8) if what == "algorithm" else None
        data, size = (ROWS[:6] if what == "rows" else ROWS), (2 if what == "batch_size" else 4)
        with pytest.raises(UserError, match=f"(?s)another run.*  {what}.*another output_dir"):
            make(algo, output_dir=str(tmp_path), **training).train(data, batch_size=size)
    finished = make(output_dir=str(tmp_path), max_steps=1, on_row=lambda *_: pytest.fail("a finished run trained"))
    finished.train(ROWS, batch_size=4)
    assert Path(tmp_path, "checkpoints", "1").is_dir()


def test_training_outside_the_main_thread():
    """Signals can only be caught in the main thread; elsewhere training goes on without."""
    learner, found = make(max_steps=1), []
    thread = threading.Thread(target=lambda: found.append(learner.train(ROWS, batch_size=4)))
    thread.start()
    thread.join()
    assert found[0]["step"] == 1
