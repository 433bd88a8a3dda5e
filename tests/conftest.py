"""What every test runs under: eight fake devices, no silent rank promotion, one torch thread, quick compilations."""

from __future__ import annotations

import importlib.metadata
import os
import tempfile

# Set before jax is imported, and inherited by the other worker and by the programs that tests start.
os.environ["JAX_PLATFORMS"] = "cpu"
# Torch is only the reference of some tests; its threads would fight over the cores with jax and the other worker.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# The programs of the tests run for milliseconds: compiling them without optimizations is four times as quick. An
# unknown flag would end the process, so other versions than these go without.
if importlib.metadata.version("jaxlib").startswith("0.10."):
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false")
# One program is compiled once for all of them; the process that makes the folder removes it.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    _cache = tempfile.TemporaryDirectory(prefix="tunix_like_tests_", ignore_cleanup_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _cache.name
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"

import jax

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
