"""Data sources: each one turns the `data` section of a configuration into rows with prompts.

Public names: `DataSource`, `Record`, `SOURCES`, `load_source`; for mixes also `source_estimators`,
`template_variables`, `check_parts`, `check_rewards`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tunix_like.data import gsm8k, jsonl, maze, mix, reverse_text
from tunix_like.data.entries import entries, source_estimators, template_variables
from tunix_like.data.mix import check_parts, check_rewards
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

SOURCES: dict[str, Callable[[DataConfig], DataSource]] = {
    "maze": maze.load,
    "gsm8k": gsm8k.load,
    "reverse_text": reverse_text.load,
    "jsonl": jsonl.load,
    "hub": jsonl.load_hub,
    "mix": lambda config: mix.load(config, load_source),
}

_ROW_KEYS = frozenset(
    {"path", "split", "eval_split", "prompt_template", "system_prompt", "apply_chat_template", "chat_template_args"}
)

_OWN_KEYS = _ROW_KEYS | {"answer_template"}  # gsm8k does not read it: its answer column is fixed

# In addition to data.train_size and data.eval_size, which every source reads.
_READS: dict[str, frozenset[str]] = {
    "maze": frozenset({"maze_size", "seed"}),
    "gsm8k": _ROW_KEYS,
    "reverse_text": frozenset({"text_length", "seed"}),
    "jsonl": _OWN_KEYS,
    "hub": _OWN_KEYS,
}


def load_source(config: DataConfig) -> DataSource:
    """Loads and checks the data source that `config` names.

    Raises:
      UserError: the source is unknown, does not read a key that is set, or its rows are invalid.
    """
    if config.name not in SOURCES:
        raise UserError(f"data.name={config.name} is unknown. {nearest(config.name, SOURCES)}")
    entries(config)  # raises if data.sources is set without a mix, or if keys are set beside data.sources
    if config.name != "mix":
        refuse_unread_keys(config, _READS[config.name])
    return SOURCES[config.name](config)
