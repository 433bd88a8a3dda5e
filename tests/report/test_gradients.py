"""Tests `report --gradients`: the gradient norm of each prompt, against the plain model on repeated prompts, and its
page."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tunix_like.cli import main as cli
from tunix_like.report import gradients
from tunix_like.runs.trained import open_trained

pytestmark = pytest.mark.slow

CONFIG = """
model: {init: random, config: {model_type: qwen2, hidden_size: 8, intermediate_size: 8, num_hidden_layers: 1,
  num_attention_heads: 2, num_key_value_heads: 1, max_position_embeddings: 64, tie_word_embeddings: true}}
data: {name: reverse_text, batch_size: 8, train_size: 20, eval_size: 8}
algorithm: {advantage_estimator: drgrpo, num_generations: 4, loss_agg_mode: seq-mean-token-sum, beta: 0.05}
rollout: {max_prompt_length: 16, max_tokens_to_generate: 4}
rewards: {functions: [{name: reward.py:f}], workers: 0}
optimizer: {learning_rate: 1e-2}
eval: {samples: 1, batch_size: 8}
training: {max_steps: 1, output_dir: run}
"""
REWARD = """
def f(prompts, completions, **_):
    return [None if len(c) == 3 else float(sum(map(ord, c)) % 3 == 0) for c in completions]
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "c.yaml").write_text(CONFIG)
    assert cli.main(["train", "c.yaml"]) == 0
    return tmp_path / "run"


def naive(trained, batch):
    """Returns for each group the gradient of `-sum A log p / N`, computed by the plain model on every prompt and
    completion."""
    graphdef, state = nnx.split(trained.model)

    @jax.jit
    def norm(state, tokens, real, chosen, weight):
        def loss(state):
            logits = nnx.merge(graphdef, state)(tokens, real)[:, :-1]
            logprobs = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], axis=2)[..., 0]
            return -(weight[:, None] * jnp.where(chosen[:, 1:], logprobs, 0.0)).sum()

        return jnp.sqrt(sum((leaf**2).sum() for leaf in jax.tree.leaves(jax.grad(loss)(state))))

    groups, size = batch.rewards.shape
    width = batch.prompt_tokens.shape[1] + batch.completion_tokens.shape[2]
    out = []
    for g in range(groups):
        tokens, real, chosen = (
            np.zeros((size, width), np.int32),
            np.zeros((size, width), int),
            np.zeros((size, width), bool),
        )
        begin = batch.prompt_lengths[g]
        for s in range(size):
            end = begin + batch.completion_lengths[g, s]
            tokens[s, :begin] = batch.prompt_tokens[g, :begin]
            tokens[s, begin:end] = batch.completion_tokens[g, s, : end - begin]
            real[s, :end], chosen[s, begin:end] = 1, True
        known = batch.scored[g]
        mean = batch.rewards[g][known].mean() if known.any() else 0.0
        weight = np.where(known & (known.sum() > 1), batch.rewards[g] - mean, 0) / batch.scored.sum()
        out.append(float(norm(state, tokens, real, chosen, np.float32(weight))))
    return out


def test_norms_equal_those_of_the_plain_model(run, monkeypatch, capsys):
    """The KL is left out. Twenty rows make two batches of eight. The page shows the result."""
    batches, made = [], gradients.training_batch
    monkeypatch.setattr(gradients, "training_batch", lambda *args: batches.append(made(*args)) or batches[-1])
    found = gradients.measure(run, 9)
    trained = open_trained(str(run))
    assert len(batches) == 2 and found.origin == f"{run}/checkpoints/1"
    expected, rates = [], []
    for batch in batches:
        scored, rewards = batch.scored, batch.rewards
        kept = scored.any(axis=1)
        expected += np.array(naive(trained, batch))[kept].tolist()
        rates += [rewards[g][scored[g]].mean() for g in np.flatnonzero(kept)]
    np.testing.assert_allclose(found.norms, expected, rtol=1e-3, atol=1e-6)
    np.testing.assert_allclose(found.rates, rates, rtol=1e-6)
    assert sum(norm > 0 for norm in found.norms) >= 3, "the test can fail"
    assert all((each in (0, 9)) == (rate in (0, 1)) for each, rate in zip(found.bins, found.rates, strict=True))

    assert cli.main(["report", "run", "--gradients", "1", "--run-code", "--png", "png"]) == 0
    assert '"gradients":[{"rates":[' in (run / "report.html").read_text()
    assert (run.parent / "png" / "gradient_norm_by_pass_rate.png").exists()
    assert cli.main(["report", "run", "--gradients", "0", "--run-code"]) == 2
    assert "--gradients 0: give a number of batches" in capsys.readouterr().err
    (run / "config.yaml").unlink()
    assert cli.main(["report", "run", "--gradients", "1", "--run-code"]) == 2
    assert "has no config.yaml" in capsys.readouterr().err
