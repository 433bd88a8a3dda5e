"""Registers engines by name, and loads engines from a user's file or module (`rollout.engine`)."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from jax.sharding import Mesh

from tunix_like.config.schema import RolloutConfig
from tunix_like.errors import UserError, check_type, nearest
from tunix_like.models.decoder import Decoder
from tunix_like.runtime.user_code import check_arguments, check_new_name, load_function
from tunix_like.text.tokenizer import Tokenizer
from tunix_like.types import Engine

_F = TypeVar("_F", bound=Callable[..., Engine])

MEMBERS = "give an object with place (it may return its argument), generate, max_prompt_length and row_steps"
"""What an engine must have, for error messages."""

KEYS_OF_ENGINES = ("urls", "weights_folder", "devices")
"""Keys of the section `rollout` that are an error with an engine that does not read them."""


class EngineSetup(NamedTuple):
    """What the engine of a run is made from.

    Attributes:
      model: the model that is trained. Its weights change; `Engine.place` gets the current ones.
      folder: the run folder.
      max_gap: `training.max_logprob_gap`.
    """

    model: Decoder
    tokenizer: Tokenizer
    rollout: RolloutConfig
    folder: Path
    mesh: Mesh | None = None
    max_gap: float | None = None


class EngineKind(NamedTuple):
    """A value of `rollout.engine`.

    Attributes:
      make: called with an `EngineSetup` and, by name, the values of `rollout.engine_arguments`. None: the sampler of
        this process, which each learner makes itself.
      reads: those of `KEYS_OF_ENGINES` that have an effect. An engine that reads `urls` cannot work without them.
      ask_servers: returns for each server its address, and a line about it or why a run could not use it.
    """

    make: Callable[..., Engine] | None
    reads: Collection[str] = ("devices",)
    ask_servers: Callable[[EngineSetup], list[tuple[str, str | UserError]]] | None = None


ENGINES: dict[str, EngineKind] = {}
"""All registered engines by name."""


def register_engine(name: str, reads: Collection[str] = ("devices",)) -> Callable[[_F], _F]:
    """Returns a decorator that registers a class or a function that makes engines; see `EngineKind`.

    Raises:
      UserError: the name is already registered, or contains a colon (reserved for files and modules).
    """

    def register(make: _F) -> _F:
        check_new_name("engine", name, ENGINES)
        ENGINES[name] = EngineKind(make, reads)
        return make

    return register


def find_engine(name: str) -> EngineKind:
    """Returns the engine of a registered name, of `path/to/file.py:Class` or of `package.module:Class`."""
    if name in ENGINES:
        return ENGINES[name]
    if ":" in name:
        return EngineKind(load_function(name, "rollout.engine: Engine"))
    raise UserError(
        f"rollout.engine: the engine '{name}' is unknown. {nearest(name, ENGINES)} "
        "Write an engine of your own as path/to/file.py:Class or package.module:Class."
    )


def check_engine(rollout: RolloutConfig) -> None:
    """Raises UserError if the engine is unknown, if a key is set that it does not read, or if a key or an argument is
    missing."""
    kind = find_engine(rollout.engine)
    for key in KEYS_OF_ENGINES:
        if getattr(rollout, key) and key not in kind.reads:
            others = " or ".join(name for name, other in ENGINES.items() if key in other.reads)
            raise UserError(f"rollout.{key}: it needs rollout.engine={others}; set it, or omit rollout.{key}.")
    if "urls" in kind.reads and not rollout.urls:
        raise UserError(
            f"rollout.urls: rollout.engine={rollout.engine} needs the addresses of servers, e.g. "
            "[http://127.0.0.1:8000]."
        )
    make: Any = (lambda setup: None) if kind.make is None else kind.make
    check_arguments("rollout.engine_arguments", rollout.engine, make, rollout.engine_arguments or {}, positional=1)


def engine_of(setup: EngineSetup) -> Engine | None:
    """Makes the engine of a run; None for the sampler of this process, which each learner makes itself.

    Raises:
      UserError: the engine cannot be used, or the result is not an engine.
    """
    kind = find_engine(setup.rollout.engine)
    if kind.make is None:
        return None
    engine: Any = kind.make(setup, **(setup.rollout.engine_arguments or {}))
    check_type(f"rollout.engine={setup.rollout.engine}", engine, Engine, MEMBERS)
    return engine
