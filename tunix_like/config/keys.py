"""Declares config keys (dataclass fields with documentation and allowed values), and checks the values of keys."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from tunix_like.config.argument_names import NamedArguments
from tunix_like.config.urls import is_server, plain_hub_id
from tunix_like.errors import UserError, nearest
from tunix_like.runtime.object_storage import is_remote

LARGEST_INT = 2**31 - 1
SMALLEST_FLOAT = 1.1754944e-38
LARGEST_FLOAT = 3.4028235e38


def key(
    default: Any = None,
    *,
    doc: str,
    choices: Sequence[str] | None = None,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    blank: bool = False,
    python_only: bool = False,
    hub: str | None = None,
    address: bool = False,
    may_change: bool = False,
) -> Any:
    """Declares a config key: a dataclass field with its documentation and allowed range.

    The range is `at_least <= value <= at_most` and `above < value < below`; `blank` allows an empty text. A key with
    `python_only` cannot be set in YAML. `hub` is the kind of an id of the Hugging Face hub (see `plain_hub_id`).
    `address`: a folder that can be an address in object storage, as each value with `hub` can.
    `may_change`: a resumed run may have another value than its checkpoint.
    """
    metadata = {
        "doc": doc,
        "choices": choices,
        "at_least": at_least,
        "above": above,
        "at_most": at_most,
        "below": below,
        "blank": blank,
        "python_only": python_only,
        "hub": hub,
        "address": address,
        "may_change": may_change,
    }
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def number_problem(value: Any) -> str | None:
    """Returns why an integer does not fit into int32, or a float not into float32; None for any other value.

    Compiled programs use no wider number types.
    """
    if isinstance(value, int) and abs(value) > LARGEST_INT:
        return f"integers must be between -{LARGEST_INT} and {LARGEST_INT}"
    if isinstance(value, float) and not math.isfinite(value):
        return "give a finite number"
    if isinstance(value, float) and value and not SMALLEST_FLOAT <= abs(value) <= LARGEST_FLOAT:
        return f"in float32 it would be {'infinite' if abs(value) > 1 else '0'}"
    return None


def _text_problem(text: str) -> str | None:
    """Returns why a text cannot be a file name or cannot be encoded in UTF-8; None for any other text."""
    if "\0" in text:
        return "it contains a NUL character, which is invalid in file names; remove it"
    try:
        text.encode()
    except UnicodeEncodeError:  # Python decodes bytes of an argument that are not UTF-8 to surrogates
        return "it contains a lone surrogate (half of a character); write it in UTF-8"
    return None


def shortened(value: Any) -> str:
    """Returns `repr(value)`, truncated for messages; for an integer above 10**60, a text with its number of digits."""
    if isinstance(value, int) and abs(value) > 10**60:
        return f"a number of {int(value.bit_length() * math.log10(2)) + 1} digits"
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def check_ranges(section: Any, path: str) -> None:
    """Raises `UserError` for the first value of a config dataclass that is outside its declared range. The message
    names the key as `path.key`."""
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        rule = field.metadata
        name = f"{path}.{field.name}"
        if value is None or not rule:
            continue
        if isinstance(value, str) and not value.strip() and not rule["blank"]:
            raise UserError(f"{name}: got {value!r}, an empty text; give a value, or omit the key.")
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and (problem := _text_problem(text)):
                raise UserError(f"{name}: got {shortened(text)}; {problem}.")
        number = isinstance(value, int | float) and not isinstance(value, bool)
        may_be_number = number and rule["at_least"] is not None  # `auto` or a number
        if rule["choices"] is not None and value not in rule["choices"] and not may_be_number:
            other = "" if rule["at_least"] is None else f" Or a number, at least {rule['at_least']}."
            raise UserError(f"{name}: unknown value '{value}'. {nearest(str(value), rule['choices'])}{other}")
        for item in value if isinstance(value, list) else [value]:
            if problem := number_problem(item):
                raise UserError(f"{name}: got {shortened(item)}; {problem}.")
        if not number:
            continue
        if rule["at_least"] is not None and value < rule["at_least"]:
            raise UserError(f"{name}: got {value}; it must be at least {rule['at_least']}.")
        if rule["above"] is not None and value <= rule["above"]:
            raise UserError(f"{name}: got {value}; it must be above {rule['above']}.")
        if rule["at_most"] is not None and value > rule["at_most"]:
            raise UserError(f"{name}: got {value}; it must be at most {rule['at_most']}.")
        if rule["below"] is not None and value >= rule["below"]:
            raise UserError(f"{name}: got {value}; it must be below {rule['below']}.")


def fixed_settings(section: Any) -> dict[str, Any]:
    """Returns the values of a config section that a resumed run must share with its checkpoint."""
    fixed = [field.name for field in dataclasses.fields(section) if not field.metadata["may_change"]]
    values = dataclasses.asdict(section)
    return {name: values[name] for name in fixed}


class Checked(NamedArguments):
    """Base class of config sections. The constructor checks the range of each value and the addresses, so that users of
    Python and of YAML get the same errors, and removes `hf://` from hub ids."""

    section = ""

    def __post_init__(self) -> None:
        check_ranges(self, self.section)
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            name = f"{self.section}.{field.name}"
            if kind := field.metadata.get("hub"):
                plain = plain_hub_id(getattr(self, field.name), name, kind)
                object.__setattr__(self, field.name, plain)
            if (kind or field.metadata.get("address")) and not is_server(getattr(self, field.name)):
                is_remote(getattr(self, field.name), name)
