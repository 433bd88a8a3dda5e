"""Reads the file of a sweep: the trials of a grid, or random ones."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tunix_like.config.load import load
from tunix_like.config.yaml_files import config_file, read_mapping
from tunix_like.errors import UserError, nearest

KEYS = ("config", "overrides", "parameters", "trials", "seed", "folder", "metric")


class Trial(NamedTuple):
    """A run of a sweep: its name, from the values of the keys that differ, the overrides with these values, and the
    number of steps (None: one epoch)."""

    name: str
    overrides: list[str]
    steps: int | None


class Sweep(NamedTuple):
    """A sweep.

    Attributes:
      config: the YAML file of all runs.
      folder: contains the run folders.
      metric: the metric that the runs are ordered by.
    """

    config: Path
    trials: list[Trial]
    folder: Path
    metric: str


def read_sweep(file: Path) -> Sweep:
    """Reads a sweep, and checks the config of each trial.

    Raises:
      UserError: a key is unknown, missing or wrong; the config of a trial is invalid.
    """
    file = config_file(file)
    fields = read_mapping(file)
    if unknown := [key for key in fields if key not in KEYS]:
        raise UserError(f"{file}: unknown key '{unknown[0]}'. {nearest(unknown[0], KEYS)}")
    for key, kind, what in (
        ("config", str, "a YAML file"),
        ("parameters", Mapping, "a mapping of keys to lists"),
        ("overrides", list, "a list of a.b=value"),
        ("folder", str, "a folder"),
        ("metric", str, "a metric"),
        ("seed", int, "an integer"),
    ):
        needed = key in ("config", "parameters")
        if (needed or fields.get(key) is not None) and not isinstance(fields.get(key), kind):
            raise UserError(f"{file}: {key}: got {fields.get(key)!r}; give {what}.")
    if "://" in (fields.get("folder") or ""):
        raise UserError(
            f"{file}: folder: got {fields['folder']!r}; a sweep needs a folder of this machine, or a shared one."
        )
    number = fields.get("trials")
    parameters = fields["parameters"]
    if number is not None and (not isinstance(number, int) or number < 1):
        raise UserError(f"{file}: trials: got {number!r}; give the number of random trials; unset: a grid.")
    config = Path(fields["config"])
    folder = Path(fields.get("folder") or f"runs/{file.stem}")
    values = {key: _values(f"{file}: parameters: {key}", given, number) for key, given in parameters.items()}
    if number is None:
        chosen = [dict(zip(values, row, strict=True)) for row in product(*values.values())]
    else:
        rng = np.random.default_rng(fields.get("seed") or 0)
        drawn = [{key: draw(given, rng) for key, given in values.items()} for _ in range(number)]
        chosen = list({json.dumps(each): each for each in drawn}.values())
    shared = list(fields.get("overrides") or ())
    trials = []
    for each in chosen:
        name, overrides = _trial(each, shared, folder)
        try:
            trials.append(Trial(name, overrides, load(config, overrides).training.max_steps))
        except UserError as error:
            raise UserError(f"{file}: {name}: {error}") from error
    return Sweep(config, trials, folder, fields.get("metric") or "eval/pass@1")


def _values(where: str, given: Any, number: int | None) -> Any:
    """Checks the values of a parameter: a list, or for random trials also a range `{low, high, log}`."""
    if isinstance(given, list) and given:
        return given
    if isinstance(given, Mapping) and number is not None and {"low", "high"} <= given.keys() <= {"low", "high", "log"}:
        low = given["low"]
        high = given["high"]
        log = given.get("log", False)
        numbers = all(isinstance(end, int | float) and not isinstance(end, bool) for end in (low, high))
        if numbers and low < high and (low > 0 or not log):
            return given
        raise UserError(f"{where}: got {dict(given)}; low must be below high, and above 0 with log.")
    if isinstance(given, Mapping) and number is None:
        raise UserError(f"{where}: a range needs random trials; set trials, or give a list.")
    raise UserError(f"{where}: got {given!r}; give a list of values, or {{low: ..., high: ..., log: true}}.")


def draw(given: Any, rng: np.random.Generator) -> Any:
    """Draws one of a list, or a number of a range to three digits, uniformly or with `log` log-uniformly."""
    if isinstance(given, list):
        return given[rng.integers(len(given))]
    low, high = given["low"], given["high"]
    value = math.exp(rng.uniform(math.log(low), math.log(high))) if given.get("log") else rng.uniform(low, high)
    if isinstance(low, int) and isinstance(high, int):
        return round(value)
    return float(f"{value:.3g}")


def _trial(values: Mapping[str, Any], shared: Sequence[str], folder: Path) -> tuple[str, list[str]]:
    last = [key.rpartition(".")[2] for key in values]
    names = [short if last.count(short) == 1 else key for key, short in zip(values, last, strict=True)]
    texts = [value if isinstance(value, str) else json.dumps(value) for value in values.values()]
    name = ",".join(f"{key}={text}" for key, text in zip(names, texts, strict=True)).replace("/", "_")
    own = [f"{key}={text}" for key, text in zip(values, texts, strict=True)]
    return name, [*shared, *own, f"training.output_dir={folder / name}"]
