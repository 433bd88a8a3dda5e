"""Compares the losses of pairs with TRL's trainers, with float32 weights of the same tiny model: loss, metrics and
gradients."""

from __future__ import annotations

import numpy as np
import optax
import pytest
from flax.nnx.traversals import flatten_mapping

import tunix_like
from tests.training import test_reward_model
from tests.training.test_preferences import LOSSES, ROWS, TOKENIZER, gradient_of, make, make_model
from tunix_like import PreferenceConfig
from tunix_like.models.weights import hf_name

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
datasets = pytest.importorskip("datasets")
pytest.importorskip("trl")

pytestmark = pytest.mark.slow

PAIRS = ROWS[:4]


class KeepGradients(transformers.TrainerCallback):
    def __init__(self):
        self.kept = {}

    def on_pre_optimizer_step(self, args, state, control, model=None, **others):
        self.kept |= {name: p.grad.numpy().copy() for name, p in model.named_parameters() if p.grad is not None}


@pytest.fixture
def peer(tmp_path):
    """Runs one step of a TRL trainer on `PAIRS`, and returns the logged metrics and the gradients."""

    def run(trainer, config, model, **given):
        settings = config(
            output_dir=str(tmp_path / "peer"), per_device_train_batch_size=len(PAIRS), max_steps=1, learning_rate=1e-30,
            max_grad_norm=1e30, report_to=[], use_cpu=True, bf16=False, logging_steps=1, disable_tqdm=True,
            save_strategy="no", gradient_checkpointing=False, max_length=64, **given.pop("settings"),
        )  # fmt: skip
        callback = KeepGradients()
        made = trainer(
            model=model, args=settings, train_dataset=datasets.Dataset.from_list(PAIRS), callbacks=[callback],
            processing_class=transformers.AutoTokenizer.from_pretrained(tmp_path / "policy"), **given,
        )  # fmt: skip
        made.train()
        return next(row for row in made.state.log_history if "loss" in row), callback.kept

    return run


def assert_gradients_equal(ours, theirs):
    flat = {hf_name(path): (path, value) for path, value in flatten_mapping(ours).items()}
    assert set(flat) == set(theirs)
    off = size = 0.0
    for name, (path, value) in flat.items():
        other = theirs[name].T if path[-1] == "kernel" else theirs[name]
        off, size = off + np.square(value - other).sum(), size + np.square(other).sum()
    assert size > 0 and (off / size) ** 0.5 < 1e-5


def export(model, folder):
    tunix_like.export_model(model, TOKENIZER, folder)
    return folder


@pytest.mark.parametrize("name", ["sigmoid", "ipo"])
def test_dpo_and_ipo(name, tmp_path, peer):
    from trl import DPOConfig, DPOTrainer

    reference = make_model(seed=1, tie_word_embeddings=False)
    folders = [export(make_model(tie_word_embeddings=False), tmp_path / "policy"), export(reference, tmp_path / "ref")]
    policy, ref = (transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for folder in folders)
    settings = {"beta": 0.3, "loss_type": [name]}
    theirs, gradients = peer(DPOTrainer, DPOConfig, policy, ref_model=ref, settings=settings)
    model = make_model(tie_word_embeddings=False)
    learner = make(LOSSES[name], model=model, ref_model=reference, max_steps=1, actor_optimizer=optax.sgd(1.0))
    row, _, ours = gradient_of(learner, PAIRS)
    for metric in ("loss", "rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies",
                   "logps/chosen", "logps/rejected"):  # fmt: skip
        assert row[f"train/{metric}"] == pytest.approx(theirs[metric], rel=1e-5, abs=2e-6), metric
    assert_gradients_equal(ours, gradients)


def test_orpo(tmp_path, peer):
    """TRL's likelihood term includes the prompt, ours is that of the completion, as in the paper. The difference is
    computed with the model of transformers."""
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    folder = export(make_model(tie_word_embeddings=False), tmp_path / "policy")
    policy = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    theirs, gradients = peer(ORPOTrainer, ORPOConfig, policy, settings={"beta": 0.3})
    learner = make(
        LOSSES["orpo"], model=make_model(tie_word_embeddings=False), max_steps=1, actor_optimizer=optax.sgd(1.0)
    )
    row, _, ours = gradient_of(learner, PAIRS)
    for metric in ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies", "logps/chosen",
                   "logps/rejected", "log_odds_ratio"):  # fmt: skip
        assert row[f"train/{metric}"] == pytest.approx(theirs[metric], rel=1e-5, abs=2e-6), metric
    policy.zero_grad()
    whole, own = [], []
    for pair in PAIRS:
        prompt = TOKENIZER.encode_prompt(pair["prompt"], False)[1]
        tokens = torch.tensor([prompt + learner._answers.encode(pair["prompt"], pair["chosen"], pair).tokens])
        logprobs = policy(tokens).logits[0].log_softmax(-1)[:-1].gather(1, tokens[0, 1:, None])[:, 0]
        whole.append(logprobs)
        own.append(logprobs[len(prompt) - 1 :])
    difference = torch.cat(own).mean() - torch.cat(whole).mean()
    difference.backward()
    assert row["train/loss"] == pytest.approx(theirs["loss"] - difference.item(), rel=1e-5)
    without = {name: gradients[name] - parameter.grad.numpy() for name, parameter in policy.named_parameters()}
    assert_gradients_equal(ours, without)


def test_bradley_terry(tmp_path, peer):
    from trl import RewardConfig, RewardTrainer

    export(make_model(), tmp_path / "policy")  # for its tokenizer
    folder = export(test_reward_model.make_model(), tmp_path / "reward")
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    theirs, gradients = peer(RewardTrainer, RewardConfig, model, settings={"center_rewards_coefficient": 0.05})
    preference = PreferenceConfig(center_rewards=0.05)
    row, _, ours = gradient_of(test_reward_model.make(preference, max_steps=1, actor_optimizer=optax.sgd(1.0)), PAIRS)
    for metric, other in (("loss", "loss"), ("rewards/margins", "margin"), ("rewards/accuracies", "accuracy")):
        assert row[f"train/{metric}"] == pytest.approx(theirs[other], rel=1e-5, abs=1e-6), metric
    assert_gradients_equal(ours, gradients)
