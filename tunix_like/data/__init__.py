"""Data sources: a source turns the section `data` of a configuration into rows with prompts.

Start with `load_source` below, which finds the source in `SOURCES`: a file such as `jsonl.py`, `gsm8k.py` or `maze.py`,
whose `load` returns a `DataSource` (`source.py`), or `mix.py`, which combines several. `stream.py` draws the rows and
encodes their prompts in batches, `curriculum.py` by their difficulty.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, cast

from tunix_like.config.sources import entries
from tunix_like.data import mix
from tunix_like.data.mix import check_parts
from tunix_like.data.source import DataSource, Record, refuse_unread_keys
from tunix_like.errors import UserError, nearest

if TYPE_CHECKING:
    from tunix_like.config.schema import DataConfig

__all__ = [
    "SOURCES",
    "DataSource",
    "Record",
    "check_parts",
    "load_source",
]

_PROMPT_KEYS = frozenset({"prompt_template", "system_prompt", "apply_chat_template", "chat_template_args"})

_ROW_KEYS = _PROMPT_KEYS | {"path", "split", "eval_split"}

_OWN_KEYS = _ROW_KEYS | {"answer_template"}  # not for gsm8k, whose answer column is fixed


class RegisteredSource(NamedTuple):
    """A data source.

    Attributes:
      place: its function from a `DataConfig` to a `DataSource`, as `MODULE:FUNCTION` of this package or, with the full
        name of the module, of another one.
      reads: the keys of the section `data` that it reads besides `train_size` and `eval_size`.
    """

    place: str
    reads: frozenset[str] = frozenset()

    @property
    def load(self) -> Callable[[DataConfig], DataSource]:
        module, _, function = self.place.partition(":")
        module = module if "." in module else f"{__name__}.{module}"
        return cast("Callable[[DataConfig], DataSource]", getattr(importlib.import_module(module), function))


SOURCES = {
    "maze": RegisteredSource("maze:load", frozenset({"maze_size", "seed"})),
    "maze_pairs": RegisteredSource("maze:load_pairs", frozenset({"maze_size", "seed"})),
    "gsm8k": RegisteredSource("gsm8k:load", _ROW_KEYS),
    "reverse_text": RegisteredSource("reverse_text:load", frozenset({"text_length", "seed"})),
    "maze_steps": RegisteredSource("games:load_maze_steps", frozenset({"maze_size", "seed"})),
    "guess": RegisteredSource("games:load_guess", frozenset({"seed"})),
    "sums": RegisteredSource("sums:load", frozenset({"seed"})),
    "calculator": RegisteredSource("calculator:load", frozenset({"seed", "chat_template_args"})),
    "reasoning_gym": RegisteredSource("reasoning_gym:load", _PROMPT_KEYS | {"task", "arguments", "seed"}),
    "jsonl": RegisteredSource("jsonl:load", _OWN_KEYS),
    "hub": RegisteredSource("jsonl:load_hub", _OWN_KEYS),
    "verifiers": RegisteredSource(
        "tunix_like.verifiers.tasks:load", frozenset({"path", "arguments", "eval_arguments", "chat_template_args"})
    ),
}


def load_source(config: DataConfig) -> DataSource:
    """Loads and checks the data source that `config` names."""
    if config.name != "mix" and config.name not in SOURCES:
        raise UserError(f"data.name={config.name} is unknown. {nearest(config.name, [*SOURCES, 'mix'])}")
    entries(config)  # raises if data.sources is set without a mix, or if keys are set beside data.sources
    if config.name == "mix":
        return mix.load(config, load_source)
    source = SOURCES[config.name]
    refuse_unread_keys(config, source.reads)
    return source.load(config)
