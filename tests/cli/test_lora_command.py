"""Tests a run with adapters from the command line: training, evaluation, both kinds of export, and loading in PEFT and
transformers."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tunix_like
from tunix_like.cli import main as cli
from tunix_like.config.load import load
from tunix_like.runs import build as runs
from tunix_like.runs.trained import open_trained
from tunix_like.storage.checkpoints import Checkpoints

pytestmark = pytest.mark.slow

YAML = str(Path(__file__).resolve().parents[2] / "examples" / "debug" / "reverse_text.yaml")
SMALL = (
    "model.config.hidden_size=64",
    "model.config.intermediate_size=64",
    "model.config.num_hidden_layers=1",
    "data.batch_size=4",
    "data.train_size=50",
    "data.eval_size=8",
    "algorithm.num_generations=4",
    "sft.max_steps=20",
    "sft.batch_size=8",
    "sft.optimizer.learning_rate=0.01",
    "eval.batch_size=8",
    "training.max_steps=1",
    "training.output_dir=run",
    "mesh.shape=[8, 1]",
)
LORA = ("lora.rank=4", "lora.alpha=6", "data.batch_size=8")


def test_run_with_adapters_is_trained_evaluated_and_exported(tmp_path, monkeypatch, capsys):
    import peft
    import torch
    import transformers

    monkeypatch.chdir(tmp_path)

    def call(*argv):
        status, said = cli.main(argv), capsys.readouterr()
        assert status == 0, said.err
        return said.out

    said = call("train", YAML, *SMALL, *LORA, "--dry-run")
    kinds = "q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj"
    assert "0.03 M parameters frozen in float32, 0.00 M trained (LoRA of rank 4, alpha 6, on " + kinds in said
    assert call("train", YAML, *SMALL, *LORA).count("LoRA of rank 4") == 1
    assert "8 problems, 4 samples each" in call("eval", "run")
    assert call("generate", "run", "--prompt", "abc>", "rollout.temperature=0")
    call("export", "run", "merged")
    call("export", "run", "adapter", "--adapter")
    assert json.loads(Path("adapter/adapter_config.json").read_text())["lora_alpha"] == 6

    # The base is drawn again from the config and seed of the run. PEFT combines it with the adapters into the merged
    # model.
    base, tokenizer = tunix_like.load_model("run/model", init="random")
    tunix_like.export_model(base, tokenizer, "base")
    tokens = np.random.default_rng(0).integers(0, tokenizer.vocab_size, (2, 12))

    def logits(model):
        with torch.no_grad():
            return model(torch.tensor(tokens)).logits.float().numpy()

    load = transformers.AutoModelForCausalLM.from_pretrained
    alone, merged = (load(folder, dtype=torch.float32) for folder in ("base", "merged"))
    before = logits(alone)
    np.testing.assert_allclose(logits(peft.PeftModel.from_pretrained(alone, "adapter")), logits(merged), atol=1e-4)
    assert np.abs(logits(merged) - before).max() > 0.1
    trained = open_trained("run")
    np.testing.assert_allclose(trained.model(jnp.asarray(tokens)), logits(merged), atol=1e-4)
    assert trained.params["layers"][0]["mlp"]["up_proj"]["lora_a"].addressable_shards[0].data.shape == (8, 4)

    with Checkpoints(Path("run/checkpoints").absolute()) as checkpoints:
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), trained.params)
        with pytest.raises(tunix_like.UserError, match=r"params/embed_tokens/embedding: stored nothing"):
            checkpoints.restore(1, {"params": shapes})


def test_targets_are_checked_before_any_weights(monkeypatch):
    monkeypatch.setattr(runs, "load_model", lambda *args, **kinds: pytest.fail("weights were read"))
    experts = "num_experts=4 num_experts_per_tok=2 moe_intermediate_size=32 model_type=qwen3_moe"
    experts += " head_dim=16 norm_topk_prob=true"
    fields = [f"model.config.{field}" for field in experts.split()]
    with pytest.raises(tunix_like.UserError, match=r"lora\.targets: up_proj: .* mixtures of experts"):
        runs.assemble(load(YAML, [*fields, "lora.rank=2", "lora.targets=[up_proj]"]))
