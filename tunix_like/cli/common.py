"""Provides functions that several commands use."""

from __future__ import annotations

import os
from pathlib import Path

from tunix_like.errors import UserError
from tunix_like.runtime.object_storage import is_remote


def setup_jax() -> None:
    """Enables the persistent compilation cache of jax; JAX_COMPILATION_CACHE_DIR sets its folder."""
    import jax

    folder = os.environ.get("JAX_COMPILATION_CACHE_DIR", str(Path.home() / ".cache" / "tunix_like" / "xla"))
    jax.config.update("jax_compilation_cache_dir", folder)
    # Caches programs with a short compile time too, because a run has many of them.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def chosen_source(source: str, best: bool) -> str:
    """Returns the source to open: `source`, or with `best` the best checkpoint of the run folder `source`."""
    from tunix_like.models.opening import BEST

    if not best:
        return source
    if is_remote(source):
        return f"{source.rstrip('/')}/checkpoints/{BEST}"
    if not (Path(source) / "checkpoints").is_dir():
        raise UserError(f"--best: {source} is not a run folder with checkpoints; name a run, or leave --best out.")
    return str(Path(source) / "checkpoints" / BEST)
