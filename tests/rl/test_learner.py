"""The learner from the door a Python user comes in by: data of every kind, five algorithms, KL, several updates,
mistakes, resuming."""

import json
import threading
from pathlib import Path

import grain.python as grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import tunix_like
from tunix_like import (
    LEARNERS,
    AlgorithmConfig,
    CustomConfig,
    CustomLearner,
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
from tunix_like.data import reverse_text
from tunix_like.metrics import rows as metric_rows
from tunix_like.rl import advantages, learners
from tunix_like.rl.advantages import ADVANTAGE_ESTIMATORS
from tunix_like.rl.objective import resolve

TEXTS = ["ab", "cd", "ef", "gh", "ba", "dc", "fe", "hg"]
ROWS = [reverse_text.record(text) for text in TEXTS]
HF = {
    "model_type": "qwen2",
    "vocab_size": 13,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
TOKENIZER = reverse_text.tokenizer()
SGD = optax.sgd(0.5)
OWN = ("tokenizer", "metric_fns", "eval_config", "ref_model", "on_row")


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
    own = {name: training.pop(name) for name in OWN if name in training}
    settings = {"max_steps": 2, "actor_optimizer": SGD} | training
    return learner(
        model=make_model() if model is None else model,
        tokenizer=own.pop("tokenizer", TOKENIZER),
        reward_fns=[reward],
        algo_config=MaxRLConfig(num_generations=4) if algo is None else algo,
        rollout_config=rollout or RolloutConfig(max_prompt_length=8, max_tokens_to_generate=4),
        training_config=RLTrainingConfig(**settings),
        **own,
    )


def collect(learner, data=ROWS, eval_ds=None, **arguments):
    """Trains, and returns all rows of metrics."""
    found = []
    learner._on_row = lambda row, total: found.append(dict(row))
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
    with pytest.raises(UserError, match="max_prompt_length.*768.*64 positions. Set both"):
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
    """Advantage and loss are one program: the estimator is traced into it, once, and never sees a number."""
    seen, counts = [], []
    monkeypatch.setattr(advantages, "ADVANTAGE_ESTIMATORS", registry := dict(ADVANTAGE_ESTIMATORS))
    monkeypatch.setattr(learners, "ADVANTAGE_ESTIMATORS", registry)

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
        on_row=lambda row, total: counts.append((row["train/perf/compilations"], len(compiled))),
    )
    last = learner.train(ROWS, batch_size=4)
    assert seen == [[True, True, True]]
    assert [traced for traced, _ in counts] == [1.0] * 5
    assert counts[0][1] > 0 and len({programs for _, programs in counts}) == 1, f"compiled after step 1: {counts}"
    assert last["train/advantage/max"] == 0.5 and last["train/advantage/min"] == -0.5


DEFAULTS = {
    "grpo": ("GRPOLearner", "sequence-mean-token-mean", "ppo_clip", "low_var_kl", False),
    "drgrpo": ("DrGRPOLearner", "sequence-mean-token-scale", "ppo_clip", "low_var_kl", False),
    "rloo": ("RLOOLearner", "seq-mean-token-sum", "reinforce", "kl", True),
    "maxrl": ("MaxRLLearner", "token-mean", "ppo_clip", "low_var_kl", False),
    "maxpo": ("MaxPOLearner", "token-mean", "ppo_clip", "low_var_kl", False),
}


def test_what_an_unset_key_means():
    found = {}
    for name, learner in LEARNERS.items():
        algo = resolve(AlgorithmConfig(advantage_estimator=name), learner.config_class)
        found[name] = (learner.__name__, algo.loss_agg_mode, algo.policy_loss_fn, algo.kl_loss_mode, algo.kl_in_reward)
        assert algo.beta == 0.0 and algo.advantage_estimator == name
        assert getattr(tunix_like, learner.__name__) is learner
        assert getattr(tunix_like, learner.__name__.replace("Learner", "Config")) is learner.config_class
    assert found == DEFAULTS
    assert resolve(AlgorithmConfig(loss_agg_mode="token-mean"), GRPOConfig).loss_agg_mode == "token-mean"


@pytest.mark.parametrize("name", DEFAULTS)
def test_each_learner_trains(name):
    """Two steps of each by its own class; the first step's numbers are those of its estimator, loss and weights."""
    rewards, lengths = [], []

    def watched(prompts, completions, answer):
        rewards.append(varied(prompts, completions, answer))
        return rewards[-1]

    def keep(prompts, completions, rewards, advantages, **columns):
        lengths.append(np.asarray(advantages).reshape(4, 4))
        return {}

    k = {"k": 2} if name == "maxpo" else {}
    learner = make(
        LEARNERS[name].config_class(num_generations=4, **k), learner=LEARNERS[name], reward=watched, metric_fns=[keep]
    )
    before = jax.tree.map(np.asarray, learner.params)
    rows = collect(learner)
    assert [row["step"] for row in rows] == [1, 2]
    assert differ(before, learner.params) and all(np.isfinite(list(row.values())).all() for row in rows)
    expected = tunix_like.compute_advantages(np.reshape(rewards[0], (4, 4)), name, **k)
    np.testing.assert_allclose(lengths[0], expected, rtol=1e-5, atol=1e-6)
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
def test_the_loss_is_the_one_of_the_table(name, monkeypatch):
    """The reported loss of a step, against loops over tokens; micro-batches of two completions change nothing."""
    caught = []
    rewards = np.array([[1.0, 0, 2, 0], [0, 0, 0, 3], [1, 1, 1, 0], [0, 2, 2, 0]])

    learner = make(
        LEARNERS[name].config_class(num_generations=4),
        learner=LEARNERS[name],
        reward=lambda prompts, completions: rewards.reshape(-1),
        max_steps=1,
        train_micro_batch_size=2,
    )
    generate = learner.sampler.generate
    monkeypatch.setattr(learner.sampler, "generate", lambda *a, **k: caught.append(generate(*a, **k)) or caught[-1])
    row = collect(learner)[0]
    expected = naive_loss(name, rewards, caught[0].lengths, caught[0].logprobs)
    assert len(set(caught[0].lengths.reshape(-1).tolist())) > 1, "lengths must differ, or the weights all look alike"
    assert row["train/loss"] == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_a_config_of_another_learner_is_refused():
    with pytest.raises(UserError, match="RLOOLearner takes a RLOOConfig, got a GRPOConfig"):
        make(GRPOConfig(), learner=RLOOLearner)
    with pytest.raises(UserError, match="algorithm.epsilon: the loss 'reinforce' does not read it"):
        make(RLOOConfig(num_generations=4, epsilon=0.1), learner=RLOOLearner).train(ROWS)
    with pytest.raises(UserError, match="algorithm.k: the estimator 'maxpo' needs it"):
        make(MaxPOConfig(num_generations=4), learner=LEARNERS["maxpo"]).train(ROWS)
    plain = make(AlgorithmConfig(num_generations=4), learner=GRPOLearner)  # the base class takes the learner's defaults
    assert (plain.algo.advantage_estimator, plain.algo.policy_loss_fn) == ("grpo", "ppo_clip")


def raises(prompts, completions, answer):
    raise ZeroDivisionError("oops")


BAD_REWARDS = {
    "too few": (lambda prompts, completions: [1.0] * 3, "returned 3 values for 16 completions"),
    "raising": (raises, "'raises' raised ZeroDivisionError: oops"),
    "text": (lambda prompts, completions: ["1"] * 16, "'1', is not a number"),
    "infinite": (lambda prompts, completions: [float("inf")] * 16, "inf, is not within"),
    "negative": (lambda prompts, completions: [-1.0, 1.0] * 8, "maxrl divides .* non-negative.*truncation_order"),
    "unscored": (lambda prompts, completions: [float("nan")] * 16, "no completion could be scored"),
    "another column": (lambda completions, gold: [1.0] * 16, "needs an argument 'gold'.*there are: answer"),
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

    def keep(prompts, completions, rewards, advantages, **columns):
        kept.append(advantages)
        return {}

    row = collect(make(reward=some, metric_fns=[keep], max_steps=1))[0]
    assert row["train/reward/unscored_frac"] == 0.25 and row["train/rewards/mean"] == pytest.approx(1 / 3)
    np.testing.assert_allclose(kept[0].reshape(4, 4), [[2, -1, -1, 0]] * 4, rtol=1e-6)


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
    assert row["train/perf/compilations"] == 1
    with pytest.raises(UserError, match="'reinforce' has no ratio.*make 2. Use ppo_clip"):
        make(RLOOConfig(num_generations=4, **algorithm), learner=RLOOLearner, **training).train(ROWS, batch_size=4)
    one = collect(make(max_steps=1, reward=varied, actor_optimizer=optimizer))[0]
    assert one["train/is_ratio/max"] == pytest.approx(1.0, abs=1e-6) and one["train/pg_clipfrac"] == 0


def test_kl_in_the_loss_starts_at_zero_against_the_starting_weights():
    learner = make(GRPOConfig(num_generations=4, beta=0.1), learner=GRPOLearner, reward=varied, max_steps=3)
    start = jax.tree.map(np.asarray, learner.params)
    rows = collect(learner)
    assert rows[0]["train/kl"] == pytest.approx(0.0, abs=1e-6)
    assert 0 < rows[1]["train/kl"] < rows[2]["train/kl"], "k3 is never negative, and the policy moves away"
    assert_same(jax.tree.map(np.asarray, learner.ref_params), start)
    assert make(GRPOConfig(num_generations=4), learner=GRPOLearner).ref_params is None, "beta 0 holds no reference"


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

    def keep(prompts, completions, rewards, advantages, **columns):
        kept.append(np.asarray(advantages).reshape(4, 4))
        return {}

    model, reference = make_model(), make_model(seed=7)
    learner = make(
        RLOOConfig(num_generations=4, beta=0.5), learner=RLOOLearner, model=model, ref_model=reference,
        reward=lambda prompts, completions: [0.0] * len(completions), metric_fns=[keep], max_steps=1,
    )  # fmt: skip
    caught, generate = [], learner.sampler.generate
    learner.sampler.generate = lambda *a, **k: caught.append((a[1], generate(*a, **k))) or caught[-1][1]
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
    learner = make(GRPOConfig(num_generations=4, beta=0.1), learner=GRPOLearner, model=model, ref_model=model)
    assert len(collect(learner)) == 2


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
    backend = reverse_text.tokenizer()._backend
    tokenizer = Tokenizer(backend, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", chat_template=CHAT)
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
    assert row["train/perf/compilations"] == 1 and row["step"] == 1
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
    assert max(map(len, seen)) == 3 and "2 training prompts are longer" in caplog.text
    with pytest.raises(UserError, match="all 2 training prompts are longer than rollout.max_prompt_length=8; raise it"):
        make().train(long)


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
        with pytest.raises(UserError, match=f"another run: {what}.*another output_dir"):
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
