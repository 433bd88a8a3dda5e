"""Settings of every test: eight simulated devices, errors for implicit rank promotion, one torch thread, fast
compilation."""

from __future__ import annotations

import contextlib
import gc
import importlib.metadata
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Set before jax is imported. The pytest workers and the programs that tests start inherit these variables.
os.environ["JAX_PLATFORMS"] = "cpu"
# Torch is only the reference of some tests. Several torch threads would compete with jax for the processor cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# The compiled programs of the tests run for milliseconds, and compilation without optimizations takes a quarter of the
# time. An unknown flag would end the process, so each jax version gets only the flags that it accepts.
if importlib.metadata.version("jaxlib").startswith("0.10."):
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false")
elif importlib.metadata.version("jaxlib").startswith(("0.11.", "0.12.")):
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
# Compiled programs are cached between runs, because compilation takes most of the time of a test.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    _cache = Path.home() / ".cache" / "tunix_like" / "tests"
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(_cache)
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    for _file in _cache.glob("*") if "PYTEST_XDIST_WORKER" not in os.environ else ():
        with contextlib.suppress(OSError):  # another run may have removed the file
            if _file.stat().st_mtime < time.time() - 14 * 24 * 3600:
                _file.unlink()

import jax
import pytest

from tests.process import resident_bytes

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
# A shell ignores SIGINT for a command in the background, and `nohup` ignores SIGHUP. Programs that tests start would
# ignore them too.
for _number, _handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_number) == signal.SIG_IGN:
        signal.signal(_number, _handler)
# The imported modules (jax, torch, transformers) have millions of objects. With the default thresholds, the collections
# that visit all of them take a tenth of the time of the tests.
gc.set_threshold(50_000, 20, 20)


# jax keeps the lowered module of every program it compiled, each in an MLIR context of its own. A context takes 1.2 MB
# and makes each later lowering slower: a small function took 9 ms in a new process and 35 ms after 2,400 others.
# A program also takes at least four of the 65,530 memory mappings of a process; XLA ends it when a mapping fails.
MOST_GROWTH = 2**30
resident_at_release = 0
"""The memory of this process when it last released its compiled programs, in bytes."""


LONGEST = ("training", "examples", "models", "runtime")
"""The folders with the longest files. They come first, because a file stays on one worker: a long file at the end would
keep one worker busy and the others waiting."""


JUDGES = ("torch", "transformers", "peft", "trl", "datasets", "openai", "anthropic", "pandas", "reasoning_gym")
"""Modules of the extra `judges` that tests import where they need them."""


def _skipped_without_judges() -> Iterator[Any]:
    """Skips a test that imports a module of `JUDGES` which is not installed."""
    try:
        return (yield)
    except ModuleNotFoundError as error:
        if error.name in JUDGES:
            pytest.skip(f"{error.name} is not installed: pip install -e '.[test,judges]'")
        raise


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[Any]:
    return (yield from _skipped_without_judges())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Iterator[Any]:
    return (yield from _skipped_without_judges())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Moves the tests of `LONGEST` to the front."""
    items.sort(key=lambda item: item.path.parent.name not in LONGEST)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Excludes all imported modules from garbage collection."""
    global resident_at_release
    gc.freeze()
    resident_at_release = resident_bytes()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Iterator[None]:
    """Releases the compiled programs if the memory of this process has grown by `MOST_GROWTH` since it last did."""
    global resident_at_release
    yield
    if resident_bytes() > resident_at_release + MOST_GROWTH:
        from tunix_like.runtime.host_memory import return_freed_memory  # not sooner, or its shapes are not checked

        jax.clear_caches()
        gc.collect()
        return_freed_memory()
        resident_at_release = resident_bytes()


@pytest.fixture
def compiled() -> Iterator[list[float]]:
    """A list that gets one entry for every program that XLA compiles: the seconds it took."""
    programs = []

    def on_event(event: str, duration: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            programs.append(duration)

    jax.monitoring.register_event_duration_secs_listener(on_event)
    yield programs
    jax.monitoring.unregister_event_duration_listener(on_event)
