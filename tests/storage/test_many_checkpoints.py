"""What a process keeps of the checkpoints it wrote: nothing."""

from __future__ import annotations

import gc

import jax.numpy as jnp
import pytest

from tunix_like.storage.checkpoints import Checkpoints


@pytest.mark.slow
def test_a_save_leaves_no_objects_behind(tmp_path):
    """A run makes thousands of them. What is made once, at the first few, may stay. Lists are not counted: tensorstore
    0.1.86 leaks 24 of them (8 kB) in a call that orbax makes at each save for a line in its log."""

    def objects_after(steps):
        for step in steps:
            checkpoints.save(step, {"w": jnp.full((4, 4), step)}, meta={"step": step})
        checkpoints.wait()
        gc.collect()
        return sum(type(each) is not list for each in gc.get_objects())

    with Checkpoints(tmp_path / "checkpoints", 2) as checkpoints:
        before = objects_after(range(1, 21))
        assert objects_after(range(21, 41)) - before < 10
