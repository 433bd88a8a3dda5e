"""Tests reward models: their loss and gradient, the format of transformers, and their use as a reward function."""

from __future__ import annotations

import inspect
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split

import tunix_like
from tests.tiny_model import HF
from tests.training.test_history import KEEPS, letters
from tests.training.test_preferences import ROWS, SAID, TOKENIZER, collect, distance, gradient_of, params_of
from tests.training.test_preferences import make as make_pairs
from tunix_like import (
    AnswerLikelihood,
    LoraConfig,
    PreferenceConfig,
    RewardModel,
    RewardModelLearner,
    UserError,
    add_scalar_head,
)
from tunix_like.cli.main import main
from tunix_like.config.schema import MeshConfig
from tunix_like.models.lora import add_lora
from tunix_like.models.sharding import build_mesh
from tunix_like.rewards import per_turn
from tunix_like.text.tokenizer import Tokenizer


def make_model(seed=0, **changed):
    return add_scalar_head(tunix_like.load_model(HF | changed, init="random", seed=seed)[0])


def make(preference=None, *, model=None, **given):
    preference = PreferenceConfig() if preference is None else preference
    return make_pairs(preference, model=model or make_model(), learner=RewardModelLearner, **given)


def whole(learner, row, column):
    """Returns the tokens of the prompt and a completion of a row."""
    prompt = learner.tokenizer.encode_prompt(row["prompt"], False)[1]
    return prompt + learner._answers.encode(row["prompt"], row[column], row).tokens


def last_hidden(model, tokens):
    hidden, *_ = model._causal(jnp.array([tokens]), *[jnp.arange(len(tokens))[None]] * 2)
    return model.norm(hidden)[0, -1]


@pytest.mark.slow
@pytest.mark.parametrize("center", [None, 0.05])
def test_loss_and_gradient_equal_those_of_whole_sequences(center):
    """Also with several turns, whose whole text is scored."""
    rows = [*ROWS[:3], {"prompt": "ab>", "chosen": SAID, "rejected": "ba"}]
    learner = make(PreferenceConfig(center_rewards=center), max_steps=1, actor_optimizer=optax.sgd(1.0))
    row, before, got = gradient_of(learner, rows)

    def loss(params):
        model = nnx.merge(learner.graphdef, params)
        kernel = params["score"]["kernel"][:, 0]
        r = jnp.array([[last_hidden(model, whole(learner, row, name)) @ kernel for name in ("chosen", "rejected")]
                       for row in rows])  # fmt: skip
        return (jnp.log1p(jnp.exp(r[:, 1] - r[:, 0])) + (center or 0) * r.sum(1) ** 2).mean()

    value, expected = jax.value_and_grad(loss)(jax.tree.map(jnp.asarray, before))
    assert row["train/loss"] == pytest.approx(float(value), rel=1e-5)
    assert distance(got, expected) < 2e-5
    assert "train/entropy" not in row and "train/logps/chosen" not in row


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A reward model and the learner that trained it, and its folder."""
    learner = make(model=make_model(tie_word_embeddings=False), max_steps=20)
    rows = collect(learner, held_out=ROWS)
    assert rows[-1]["eval/rewards/accuracies"] == 1 and rows[-1]["eval/loss"] < 0.3
    folder = tmp_path_factory.mktemp("reward") / "model"
    tunix_like.export_model(learner.model, TOKENIZER, folder)
    return learner, folder


def test_scores_are_those_of_transformers(trained):
    import torch
    import transformers

    learner, folder = trained
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    assert theirs.config.num_labels == 1 and theirs.config.architectures == ["Qwen2ForSequenceClassification"]
    texts = [[row["chosen"], row["rejected"], row["chosen"] + "a"] for row in ROWS]
    prompts = [row["prompt"] for row in ROWS for _ in range(3)]
    model = RewardModel(folder)
    got = model(prompts, [text for group in texts for text in group])
    expected = []
    with torch.no_grad():
        for row, group in zip(ROWS, texts, strict=True):
            for text in group:
                tokens = whole(learner, {**row, "text": text}, "text")
                expected.append(theirs(torch.tensor([tokens])).logits.item())
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)
    assert np.std(expected) > 0.1


@pytest.mark.parametrize("kind", [RewardModel, AnswerLikelihood])
def test_messages_before_a_turn_are_rendered(kind, tmp_path):
    """As in a reward of turns. The chat template of the scoring model is used."""
    tokenizer = letters(KEEPS)
    changed = {"vocab_size": tokenizer.vocab_size}
    model = make_model(**changed) if kind is RewardModel else tunix_like.load_model(HF | changed, init="random")[0]
    if kind is RewardModel:
        kernel = model.score.kernel
        kernel.set_value(jnp.ones_like(kernel.get_value()))
    tunix_like.export_model(model, tokenizer, tmp_path / "model")
    score = per_turn(kind(tmp_path / "model"))
    assert score.unrendered
    first = [{"role": "user", "content": "ab"}]
    messages = [[*first, {"role": "assistant", "content": "c"}, {"role": "user", "content": "d"}], first]
    given = {"completions": ["h", "e"], "answer": ["a", "b"]}
    names = inspect.signature(score).parameters
    found, expected = (
        score.score_groups("score", {k: v for k, v in (given | {"prompts": prompts}).items() if k in names}, 2, 1)
        for prompts in (messages, ["ab>c<eos>d>", "ab>"])
    )
    np.testing.assert_allclose(found.rewards, expected.rewards, rtol=1e-5)
    assert len({*found.rewards}) == 2 and np.isfinite(found.rewards).all()


def test_likelihoods_of_answers_are_those_of_transformers(tmp_path):
    """Of text, of messages before a turn, and of an answer that does not fit."""
    import torch
    import transformers

    model = tunix_like.load_model(HF | {"max_position_embeddings": 16}, init="random", seed=1)[0]
    tunix_like.export_model(model, TOKENIZER, tmp_path / "model")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    prompts = ["ab>", "cd>", "ab>", "ab>"]
    completions = ["c", "", "ba", "a" * 13]
    answers = ["ab", "d", "abcd", "ab"]
    got = AnswerLikelihood(tmp_path / "model")(prompts, completions, answers)
    for prompt, completion, answer, value in zip(prompts[:3], completions, answers, got, strict=False):
        before = [*TOKENIZER.encode_prompt(prompt, False)[1], *TOKENIZER.encode_data(completion, 16)]
        whole = [*before, *TOKENIZER.encode_data(answer, 16)]
        with torch.no_grad():
            logprobs = theirs(torch.tensor([whole])).logits.double().log_softmax(-1)[0]
        expected = sum(logprobs[i - 1, whole[i]].item() for i in range(len(before), len(whole)))
        assert value == pytest.approx(expected, abs=1e-4)
    assert np.isnan(got[3])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pad", "more", "rows", "own"),
    [
        ("<eos>", ["<|im_start|>", "<my_pad>"], 0, "<my_pad>"),
        (None, ["<|im_start|>"], 0, "<|im_start|>"),
        (None, [], 4, "<|pad|>"),
        ("<eos>", [], 1, "<|pad|>"),
        ("<eos>", [], 0, None),
    ],
)
def test_exported_model_has_a_pad_token_that_ends_no_text(trained, tmp_path, pad, more, rows, own):
    """transformers takes the score of the last token that is no pad token."""
    import torch
    import transformers

    backend = Backend(WordLevel({letter: i for i, letter in enumerate("abcd>?")}, unk_token="?"))
    backend.pre_tokenizer = Split("", "isolated")
    backend.add_special_tokens(["<eos>", *more])
    tokenizer = Tokenizer(backend, eos_token="<eos>", pad_token=pad)
    model = make_model(vocab_size=tokenizer.vocab_size + rows)
    tunix_like.export_model(model, tokenizer, tmp_path / "model")
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "model")
    read = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    assert read.pad_token == own and theirs.config.pad_token_id == read.pad_token_id
    texts = ["ab", "abcd", "c"]
    rows = [read(f"ab>{text}<eos>")["input_ids"] for text in texts]
    with torch.no_grad():
        if own is None:
            expected = [theirs(torch.tensor([row])).logits.item() for row in rows]
        else:
            width = max(map(len, rows))
            padded = torch.tensor([row + [read.pad_token_id] * (width - len(row)) for row in rows])
            expected = theirs(padded, attention_mask=padded != read.pad_token_id).logits[:, 0].tolist()
    for tokens, score in zip(rows, expected, strict=True):
        assert float(last_hidden(model, tokens) @ model.score.kernel[...][:, 0]) == pytest.approx(score, abs=1e-5)
    assert RewardModel(tmp_path / "model")(["ab>"] * 3, texts) == pytest.approx(expected, abs=1e-5)


def test_foreign_model_whose_pad_token_ends_a_text_has_the_score_of_transformers(trained, tmp_path):
    import torch
    import transformers

    _, folder = trained
    shutil.copytree(folder, tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    fields = json.loads(file.read_text())
    file.write_text(json.dumps(fields | {"pad_token_id": TOKENIZER.eos_id}))
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "model")
    texts, prompt = ["ba", "a", "", "dcb"], TOKENIZER.encode_prompt("ab>", False)[1]
    rows = [[*prompt, *TOKENIZER.encode(text, add_special_tokens=False), TOKENIZER.eos_id] for text in texts]
    with torch.no_grad():
        expected = [theirs(torch.tensor([row])).logits.item() for row in rows]
    assert RewardModel(tmp_path / "model")(["ab>"] * 4, texts) == pytest.approx(expected, abs=1e-5)
    assert RewardModel(folder)(["ab>"] * 4, texts) != pytest.approx(expected, abs=1e-3)


@pytest.mark.slow
def test_groups_of_unequal_sizes_and_texts_that_do_not_fit(trained):
    _, folder = trained
    prompts = ["ab>", "ab>", "cd>", "ab>", "ab>", "ab>", "ab>", "c" * 70 + ">", "d>"]
    completions = ["ba", "a", "dc", "b", "ba", "c", "a", "c", "d" * 70]
    got = RewardModel(folder)(prompts, completions)
    assert got[4] == pytest.approx(got[0], abs=1e-6) and got[6] == pytest.approx(got[1], abs=1e-6)
    assert np.isnan(got).tolist() == [False] * (len(got) - 2) + [True] * 2
    alone = [
        RewardModel(folder)([prompt], [text])[0] for prompt, text in zip(prompts[:4], completions[:4], strict=True)
    ]
    assert got[:4] == pytest.approx(alone, abs=1e-5)
    assert np.isnan(RewardModel(folder)(prompts[-2:], completions[-2:])).all()


def test_scores_on_a_mesh(trained):
    _, folder = trained
    mesh = build_mesh(MeshConfig(shape=[2, 2, 1], axis_names=["data", "fsdp", "tp"]), jax.devices()[:4])
    prompts, texts = [row["prompt"] for row in ROWS[:3]], [row["chosen"] for row in ROWS[:3]]
    assert RewardModel(folder, mesh)(prompts, texts) == pytest.approx(RewardModel(folder)(prompts, texts), abs=1e-5)


@pytest.mark.slow
def test_training_on_8_devices_equals_that_on_one():
    wide = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 16}
    found = []
    for shape in (None, [2, 2, 2]):
        mesh = None if shape is None else build_mesh(MeshConfig(shape=shape, axis_names=["data", "fsdp", "tp"]))
        learner = make(model=make_model(**wide), mesh=mesh, max_steps=2, train_micro_batch_size=2)
        rows = collect(learner, batch_size=8)
        found.append(([row["train/loss"] for row in rows], params_of(learner.model)))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-5)
    assert distance(found[1][1], found[0][1]) < 1e-4


@pytest.mark.slow
def test_a_resumed_run_equals_the_uninterrupted_run(tmp_path):
    def trained(folder, steps):
        learner = make(max_steps=steps, output_dir=str(tmp_path / folder), checkpoint_every_n_steps=1)
        collect(learner, shuffle=True)
        return params_of(learner.model)

    whole, _ = trained("whole", 4), trained("parts", 2)
    jax.tree.map(np.testing.assert_array_equal, trained("parts", 4), whole)


@pytest.mark.slow
def test_adapters_and_the_head_are_trained():
    model = add_lora(make_model(), LoraConfig(rank=2), 0)
    learner = make(model=model, max_steps=3)
    before = params_of(learner.model)
    collect(learner)
    after = params_of(learner.model)
    changed = jax.tree_util.tree_map_with_path(lambda path, a, b: not np.array_equal(a, b), before, after)
    assert changed["score"]["kernel"] and not changed["embed_tokens"]["embedding"]
    assert changed["layers"][0]["mlp"]["up_proj"]["lora_b"] and not changed["layers"][0]["mlp"]["up_proj"]["kernel"]
    with pytest.raises(UserError, match="export the whole model"):
        tunix_like.save_adapter(learner.model, "unused")


def test_wrong_models_are_refused(tmp_path, trained):
    _, folder = trained
    plain = tunix_like.load_model(HF, init="random")[0]
    with pytest.raises(UserError, match="no scalar head"):
        make(model=plain)
    with pytest.raises(UserError, match="it is a reward model"):
        make_pairs(model=make_model())
    with pytest.raises(UserError, match="cannot sample"):
        make_model()(jnp.ones((1, 2), jnp.int32))
    tunix_like.export_model(plain, TOKENIZER, tmp_path / "plain")
    with pytest.raises(UserError, match=r"model:.*no reward model"):
        RewardModel(tmp_path / "plain")
    config = json.loads((folder / "config.json").read_text())
    with pytest.raises(UserError, match="one label only"):
        tunix_like.load_model(config | {"id2label": {"0": "A", "1": "B"}}, init="random")
    with pytest.raises(UserError, match="preference.beta: the reward model does not read it"):
        make(PreferenceConfig(beta=0.3))


YAML = """
model: {{path: {folder}}}
data: {{name: jsonl, path: {data}, eval_size: 2, batch_size: 8}}
algorithm: {{advantage_estimator: {name}}}
rollout: {{max_prompt_length: 8, max_tokens_to_generate: 4}}
optimizer: {{learning_rate: 1.0e-2}}
eval: {{samples: 2, batch_size: 2}}
training: {{max_steps: 2, loggers: [], output_dir: {out}}}
"""


@pytest.mark.slow
def test_commands_train_both_kinds_and_sample_for_the_reward_model(tmp_path, capsys):
    """From files to an exported reward model, and RL whose reward it is; DPO resumes, is evaluated and exported."""
    policy = tunix_like.load_model(HF, init="random")[0]
    tunix_like.export_model(policy, TOKENIZER, tmp_path / "policy")
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS * 2)))

    def command(kind, name, *overrides, status=0):
        file = tmp_path / f"{name}.yaml"
        given = {"folder": tmp_path / "policy", "data": tmp_path / "rows.jsonl", "out": tmp_path / f"run_{name}"}
        file.write_text(YAML.format(name=name, **given))
        assert main([kind, str(file), *overrides]) == status
        return capsys.readouterr()

    adapters = "lora.rank=2", f"training.output_dir={tmp_path}/run_lora"
    for overrides in ((), adapters):
        said = command("train", "reward_model", *overrides).out
        assert "RewardModelLearner (reward_model)" in said and "Bradley-Terry" in said and "sampled at once" not in said
    assert main(["export", f"{tmp_path}/run_reward_model", f"{tmp_path}/judge"]) == 0
    assert main(["export", f"{tmp_path}/run_lora", f"{tmp_path}/judge_lora"]) == 0
    assert (
        RewardModel(tmp_path / "judge_lora")(["ab>"], ["ba"])[0] != RewardModel(tmp_path / "judge")(["ab>"], ["ba"])[0]
    )
    name = f"rewards.functions=[{{name: 'model:{tmp_path}/judge'}}]"
    command("train", "maxrl", name, "algorithm.num_generations=4", "algorithm.advantage_estimator=rloo")
    rows = [json.loads(line) for line in (tmp_path / "run_maxrl" / "metrics.jsonl").read_text().splitlines()]
    assert np.isfinite(rows[-1]["train/rewards/mean"]) and rows[-1]["train/rewards/mean"] != 0

    command("train", "dpo")
    command("train", "dpo", "training.max_steps=3")
    rows = [json.loads(line) for line in (tmp_path / "run_dpo" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2, 3] and "eval/rewards/accuracies" in rows[-1]
    assert "eval/pass@1" not in rows[-1], "the rows have no answer"
    assert main(["export", f"{tmp_path}/run_dpo", f"{tmp_path}/out"]) == 0
    assert main(["report", f"{tmp_path}/run_dpo"]) == 0
    assert not tunix_like.load_model(tmp_path / "out")[0].config.scalar_head
    for override in ("algorithm.num_generations=4", "rollout.max_staleness=1", "training.mini_batch_size=2"):
        assert override.partition("=")[0] in command("train", "dpo", override, status=2).err
    assert "rewards.functions" in command("train", "reward_model", name, status=2).err
    assert "preference.beta" in command("train", "maxrl", name, "preference.beta=0.2", status=2).err
