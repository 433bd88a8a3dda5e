"""Tests what the programs of a run transfer over the network of a TPU slice and in kernels, read from the text of the
compiler."""

from __future__ import annotations

import json

import pytest

from tests.process import ROOT, python
from tunix_like.compile.devices import compiler_of, parse_devices

pytestmark = pytest.mark.slow

MODEL = {
    "model_type": "qwen3",
    "vocab_size": 256,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}
ROWS, TOKENS = 32, 32
"""Completions of a chunk, and tokens of a completion. Both are small, so that most of the traffic is weights."""

COMPILED = """
import json, math, sys
from tunix_like.compile import devices
devices.prepare()
import jax
from tunix_like.compile import programs, report as doctor
from tunix_like.config.load import load
from tunix_like.models.sharding import scope
from tunix_like.compile.costs import Counter

on, name, loop, config, *overrides = sys.argv[1:]
target = doctor.find_target(on)
device = doctor.Device(target.kind.backend, target.kind.memory)
plan = programs.make_plan(load(config, overrides), device, target.described)
program = getattr(programs, name)(plan)
with scope(program.mesh):
    counter = Counter(program.lower().compile().as_text(), program.trips)
trip = counter.one_trip(loop)
weights = 2 * sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(plan.split[1]))
report = {"weights": weights, "rows": plan.estimate.micro_batch, "collectives": trip.collectives}
report |= {"kernels": trip.kernels, "kernel_bytes": trip.kernel_bytes}
report["other_bytes"] = trip.memory_bytes - trip.kernel_bytes
print(json.dumps(report | {"decoding": plan.model.decoding}))
"""


def compiled(cwd, program: str, loop: str, *overrides: str, on: str = "v5e-8") -> dict:
    """Compiles a program of `compile/programs.py` for the devices `on` in a separate process.

    Returns:
      `weights`: bytes of the trained weights in bfloat16; `collectives`: bytes that a device receives in one iteration
    of the loop, by kind; `rows`: completions of a chunk.
    """
    if compiler_of(parse_devices(on)[0]) is None:
        pytest.skip(f"the compiler for {on} is not installed")
    config = str(ROOT / "examples" / "debug" / "reverse_text.yaml")
    sizes = ("data.batch_size=16", "algorithm.num_generations=4", f"training.train_micro_batch_size={ROWS}")
    lengths = ("rollout.max_prompt_length=32", f"rollout.max_tokens_to_generate={TOKENS}", "sft.max_steps=0")
    argv = (on, program, loop, config, f"model.config={json.dumps(MODEL)}", *sizes, *lengths, *overrides)
    done = python("-c", COMPILED, *argv, cwd=cwd)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["rows"] == ROWS
    return report


@pytest.mark.parametrize(("layout", "moved"), [("auto", False), ("[1, 8, 1]", True)])
def test_decoding_transfers_no_weights(tmp_path, layout, moved):
    """Covers one token of every row. With the layout of training, nearly all weights would be transferred."""
    report = compiled(tmp_path, "decode_program", "tokens", f"rollout.mesh={layout}")
    share = sum(report["collectives"].values()) / report["weights"]
    assert (share > 0.5) if moved else (share < 0.01)


@pytest.mark.parametrize(
    ("on", "kernel", "tokens", "tp"),
    [("v5e-8", "tpu", tokens, tp) for tokens in (1024, 8192) for tp in (1, 2)] + [("8xh200", "gpu", 8192, 2)],
)
def test_decoding_reads_the_caches_in_kernels_alone(tmp_path, on, kernel, tokens, tp):
    """Two kernels per layer, with the halves of the heads on two devices, and no copy of a cache, also if the memory on
    the chip has room for the caches."""
    longer = "data.batch_size=64", "rollout.max_prompt_length=256", f"rollout.max_tokens_to_generate={tokens}"
    wide = f"model.config={json.dumps(MODEL | {'head_dim': 128, 'max_position_embeddings': 8448})}"
    mesh = f"rollout.mesh=[{8 // tp}, 1, {tp}]"
    report = compiled(tmp_path, "decode_program", "tokens", mesh, wide, *longer, on=on)
    key = 2 * 128 * 2 * 2 // tp  # bytes of a position's keys and values on one device
    caches = MODEL["num_hidden_layers"] * key * (8 * tp * 256 + 32 * tp * tokens / 2)  # half of the columns are filled
    assert report["decoding"] == kernel and report["kernels"] == 2 * MODEL["num_hidden_layers"]
    assert report["kernel_bytes"] == caches and report["other_bytes"] < report["weights"] + 0.1 * caches


@pytest.mark.parametrize(("remat", "times"), [("false", 2), ("true", 3)])
def test_transfers_of_a_chunk_of_the_update(tmp_path, remat, times):
    """The weights are gathered once, and once more for the recomputation. Their gradient is scattered.

    All is in bfloat16. The allowance is three times the hidden states of the chunk: the vocabulary is split over the
    devices, so that they are gathered for the logits and their gradients scattered, and the embeddings are sent to the
    rows.
    """
    report = compiled(tmp_path, "update_program", "chunks", f"training.remat={remat}")
    hidden = 2 * ROWS * TOKENS * MODEL["hidden_size"]
    received = sum(report["collectives"].values()) * 8 / 7  # a device has an eighth already
    assert (times - 1) * report["weights"] < received < times * report["weights"] + 3 * hidden, report
