"""Defines the data sources. A source turns the `data` section of a configuration into rows with prompts.

Public names: `DataSource`, `Record`, `SOURCES`, `load_source`; for a mix of several sources also `source_estimators`,
`template_variables`, `check_parts`, `check_rewards`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, cast

from tunix_like.data import mix
from tunix_like.data.mix import check_parts, check_rewards, entries, source_estimators, template_variables
from tunix_like.data.source import DataSource, Record, refuse_unread_keys
from tunix_like.errors import UserError, nearest

if TYPE_CHECKING:
    from tunix_like.config.schema import DataConfig

__all__ = [
    "SOURCES",
    "DataSource",
    "Record",
    "check_parts",
    "check_rewards",
    "load_source",
    "source_estimators",
    "template_variables",
]

_PROMPT_KEYS = frozenset({"prompt_template", "system_prompt", "apply_chat_template", "chat_template_args"})

_ROW_KEYS = _PROMPT_KEYS | {"path", "split", "eval_split"}

_OWN_KEYS = _ROW_KEYS | {"answer_template"}  # not for gsm8k, whose answer column is fixed


class Source(NamedTuple):
    """A data source. `place` is its function, as `MODULE:FUNCTION` of this package, from a `DataConfig` to a
    `DataSource`; `reads` are the keys of the section `data` that it reads besides `train_size` and `eval_size`."""

    place: str
    reads: frozenset[str] = frozenset()

    @property
    def load(self) -> Callable[[DataConfig], DataSource]:
        module, _, function = self.place.partition(":")
        return cast(
            "Callable[[DataConfig], DataSource]", getattr(importlib.import_module(f"{__name__}.{module}"), function)
        )


SOURCES = {
    "maze": Source("maze:load", frozenset({"maze_size", "seed"})),
    "maze_pairs": Source("maze:load_pairs", frozenset({"maze_size", "seed"})),
    "gsm8k": Source("gsm8k:load", _ROW_KEYS),
    "reverse_text": Source("reverse_text:load", frozenset({"text_length", "seed"})),
    "maze_steps": Source("games:load_maze_steps", frozenset({"maze_size", "seed"})),
    "guess": Source("games:load_guess", frozenset({"seed"})),
    "sums": Source("sums:load", frozenset({"seed"})),
    "calculator": Source("calculator:load", frozenset({"seed", "chat_template_args"})),
    "reasoning_gym": Source("reasoning_gym:load", _PROMPT_KEYS | {"task", "arguments", "seed"}),
    "jsonl": Source("jsonl:load", _OWN_KEYS),
    "hub": Source("jsonl:load_hub", _OWN_KEYS),
    "verifiers": Source("verifiers:load", frozenset({"path", "arguments", "eval_arguments", "chat_template_args"})),
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
