"""`algorithm.credit: turn`: what the sampled tokens of each turn get, from an environment to the weights."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest

import tunix_like
from tests.training.small_learner import ROWS, assert_same, collect, differ, make, params_of
from tests.training.test_environments import LENGTHS, TURNS
from tunix_like import (
    AnswerLikelihood,
    GRPOConfig,
    GRPOLearner,
    MaxRLConfig,
    MaxRLLearner,
    OTBConfig,
    OTBLearner,
    PPOConfig,
    PPOLearner,
    RLOOConfig,
    RLOOLearner,
    UserError,
    turn_advantages,
)
from tunix_like.config.schema import MeshConfig
from tunix_like.models.sharding import build_mesh
from tunix_like.rewards import per_turn
from tunix_like.training.updates import Updates


class Vowels:
    """Rewards a vowel in each turn. A consonant of the second half of the alphabet ends the trajectory early."""

    def reset(self, **columns):
        self.turns = 0

    def step(self, completion):
        self.turns += 1
        last = completion[-1:]
        return "x", {"a": 1.0, "e": 0.5}.get(last, 0.0), last in "fgh" or self.turns == 3


class Mapped(Vowels):
    """Tells a state and its potential after each turn."""

    def step(self, completion):
        last = completion[-1:]
        return *super().step(completion), {"state": last, "potential": 0.3 * (last in "abcd")}


class Silent(Vowels):
    """The turns of `Vowels` without their rewards."""

    def step(self, completion):
        observation, _, done = super().step(completion)
        return observation, 0.0, done


def vowels(completions, conversation, prompts):
    """The rewards of `Vowels` for single turns."""
    return [{"a": 1.0, "e": 0.5}.get(text[-1:]) for text in completions]


class Failing(Vowels):
    """Fails in some later turns, so that the trajectory is unscored."""

    def step(self, completion):
        if self.turns and completion[-1:] in "bcd":
            raise ValueError("no more")
        return super().step(completion)


class AtTheEnd(Vowels):
    """Always three turns, and one reward at the end."""

    def step(self, completion):
        _, reward, _ = super().step(completion)
        return "x", reward if self.turns == 3 else 0.0, self.turns == 3


class AtTheStart(Vowels):
    """Always three turns, and one reward after the first."""

    def step(self, completion):
        _, reward, _ = super().step(completion)
        return "x", reward if self.turns == 1 else 0.0, self.turns == 3


def learner(kind=RLOOLearner, algo=None, environment=Vowels, **arguments):
    return make(algo or RLOOConfig(num_generations=4, credit="turn"), learner=kind, reward=(), environment=environment,
                environment_config=TURNS, rollout=LENGTHS, **arguments)  # fmt: skip


@pytest.fixture
def credits(monkeypatch):
    """Collects the batches of `Updates.run`, and the advantages or (with a critic) rewards of its turns."""
    found = []
    run = Updates.run

    def watched(self, step, problems, batch, ref, stale, turn_credit=None):
        found.append((batch, turn_credit))
        return run(self, step, problems, batch, ref, stale, turn_credit)

    monkeypatch.setattr(Updates, "run", watched)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, algo, environment",
    [
        (RLOOLearner, RLOOConfig(num_generations=4, credit="turn"), Vowels),
        (RLOOLearner, RLOOConfig(num_generations=4, credit="turn"), Failing),
        (RLOOLearner, RLOOConfig(num_generations=4, credit="turn", gamma=0.5, turn_baseline="reached"), Vowels),
        (RLOOLearner, RLOOConfig(num_generations=4, credit="turn", turn_baseline="state"), Mapped),
        (GRPOLearner, GRPOConfig(num_generations=4, credit="turn"), Vowels),
        (MaxRLLearner, MaxRLConfig(num_generations=4, credit="turn", turn_coef=0.5), Vowels),
        (MaxRLLearner, MaxRLConfig(num_generations=4, credit="turn", binarize=True), Vowels),
    ],
    ids=["rloo", "rloo, failures", "rloo, reached", "rloo, state", "grpo", "maxrl", "maxrl, binarize"],
)
def test_tokens_get_the_advantage_of_their_turn(kind, algo, environment, credits, tmp_path):
    """The oracle reads the rewards after each turn from the rollout file, and the turns from the mask."""
    made = learner(kind, algo, environment, output_dir=str(tmp_path), max_steps=1)
    collect(made)
    ((batch, turns),) = credits
    rows = [json.loads(line) for line in (tmp_path / "rollouts" / "step_000001.jsonl").read_text().splitlines()]
    rows = [rows[start : start + 4] for start in range(0, len(rows), 4)]
    name = made.algo.advantage_estimator
    several = 0
    assert (environment is Failing) == (not batch.scored.all())
    for group, members in enumerate(rows):
        longest = max(len(row["turn_rewards"]) for row in members)
        rewards = [row["turn_rewards"] if row["reward"] is not None else [None] * longest for row in members]
        if algo.binarize:
            rewards = [[*row[:-1], float(row[-1] >= 1)] for row in rewards]
        known = {
            key: [row[f"turn_{key}"] for row in members] for key in ("states", "potentials") if environment is Mapped
        }
        expected = turn_advantages(
            rewards,
            name,
            algo.gamma or 1.0,
            algo.turn_baseline or "fixed_index",
            turn_coef=algo.turn_coef or 1.0,
            **known,
        )
        if known:
            assert [row[0] for row in known["states"]] == [None] * 4, "all begin in one state"
            assert all(set(row[1:]) <= set("abcdefgh") for row in known["states"])
            assert any(map(any, known["potentials"]))
        for sample, row in enumerate(members):
            sampled = batch.sampled[group, sample]
            turn = np.cumsum(np.diff(sampled.astype(int), prepend=0) == 1) - 1  # an observation is between two
            assert turn.max() + 1 == len(row["turn_rewards"])
            count = len(row["turn_rewards"])  # `expected` has more for an unscored trajectory
            np.testing.assert_allclose(row["turn_advantages"], expected[sample][:count], atol=1e-4)
            whole = row["advantage"] if name == "maxrl" else 0.0
            term = expected[sample][turn[sampled]]
            if name == "maxrl":  # the file has the mean over the tokens, with the advantage of the outcome
                whole = row["advantage"] - turns[group, sample][sampled].mean()
            np.testing.assert_allclose(turns[group, sample][sampled] + whole, term, atol=1e-5)
            assert not turns[group, sample][~sampled].any()
            several += turn.max() > 0
    assert several and np.abs(turns).max() > 0.1


@pytest.mark.slow
def test_a_reward_at_the_end_of_equally_many_turns_is_that_of_the_trajectory():
    by_turn = learner(environment=AtTheEnd)
    whole = learner(algo=RLOOConfig(num_generations=4), environment=AtTheEnd)
    start = params_of(by_turn.model)
    for made in (by_turn, whole):
        collect(made)
    assert differ(params_of(whole.model), start)
    for one, two in zip(*map(leaves, (by_turn, whole)), strict=True):
        np.testing.assert_allclose(one, two, atol=2e-6)


def leaves(made):
    return jax.tree.leaves(params_of(made.model))


@pytest.mark.slow
def test_a_reward_at_the_start_credits_the_first_turn_alone(credits):
    collect(learner(environment=AtTheStart, max_steps=1))
    ((batch, turns),) = credits
    number = batch.sampled.cumsum(-1)
    for group, sample in np.ndindex(batch.rewards.shape):
        given = turns[group, sample]
        later = np.flatnonzero(given)
        # The observation after the first turn is not sampled: the credit ends before it.
        first = np.flatnonzero(~batch.sampled[group, sample])
        assert not len(later) or not len(first) or later.max() < first.min()
    assert np.abs(turns).max() > 0.1 and number.max() > 2


@pytest.mark.slow
def test_groups_of_equal_sums_and_other_turns_have_a_signal(credits):
    """With dynamic sampling they are kept; a group whose turns all have the same rewards is left out of the update."""

    class Once(Vowels):
        """A reward of 1 after the first or after the second turn, or never."""

        def step(self, completion):
            self.turns += 1
            first = completion[-1:] in "abcd"
            if self.turns == 1:
                self.first = first
            return "x", float(self.first if self.turns == 1 else not self.first), self.turns == 2

    algo = RLOOConfig(num_generations=4, credit="turn", dynamic_sampling=True)
    rows = collect(learner(algo=algo, environment=Once, max_steps=1))
    ((batch, turns),) = credits
    assert (batch.rewards == 1).all(), "all sums are equal"
    assert np.abs(turns).max() > 0.1 and rows[0]["train/dynamic_sampling/short_groups"] == 0
    assert rows[0]["train/update/rows_left_out_frac"] < 1 and rows[0]["train/grad_norm"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("credit", ["trajectory", "turn"])
def test_a_reward_function_of_turns_is_as_a_reward_of_the_environment(credit, tmp_path):
    algo = RLOOConfig(num_generations=4, credit=credit)
    by_environment = learner(algo=algo)
    by_function = learner(algo=algo, environment=Silent, output_dir=str(tmp_path))
    by_function.set_rewards([per_turn(vowels)], [0.5])
    by_environment.set_rewards([lambda completions: [0.0 for _ in completions]])
    halved = learner(algo=algo, environment=Halved)
    for made in (by_environment, by_function, halved):
        collect(made)
    assert_same(params_of(by_function.model), params_of(halved.model))
    assert differ(params_of(by_environment.model), params_of(halved.model))
    rows = [json.loads(line) for line in (tmp_path / "rollouts" / "step_000001.jsonl").read_text().splitlines()]
    assert all(sum(row["turn_rewards"]) == row["reward"] == 0.5 * row["reward/vowels"] for row in rows)
    assert len({tuple(row["turn_rewards"]) for row in rows}) > 3


class Halved(Vowels):
    def step(self, completion):
        observation, reward, done = super().step(completion)
        return observation, reward / 2, done


@pytest.mark.slow
def test_reward_functions_of_turns_see_the_conversation_before_the_turn():
    seen = []

    def look(prompts, completions, conversation, answer):
        seen.extend(zip(prompts, completions, conversation, strict=True))
        return [0.0] * len(completions)

    made = learner(environment=Silent, max_steps=1)
    made.set_rewards([per_turn(look)])
    collect(made)
    lengths = [len(conversation) for _, _, conversation in seen]
    assert set(lengths) == {1, 3, 5}, "the prompt, and two messages per earlier turn"
    for prompt, completion, conversation in seen:
        roles = [message["role"] for message in conversation]
        assert roles == ["user", "assistant"] * (len(roles) // 2) + ["user"]
        assert prompt.startswith(conversation[0]["content"])
        assert all(message["content"] in prompt for message in conversation)
        assert isinstance(completion, str)


@pytest.mark.slow
def test_potentials_of_a_function_are_those_of_the_environment():
    def potential(completions, conversation):
        assert set(completions) == {""}
        last = [messages[-2]["content"][-1:] if len(messages) > 1 else "none" for messages in conversation]
        return [0.3 * (letter in "abcd") for letter in last]

    def run(environment, **arguments):
        made = learner(environment=environment)
        made.set_rewards(**arguments)
        collect(made)
        return params_of(made.model)

    shaped = run(Mapped, reward_fns=())
    assert_same(run(Vowels, reward_fns=[per_turn(potential, potential=True)]), shaped)
    assert differ(run(Vowels, reward_fns=()), shaped)


@pytest.mark.slow
def test_a_potential_can_be_the_likelihood_of_the_answer(tmp_path):
    made = learner(environment=Silent, output_dir=str(tmp_path / "run"), max_steps=1)
    tunix_like.export_model(made.model, made.tokenizer, tmp_path / "model")
    likelihood = AnswerLikelihood(tmp_path / "model")
    made.set_rewards([per_turn(likelihood, potential=True)])
    collect(made)
    rows = [json.loads(line) for line in (tmp_path / "run" / "rollouts" / "step_000001.jsonl").read_text().splitlines()]
    answers = {row["prompt"]: row["answer"] for row in ROWS}
    several = 0
    for row in rows:
        turns = [place for place, message in enumerate(row["turns"]) if message["role"] == "assistant"]
        before = [[each["content"] for each in row["turns"][:place]] for place in turns]
        prompts = ["\n".join([row["prompt"], *lines]) for lines in before]
        expected = likelihood(prompts, [""] * len(turns), [answers[row["prompt"]]] * len(turns))
        np.testing.assert_allclose(row["turn_potentials"], expected, atol=1e-4)
        several += len(set(row["turn_potentials"])) > 1
    assert several and all(row["reward"] == 0 for row in rows)


@pytest.mark.slow
def test_a_turn_that_cannot_be_scored_leaves_its_trajectory_unscored(tmp_path):
    def partly(completions):
        return [float("nan") if text[-1:] in "ab" else 1.0 for text in completions]

    made = learner(environment=Silent, output_dir=str(tmp_path), max_steps=1)
    made.set_rewards([per_turn(partly)])
    collect(made)
    rows = [json.loads(line) for line in (tmp_path / "rollouts" / "step_000001.jsonl").read_text().splitlines()]
    failed = [any(m["role"] == "assistant" and m["content"][-1:] in "ab" for m in row["turns"]) for row in rows]
    assert [row["reward"] is None for row in rows] == failed and 0 < sum(failed) < len(rows)
    assert all(None in row["turn_rewards"] for row, missing in zip(rows, failed, strict=True) if missing)


@pytest.mark.slow
def test_a_baseline_of_states_needs_states():
    made = learner(algo=RLOOConfig(num_generations=4, credit="turn", turn_baseline="state"), max_steps=1)
    with pytest.raises(UserError, match=r"algorithm\.turn_baseline: state needs a text or number"):
        collect(made)


@pytest.mark.slow
def test_the_critic_gets_the_reward_of_each_turn_at_its_last_token(credits, tmp_path):
    """With `gae_lambda` and `gamma` 1 the returns are the rewards-to-go."""
    made = learner(PPOLearner, PPOConfig(num_generations=4, credit="turn"), output_dir=str(tmp_path), max_steps=1)
    (row,) = [row for row in collect(made) if row["step"] == 1]
    ((batch, turns),) = credits
    np.testing.assert_allclose(turns.sum(-1), batch.rewards, atol=1e-6)
    returns = np.cumsum(turns[..., ::-1], axis=-1)[..., ::-1]
    assert row["train/critic/return"] == pytest.approx(returns[batch.sampled].mean(), abs=1e-5)
    last = batch.sampled & ~np.pad(batch.sampled, ((0, 0), (0, 0), (0, 1)))[..., 1:]
    assert (turns[~last] == 0).all() and ((turns != 0).sum(-1) > 1).any()


@pytest.mark.slow
def test_groups_without_a_signal_are_left_out(credits):
    class Nothing(Vowels):
        def step(self, completion):
            return "x", 0.0, super().step(completion)[2]

    rows = collect(learner(environment=Nothing, max_steps=1))
    assert rows[0]["train/update/rows_left_out_frac"] == 1


@pytest.mark.slow
def test_mesh_training_equals_one_device():
    algo = RLOOConfig(num_generations=4, credit="turn", turn_baseline="state")
    one = learner(algo=algo, environment=Mapped)
    many = learner(algo=algo, environment=Mapped, mesh=build_mesh(MeshConfig(shape=[8, 1])))
    start = params_of(one.model)
    for made in (one, many):
        collect(made, batch_size=8)
    assert differ(params_of(one.model), start)
    for a, b in zip(*map(leaves, (one, many)), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


@pytest.mark.slow
def test_a_resumed_run_equals_the_uninterrupted_one(tmp_path):
    def run(folder, steps):
        made = learner(output_dir=str(tmp_path / folder), max_steps=steps)
        made.train(ROWS, batch_size=4)
        return params_of(made.model)

    whole = run("whole", 3)
    run("parts", 1)
    assert_same(run("parts", 3), whole)


@pytest.mark.parametrize(
    "algo, named",
    [
        (RLOOConfig(num_generations=4, gamma=0.9), "algorithm.gamma"),
        (RLOOConfig(num_generations=4, turn_baseline="reached"), "algorithm.turn_baseline"),
        (RLOOConfig(num_generations=4, credit="turn", binarize=True), "algorithm.binarize"),
        (RLOOConfig(num_generations=4, credit="turn", turn_coef=0.5), "algorithm.turn_coef"),
        (PPOConfig(num_generations=4, credit="turn", gamma=0.5), "critic.gamma"),
        (PPOConfig(num_generations=4, credit="turn", turn_baseline="state"), "algorithm.turn_baseline"),
    ],
)
def test_settings_that_do_not_fit(algo, named):
    with pytest.raises(UserError, match=named):
        learner(PPOLearner if isinstance(algo, PPOConfig) else RLOOLearner, algo=algo)


def test_a_wrong_number_of_values_for_turns_is_a_failure():
    """A call per turn would take one value for the right number."""
    one = per_turn(lambda completions: [1.0])
    found = one.score_groups("one", {"completions": ["a"] * 40}, 40, 1)
    assert np.isnan(found.rewards).all() and set(found.failures) == set(range(40))
    right = per_turn(lambda completions: [float(len(text)) for text in completions])
    found = right.score_groups("right", {"completions": ["ab"] * 39 + ["c"]}, 40, 1)
    assert found.rewards.tolist() == [2.0] * 39 + [1.0] and not found.failures


def test_reward_functions_of_turns_need_turns_and_potentials_credit_by_turn():
    with pytest.raises(UserError, match="'vowels': it scores turns"):
        make(reward=[per_turn(vowels)])
    made = learner(algo=RLOOConfig(num_generations=4))
    with pytest.raises(UserError, match=r"'vowels': only algorithm\.credit=turn"):
        made.set_rewards([per_turn(vowels, potential=True)])
    with pytest.raises(UserError, match="'vowels': 'ppo' has a critic"):
        learner(PPOLearner, PPOConfig(num_generations=4, credit="turn")).set_rewards([per_turn(vowels, potential=True)])


def test_credit_of_turns_needs_turns_and_an_estimator_of_completions():
    with pytest.raises(UserError, match=r"algorithm\.credit: turn needs an environment"):
        make(RLOOConfig(num_generations=4, credit="turn"), learner=RLOOLearner)
    with pytest.raises(UserError, match=r"algorithm\.credit: 'otb'"):
        learner(OTBLearner, OTBConfig(num_generations=4, credit="turn"))
