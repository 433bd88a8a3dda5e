"""Tests the lower bounds of programs against bytes that are counted array by array and position by position."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh

from tests.models.layer_kinds import SHARED_KEYS
from tunix_like.compile import report
from tunix_like.compile.costs import Costs
from tunix_like.compile.programs import Program
from tunix_like.config.load import load
from tunix_like.models.config import DecoderConfig
from tunix_like.models.decoder import Decoder
from tunix_like.models.fields import DeltaRule, Experts
from tunix_like.models.quantized_base import quantize_base
from tunix_like.models.sharding import place_params
from tunix_like.planning.bounds import (
    TYPICAL,
    bound_seconds,
    decode_bytes,
    held_bytes,
    prefill_bytes,
    update_bytes,
    weight_bytes,
)
from tunix_like.rollout.decoding import cast_params
from tunix_like.runtime.accelerators import KINDS

PROMPTS, GROUP, WIDTH, STEPS = 4, 2, 5, 6


def model_of(quantize=None, **changes):
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_layers": 2, "num_heads": 4}
    config = DecoderConfig(**sizes | {"num_kv_heads": 2, "head_dim": 8} | changes)
    return quantize_base(Decoder(config, rngs=nnx.Rngs(0), dtype=jnp.bfloat16), quantize)


def arrays_of(model, mesh=None):
    """The arrays that the first device holds of the weights in the compute dtype."""
    graphdef, state = nnx.split(model)
    arrays = place_params(cast_params(graphdef, nnx.to_pure_dict(state)), mesh)
    return jax.tree.map(lambda x: x.addressable_shards[0].data, arrays)


def nbytes(tree):
    return sum(x.nbytes for x in jax.tree.leaves(tree))


def of_decoding(model, weights, row, rounds=1, parts=1, tp=1):
    """Counts the bytes of sampling, one position after another. `weights` are read in every iteration, and `row` is the
    size of a row of the embedding."""
    total, config = 0.0, model.config
    for step in range(STEPS):
        total += rounds * weights + PROMPTS * GROUP // parts * row
        for layer in range(config.num_layers):
            window = config.window(layer)
            wide = window is None and config.full_head_dim
            one = np.zeros((2, config.num_kv_heads // tp, wide or config.head_dim), jnp.bfloat16).nbytes
            seen = [p for p in range(WIDTH + step) if window is None or p > WIDTH + step - window]
            own = sum(p >= WIDTH for p in seen) + 1  # one is written
            total += one * (PROMPTS * GROUP * own + PROMPTS * (len(seen) - own + 1)) / parts
    return total


def test_bytes_of_recurrent_layers():
    """The oracle is the memory that a prefill returns: it is written once per prompt. In an iteration, each completion
    reads and writes its own, except that the first one reads that of the prompt."""
    rule = DeltaRule(key_heads=1, value_heads=2, key_width=8, value_width=4, taps=4)
    model, plain = model_of(delta_rule=rule, recurrent_layers=(True, False)), model_of(num_layers=1)
    tokens, lengths = jnp.zeros((PROMPTS, WIDTH), jnp.int32), jnp.full(PROMPTS, WIDTH)
    _, cache, _ = nnx.eval_shape(lambda model: model.prefill(tokens, lengths), model)
    memory = sum(x.size * x.dtype.itemsize for x in cache[0])
    given, rows = (None, (PROMPTS, GROUP), (WIDTH, STEPS), 1), PROMPTS * GROUP
    more = STEPS * (weight_bytes(model, None, rows) - weight_bytes(plain, None, rows))
    of_decoding = decode_bytes(model, *given) - decode_bytes(plain, *given) - more
    assert of_decoding == memory / PROMPTS * (rows * (2 * STEPS - 1) + PROMPTS)
    more = weight_bytes(model, None, PROMPTS * WIDTH, False) - weight_bytes(plain, None, PROMPTS * WIDTH, False)
    assert (
        prefill_bytes(model, None, PROMPTS, WIDTH, 1) == prefill_bytes(plain, None, PROMPTS, WIDTH, 1) + more + memory
    )


def test_bytes_of_a_tiny_model_by_hand():
    """Two layers: q and o 16 x 32, k and v 16 x 16, three matrices 16 x 32 of the MLP; two norms of 16 in float32. The
    embedding is 64 x 16. A position has 2 x 2 x 8 numbers of two bytes in each layer."""
    model = model_of(tie_embeddings=True)
    layers = 2 * (2 * (2 * 512 + 2 * 256 + 3 * 512) + 4 * 2 * 16) + 4 * 16
    assert weight_bytes(model, None, 8) == layers + 2 * 64 * 16 + 8 * 32
    assert weight_bytes(model, None, 8, head=False) == layers + 8 * 32
    filled = 0 + 1 + 2 + 3 + 4 + 5
    cache = 2 * 64 * (8 * (filled + 6) + 4 * 6 * 5)
    assert decode_bytes(model, None, (4, 2), (5, 6), 1) == 6 * (layers + 2 * 64 * 16 + 8 * 32) + cache
    assert prefill_bytes(model, None, 4, 5, 2) == 2 * layers + 20 * 32 + 2 * 64 * 20
    assert prefill_bytes(model, None, 400, 5, 1) == layers + 64 * 32 + 2 * 64 * 2000, "a row is read once at most"


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "changes",
    [{}, {"windows": (4, None)}, {"windows": (3, 9)}, {"quantize": "int8"}, SHARED_KEYS],
    ids=["plain", "one window", "windows", "int8", "keys of earlier layers"],
)
def test_bytes_of_decoding(tied, changes):
    model = model_of(tie_embeddings=tied, **changes)
    arrays = arrays_of(model)
    table = arrays.pop("embed_tokens")["embedding"]
    second = arrays.pop("embed_tokens_per_layer", {}).get("embedding", table[:, :0])
    weights, row = nbytes(arrays) + tied * table.nbytes, table[0].nbytes + second[0].nbytes
    for rounds in (1, 3):
        found = decode_bytes(model, None, (PROMPTS, GROUP), (WIDTH, STEPS), rounds)
        assert found == pytest.approx(of_decoding(model, weights, row, rounds), rel=1e-12)


def test_bytes_of_decoding_on_a_mesh():
    """Four parts of completions; two devices share the heads, the matrices and the vocabulary. A device finds half of
    the tokens in its half of the embedding."""
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 1, 2), ("data", "fsdp", "tp"))
    model = model_of(tie_embeddings=True)
    arrays = arrays_of(model, mesh)
    row = arrays["embed_tokens"]["embedding"][0].nbytes / 2
    found = decode_bytes(model, mesh, (PROMPTS, GROUP), (WIDTH, STEPS), 1)
    assert found == pytest.approx(of_decoding(model, nbytes(arrays), row, parts=4, tp=2), rel=1e-12)
    assert nbytes(arrays) < 0.6 * nbytes(arrays_of(model))


@pytest.mark.parametrize(("tokens", "share"), [(1, 0.25), (3, 0.75), (4, 1.0), (40, 1.0)])
def test_experts_that_no_token_selects_are_not_read(tokens, share):
    experts = Experts(number=8, per_token=2, intermediate_size=8, normalised=True)
    model = model_of(experts=experts, expert_layers=(True, False))
    arrays = arrays_of(model)
    table = arrays.pop("embed_tokens")["embedding"]
    unread = (1 - share) * nbytes(arrays["layers"][0]["mlp"]["experts"])
    assert weight_bytes(model, None, tokens) == nbytes(arrays) - unread + tokens * table[0].nbytes


def test_bytes_of_an_update():
    """The weights in bfloat16 in both passes; float32 weights and two moments are read and written."""
    model = model_of()
    params = nnx.to_pure_dict(nnx.split(model)[1])
    state = params, {"first": params, "second": params}
    assert held_bytes(state) == 3 * nbytes(params)
    assert update_bytes(model, None, 10, state) == 2 * weight_bytes(model, None, 10) + 6 * nbytes(params)


def test_seconds_of_the_bound():
    kind = KINDS["v5e"]
    assert bound_seconds(2 * 197e12, 819e9, kind) == pytest.approx(2.0)
    assert bound_seconds(2 * 197e12, 3 * 819e9, kind) == pytest.approx(3.0)
    assert bound_seconds(0.9 * 197e12, 0.85 * 819e9, kind, (0.45, 0.85)) == pytest.approx(2.0)
    assert bound_seconds(0.9 * 197e12, 4 * 0.85 * 819e9, kind, (0.45, 0.85)) == pytest.approx(4.0)


def compiled(operations, needed, **costs):
    program = Program("decode", lambda: None, None, operations, needed, 1, {})
    return report.Compiled(program, 1.0, costs=Costs(**costs))


def test_the_report_has_the_bound():
    """On two devices, whose bytes take 2 s at the peak and whose arithmetic takes 1 s, 4 s are predicted. The update is
    bound by arithmetic."""
    target = report.Target("v5e-2", KINDS["v5e"], 2, [None, None], "a compiler")
    done = [compiled(2 * 197e12, 2 * 819e9, memory_bytes=4 * 819e9), compiled(6 * 197e12, 819e9, memory_bytes=819e9)]
    rows = {name: cells for name, *cells in report.rows_of(done[:1], target)}
    names = list(rows)
    assert names.index("memory traffic a step") == names.index("bytes needed a step") + 1
    assert (rows["bytes needed a step"], rows["memory traffic a step"]) == (["1.64 TB"], ["3.28 TB"])
    assert (rows["bound of a step"], rows["of the bound"]) == (["2 s"], ["50%"])
    (line,) = [line for line in report.notes_of(done, target, load(None, [])) if line.startswith("bound:")]
    best, worst = 2 / 0.85 + 3 / 0.45, 2 / 0.4 + 3 / 0.3
    assert f"is 5 s; typical are {best:.3g} to {worst:.3g} s, at 30% to 45%" in line and "40% to 85%" in line
    found = report._as_json(done[0], target)
    assert (found["needed_bytes"], found["bound_seconds"]) == (2 * 819e9, 2.0)
    assert found["typical_seconds"] == pytest.approx([2 / TYPICAL[0][1], 2 / TYPICAL[1][1]])


def test_simulated_devices_have_no_bound():
    target = report.Target("v5e-2", KINDS["v5e"], 2, None, "a simulation")
    done = [compiled(1e12, 1e9)]
    rows = {name: cells for name, *cells in report.rows_of(done, target)}
    assert rows["bytes needed a step"] == ["1 GB"] and "of the bound" not in rows
    assert not any(line.startswith("bound:") for line in report.notes_of(done, target, load(None, [])))
    found = report._as_json(done[0], target)
    assert (found["needed_bytes"], found["bound_seconds"], found["typical_seconds"]) == (1e9, None, None)
