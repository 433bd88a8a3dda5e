"""Tests the algorithms: their defaults, their losses against loops over tokens, and the rewards that they
accept."""

import functools
import json

import jax
import numpy as np
import pytest

import tunix_like
from tests.parameters import others_slow
from tunix_like import (
    LEARNERS,
    AlgorithmConfig,
    CustomConfig,
    DrGRPOConfig,
    GRPOConfig,
    GRPOLearner,
    MaxPOConfig,
    RLOOConfig,
    RLOOLearner,
    UserError,
)
from tunix_like.algorithms.objective import resolve
from tunix_like.storage.metrics import rows as metric_rows

from .small_learner import (
    ROWS,
    assert_same,
    collect,
    differ,
    long_or_short,
    make,
    params_of,
    varied,
    watch_advantages,
    watch_rewards,
    watch_sampler,
)

DEFAULTS = {
    "grpo": ("GRPOLearner", "sequence-mean-token-mean", "ppo_clip", "low_var_kl", False),
    "drgrpo": ("DrGRPOLearner", "sequence-mean-token-scale", "ppo_clip", "low_var_kl", False),
    "rloo": ("RLOOLearner", "seq-mean-token-sum", "reinforce", "kl", True),
    "maxrl": ("MaxRLLearner", "token-mean", "ppo_clip", "low_var_kl", False),
    "maxpo": ("MaxPOLearner", "token-mean", "ppo_clip", "low_var_kl", False),
    "maxk_mix": ("MaxKMixLearner", "token-mean", "ppo_clip", "low_var_kl", False),
    "order_statistic": ("OrderStatisticLearner", "token-mean", "ppo_clip", "low_var_kl", False),
    "pkpo": ("PKPOLearner", "token-mean", "ppo_clip", "low_var_kl", False),
    "passk": ("PassKLearner", "token-mean", "ppo_clip", "low_var_kl", False),
    "opo": ("OPOLearner", "token-mean", "ppo_clip", "low_var_kl", False),
    "reinforce_pp": ("ReinforcePPLearner", "token-mean", "ppo_clip", "low_var_kl", False),
    "otb": ("OTBLearner", "seq-mean-token-sum", "reinforce", "kl", True),
    "ppo": ("PPOLearner", "token-mean", "ppo_clip", "kl", True),
    "distillation": ("DistillationLearner", "token-mean", "ppo_clip", "low_var_kl", False),
    "gdpo": ("GDPOLearner", "sequence-mean-token-mean", "ppo_clip", "low_var_kl", False),
}
OF_REWARDS = [name for name in DEFAULTS if name not in ("otb", "ppo", "distillation")]
PARAMETERS = {name: {"k": 2} for name in ("maxpo", "pkpo", "passk")}
PARAMETERS |= {"maxk_mix": {"alpha": 0.5}, "order_statistic": {"k": 2, "weights": [0.25, 1.0]}}


def test_defaults_of_unset_keys():
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


@pytest.mark.parametrize("name", others_slow(OF_REWARDS, "rloo", "maxrl"))
def test_each_learner_trains(name):
    """Each learner trains two steps. The metrics of the first step are those of its estimator, loss and weights."""
    rewards, found = [], []
    parameters = PARAMETERS.get(name, {})
    learner = make(
        LEARNERS[name].config_class(num_generations=4, **parameters),
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
    expected = tunix_like.compute_advantages(rewards[0], name, lengths=lengths, **parameters)
    np.testing.assert_allclose(found[0], expected, rtol=1e-5, atol=1e-6)
    assert "train/pg_clipfrac" in rows[0] or name == "rloo"
    assert ("train/is_ratio/mean" in rows[0]) == (name != "rloo")
    assert rows[0]["train/advantage/abs_mean"] == pytest.approx(np.abs(expected).mean(), rel=1e-5)


def test_gdpo_gets_the_rewards_of_each_function():
    """The advantages of a step are those of TRL's formula, from the rewards and the weights of two functions."""
    one, two, found = [], [], []
    learner = make(
        LEARNERS["gdpo"].config_class(num_generations=4), learner=LEARNERS["gdpo"], max_steps=1,
        reward={"one": watch_rewards(one), "two": watch_rewards(two, long_or_short)}, reward_weights=[1.0, 50.0],
        metric_fns=[watch_advantages(found)],
    )  # fmt: skip
    collect(learner)
    rewards = np.stack([one[0], two[0]])
    mean, deviation = rewards.mean(axis=2, keepdims=True), rewards.std(axis=2, ddof=1, keepdims=True)
    total = np.tensordot([1.0, 50.0], (rewards - mean) / (deviation + 1e-6), axes=1)
    np.testing.assert_allclose(found[0], total / total.std(ddof=1), rtol=1e-4, atol=1e-5)
    summed = tunix_like.compute_advantages(one[0] + 50 * two[0], "gdpo")
    assert np.abs(summed - found[0]).max() > 0.05, "which the total reward does not give"


@pytest.mark.parametrize("name", ["grpo", "gdpo"])
def test_rewards_far_from_zero_of_functions_that_apply_in_turn(name):
    """Each completion is scored by one of two functions, as in TRL's multi-task rewards, and by a third that never
    applies. The rewards differ by parts of an offset of 1e6."""
    total, found = [], []

    def of_task(task):
        def score(prompts, completions, answer):
            rewards = [1e6 + 1e-3 * reward for reward in long_or_short(prompts, completions, answer)]
            total.append(rewards)
            return [reward if i // 4 % 2 == task else None for i, reward in enumerate(rewards)]

        return score

    learner = make(
        LEARNERS[name].config_class(num_generations=4), learner=LEARNERS[name], max_steps=1,
        reward={"one": of_task(0), "two": of_task(1), "never": lambda completions: [None] * len(completions)},
        metric_fns=[watch_advantages(found)],
    )  # fmt: skip
    row = collect(learner)[0]
    assert row["train/reward/unscored_frac"] == 0 and row["train/rewards/one"] == pytest.approx(1e6, rel=1e-3)
    exact = np.reshape(total[0], (4, 4)) - 1e6
    assert exact.std() > 0
    np.testing.assert_allclose(found[0], tunix_like.compute_advantages(exact, name), rtol=1e-3, atol=1e-4)


def naive_loss(name, rewards, lengths, logprobs):
    """Returns the loss of one step of ratio 1 by loops, with each learner's sum over tokens as in its row of the
    table."""
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


@pytest.mark.slow
@pytest.mark.parametrize("name", others_slow(["grpo", "drgrpo", "rloo", "maxrl"], "grpo", "rloo"))
def test_loss_equals_that_of_loops_over_tokens(name):
    """The reported loss of a step equals that of loops over tokens. Micro-batches of two completions do not change
    it."""
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


def test_config_of_another_learner_is_rejected():
    with pytest.raises(UserError, match="RLOOLearner takes a RLOOConfig, got a GRPOConfig"):
        make(GRPOConfig(), learner=RLOOLearner)
    with pytest.raises(UserError, match="algorithm.epsilon: the loss 'reinforce' does not read it"):
        make(RLOOConfig(num_generations=4, epsilon=0.1), learner=RLOOLearner).train(ROWS)
    with pytest.raises(UserError, match="algorithm.k: the estimator 'maxpo' requires it"):
        make(MaxPOConfig(num_generations=4), learner=LEARNERS["maxpo"]).train(ROWS)
    plain = make(AlgorithmConfig(num_generations=4), learner=GRPOLearner)  # the base class uses the learner's defaults
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
def test_invalid_reward_stops_at_step_1_with_completions_saved(kind, tmp_path):
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


@pytest.mark.slow
def test_unscored_completions_are_excluded():
    """None and NaN are not zeros: such completions are excluded from the group's statistics, are counted, and have no
    weight in the loss."""
    kept = []

    def some(prompts, completions, answer):
        return [None if i % 4 == 3 else float(i % 4 == 0) for i in range(len(completions))]

    row = collect(make(reward=some, metric_fns=[watch_advantages(kept)], max_steps=1))[0]
    assert row["train/reward/unscored_frac"] == 0.25 and row["train/rewards/mean"] == pytest.approx(1 / 3)
    np.testing.assert_allclose(kept[0], [[2, -1, -1, 0]] * 4, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kinds"), [("maxrl", "non-negative"), ("passk", "binary")])
def test_estimator_gets_the_shaped_rewards(name, kinds):
    """A negative weight (and for passk DAPO's penalty) gives signed rewards, which the estimator accepts after
    binarization. The rows of metrics contain the values of the functions."""
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


@pytest.mark.slow
def test_truncated_completions_count_in_their_group_but_not_in_the_loss():
    """Tests overlong=mask against loops: advantages use the whole group, weights only the completions that ended by
    themselves."""
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
