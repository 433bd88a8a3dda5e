"""Tests user-defined estimators, by registration and by file, and estimators by data source."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tunix_like
from tests.parameters import others_slow
from tunix_like import (
    CustomConfig,
    CustomLearner,
    UserError,
    register_advantage_estimator,
)
from tunix_like.algorithms.registry import ADVANTAGE_ESTIMATORS
from tunix_like.training.updates import Updates

from .small_learner import (
    ROWS,
    assert_same,
    collect,
    differ,
    make,
    params_of,
    varied,
    watch_advantages,
    watch_sampler,
)


@pytest.mark.slow
def test_estimators_without_module_or_hash(monkeypatch):
    """Functions made by `exec` and callable dataclasses are such estimators."""
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


@pytest.mark.slow
def test_user_defined_estimators_are_traced_by_each_learner(monkeypatch):
    """A user's function may read state that has changed since. A second learner traces it again."""
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


@pytest.mark.slow
def test_user_defined_estimator_by_file(tmp_path):
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


def test_array_of_a_wrong_shape_ends_the_run_before_completions_are_sampled(tmp_path):
    """The shape is right for two prompts, for which the learner has tried it, and wrong for a batch."""
    calls = []
    learner = own(tmp_path, "first_two")(reward=lambda *given, **columns: calls.append(given), max_steps=3)
    before = params_of(learner.model)
    with pytest.raises(UserError, match="own.py:first_two' returned an array of shape .2, 4. for rewards of shape .4"):
        learner.train(ROWS, batch_size=4)
    assert not calls
    assert_same(params_of(learner.model), before)


BAD_ESTIMATORS = {
    "first_two": "own.py:first_two' returned an array of shape .2, 4. for rewards of shape .4, 4.",
    "broken": "own.py:broken' returned (inf|nan) for completion 0 of group 2 .prompt '(ab|cd|ef|gh|ba|dc|fe|hg)>'.*"
    "with rewards .5.0, 1.0, 0.0, 2.0.*The weights are those before this step",
}


@pytest.mark.slow
@pytest.mark.parametrize("function", others_slow(BAD_ESTIMATORS, "broken"))
def test_invalid_estimator_changes_no_weight(function, tmp_path, monkeypatch):
    """The invalid result is detected before the weights change, in the step in which it occurs. The completions are
    saved. No update is compiled ahead here, as in a run with an environment."""
    monkeypatch.setattr(Updates, "compile_ahead", lambda *_: None)
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
    learner._listeners[0] = lambda row, total: weights.append(jax.tree.map(np.asarray, learner.params))
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


@pytest.mark.slow
def test_every_source_has_its_own_estimator(tmp_path):
    """In one batch and one compiled step, the advantages of each group are those of its source's estimator, and those
    of the run's estimator otherwise."""
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
def test_error_in_a_source_names_the_source(given, message):
    with pytest.raises(UserError, match=message):
        make(source_estimators={"hard": {"advantage_estimator": "rloo"}, "easy": given})
