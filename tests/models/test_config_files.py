"""Compares what is read from the `config.json` of each family, and what an export writes, with `config_files.json`.
After an intended change, `python -m tests.models.test_config_files` writes this file again."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from tests.models.published_configs import CHECKPOINTS, GEMMA4_26B, GEMMA4_31B
from tunix_like.models.config import DecoderConfig
from tunix_like.models.families import FAMILIES

FILE = Path(__file__).with_name("config_files.json")
ACCEPTED = {name: fields for name, (fields, refused) in CHECKPOINTS.items() if refused is None}
ACCEPTED |= {"google/gemma-4-31B": GEMMA4_31B, "google/gemma-4-26B-A4B": GEMMA4_26B}


def read_file(fields: dict[str, Any], folder: Path) -> DecoderConfig:
    (folder / "config.json").write_text(json.dumps(fields))
    return DecoderConfig.from_hf(folder)


def conversion(fields: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Returns the fields that are read, without those with the default, and the fields that the export changes."""
    config = read_file(fields, folder)
    read = {
        field.name: plain(value)
        for field in dataclasses.fields(config)
        if field.compare and (value := getattr(config, field.name)) != field.default
    }
    text = fields.get("text_config", fields)
    changed = {name: plain(value) for name, value in config.to_hf().items() if text.get(name, "absent") != value}
    return {"read": read, "written": changed}


def plain(value: Any) -> Any:
    """Returns a value for a JSON file; a sequence with one entry per layer as its repeated pattern."""
    if dataclasses.is_dataclass(value):
        return {type(value).__name__: dataclasses.asdict(value)}
    if not isinstance(value, list | tuple) or len(value) < 4:
        return value
    entries = list(value)
    period = next(n for n in range(1, len(entries) + 1) if entries == (entries[:n] * len(entries))[: len(entries)])
    return {"repeated": entries[:period], "entries": len(entries)}


@pytest.mark.parametrize("name", ACCEPTED)
def test_fields_that_are_read_and_written(name, tmp_path):
    assert json.loads(json.dumps(conversion(ACCEPTED[name], tmp_path))) == json.loads(FILE.read_text())[name]


@pytest.mark.parametrize("name", ACCEPTED)
def test_export_gives_the_same_config_again(name, tmp_path):
    """Also without the file from which the config was read, in a family that the options select."""
    config = read_file(ACCEPTED[name], tmp_path)
    assert read_file(config.to_hf(), tmp_path) == config
    assert read_file(dataclasses.replace(config, source=None).to_hf(), tmp_path) == config


def test_every_family_is_compared(tmp_path):
    families = {read_file(fields, tmp_path).to_hf()["model_type"] for fields in ACCEPTED.values()}
    assert families == FAMILIES.keys(), "add a config to CHECKPOINTS in published_configs.py"
    assert json.loads(FILE.read_text()).keys() == ACCEPTED.keys(), "run python -m tests.models.test_config_files"


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        lines = [f"{json.dumps(name)}: {json.dumps(conversion(ACCEPTED[name], Path(folder)))}" for name in ACCEPTED]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
