"""Provides the engines that `rollout.engine` can name."""

from __future__ import annotations

from typing import Any

from tunix_like.errors import UserError, one_line
from tunix_like.rollout.engines.registry import ENGINES, EngineKind
from tunix_like.types import Engine


def _vllm() -> Any:
    try:
        from tunix_like.rollout.engines import vllm
    except ImportError as error:
        raise UserError(
            f"rollout.engine: vllm needs more packages ({one_line(error)}); run pip install 'tunix-like[vllm]'."
        ) from None
    return vllm


def _make_vllm(setup: Any) -> Engine:
    engine: Engine = _vllm().make(setup)
    return engine


ENGINES["local"] = EngineKind(None)
ENGINES["vllm"] = EngineKind(_make_vllm, ("urls", "weights_folder"), lambda setup: _vllm().ask_servers(setup))
