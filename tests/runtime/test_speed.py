"""Tests clocks, counters and traces on real programs, and the operation count of a forward pass against XLA's."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tunix_like.errors import UserError
from tunix_like.models.config import DecoderConfig
from tunix_like.models.counts import forward_operations
from tunix_like.models.decoder import Decoder
from tunix_like.runtime import profile as speed

CONFIG = DecoderConfig(
    vocab_size=96, hidden_size=64, intermediate_size=160, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16
)


def test_operations_equal_the_count_of_xla():
    """A completion after a prompt of one token is a plain forward pass over its tokens except the last. XLA also counts
    norms, rotations and the masked half of the scores, which are few here."""
    model = Decoder(CONFIG, rngs=nnx.Rngs(0))
    graphdef, state = nnx.split(model)
    length = 24
    run = jax.jit(lambda state, tokens: nnx.merge(graphdef, state)(tokens))
    counted = run.lower(state, jnp.zeros((1, length), jnp.int32)).compile().cost_analysis()["flops"]
    found = forward_operations(CONFIG, np.array([1]), np.array([[length]]))
    assert 0.85 * counted < found < counted


def test_operations_count_a_prompt_once_and_no_padding():
    prompt, pair = np.array([30]), np.array([[7, 11]])
    both, first, second = (forward_operations(CONFIG, prompt, lengths) for lengths in (pair, pair[:, :1], pair[:, 1:]))
    matrices = 2 * (64 * 16 * 12 + 3 * 64 * 160)
    assert first + second - both == 2 * matrices * 30 + 4 * 2 * 64 * 30 * 31 / 2
    assert forward_operations(CONFIG, np.array([30, 8]), np.array([[7, 11], [0, 0]])) == both
    assert forward_operations(CONFIG, prompt, np.array([[7, 11, 0]])) == both


def test_only_new_compilations_are_counted():
    count = speed.Compilations()
    run = jax.jit(lambda x: x * 3 + 1)
    run(np.arange(3.0))
    programs, seconds = count.take()
    assert programs == 1 and seconds > 0
    run(np.arange(3.0))
    assert count.take() == (0, 0)


def test_laps_of_the_same_name_are_added(monkeypatch):
    now = iter([10.0, 11.0, 13.5, 14.0])
    monkeypatch.setattr(speed.time, "perf_counter", lambda: next(now))
    clock = speed.Clock()
    for name in ("data", "rollout", "data"):
        clock.lap(name)
    assert clock.seconds == {"time/data": 1.5, "time/rollout": 2.5}


@pytest.mark.parametrize(
    ("kind", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L40", 181e12),
        ("TPU v5 lite", 197e12),
        ("TPU v5p", 459e12),
        ("cpu", None),
    ],
)
def test_the_peak_of_a_device(monkeypatch, kind, peak):
    device = type("Device", (), {"device_kind": kind})
    monkeypatch.setattr(speed.jax, "devices", lambda: [device, device])
    monkeypatch.setattr(speed.jax, "device_count", lambda: 2)
    assert speed.peak_flops() == (None if peak is None else 2 * peak)


@pytest.mark.slow
def test_a_trace_of_some_steps(tmp_path):
    profile = speed.Profile([2, 3], tmp_path)
    sizes = []
    for step in range(1, 5):
        with profile.around(step):
            jax.jit(jnp.sin)(np.arange(4.0)).block_until_ready()
        sizes.append(len(list((tmp_path / "profile").rglob("*.xplane.pb"))))
    assert sizes == [0, 0, 1, 1]


def test_trace_of_a_run_that_starts_late_and_ends_early(tmp_path):
    profile = speed.Profile([2, 9], tmp_path)
    for step in (3, 4):
        with profile.around(step):
            jax.jit(jnp.cos)(np.arange(4.0)).block_until_ready()
    for _ in range(2):
        profile.close()
        assert len(list((tmp_path / "profile").rglob("*.xplane.pb"))) == 1


def test_a_trace_is_written_when_a_step_fails(tmp_path):
    profile = speed.Profile([1, 9], tmp_path)
    with pytest.raises(ZeroDivisionError), profile.around(1):
        1 / 0  # noqa: B018
    assert list((tmp_path / "profile").rglob("*.xplane.pb"))


@pytest.mark.parametrize("steps", [[3], [0, 2], [4, 3], [1, 2, 3]])
def test_invalid_steps_of_a_trace_are_rejected(tmp_path, steps):
    with pytest.raises(UserError, match=r"training.profile_steps: expected the first and the last"):
        speed.Profile(steps, tmp_path)


def test_trace_without_a_folder_is_rejected():
    with pytest.raises(UserError, match=r"set training.output_dir"):
        speed.Profile([1, 2], None)
