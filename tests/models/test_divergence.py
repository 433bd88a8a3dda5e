"""Tests the divergence from a teacher against float64 over the whole vocabulary, values of TRL, and its memory."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tunix_like.models.divergence import Outputs, token_divergence
from tunix_like.models.sharding import scope

torch = pytest.importorskip("torch")

LANES, TOKENS, WIDTH, TEACHER_WIDTH, SIZE = 2, 13, 6, 9, 31
RNG = np.random.default_rng(0)
HIDDEN, OF_TEACHER = (2 * RNG.normal(size=(LANES, TOKENS, width)) for width in (WIDTH, TEACHER_WIDTH))
HEAD, TEACHER_HEAD = (RNG.normal(size=(width, SIZE)) for width in (WIDTH, TEACHER_WIDTH))
TARGETS = RNG.integers(0, SIZE, (LANES, TOKENS)).astype(np.int32)
WEIGHTS = RNG.normal(size=(LANES, TOKENS))
"""Different for each token, so that a gradient of another token's divergence is found."""
BETAS = (0.0, 0.1, 0.5, 0.9, 1.0)


def found(beta, chunk=1000, head=HEAD, teacher_head=TEACHER_HEAD, caps=(None, None), temperature=0.7):
    """Returns divergences, the teacher's log-probabilities, and the gradients of the weighted sum of divergences."""

    @jax.jit
    @functools.partial(jax.value_and_grad, argnums=(0, 1), has_aux=True)
    def weighted(hidden, head, of_teacher, teacher_head):
        outputs = Outputs(hidden, head, caps[0]), Outputs(of_teacher, teacher_head, caps[1])
        both = token_divergence(*outputs, jnp.asarray(TARGETS), beta, temperature, chunk)
        return (jnp.asarray(WEIGHTS, jnp.float32) * both[0]).sum(), both

    arrays = (jnp.asarray(x, jnp.float32) for x in (HIDDEN, head, OF_TEACHER, teacher_head))
    (_, both), gradients = weighted(*arrays)
    return *map(np.asarray, both), *map(np.asarray, gradients)


def expected(beta, head=HEAD, teacher_head=TEACHER_HEAD, caps=(None, None), temperature=0.7):
    """The same in float64, from the definition and by automatic differentiation."""
    hidden, of_policy, of_teacher, theirs = (torch.tensor(x) for x in (HIDDEN, head, OF_TEACHER, teacher_head))
    hidden.requires_grad_(), of_policy.requires_grad_()
    common = min(head.shape[1], teacher_head.shape[1])

    def distribution(states, matrix, cap):
        logits = states @ matrix
        logits = logits if cap is None else cap * torch.tanh(logits / cap)
        return torch.softmax(logits[..., :common] / temperature, dim=-1)

    def kl(a, b):
        return (a * (a.log() - b.log())).sum(-1)

    p, q = distribution(hidden, of_policy, caps[0]), distribution(of_teacher, theirs, caps[1])
    mixture = beta * q + (1 - beta) * p
    limits = {0.0: lambda: kl(q, p), 1.0: lambda: kl(p, q)}
    divergence = limits.get(beta, lambda: beta * kl(q, mixture) + (1 - beta) * kl(p, mixture))()
    (torch.tensor(WEIGHTS) * divergence).sum().backward()
    chosen = torch.take_along_dim(
        q.log(), torch.tensor(TARGETS, dtype=torch.int64).clamp(max=common - 1)[..., None], -1
    )
    return tuple(x.detach().numpy() for x in (divergence, chosen[..., 0], hidden.grad, of_policy.grad))


def assert_close(ours, theirs, tolerance=5e-6):
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance * np.abs(other).max())


@pytest.mark.parametrize("beta", BETAS)
def test_equals_float64_over_the_whole_vocabulary(beta):
    whole = found(beta)
    assert_close(whole, expected(beta))
    assert_close(found(beta, chunk=6), whole, 1e-6)  # five pieces, the last with padding


def test_bounded_logits_and_vocabularies_of_different_sizes():
    """Distributions are over the tokens of both vocabularies. Log-probabilities of other tokens are -inf."""
    assert_close(found(0.3, caps=(1.5, 2.5)), expected(0.3, caps=(1.5, 2.5)))
    wider = np.concatenate([HEAD, RNG.normal(size=(WIDTH, 5))], axis=1)
    assert_close(found(0.3, head=wider, caps=(1.5, None)), expected(0.3, head=wider, caps=(1.5, None)))
    divergence, chosen, *gradients = found(0.3, teacher_head=TEACHER_HEAD[:, :-4], chunk=6)
    theirs = expected(0.3, teacher_head=TEACHER_HEAD[:, :-4])
    assert_close((divergence, *gradients), (theirs[0], *theirs[2:]))
    known = TARGETS < SIZE - 4
    assert (~known).sum() > 0 and (chosen[~known] == -np.inf).all()
    assert_close([chosen[known]], [theirs[1][known]])
    assert (gradients[1][:, -4:] == 0).all()


@pytest.mark.parametrize("beta", BETAS)
def test_a_teacher_equal_to_the_policy_gives_zero(beta):
    outputs = Outputs(jnp.asarray(HIDDEN, jnp.float32), jnp.asarray(HEAD, jnp.float32), None)

    def run(hidden):
        return token_divergence(outputs._replace(hidden=hidden), outputs, jnp.asarray(TARGETS), beta, 1.0, 6)[0]

    divergence, pull_back = jax.vjp(run, outputs.hidden)
    assert np.abs(divergence).max() < 1e-6 and np.abs(pull_back(jnp.ones_like(divergence))[0]).max() < 1e-6


TRL = {
    0.0: (1.9101797923442856, (0.5377214089828385, -0.5412767397532705)),
    0.1: (0.1672456947072809, (0.04317712068698142, -0.03503136055347361)),
    0.5: (0.4880160449455455, (0.11338564514297028, -0.05696105696619381)),
    0.9: (0.23872579528537838, (0.053988550835835286, -0.01880300999212271)),
    1.0: (3.549976315559247, (0.7186542447370836, -0.24729806128005719)),
}
"""Sum, and first two derivatives, of `GKDTrainer.generalized_jsd_loss` of TRL 1.16.0 at temperature 0.7."""


@pytest.mark.parametrize("beta", TRL)
def test_beta_has_the_meaning_of_trl(beta):
    place = np.arange(10).reshape(1, 2, 5)
    logits, of_teacher = (jnp.asarray(x, jnp.float32) for x in (np.sin(1 + 3 * place), 2 * np.cos(2 + 5 * place)))

    def run(x):
        outputs = Outputs(x, jnp.eye(5), None), Outputs(of_teacher, jnp.eye(5), None)
        return token_divergence(*outputs, jnp.zeros((1, 2), int), beta, 0.7, 100)[0].sum()

    value, gradient = jax.value_and_grad(run)(logits)
    assert value == pytest.approx(TRL[beta][0], rel=1e-5)
    np.testing.assert_allclose(gradient[0, 0, :2], TRL[beta][1], rtol=1e-4)


def test_far_apart_distributions_stay_finite():
    far = jnp.array([[[200.0, 0, -200], [-200, 0, 200]]])
    for beta in (1e-3, 0.5, 1 - 1e-3):

        def run(x, beta=beta):
            outputs = Outputs(x, jnp.eye(3), None), Outputs(-far, jnp.eye(3), None)
            return token_divergence(*outputs, jnp.zeros((1, 2), int), beta, 1.0, 100)[0]

        divergence, pull_back = jax.vjp(run, far)
        entropy = -beta * np.log(beta) - (1 - beta) * np.log1p(-beta)  # the largest value of this divergence
        np.testing.assert_allclose(divergence, entropy, rtol=1e-4)
        assert np.isfinite(pull_back(jnp.ones_like(divergence))[0]).all()


def test_memory_does_not_grow_with_tokens_times_vocabulary():
    size, width = 4096, 8

    def temporaries(tokens):
        def loss(hidden, head, of_teacher, teacher_head, targets):
            outputs = Outputs(hidden, head, None), Outputs(of_teacher, teacher_head, None)
            return token_divergence(*outputs, targets, 0.5, 1.0, 64)[0].sum()

        shapes = [(1, tokens, width), (width, size), (1, tokens, 2 * width), (2 * width, size)]
        arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
        step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
        lowered = step.lower(*arrays, jax.ShapeDtypeStruct((1, tokens), jnp.int32))
        return lowered.compile().memory_analysis().temp_size_in_bytes

    few, many = temporaries(256), temporaries(2048)
    assert few > 64 * size * 4, "the logits of a piece"
    assert many - few < 0.02 * (2048 - 256) * size * 4


def test_a_split_vocabulary_gives_the_same():
    whole = found(0.3, head=HEAD[:, :24], teacher_head=TEACHER_HEAD[:, :24], chunk=2)
    mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 3)
    with scope(mesh):
        assert_close(found(0.3, head=HEAD[:, :24], teacher_head=TEACHER_HEAD[:, :24], chunk=2)[2:], whole[2:])
