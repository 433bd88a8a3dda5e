"""What several commands share."""

from __future__ import annotations

import os
from pathlib import Path

from tunix_like.errors import UserError


def setup_jax() -> None:
    """Keeps compiled programs between runs; JAX_COMPILATION_CACHE_DIR chooses where."""
    import jax

    folder = os.environ.get("JAX_COMPILATION_CACHE_DIR", str(Path.home() / ".cache" / "tunix_like" / "xla"))
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)  # the many small ones add up to seconds


def chosen_source(source: str, best: bool) -> str:
    """Returns what `open_trained` takes. Raises UserError where the best checkpoint of something other than a run folder
    is asked for."""
    from tunix_like.runs.trained import BEST

    if not best:
        return source
    if not (Path(source) / "checkpoints").is_dir():
        raise UserError(f"--best: {source} is no folder of a run with checkpoints.")
    return str(Path(source) / "checkpoints" / BEST)
