"""Describes functions as tools by a JSON schema of their parameters, and runs the tool calls in the turns of the
policy."""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, Union

from tunix_like.environments.protocol import EnvStepResult, checked_observation
from tunix_like.errors import UserError
from tunix_like.text.tool_calls import ToolCall, tool_calls

_TYPES: dict[Any, dict[str, Any]] = {
    int: {"type": "integer"},
    float: {"type": "number"},
    str: {"type": "string"},
    bool: {"type": "boolean"},
    list: {"type": "array"},
    dict: {"type": "object"},
    Any: {},
}
_JSON_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}
_SECTION = re.compile(r"\n\s*(Args|Arguments|Returns|Raises|Yields|Examples?|Notes?):[ \t]*(?=\n|$)")
_PARAMETER = re.compile(r"^(\s*)(\w+)\s*(?:\([^)]*\))?:\s*(.*)$")


class ToolResult(NamedTuple):
    """The result of a tool call: the text that the model sees, and whether the call failed. The other fields are as in
    `EnvStepResult`."""

    text: str
    failed: bool = False
    reward: float = 0.0
    done: bool = False
    info: Mapping[str, Any] = {}


class ToolCalls:
    """Reads, checks, runs and counts the tool calls of one trajectory. The text for a call that cannot be run begins
    with "error:".

    Args:
      schemas: the schemas of the tools by name (see `schema_of`); None if the caller checks names and arguments.
    """

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]] | None = None):
        self._schemas = schemas
        self._calls = self._errors = 0

    def read(self, completion: str) -> list[ToolCall]:
        """Returns the calls in a turn. A call that cannot be run has an error."""
        calls = [call._replace(error=self._problem(call)) for call in tool_calls(completion)]
        self._calls += len(calls)
        self._errors += sum(call.error is not None for call in calls)
        return calls

    def step(self, completion: str, run: Callable[[ToolCall], ToolResult]) -> EnvStepResult:
        """Runs the calls of a turn in their order until one ends the episode, and returns one message for each. A turn
        without a call is the final answer."""
        calls = self.read(completion)
        messages: list[dict[str, str]] = []
        reward = 0.0
        done = not calls
        info = dict[str, Any]()
        for call in calls:
            if call.error is not None:
                messages.append(tool_message(call.name, f"error: {call.error}"))
                continue
            result = run(call)
            self._errors += result.failed
            messages.append(tool_message(call.name, result.text))
            reward = reward + result.reward
            done = result.done
            info = {**info, **result.info}
            if done:
                break
        return EnvStepResult(checked_observation(messages or None, "tools"), reward, done, info | self.counts())

    def counts(self) -> dict[str, float]:
        """Returns the metrics of the trajectory."""
        return {"tool_calls": float(self._calls), "tool_errors": float(self._errors)}

    def _problem(self, call: ToolCall) -> str | None:
        if call.error is not None or self._schemas is None:
            return call.error
        if call.name not in self._schemas:
            return f"there is no tool '{call.name[:100]}'; valid: {', '.join(self._schemas)}"
        return argument_problem(self._schemas[call.name], call.arguments)


def tool_message(name: str, text: str) -> dict[str, str]:
    return {"role": "tool", "content": text} | ({"name": name} if name else {})


def schema_of(function: Any, name: str | None = None) -> dict[str, Any]:
    """Returns the description of a tool in the form that chat templates take.

    The description has the form `{"type": "function", "function": {"name", "description", "parameters": JSON schema}}`,
    as in `transformers.utils.get_json_schema`. The descriptions are read from the docstring, which must be in Google
    style.

    Args:
      name: the name of the tool in error messages, e.g. `MyEnv.search`. If None, the name of the function is used.

    Raises:
      UserError: the docstring, a type hint or the description of a parameter is missing, a type has no JSON form, or
        the function is async.
    """
    label = str(name or getattr(function, "__name__", repr(function)))
    _check_kind(function, label)
    description, described = _read_docstring(inspect.getdoc(function) or "")
    if not description:
        raise UserError(
            f"Tool '{label}' has no docstring; add one that says what the tool does, with an Args section that "
            "describes its parameters."
        )
    hints = _hints(function, label)
    properties: dict[str, Any] = {}
    required = []
    for parameter in _parameters(function, label):
        if parameter.name not in hints:
            raise UserError(
                f"Tool '{label}': the parameter '{parameter.name}' has no type hint; add one, e.g. "
                f"'{parameter.name}: str'."
            )
        if parameter.name not in described:
            raise UserError(
                f"Tool '{label}': the docstring does not describe the parameter '{parameter.name}'; add the line "
                f"'{parameter.name}: ...' to its Args section."
            )
        schema = _schema(hints[parameter.name], label, parameter.name)
        properties[parameter.name] = schema | {"description": described[parameter.name]}
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    if required:
        parameters["required"] = required
    return {
        "type": "function",
        "function": {
            "name": getattr(function, "__name__", label),
            "description": description,
            "parameters": parameters,
        },
    }


def argument_problem(schema: Mapping[str, Any], arguments: Mapping[str, Any]) -> str | None:
    """Returns what is wrong with the arguments of a tool call, or None. `schema` is as in `schema_of`."""
    parameters = schema["function"]["parameters"]
    known = parameters["properties"]
    for name in parameters.get("required", ()):
        if name not in arguments:
            return f"the argument '{name}' is missing"
    for name, value in arguments.items():
        if name not in known:
            return f"there is no argument '{name}'; valid: {', '.join(known) or 'none'}"
        if not _fits(value, known[name]):
            wanted = known[name]
            what = f"one of {wanted['enum']}" if "enum" in wanted else f"of type {wanted.get('type', 'another')}"
            return f"the argument '{name}' must be {what}"
    return None


def _check_kind(function: Any, label: str) -> None:
    if not callable(function):
        raise UserError(f"Tool '{label}' is of type {type(function).__name__}, which is not callable.")
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        raise UserError(
            f"Tool '{label}' is async, which is not supported; write a plain def, which may use asyncio.run."
        )
    if inspect.isgeneratorfunction(function):
        raise UserError(f"Tool '{label}' is a generator (it has a yield); return the result.")


def _parameters(function: Callable[..., Any], label: str) -> list[inspect.Parameter]:
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        raise UserError(f"Tool '{label}' has no signature; wrap it in a function with type hints.") from None
    if parameters and parameters[0].name in ("self", "cls") and parameters[0].annotation is inspect.Parameter.empty:
        parameters = parameters[1:]
    for p in parameters:
        if p.kind not in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY):
            raise UserError(f"Tool '{label}': the parameter '{p}' cannot be passed by name; name each parameter.")
    return parameters


def _hints(function: Callable[..., Any], label: str) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function)
    except Exception as error:
        raise UserError(
            f"Tool '{label}': its type hints cannot be read ({type(error).__name__}: {error}); import the names that "
            "they use."
        ) from None


def _schema(hint: Any, label: str, parameter: str) -> dict[str, Any]:
    origin = typing.get_origin(hint)
    inner = typing.get_args(hint)
    if origin is None and isinstance(hint, typing.Hashable) and hint in _TYPES:
        return dict(_TYPES[hint])
    if origin is Literal and all(type(value) in _JSON_TYPES for value in inner):
        kinds = list(dict.fromkeys(_JSON_TYPES[type(value)] for value in inner))
        return {"type": kinds[0] if len(kinds) == 1 else kinds, "enum": list(inner)}
    if origin in (Union, types.UnionType):
        return _union(inner, label, parameter)
    if origin is list:
        return {"type": "array", "items": _schema(inner[0], label, parameter)}
    if origin is dict:
        return {"type": "object", "additionalProperties": _schema(inner[1], label, parameter)}
    shown = getattr(hint, "__name__", hint)
    raise UserError(
        f"Tool '{label}': the type hint {shown} of the parameter '{parameter}' has no JSON form; "
        "use int, float, str, bool, list[...], dict[str, ...], Literal[...], or one of these with `| None`."
    )


def _union(inner: tuple[Any, ...], label: str, parameter: str) -> dict[str, Any]:
    parts = [_schema(hint, label, parameter) for hint in inner if hint is not type(None)]
    if len(parts) == 1:
        schema = parts[0]
    elif all(part.keys() == {"type"} and isinstance(part["type"], str) for part in parts):
        schema = {"type": sorted({part["type"] for part in parts})}
    else:
        schema = {"anyOf": parts}
    return schema | ({"nullable": True} if type(None) in inner else {})


def _fits(value: Any, schema: Mapping[str, Any]) -> bool:
    """Returns whether a JSON value has the type of a schema. The values in a list are checked, but not those in an
    object."""
    if value is None:
        untyped = "type" not in schema and "anyOf" not in schema
        return untyped or bool(schema.get("nullable")) or "null" in _listed(schema.get("type", []))
    if "enum" in schema:
        return any(value == choice and type(value) is type(choice) for choice in schema["enum"])
    if "anyOf" in schema:
        return any(_fits(value, part) for part in schema["anyOf"])
    if "type" not in schema:
        return True
    kinds = _listed(schema["type"])
    if isinstance(value, bool):
        return "boolean" in kinds
    if isinstance(value, int):
        return "integer" in kinds or "number" in kinds
    if isinstance(value, list):
        return "array" in kinds and all(_fits(entry, schema.get("items", {})) for entry in value)
    return {str: "string", float: "number", dict: "object"}.get(type(value)) in kinds


def _listed(kinds: str | list[str]) -> list[str]:
    return [kinds] if isinstance(kinds, str) else kinds


def _read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Returns the description of a function and those of its parameters, from a docstring in Google style."""
    parts = _SECTION.split(f"\n{text.strip()}\n")
    described: dict[str, str] = {}
    for title, body in zip(parts[1::2], parts[2::2], strict=True):
        if title in ("Args", "Arguments"):
            described = _described(body)
    return parts[0].strip(), described


def _described(body: str) -> dict[str, str]:
    described: dict[str, str] = {}
    name = None
    indent = None
    for line in body.splitlines():
        if not line.strip():
            continue
        match = _PARAMETER.match(line)
        if match and (indent is None or len(match[1]) <= indent):
            indent = len(match[1])
            name = match[2]
            described[name] = match[3].strip()
        elif name is not None:
            described[name] = f"{described[name]} {line.strip()}".strip()
    return described
