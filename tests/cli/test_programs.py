"""`doctor --config --devices`: the programs of a run on devices that are not here, against the programs of a run."""

from __future__ import annotations

import json
import re

import jax
import pytest
from flax import nnx

from tests.process import ROOT, python
from tests.tiny_model import HF
from tunix_like.cli import programs
from tunix_like.config.load import load
from tunix_like.config.schema import OptimizerConfig
from tunix_like.errors import UserError
from tunix_like.models.sharding import place_params
from tunix_like.training.memory import parameter_count
from tunix_like.training.optimizer import build_optimizer, init_optimizer

pytestmark = pytest.mark.slow

YAML = str(ROOT / "examples" / "debug" / "reverse_text.yaml")
MODEL = {
    "model_type": "qwen3",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
SMALL = (f"model.config={json.dumps(MODEL)}", "data.batch_size=8", "algorithm.num_generations=4", "sft.max_steps=0")


@pytest.mark.parametrize(
    ("text", "kind", "number"),
    [("v5e-8", programs.KINDS["v5e"], 8), ("8xh100", programs.KINDS["h100"], 8), ("8xH100", programs.KINDS["h100"], 8),
     ("4", None, 4)],
)  # fmt: skip
def test_devices(text, kind, number):
    assert programs.parse_devices(text) == (kind, number)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("v9-8", "unknown kind 'v9'.*v5e"),
        ("8xtoaster", "unknown kind 'toaster'.*h100"),
        ("", "expected KIND-N"),
        ("v5e", "expected KIND-N"),
        ("0", "from 1 to 512"),
        ("v5e-100000", "from 1 to 512"),
    ],
)
def test_bad_devices(text, said):
    with pytest.raises(UserError, match=f"--devices: .*{said}"):
        programs.parse_devices(text)


def test_a_backend_that_runs_already():
    programs.pretend(len(jax.devices()))
    with pytest.raises(UserError, match="a new process"):
        programs.pretend(len(jax.devices()) + 1)


@pytest.fixture(scope="module")
def plan():
    return programs.make_plan(load(YAML, [*SMALL, "mesh.shape=[4, 2]"]), programs.KINDS["v5e"])


def test_shapes_lie_where_a_run_puts_its_arrays(plan):
    """Parameters and optimizer state, against those of a model that is really there."""
    params = plan.split[1]
    made = nnx.to_pure_dict(nnx.split(type(plan.model)(plan.model.config, rngs=nnx.Rngs(0), dtype=plan.model.dtype))[1])
    placed = place_params(made, plan.mesh)
    optimizer = build_optimizer(OptimizerConfig(), 1)
    state = init_optimizer(optimizer, placed)
    found = params, programs.state_shapes(optimizer, params)
    assert jax.tree.structure(found) == jax.tree.structure((placed, state))
    for shape, array in zip(jax.tree.leaves(found), jax.tree.leaves((placed, state)), strict=True):
        assert (shape.shape, shape.dtype) == (array.shape, array.dtype)
        assert shape.sharding.is_equivalent_to(array.sharding, array.ndim)


def test_the_update_of_one_device(plan):
    """A device has an eighth of every matrix and of its moments, and all else whole. There is one chunk here, so that
    XLA counts the whole step."""
    update = programs.compile_update(plan)
    matrices = sum(x.size for x in jax.tree.leaves(plan.split[1]) if x.ndim > 1)
    weights = 3 * 4 * (matrices // 8 + parameter_count(plan.model.config) - matrices)
    assert weights < update.arguments < weights + 50_000, "a batch of 8 x 4 x 8 tokens"
    assert update.temporaries > matrices and 0.9 < 8 * update.flops / update.operations < 8
    assert update.estimate is not None and update.estimate.name in ("update", "optimizer")


def test_the_report(tmp_path):
    """Eight devices, in a process of their own; a folder with config.json alone."""
    (tmp_path / "config.json").write_text(json.dumps(HF | {"num_attention_heads": 2}))
    argv = ["doctor", "--config", YAML, "--devices", "v5e-8", *SMALL[1:], "data.train_size=50"]
    own = ["model.config=null", f"model.path={tmp_path}", "model.init=pretrained", "rollout.max_tokens_to_generate=8"]
    done = python("-m", "tunix_like", *argv, *own, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    said = done.stdout
    assert "v5e-8: fsdp 8, tp 1; 16 GB per device; bfloat16" in said
    for name in ("arguments", "temporaries", "sum", "estimated", "FLOPs by XLA", "FLOPs of a step", "seconds"):
        assert re.search(rf"{name}.*\d", said), name
    assert "upper bound" in said and "the body of a loop counts once" in said
    again = [*argv[:3], "--devices", "v5e-3", "mesh.shape=[2, 1]"]
    done = python("-m", "tunix_like", *again, cwd=tmp_path)
    assert done.returncode == 2 and re.fullmatch(r"error: mesh.shape: \[2, 1\] needs 2 .* there are 3.*\n", done.stderr)
