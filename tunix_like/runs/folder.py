"""Manages the run folder: its path, the check that it belongs to the run, and the config keys that may change on
resume.

A run folder contains `config.yaml` (resolved), `model/` (the model's description, without weights), `metrics.jsonl`,
`trace.json`, `checkpoints/`, `sft_checkpoints/`, `rollouts/` and `skipped/` (the inputs of skipped updates).
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tunix_like.config.load import as_dict, differences, flat, keys, read_yaml, save, with_defaults
from tunix_like.config.schema import Config
from tunix_like.config.yaml_files import config_file
from tunix_like.errors import UserError
from tunix_like.models.loading import save_description
from tunix_like.models.lora import save_adapter_config
from tunix_like.models.opening import newest_checkpoints
from tunix_like.runs.build import Parts
from tunix_like.runtime.atomic import is_temporary
from tunix_like.runtime.object_storage import is_remote
from tunix_like.runtime.processes import by_first
from tunix_like.storage.mirror import STATE, local_folder
from tunix_like.storage.run_lock import FILE as LOCK


def may_change(key: str) -> bool:
    """Whether a resumed run may have another value of the dotted `key` of its config than its checkpoint."""
    free = ["environment.arguments.url", *(each.name for each in keys() if each.may_change)]
    return any(key == each or key.startswith(f"{each}.") for each in free)


def run_folder(config: Config, config_path: str | Path, kind: str) -> str | Path:
    """Returns `training.output_dir`, in which `{a.b}` is replaced by the value of the key `a.b`, so that the runs of a
    sweep get different folders. If it is not set, returns `runs/<config>-<kind>-s<seed>`.

    `<config>` is the name of the config file without its ending. `kind` is the name of the advantage estimator. For an
    estimator `FILE.py:function`, only the name of the function is used.
    """
    if config.training.output_dir is not None:
        place = _filled(config.training.output_dir, config)
        return place if is_remote(place) else Path(place)
    name = kind.replace(":", ".").rpartition(".")[2]
    return Path("runs") / f"{config_file(Path(config_path)).stem}-{name}-s{config.training.seed}"


def _filled(template: str, config: Config) -> str:
    """Replaces each `{a.b}` by the value of this key."""
    values = dict(flat(as_dict(config)))

    def value(match: re.Match[str]) -> str:
        if (key := match[1]) not in values:
            close = difflib.get_close_matches(key, values, n=1)
            hint = f" Did you mean {{{close[0]}}}?" if close else ""
            raise UserError(f"training.output_dir: {match[0]} names no key.{hint}")
        return str(values[key]).replace("/", "_")

    return re.sub(r"\{(\w+(?:\.\w+)+)\}", value, template)


def claim(place: str | Path, parts: Parts) -> None:
    """Checks that a run may use the folder `place`, and writes the config and the model description of the run into
    it."""
    begun = newest_checkpoints(local_folder(place)) is not None
    by_first(lambda: _claim(place, parts, begun))


def check_place(place: str | Path, parts: Parts) -> None:
    """Checks that a run may use the folder `place`, without writing into it. Raises UserError."""
    folder = local_folder(place).absolute()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise UserError(f"training.output_dir: {place} cannot be written: {there} is no folder that you may write to.")
    _check_unused(place, parts, newest_checkpoints(folder) is not None)


def _check_unused(place: str | Path, parts: Parts, begun: bool) -> None:
    folder = local_folder(place)
    file = folder / "config.yaml"
    if file.exists():
        saved = with_defaults(read_yaml(file), as_dict(Config()))
        changed = differences(_without_urls(saved), _without_urls(as_dict(parts.config)))
        fixed = [line for line in changed if not may_change(line.partition(":")[0])]
        free = [line for line in changed if may_change(line.partition(":")[0])]
        if fixed and begun:  # without a checkpoint, the run can start again without loss
            raise UserError(
                f"{place} holds a run with another config:\n  " + "\n  ".join(fixed) + "\n"
                "Use the same values to resume it, or training.output_dir=<another folder> to start a new run. For a "
                f"sweep, name the folder by the key: training.output_dir='{place}-{{{fixed[0].partition(':')[0]}}}'."
                + ("\nThese keys differ too, which is allowed:\n  " + "\n  ".join(free) if free else "")
            )
        return
    paths = folder.iterdir() if folder.exists() else ()
    if any(path.name not in (LOCK, STATE, "config.yaml.tmp") and not is_temporary(path) for path in paths):
        raise UserError(f"{place} is not empty and is not a run folder; choose another training.output_dir.")


def _claim(place: str | Path, parts: Parts, begun: bool) -> None:
    _check_unused(place, parts, begun)
    folder = local_folder(place)
    folder.mkdir(parents=True, exist_ok=True)
    save(parts.config, folder / "config.yaml")
    save_description(parts.model.config, parts.tokenizer, folder / "model", parts.config.model.param_dtype)
    if parts.model.adapters is not None:
        save_adapter_config(parts.model, folder / "model")


def _without_urls(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings without the addresses of servers of rewards, which may change when a run is resumed."""
    rewards = settings["rewards"]
    entries = [{key: value for key, value in each.items() if key != "url"} for each in rewards["functions"] or ()]
    return {**settings, "rewards": {**rewards, "functions": entries}}
