"""Tests experts against a loop over tokens, in values and gradients, for any choice of the router, and on a mesh."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tunix_like.config.schema import MeshConfig
from tunix_like.models import grouped_products
from tunix_like.models.config import DecoderConfig
from tunix_like.models.fields import Experts
from tunix_like.models.layers import MixtureOfExperts, RoutedExperts
from tunix_like.models.sharding import build_mesh, place_params, place_prompts, scope

pytestmark = pytest.mark.slow

WIDTH, INNER, E, N = 8, 12, 5, 11


def make(normalised, per_token=2, dtype=jnp.float32, biases=False, number=E):
    """Biases are random, and the kernels large enough for the clamps of GPT-OSS, whose activation goes with biases."""
    experts = Experts(number, per_token, INNER, normalised, biases)
    kinds = {"rngs": nnx.Rngs(0), "dtype": dtype, "param_dtype": jnp.float32}
    config = DecoderConfig(13, WIDTH, 16, 1, 2, 1, 4, activation="clamped_swiglu" if biases else "silu")
    graphdef, state = nnx.split(MixtureOfExperts(config, experts, **kinds))
    params, random = nnx.to_pure_dict(state), np.random.default_rng(5)
    if biases:
        wider = lambda x: 4 * x + jnp.asarray(random.normal(size=x.shape), x.dtype)  # noqa: E731
        params["experts"] = jax.tree.map(wider, params["experts"])
        params["gate"]["bias"] += random.normal(size=number).astype(np.float32)
    return graphdef, params


def by_token(params, x, per_token, normalised):
    """Processes token by token and calls each expert separately. The choice is made by sorting, and the lower index
    wins a tie."""
    router, experts = params["gate"], params["experts"]

    def product(token, name, e):
        projection = experts[f"{name}_proj"]
        return token @ projection["kernel"][e] + (projection["bias"][e] if "bias" in projection else 0.0)

    def hidden(token, e):
        gate, up = product(token, "gate", e), product(token, "up", e)
        if "bias" not in router:
            return jax.nn.silu(gate) * up
        gate, up = jnp.where(gate > 7, 7, gate), jnp.where(up > 7, 7, jnp.where(up < -7, -7, up))
        return (up + 1) * gate / (1 + jnp.exp(-1.702 * gate))

    out = []
    for token in x:
        shares = jnp.exp(token @ router["kernel"] + router.get("bias", 0.0))
        shares = shares / shares.sum()
        chosen = np.argsort(-np.asarray(jax.lax.stop_gradient(shares)), kind="stable")[:per_token]
        total = sum(shares[e] for e in chosen) if normalised else 1.0
        out.append(sum(product(hidden(token, e), "down", e) * shares[e] / total for e in chosen))
    return jnp.stack(out)


def inputs(case):
    x = np.random.default_rng(3).normal(size=(N, WIDTH)).astype(np.float32)
    if case == "one expert for all":
        x[:] = np.abs(x)
    return jnp.asarray(x)


@pytest.mark.parametrize("case", ["as it comes", "one expert for all"])
@pytest.mark.parametrize(
    ("per_token", "normalised", "biases"), [(2, True, False), (3, False, False), (E, True, False), (3, True, True)]
)
def test_experts_equal_a_loop_over_tokens(case, per_token, normalised, biases):
    """In the second case one expert gets every token, and with two experts per token some experts get none."""
    graphdef, params = make(normalised, per_token, biases=biases)
    x = inputs(case)
    if case == "one expert for all":
        router = np.zeros((WIDTH, E), np.float32)
        router[:, 3] = 4.0
        params["gate"]["kernel"] = jnp.asarray(router) + 0.01 * params["gate"]["kernel"]
    weights = jnp.asarray(np.random.default_rng(4).normal(size=(N, WIDTH)).astype(np.float32))

    def ours(params, x):
        return (nnx.merge(graphdef, params)(x[None])[0][0] * weights).sum()

    def theirs(params, x):
        return (by_token(params, x, per_token, normalised) * weights).sum()

    found, wanted = jax.jit(jax.value_and_grad(ours, (0, 1)))(params, x), jax.value_and_grad(theirs, (0, 1))(params, x)
    model = nnx.merge(graphdef, params)
    chosen = np.asarray(RoutedExperts(model.gate, model.experts, model.numbers).route(x)[1])
    assert (case == "as it comes") or ((chosen[:, 0] == 3).all() and (per_token > 2 or len(np.unique(chosen)) < E))
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5 * max(1.0, np.abs(other).max()))


def test_the_router_is_float32():
    """In bfloat16, nearly equal weights that bfloat16 could not distinguish still sum to 1."""
    graphdef, params = make(True, dtype=jnp.bfloat16)
    model = nnx.merge(graphdef, params)
    weights, chosen = RoutedExperts(model.gate, model.experts, model.numbers).route(
        inputs("as it comes").astype(jnp.bfloat16)
    )
    assert weights.dtype == jnp.float32 and chosen.shape == (N, 2)
    np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-6)
    out, _ = nnx.merge(graphdef, params)(inputs("as it comes").astype(jnp.bfloat16))
    assert out.dtype == jnp.bfloat16


@pytest.mark.parametrize("biases", [False, True], ids=["", "biases"])
@pytest.mark.parametrize("case", ["as it comes", "one expert for all", "rows that the mesh does not divide"])
@pytest.mark.parametrize(
    "sizes",
    [{"fsdp": 2, "tp": 4}, {"fsdp": 4, "tp": 2}, {"ep": 8}, {"data": 2, "ep": 4}, {"fsdp": 2, "ep": 2, "tp": 2}],
    ids=str,
)
def test_experts_on_a_mesh(sizes, case, biases):
    """Values, gradients and choices equal those of one device. If one expert gets every token, its device takes several
    rounds with `ep`."""
    compare_on_a_mesh(sizes, case, biases, jnp.float32)


@pytest.mark.parametrize("biases", [False, True], ids=["", "biases"])
@pytest.mark.parametrize("sizes", [{"fsdp": 4, "tp": 2}, {"data": 2, "ep": 4}], ids=str)
@pytest.mark.parametrize("how", ["kernel", "tiles"])
def test_other_products_of_experts_on_a_mesh(how, sizes, biases, monkeypatch):
    """The same in bfloat16, for products in the kernel of TPUs and in tiles, as with many rows."""

    def then():
        monkeypatch.setattr(grouped_products, "INTERPRET", how == "kernel")
        for name in ("PRODUCT_BY_TILES", "SUMS_BY_TILES"):
            monkeypatch.setitem(getattr(grouped_products, name), "cpu", 0)

    compare_on_a_mesh(sizes, "as it comes", biases, jnp.bfloat16, then)


def compare_on_a_mesh(sizes, case, biases, dtype, then=lambda: None):
    """Compares experts on a mesh with those on one device, which are computed before `then` is called."""
    number = 8
    graphdef, params = make(True, biases=biases, number=number, dtype=dtype)
    if case == "one expert for all":
        params["gate"]["kernel"] = params["gate"]["kernel"].at[:, 3].set(4.0)
    mesh = build_mesh(MeshConfig(shape=list(sizes.values()), axis_names=list(sizes)))
    rows = 3 if case.startswith("rows") else 8
    x = np.random.default_rng(3).normal(size=(rows, 5, WIDTH)).astype(np.float32)
    x = jnp.asarray(np.abs(x) if case == "one expert for all" else x, dtype)
    placed = place_params(params, mesh)
    kernel = placed["experts"]["down_proj"]["kernel"].addressable_shards[0].data
    parts = (sizes.get(name, 1) for name in ("ep", "tp", "fsdp"))
    assert kernel.shape == tuple(n // part for n, part in zip((number, INNER, WIDTH), parts, strict=True))

    def loss(params, x):
        out, chosen = nnx.merge(graphdef, params)(x)
        return (out**2).sum(), chosen

    both = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
    expected = jax.jit(both)(params, x)
    assert case != "one expert for all" or (expected[0][1][..., 0] == 3).all()
    then()
    with scope(mesh):
        found = jax.jit(both)(placed, place_prompts(x, mesh, axis=0))
    error = 1e-5 if dtype == jnp.float32 else 0.03
    for one, many in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        one, many = (np.asarray(each).astype(float) for each in (one, many))
        np.testing.assert_allclose(many, one, rtol=10 * error, atol=error * max(1.0, np.abs(one).max()))
