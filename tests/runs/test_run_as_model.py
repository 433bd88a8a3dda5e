"""A run folder works wherever a model is asked for: the weights are those of the run's export. A config file opens the
model that it starts from."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import tunix_like
from tests.runs.test_recipe import SMALL, YAML
from tunix_like import UserError
from tunix_like.cli.main import main
from tunix_like.config.load import load
from tunix_like.models import opening
from tunix_like.runs.build import assemble
from tunix_like.runs.trained import open_trained

FROM = ("model.config=null", "model.init=pretrained")


def trained(folder, *overrides):
    tunix_like.run(YAML, [*SMALL, "sft.max_steps=1", f"training.output_dir={folder}", *overrides])


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Runs of all weights and of adapters, also of adapters on a run, and their exports."""
    place = tmp_path_factory.mktemp("runs")
    patch = pytest.MonkeyPatch()
    patch.chdir(place)
    trained("whole")
    trained("adapters", "lora.rank=2", "lora.alpha=8", "optimizer.learning_rate=0.1")
    trained("chained", "lora.rank=2", "optimizer.learning_rate=0.1", "model.path=adapters", *FROM)
    for name in ("whole", "adapters", "chained"):
        assert main(["export", name, f"{name}-export"]) == 0
    yield place
    patch.undo()


def weights(model):
    return nnx.to_pure_dict(nnx.split(model)[1])


def same(a, b):
    assert jax.tree.structure(weights(a)) == jax.tree.structure(weights(b))
    jax.tree.map(np.testing.assert_array_equal, weights(a), weights(b))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["whole", "adapters", "chained"])
@pytest.mark.parametrize("kinds", [{}, {"quantize": "int8"}, {"param_dtype": jnp.bfloat16}], ids=repr)
def test_a_run_loads_as_its_export(place, name, kinds):
    model, tokenizer = opening.load_model(name, **kinds)
    exported, _ = tunix_like.load_model(f"{name}-export", **({"param_dtype": jnp.float32} | kinds))
    same(model, exported)
    assert (model.dtype, model.attention, model.quantized) == (exported.dtype, exported.attention, exported.quantized)
    assert tokenizer.vocab_size == 13
    described, _, _ = opening.load_abstract(name, **kinds)
    assert jax.tree.map(jnp.shape, weights(described)) == jax.tree.map(jnp.shape, weights(model))


@pytest.mark.slow
@pytest.mark.parametrize("source", ["whole", "whole/checkpoints/1", "adapters"])
def test_training_starts_from_a_run_and_notes_its_step(place, source):
    named = [f"model.path={source}", "teacher.path=whole", "teacher.coef=0.1", *FROM]
    parts = assemble(load(YAML, [*SMALL, *named]))
    run = source.partition("/")[0]
    assert parts.config.model.path == f"{run}/checkpoints/1"
    assert parts.config.teacher.path == "whole/checkpoints/1"
    same(parts.model, tunix_like.load_model(f"{run}-export")[0])
    same(parts.teacher, tunix_like.load_model("whole-export")[0])
    assert assemble(load(YAML, [*SMALL, *named]), abstract=True).config == parts.config


@pytest.mark.slow
def test_a_reward_model_from_its_run(place):
    small = [word for word in SMALL if word.startswith(("model.", "data."))]
    options = ("algorithm.advantage_estimator=reward_model", "preference.beta=0.1", "rewards.functions=null")
    lengths = ("sft.max_steps=0", "training.max_steps=1", "training.output_dir=scored")
    tunix_like.run("maze_dpo", [*small, *options, *lengths])
    assert main(["export", "scored", "scored-export"]) == 0
    given = ["GRID_START WALL"], ["WALL PATH"]
    assert tunix_like.RewardModel("scored")(*given) == tunix_like.RewardModel("scored-export")(*given)


@pytest.mark.slow
def test_a_run_whose_start_has_moved_on_is_not_resumed_from_newer_weights(place):
    trained("first")
    trained("second", "model.path=first", *FROM)
    trained("first", "training.max_steps=2")
    longer = ("training.max_steps=2", *FROM)
    with pytest.raises(UserError, match=r"model\.path: 'first/checkpoints/1' -> 'first/checkpoints/2'"):
        trained("second", "model.path=first", *longer)
    trained("second", "model.path=first/checkpoints/1", *longer)


@pytest.mark.slow
def test_config_files_open_the_model_that_they_start_from(place, capsys):
    found = open_trained(str(YAML), [*SMALL, "model.path=whole", "lora.rank=2", *FROM])
    same(found.model, tunix_like.load_model("whole-export")[0])
    assert main(["eval", str(YAML), *SMALL, "training.seed=3"]) == 0
    assert "a random model: 4 problems" in capsys.readouterr().out.replace("\n", " ")
    assert main(["eval", "missing.yaml"]) == 2
    assert "missing.yaml" in capsys.readouterr().err
