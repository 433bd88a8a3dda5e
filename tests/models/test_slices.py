"""Tests the mesh of several TPU slices: `data` goes over the slices, every other axis stays inside one."""

from __future__ import annotations

import ast
import dataclasses
from typing import Any

import numpy as np
import pytest
from flax import nnx

from tests.process import python
from tunix_like import RolloutConfig, UserError
from tunix_like.compile.devices import compiler_of
from tunix_like.config.schema import MeshConfig
from tunix_like.models.config import DecoderConfig
from tunix_like.models.decoder import Decoder
from tunix_like.models.sharding import build_mesh, count_slices, layout_mesh
from tunix_like.planning.sizes import Device, Planner
from tunix_like.runtime.accelerators import KINDS


@dataclasses.dataclass(frozen=True)
class Chip:
    """A stand-in for a jax device: one chip of a v5e slice of 2 x 4."""

    id: int
    slice_index: int
    coords: tuple[int, int, int]
    process_index: int = 0
    core_on_chip: int = 0
    platform: str = "tpu"
    device_kind: str = "TPU v5 lite"


def chips(slices: int) -> list[Any]:
    """Returns the chips of slices of 8, in an order that alternates between the slices."""
    return [Chip(8 * s + 2 * x + y, s, (y, x, 0)) for x in range(4) for y in range(2) for s in range(slices)]


def slices_along(devices: np.ndarray, axis: int) -> list[set[int]]:
    """Returns the slices of the devices at each index of an axis."""
    return [{chip.slice_index for chip in np.ravel(part)} for part in np.moveaxis(devices, axis, 0)]


@pytest.mark.parametrize(
    ("config", "sizes", "along"),
    [
        (MeshConfig(), {"data": 2, "fsdp": 8, "tp": 1}, [{0}, {1}]),
        (MeshConfig(axis_names=["tp", "data"]), {"data": 2, "tp": 8}, [{0}, {1}]),
        (MeshConfig(axis_names=["data"]), {"data": 16}, [{0}] * 8 + [{1}] * 8),
        (
            MeshConfig(shape=[4, 2, 2], axis_names=["data", "fsdp", "tp"]),
            {"data": 4, "fsdp": 2, "tp": 2},
            [{0}, {0}, {1}, {1}],
        ),
        (
            MeshConfig(shape=[4, 2, 2], axis_names=["fsdp", "data", "tp"]),
            {"fsdp": 4, "data": 2, "tp": 2},
            [{0}, {1}],
        ),
    ],
)
def test_only_data_goes_over_slices(config, sizes, along):
    mesh = build_mesh(config, chips(2))
    assert dict(mesh.shape) == sizes
    assert slices_along(mesh.devices, mesh.axis_names.index("data")) == along
    assert {chip.id for chip in mesh.devices.flat} == set(range(16))
    sampling = layout_mesh(mesh, {"data": 2, "tp": 8})
    assert slices_along(sampling.devices, 0) == [{0}, {1}]


@pytest.mark.parametrize(
    ("config", "devices", "said"),
    [
        (MeshConfig(shape=[16, 1]), chips(2), r"mesh\.shape: 1 devices along 'data', but there are 2 TPU slices"),
        (MeshConfig(shape=[3, 8], axis_names=["data", "tp"]), chips(3)[:12], r"needs 24 devices, but there are 12"),
        (MeshConfig(shape=[2, 12], axis_names=["data", "tp"]), chips(3), r"set a multiple of 3 for 'data', or auto"),
        (MeshConfig(), chips(2)[:15], r"15 devices cannot be divided equally among 2 TPU slices; .*rollout\.devices"),
    ],
)
def test_a_mesh_that_splits_a_slice_is_refused(config, devices, said):
    with pytest.raises(UserError, match=said):
        build_mesh(config, devices)


def test_hosts_of_gpus_are_no_slices():
    assert count_slices(chips(3)) == 3
    assert (
        count_slices([dataclasses.replace(chip, device_kind="NVIDIA H100", platform="gpu") for chip in chips(3)]) == 1
    )


def test_sampling_stays_inside_a_slice():
    """One process drives all chips, as with Pathways, so that processes do not bound `tp`."""
    config = DecoderConfig(
        vocab_size=32, hidden_size=64, intermediate_size=4096, num_layers=2, num_heads=16, num_kv_heads=16, head_dim=4
    )
    model, mesh = Decoder(config, rngs=nnx.Rngs(0)), build_mesh(MeshConfig(), chips(2))
    lengths = {"max_prompt_length": 1, "max_tokens_to_generate": 4}
    slow = dataclasses.replace(KINDS["v5e"], memory_bytes=1e6, network_bytes=1e12)  # the largest tp is the fastest
    chosen = Planner(model, mesh, rollout=RolloutConfig(**lengths), device=Device("tpu", 10**9, slow)).layout()
    assert list(chosen.mesh.shape.values()) == [2, 1, 8]
    tight = Planner(model, mesh, rollout=RolloutConfig(**lengths), device=Device("tpu", 1000, slow)).layout()
    assert list(tight.mesh.shape.values()) == [2, 1, 8], "where no layout fits"
    with pytest.raises(UserError, match=r"rollout\.mesh: 1 devices along 'data', but there are 2 TPU slices"):
        Planner(
            model, mesh, rollout=RolloutConfig(**lengths, mesh=[1, 2, 8]), device=Device("tpu", 10**9, slow)
        ).layout()


COMPILED = """
from tunix_like.compile import devices
devices.prepare()
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
from tunix_like.compile.costs import Counter
from tunix_like.config.schema import MeshConfig
from tunix_like.models.sharding import build_mesh
mesh = build_mesh(MeshConfig(), devices.described_devices(*devices.parse_devices("2xv5e-4")))
weights = jax.ShapeDtypeStruct((2048, 1024), jnp.bfloat16, sharding=NamedSharding(mesh, P("fsdp")))
rows = jax.ShapeDtypeStruct((64, 2048), jnp.bfloat16, sharding=NamedSharding(mesh, P(("data", "fsdp"))))
gradient = jax.jit(jax.grad(lambda w, x: jnp.tanh(x @ w).mean()), out_shardings=weights.sharding)
costs = Counter(gradient.lower(weights, rows).compile().as_text(), {}).total()
print(costs.collectives, costs.network_bytes)
"""


@pytest.mark.slow
@pytest.mark.skipif(compiler_of(KINDS["v5e"]) is None, reason="libtpu is not installed")
def test_tpu_compiler_sends_only_the_sharded_gradient_between_slices(tmp_path):
    """Weights are gathered inside a slice. Between slices goes a quarter of the gradient, which is sharded by then."""
    done = python("-c", COMPILED, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    collectives, _, network = done.stdout.splitlines()[-1].rpartition(" ")
    found = ast.literal_eval(collectives)
    assert found.pop("all-reduce between slices") == 2048 * 1024 * 2 / 4
    assert found["all-gather"] == 2048 * 1024 * 2 * 3 / 4 and sum(found.values()) == float(network)
