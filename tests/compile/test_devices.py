"""Tests the kinds of accelerators, the sizes of slices, and the time model."""

from __future__ import annotations

import math
import os

import pytest

from tunix_like.compile import devices
from tunix_like.compile.costs import Costs, Times, times
from tunix_like.compile.devices import at_least, parse_devices
from tunix_like.errors import UserError
from tunix_like.runtime.accelerators import KINDS


@pytest.mark.parametrize(
    ("text", "kind", "number"),
    [("v5e-8", "v5e", 8), ("v5litepod-16", "v5e", 16), ("v5p-128", "v5p", 128), ("v6e-256", "v6e", 256),
     ("8xh100", "h100", 8), ("8xH200", "h200", 8), ("h100-3", "h100", 3), ("16xa100", "a100", 16), ("4", None, 4)],
)  # fmt: skip
def test_devices_are_parsed(text, kind, number):
    assert parse_devices(text) == (kind and KINDS[kind], number, 1)


def test_slices_are_parsed():
    assert parse_devices("2xv5e-16") == (KINDS["v5e"], 32, 2)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("v9-8", "unknown kind 'v9'.*v5e"),
        ("8xtoaster", "unknown kind 'toaster'.*h100"),
        ("", "expected KIND-N"),
        ("v5e", "expected KIND-N"),
        ("0", "from 1 to 256"),
        ("h100-0", "from 1 to 256"),
        ("v5e-100000", "no v5e slice of 100000 chips; the sizes are 1, 4, 8, 16, 32, 64, 128, 256"),
        ("v5p-3", "no v5p slice of 3 chips"),
        ("12xh100", "above 8 in whole nodes of 8"),
        ("2xh100-8", "TPU slices"),
        ("2xv5e-1", "at least 4 chips"),
        ("0xv5e-8", "1 to 16 TPU slices"),
        ("17xv5e-8", "1 to 16 TPU slices"),
    ],
)
def test_invalid_devices_are_rejected(text, said):
    with pytest.raises(UserError, match=f"--devices: .*{said}") as found:
        parse_devices(text)
    assert "\n" not in str(found.value)


def test_shapes_of_slices_match_their_numbers_of_chips():
    for kind in KINDS.values():
        assert all(math.prod(map(int, shape.split("x"))) == size for size, shape in kind.slices.items())
        assert (kind.backend == "tpu") == bool(kind.slices) == (kind.clock is not None)


def test_the_next_larger_slice():
    v5e, h100 = KINDS["v5e"], KINDS["h100"]
    assert [at_least(v5e, number) for number in (0.5, 3, 9.1, 256, 257)] == [
        "v5e-1", "v5e-4", "v5e-16", "v5e-256", None
    ]  # fmt: skip
    assert at_least(h100, 8.1) == "16xh100"


def test_environment_variables_of_the_user_are_kept(monkeypatch):
    monkeypatch.setattr(os, "environ", {"TPU_STDERR_LOG_LEVEL": "0"})
    devices.prepare()
    assert os.environ["JAX_PLATFORMS"] == "cpu" and os.environ["TPU_STDERR_LOG_LEVEL"] == "0"


def test_missing_compiler_gives_none(monkeypatch):
    monkeypatch.setattr(devices.importlib.util, "find_spec", lambda name: None)
    assert [devices.compiler_of(KINDS[name]) for name in ("v5e", "h200")] == [None, None]


def test_times_and_the_lower_bound():
    costs = Costs(operations=197e12, memory_bytes=2 * 819e9, cycles=4.5e9, collectives={"all-gather": 200e9})
    found = times(costs, 0.0, KINDS["v5e"], 8)
    assert found == pytest.approx((1.0, 2.0, 1.0, 3.0))
    assert (found.limit, found.predicted, found.share) == ("cycles", pytest.approx(3.0), pytest.approx(0.75))
    assert times(costs, 4 * 197e12, KINDS["v5e"], 8).limit == "arithmetic", "kernels whose products are not seen"


def test_gpus_of_several_nodes_have_the_slower_network():
    costs = Costs(memory_bytes=3350e9, collectives={"all-reduce": 100e9})
    inside, across = (times(costs, 0.0, KINDS["h100"], number) for number in (8, 16))
    assert (inside.limit, across.limit, inside.cycles) == ("memory", "network", None)
    assert across.network == pytest.approx(2.0) and across.predicted == pytest.approx(2.0)
    assert Times(0.0, 0.0, 0.0, None).share == 1.0
