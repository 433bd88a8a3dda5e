"""Reads and checks the fields of a request. Every error names the field."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from tunix_like.errors import UserError


class RequestError(UserError):
    """A request that cannot be answered.

    Args:
      message: what is wrong.
      param: name of the field that is wrong; None if the error concerns no single field.
      http: HTTP status of the answer.
      kind: the field `type` of the error in the answer.
    """

    def __init__(
        self, message: str, param: str | None = None, http: int = 400, kind: str = "invalid_request_error"
    ) -> None:
        super().__init__(message)
        self.param, self.http, self.kind = param, http, kind


def parse_object(body: bytes) -> dict[str, Any]:
    """Parses a request body as a JSON object. Raises RequestError if the body is not a JSON object."""

    def refuse(name: str) -> Any:
        raise ValueError(f"{name} is not a JSON number")

    try:
        value = json.loads(body, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        what = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise RequestError(f"the body is not valid JSON: {what}") from None
    if not isinstance(value, dict):
        raise RequestError("the body must be a JSON object")
    return value


class Fields:
    """The fields of a request body, or of an object in the body. Fields with the value null count as absent. Methods
    that return the value of a field raise RequestError if the value is not valid.

    Args:
      body: the JSON object.
      prefix: text that precedes the names of the fields in error messages.
    """

    def __init__(self, body: Mapping[str, Any], prefix: str = ""):
        self._left = {name: value for name, value in body.items() if value is not None}
        self._prefix = prefix

    def error(self, name: str, message: str) -> RequestError:
        """Returns an error that names the field `name`."""
        full = f"{self._prefix}{name}"
        return RequestError(f"{full}: {message}", full)

    def take(self, name: str) -> Any:
        """Returns the value of a field of any type; None if the field is absent."""
        return self._left.pop(name, None)

    def number(self, name: str, default: float, low: float, high: float = math.inf, above: bool = False) -> float:
        """Returns a field that is a number from `low` to `high`, or `default` if the field is absent. If `above` is
        True, the number must be greater than `low`."""
        value = self._of_type(name, (int, float), "a number")
        if value is None:
            return default
        try:
            value = float(value)
        except OverflowError:
            value = math.inf
        if not (low < value if above else low <= value) or value > high or math.isinf(value):
            bound = f"{'above' if above else 'at least'} {low:g}" + ("" if math.isinf(high) else f", at most {high:g}")
            raise self.error(name, f"got {value:g}; it must be {bound}")
        return value

    def integer(self, name: str, default: Any, low: int, high: int | None = None) -> Any:
        """Returns a field that is an integer from `low` to `high`, or `default` if the field is absent."""
        value = self._of_type(name, int, "an integer")
        if value is None:
            return default
        if value < low or (high is not None and value > high):
            bound = f"at least {low}" + ("" if high is None else f", at most {high}")
            raise self.error(name, f"got {str(value)[:24]}; it must be {bound}")
        return value

    def flag(self, name: str) -> bool:
        """Returns a boolean field, or False if the field is absent."""
        return bool(self._of_type(name, bool, "true or false"))

    def text(self, name: str) -> str | None:
        """Returns a text field, or None if the field is absent."""
        return self._of_type(name, str, "a text")

    def mapping(self, name: str) -> dict[str, Any]:
        """Returns a field that is a JSON object, or an empty dict if the field is absent."""
        return self._of_type(name, dict, "an object") or {}

    def list_of(self, name: str, valid: Callable[[Any], bool], what: str, most: int) -> list[Any]:
        """Returns a field that is a list of at most `most` items, or an empty list if the field is absent. `valid`
        checks each item; `what` is the name of the items in error messages."""
        value = self._of_type(name, list, f"a list of {what}") or []
        if not all(map(valid, value)):
            raise self.error(name, f"it must be a list of {what}")
        if len(value) > most:
            raise self.error(name, f"it has {len(value)} items, at most {most} are allowed")
        return value

    def neutral(self, values: Mapping[str, Sequence[Any]]) -> None:
        """Checks the fields of a request that the server does not support. `values` maps the name of each such field to
        the values that have no effect. Raises RequestError if a field has another value."""
        for name, allowed in values.items():
            value = self.take(name)
            same = (value == each and isinstance(value, bool) == isinstance(each, bool) for each in allowed)
            if value is not None and not any(same):
                raise self.error(name, "this parameter is not supported")

    def finish(self, ignored: Collection[str] = ()) -> None:
        """Raises RequestError if the request has a field that no method has read and that is not in `ignored`."""
        for name in self._left:
            if name not in ignored:
                raise self.error(name[:64], "there is no such parameter")

    def _of_type(self, name: str, kind: Any, what: str) -> Any:
        value = self.take(name)
        if value is None:
            return None
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise self.error(name, f"it must be {what}")
        return value
