"""Tests PPO: the update of the critic, the advantages that reach the policy, and runs of every kind."""

from __future__ import annotations

import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import tunix_like
from tests.parameters import others_slow
from tests.tiny_model import HF
from tunix_like import (
    CriticConfig,
    Curriculum,
    LoraConfig,
    OptimizerConfig,
    PPOConfig,
    PPOLearner,
    RLOOConfig,
    RLOOLearner,
    UserError,
    add_lora,
    add_scalar_head,
)
from tunix_like.algorithms.ppo import ValueObjective
from tunix_like.cli import main as cli
from tunix_like.compile.programs import make_plan, programs_of
from tunix_like.config.load import load
from tunix_like.config.schema import MeshConfig
from tunix_like.models.counts import share_of
from tunix_like.models.sharding import build_mesh
from tunix_like.planning.sizes import described_companions
from tunix_like.step.train_step import StepSpec, TrainState, train_step
from tunix_like.storage.metrics import rows as metric_rows

from .repeated_prompts import (
    BATCH,
    LAYOUTS,
    LENGTHS,
    MASK,
    PLAIN,
    PROMPTS,
    SIZE,
    STEPS,
    data_of,
    difference,
    keep_gradient,
)
from .repeated_prompts import (
    make_model as make_decoder,
)
from .small_learner import (
    ADAMW,
    ROWS,
    TOKENIZER,
    assert_same,
    collect,
    differ,
    make,
    make_model,
    params_of,
    varied,
    watch_sampler,
)
from .test_environments import LENGTHS as TURN_LENGTHS
from .test_environments import TURNS, Vowels

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

# --- the step ---------------------------------------------------------------------------------------------------------


def plain_values(model, prompt, tokens):
    """Returns the values before each token of one completion, from the hidden states of the whole text."""
    ids = jnp.asarray([*prompt, *tokens])[None]
    hidden = model.norm(model._causal(ids, *[jnp.arange(ids.shape[1])[None]] * 2)[0])[0]
    return (hidden @ model.score.kernel[...])[len(prompt) - 1 : -1, 0]


@pytest.mark.slow
@pytest.mark.parametrize("layout", others_slow([LAYOUTS[2], LAYOUTS[6]], LAYOUTS[2]))
def test_the_update_of_a_critic_equals_that_of_whole_texts(layout):
    """The second layout also has stacked layers that are recomputed, as on accelerators."""
    graphdef, params = make_decoder(4, scalar_head=True)
    rng, other = np.random.default_rng(2), layout == LAYOUTS[6]
    old, returns = rng.normal(size=(2, PROMPTS, SIZE, STEPS)).astype(np.float32)
    spec = StepSpec(
        graphdef, ValueObjective(0.3), keep_gradient, PLAIN._replace(logits_chunk=7, stacked=other, remat=other)
    )
    data = data_of(layout)
    data = data._replace(
        batch=data.batch._replace(rollout_logprobs=None), old_logprobs=old, token_advantages=returns, ref_logprobs=None
    )
    state, metrics, _ = jax.jit(lambda state, data: train_step(spec, state, data))(TrainState(params, params), data)
    counted = MASK & BATCH.scored[..., None]

    def loss(params):
        model, total = nnx.merge(graphdef, params), 0.0
        for p, i in np.argwhere(BATCH.scored):
            n = LENGTHS[p, i]
            prompt = BATCH.prompt_tokens[p, : BATCH.prompt_lengths[p]]
            v = plain_values(model, prompt, BATCH.completion_tokens[p, i, :n])
            near = old[p, i, :n] + jnp.clip(v - old[p, i, :n], -0.3, 0.3)
            total += jnp.maximum((v - returns[p, i, :n]) ** 2, (near - returns[p, i, :n]) ** 2).sum() / 2
        return total / counted.sum()

    value, expected = jax.jit(jax.value_and_grad(loss))(params)
    assert metrics["loss"] == pytest.approx(float(value), rel=1e-5)
    assert difference(state.opt_state, expected) < 1e-5


# --- learners ---------------------------------------------------------------------------------------------------------


def learner(settings=None, *, algo=None, **arguments):
    algo = PPOConfig(num_generations=4) if algo is None else algo
    given = {"learner": PPOLearner, "reward": varied, "actor_optimizer": ADAMW} | arguments
    return make(algo, **given, critic_config=CriticConfig(**settings or {}))


def judge(seed=3, **changes):
    """Returns a critic whose values differ between tokens."""
    return add_scalar_head(tunix_like.load_model(HF | changes, init="random", seed=seed)[0], 5)


def logprobs(model, prompt, tokens):
    logits = model(jnp.asarray([*prompt, *tokens])[None])[0, len(prompt) - 1 : -1]
    return jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.asarray(tokens)[:, None], axis=-1)[:, 0]


@pytest.mark.slow
@pytest.mark.parametrize("turns", others_slow(["one turn", "several turns"], "one turn"))
def test_one_step_equals_brute_force(turns):
    """The policy moves by the gradient of `-A log pi`, with the advantages of values of whole texts and rewards with a
    KL to another reference; unscored completions take no part."""
    several = turns == "several turns"

    def scored(prompts, completions, **columns):
        return [math.nan if i in (2, 9) else float(len(text)) for i, text in enumerate(completions)]

    def keep(prompts, completions, rewards, advantages, **columns):
        kept.append((rewards, advantages))
        return {}

    kept = []
    own = {"rollout": TURN_LENGTHS, "environment": Vowels, "environment_config": TURNS} if several else {}
    made = learner(
        {"gamma": 0.9, "gae_lambda": 0.8}, algo=PPOConfig(num_generations=4, beta=0.3), reward={"length": scored},
        critic=judge(), ref_model=make_model(8), actor_optimizer=optax.sgd(1.0), max_steps=1, metric_fns=[keep], **own,
    )  # fmt: skip
    sampled, start = watch_sampler(made), params_of(make_model())
    row = collect(made, shuffle=False)[0]
    out, (total, shown) = sampled[0], kept[0]
    total = np.reshape(total, out.lengths.shape)
    live = ~np.isnan(total)
    assert (~live).sum() == 2
    model, ref, critic = make_model(), make_model(8), judge()
    found = {}
    for p, i in np.argwhere(live):
        n, prompt = out.lengths[p, i], TOKENIZER.encode_prompt(ROWS[p]["prompt"], False)[1]
        tokens = out.tokens[p, i, :n]
        acts = np.flatnonzero(np.ones(n, bool) if out.token_mask is None else out.token_mask[p, i, :n])
        v = np.asarray(plain_values(critic, prompt, tokens), np.float64)[acts]
        kl = np.asarray(logprobs(model, prompt, tokens) - logprobs(ref, prompt, tokens), np.float64)[acts]
        r = -0.3 * kl
        r[-1] += total[p, i]
        deltas = r + 0.9 * np.append(v[1:], 0) - v
        a = np.array([sum(0.72**k * d for k, d in enumerate(deltas[t:])) for t in range(len(acts))])
        found[p, i] = prompt, tokens, acts, v, a, kl
    every = np.concatenate([each[4] for each in found.values()])
    white = {place: (each[4] - every.mean()) / np.sqrt(every.var(ddof=1) + 1e-8) for place, each in found.items()}

    def loss(params):
        policy, total = nnx.merge(made.graphdef, params), 0.0
        for place, (prompt, tokens, acts, *_) in found.items():
            total -= (logprobs(policy, prompt, tokens)[acts] * white[place]).sum()
        return total / len(every)

    expected = jax.jit(jax.grad(loss))(jax.tree.map(jnp.asarray, start))
    moved = jax.tree.map(lambda a, b: a - np.asarray(b), start, made.params)
    assert float(optax.tree.norm(expected)) > 1e-2 and difference(moved, expected) < 2e-4
    for place, each in white.items():
        assert shown.reshape(out.lengths.shape)[place] == pytest.approx(each.mean(), abs=1e-4)
    returns = np.concatenate([each[3] + each[4] for each in found.values()])
    values = np.concatenate([each[3] for each in found.values()])
    assert row["train/critic/return"] == pytest.approx(returns.mean(), rel=1e-4)
    assert row["train/critic/loss"] == pytest.approx(((values - returns) ** 2).mean() / 2, rel=1e-4)
    assert row["train/kl"] == pytest.approx(np.concatenate([each[5] for each in found.values()]).mean(), abs=1e-5)


@pytest.mark.slow
def test_the_critic_learns_alone_at_first():
    """Rewards depend on the prompt only. The policy waits for 60 steps, then moves too."""
    by_prompt = lambda prompts, completions, **c: [float(p[0] in "abcd") for p in prompts]  # noqa: E731
    made = learner({"warmup_steps": 60, "learning_rate": 0.02}, reward={"prompt": by_prompt}, max_steps=61)
    start, seen = params_of(make_model()), []
    rows = []

    def keep(row, total):
        rows.append(row)
        seen.append(differ(start, jax.tree.map(np.asarray, made.params)))

    made._listeners[0] = keep
    made.train(ROWS, batch_size=4)
    assert seen == [False] * 60 + [True]
    assert rows[0]["train/update/empty"] == 1 and rows[60]["train/update/empty"] == 0
    first, last = (np.mean([row["train/critic/loss"] for row in part]) for part in (rows[:4], rows[-4:]))
    assert last < 0.1 * first and rows[0]["train/critic/explained_variance"] == pytest.approx(0, abs=1e-6)
    assert rows[-1]["train/critic/explained_variance"] > 0.5


@pytest.mark.slow
def test_the_schedule_counts_updates_of_the_policy():
    """With three steps of the critic alone, the learning rate still ends where it ends without them."""
    optimizer = OptimizerConfig(learning_rate=1e-3, schedule="linear")
    rates = []
    for warmup, steps in ((0, 5), (3, 8)):
        rows = collect(learner({"warmup_steps": warmup}, actor_optimizer=optimizer, max_steps=steps))
        rates.append([row["train/learning_rate"] for row in rows])
    assert rates[1][3:] == rates[0] and len(set(rates[0])) == 5


@pytest.mark.slow
def test_several_updates_use_the_values_before_the_first():
    """Of two passes with half of the prompts each, only the first update has the values of the estimates."""
    algo = PPOConfig(num_generations=4, num_iterations=2)
    made = learner(
        {"value_clip": 1e-4, "learning_rate": 0.1}, algo=algo, mini_batch_size=2, max_steps=2, critic=judge()
    )
    rows = collect(made)
    assert rows[0]["train/critic/clipfrac"] > 0.2 and rows[0]["train/is_ratio/max"] > 1.0001
    assert all(np.isfinite(row["train/critic/loss"]) for row in rows)


@pytest.mark.slow
def test_a_critic_may_share_arrays_with_the_policy():
    """Both train, and both models have their weights afterwards."""
    model = make_model()
    critic = add_scalar_head(model)
    made = learner(model=model, critic=critic, max_steps=2)
    collect(made)
    one, two = params_of(model), params_of(critic)
    assert differ(one["layers"], two["layers"]) and differ(one["layers"], params_of(make_model())["layers"])
    assert_same(two, jax.tree.map(np.asarray, made.critic.params))
    collect(made)
    assert made.done == 4


@pytest.mark.slow
def test_one_completion_per_prompt():
    rows = collect(learner(algo=PPOConfig(num_generations=1), max_steps=2))
    assert all(row["train/advantage/nonzero_frac"] == 1 and row["train/grad_norm"] > 0 for row in rows)
    assert rows[0]["train/groups/dropped_frac"] == 0


@pytest.mark.slow
def test_mesh_equals_a_single_device():
    wide = HF | {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 16}
    ends = []
    for mesh in (None, build_mesh(MeshConfig(shape=[2, 2, 2], axis_names=["data", "fsdp", "tp"]))):
        made = learner(
            {"learning_rate": 1e-2},
            mesh=mesh,
            model=tunix_like.load_model(wide, init="random", mesh=mesh)[0],
            critic=judge(**wide),
            max_steps=2,
        )
        rows = collect(made)
        ends.append((rows, *(jax.tree.map(np.asarray, each.params) for each in (made, made.critic))))
    for name in ("loss", "critic/loss", "critic/value", "critic/grad_norm"):
        np.testing.assert_allclose(*([row[f"train/{name}"] for row in end[0]] for end in ends), rtol=1e-4, atol=1e-6)
    start = params_of(judge(**wide))
    moved = [jax.tree.map(np.subtract, end[2], start) for end in ends]
    assert difference(*moved) < 1e-2


@pytest.mark.slow
def test_adapters_of_both_share_the_frozen_base():
    model = add_lora(make_model(), LoraConfig(rank=2))
    made = learner({"learning_rate": 0.1}, model=model, max_steps=2)
    frozen = jax.tree.map(np.asarray, made.frozen)
    rows = collect(made)
    assert_same(frozen, jax.tree.map(np.asarray, made.frozen))
    base = {id(leaf) for leaf in jax.tree.leaves(made.frozen)}
    assert {id(leaf) for leaf in jax.tree.leaves(made.critic.frozen)} <= base, "nothing is copied"
    assert made.critic.work.own == made.critic.work.share.trained
    assert rows[1]["train/critic/value"] != 0 and differ(
        made.critic.state.params["score"], {"kernel": np.zeros((8, 1))}
    )


# --- mistakes ---------------------------------------------------------------------------------------------------------

WRONG = {
    "another learner": (
        dict(learner=RLOOLearner, algo=RLOOConfig(num_generations=4), settings={"gamma": 0.9}),
        "critic.gamma: only algorithm.advantage_estimator=ppo",
    ),
    "a critic of another learner": (
        dict(learner=RLOOLearner, algo=RLOOConfig(num_generations=4), critic=True),
        "critic: only algorithm.advantage_estimator=ppo",
    ),
    "no head": (dict(critic="no head"), "critic: it has no scalar head"),
    "no model": (dict(settings={"path": "folder"}), "critic: give the model of critic_config.path='folder'"),
    "vocabulary": (dict(critic="small"), "critic.path: .*vocabulary"),
    "range": (dict(settings={"gae_lambda": 1.5}), "critic.gae_lambda: got 1.5; it must be at most 1"),
    "dynamic sampling": (
        dict(algo=PPOConfig(num_generations=4, dynamic_sampling=True)),
        "algorithm.dynamic_sampling: the estimator 'ppo'",
    ),
    "parameter": (dict(algo=PPOConfig(num_generations=4, k=2)), "algorithm.k: the estimator 'ppo' does not read it"),
    "sources": (
        dict(source_estimators={"x": {"advantage_estimator": "rloo"}}),
        "data source 'x': advantage_estimator=rloo cannot be combined with ppo",
    ),
    "one completion": (
        dict(learner=RLOOLearner, algo=RLOOConfig(num_generations=1)),
        "algorithm.num_generations: got 1; the estimator 'rloo' compares .* at least 2",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_mistakes_are_rejected_before_any_compilation(name):
    arguments, message = WRONG[name]
    arguments = dict(arguments)
    critics = {True: judge, "no head": make_model, "small": lambda: judge(vocab_size=11)}
    if "critic" in arguments:
        arguments["critic"] = critics[arguments["critic"]]()
    with pytest.raises(UserError, match=message):
        learner(arguments.pop("settings", None), **arguments)


def test_a_curriculum_needs_two_completions():
    with pytest.raises(UserError, match="data.curriculum: .* at least 2"):
        learner(algo=PPOConfig(num_generations=1)).train(ROWS, batch_size=4, curriculum=Curriculum())


# --- memory, programs, the command ------------------------------------------------------------------------------------

YAML = str(EXAMPLES / "debug" / "reverse_text.yaml")
PPO = ["algorithm.advantage_estimator=ppo"]


@pytest.mark.slow
def test_memory_estimate_has_the_critic():
    for more in ([], ["lora.rank=2"]):
        plan, without = (
            make_plan(load(YAML, [*names, *more]), None) for names in (PPO, ["algorithm.advantage_estimator=grpo"])
        )
        critic = described_companions(plan.config, plan.model, plan.mesh).critic
        share = share_of(plan.judged_by[1], plan.mesh)
        assert critic.share == share, "shapes without a model are those of the critic"
        held = (share.trained if more else share.weights) + 2 * share.trained
        phases = {phase.name: phase for phase in plan.estimate.phases}
        before = {phase.name: phase for phase in without.estimate.phases}
        assert set(phases) == {*before, "critic"}
        with_counters = [phase.parts["critic"] for name, phase in phases.items() if name != "sft"]
        assert all(held <= own <= held + 8 for own in with_counters)
        assert phases["critic"].parts["gradients"] >= share.trained
        assert phases["update"].bytes - before["update"].bytes >= held


@pytest.mark.slow
def test_programs_for_absent_devices():
    made = {each.name: each for each in programs_of(make_plan(load(YAML, [*PPO, "algorithm.beta=0.1"]), None))}
    assert list(made)[:4] == ["update", "critic", "logprobs", "values"] and made["logprobs"].calls == 2
    for name in ("update", "critic", "values"):
        made[name].lower()


@pytest.mark.slow
def test_the_command_trains_and_resumes(tmp_path, monkeypatch, capsys):
    """The critic starts from the folder of a reward model. The run is stopped after two steps and continued."""
    monkeypatch.chdir(tmp_path)
    few = ["sft.max_steps=3", "data.batch_size=8", "eval.max_problems=8", "eval.samples=2", "eval.k=[1]"]
    tunix_like.export_model(judge(), TOKENIZER, "judge")
    run = ["train", YAML, *few, *PPO, "critic.path=judge", "critic.warmup_steps=1", "training.output_dir=run"]
    assert cli.main([*run, "--dry-run"]) == 0
    assert (
        "critic: judge, gamma 1, gae_lambda 1, value_clip 0.2, learning rate 1e-05, alone for 1 steps"
        in capsys.readouterr().out
    )
    for steps in (2, 3):
        assert cli.main([*run, f"training.max_steps={steps}"]) == 0
    rows = [row for row in metric_rows(tmp_path / "run") if "train/critic/loss" in row]
    assert [row["step"] for row in rows] == [1, 2, 3] and rows[0]["train/critic/value"] != 0
    assert cli.main([*run, "training.max_steps=4", "critic.gamma=0.9"]) == 2
    assert "critic.gamma: 1.0 -> 0.9" in capsys.readouterr().err
    assert cli.main(["report", "run", "--gradients", "1", "--run-code"]) == 2
    assert "cannot compute the gradients of ppo" in capsys.readouterr().err
    assert cli.main(["eval", "run", *few[2:]]) == 0 and cli.main(["export", "run", "out"]) == 0
