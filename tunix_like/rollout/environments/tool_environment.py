"""Implements environments whose turns are tool calls. The tools are plain functions, or methods of the objects that
TRL's `environment_factory` makes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tunix_like.errors import UserError
from tunix_like.rollout.environments.protocol import EnvStepResult
from tunix_like.rollout.environments.results import MOST_CHARACTERS, checked_number, checked_observation
from tunix_like.rollout.environments.tool_calls import ToolCall, tool_calls
from tunix_like.rollout.environments.tools import argument_problem, schema_of

_NOT_TOOLS = ("reset", "get_reward")


class Tools:
    """Runs and counts the tool calls of one trajectory. `functions` and `schemas` are mappings by tool name."""

    def __init__(self, functions: Mapping[str, Callable[..., Any]], schemas: Mapping[str, Mapping[str, Any]]):
        self.functions, self.schemas = functions, schemas
        self.calls, self.errors = 0, 0

    def step(self, completion: str) -> EnvStepResult:
        """Runs the tool calls of a turn in their order, and returns one message for each call.

        A turn without a tool call is the final answer. The message for a call that fails begins with "error:".
        """
        calls = tool_calls(completion)
        messages = [self._message(call) for call in calls]
        info = {"tool_calls": float(self.calls), "tool_errors": float(self.errors)}
        return EnvStepResult(checked_observation(messages or None, "tools"), 0.0, not calls, info)

    def _message(self, call: ToolCall) -> dict[str, str]:
        self.calls += 1
        content, failed = self._run(call)
        self.errors += failed
        message = {"role": "tool", "content": f"error: {content}" if failed else content}
        return message | ({"name": call.name} if call.name else {})

    def _run(self, call: ToolCall) -> tuple[str, bool]:
        """Runs one tool call. Returns its result as text, and whether the result is an error."""
        if call.error is not None:
            return call.error, True
        if call.name not in self.functions:
            return f"there is no tool '{call.name[:100]}'; valid: {', '.join(self.functions)}", True
        if problem := argument_problem(self.schemas[call.name], call.arguments):
            return problem, True
        try:
            return str(self.functions[call.name](**call.arguments))[:MOST_CHARACTERS], False
        except Exception as error:
            return f"{type(error).__name__}: {error}"[:MOST_CHARACTERS], True


def schemas_of(functions: Sequence[Callable[..., Any]]) -> dict[str, Mapping[str, Any]]:
    """Returns the schemas of functions that are tools, by name of the function.

    Raises:
      UserError: a function cannot be a tool, or two functions have the same name.
    """
    schemas: dict[str, Mapping[str, Any]] = {}
    for function in functions:
        schema = schema_of(function)
        name = schema["function"]["name"]
        if name in schemas:
            raise UserError(f"Two tools have the name '{name}'; rename one.")
        schemas[name] = schema
    return schemas


def tool_methods(kind: type) -> dict[str, Callable[..., Any]]:
    """Returns the methods of a class that TRL uses as tools, by name: all public methods except `reset` and
    `get_reward`."""
    members = inspect.getmembers(kind, predicate=inspect.isfunction)
    return {name: method for name, method in members if not name.startswith("_") and name not in _NOT_TOOLS}


def method_schemas(kind: type) -> dict[str, Mapping[str, Any]]:
    """Returns the schemas of the methods of a class that are tools, by name of the method. Raises UserError if a method
    cannot be a tool (see `schema_of`)."""
    return {name: schema_of(method, f"{kind.__name__}.{name}") for name, method in tool_methods(kind).items()}


class ToolObject:
    """The environment of one trajectory whose tools are the public methods of an object, as with `environment_factory`
    in TRL."""

    def __init__(self, environment: Any, schemas: Mapping[str, Mapping[str, Any]]):
        self.environment, self.name = environment, type(environment).__name__
        self.tools = Tools({name: getattr(environment, name) for name in schemas}, schemas)

    def reset(self, columns: Mapping[str, Any]) -> Any:
        """Resets the object whose methods are the tools. The object's `reset` gets the columns for which it has
        parameters. A `reset` with `**kwargs` gets all columns, as in TRL."""
        reset = self.environment.reset
        return checked_observation(reset(**accepted(reset, columns, f"{self.name}.reset")), f"{self.name}.reset")

    def step(self, completion: str) -> EnvStepResult:
        return self.tools.step(completion)

    def finish(self) -> float:
        """Returns the reward from the method `get_reward` of the environment, or 0 if there is no such method."""
        reward = getattr(self.environment, "get_reward", None)
        return checked_number(reward(), f"{self.name}.get_reward: reward") if callable(reward) else 0.0


class ToolFunctions:
    """The environment of one trajectory with plain functions as tools. Rewards come from the reward functions of the
    run."""

    def __init__(self, functions: Mapping[str, Callable[..., Any]], schemas: Mapping[str, Mapping[str, Any]]):
        self.tools = Tools(functions, schemas)

    def reset(self, columns: Mapping[str, Any]) -> None:
        return None

    def step(self, completion: str) -> EnvStepResult:
        return self.tools.step(completion)

    def finish(self) -> float:
        return 0.0


def accepted(function: Callable[..., Any], columns: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Returns the columns of a data row for which a method has parameters. A method with `**kwargs` accepts all
    columns.

    Raises:
      UserError: the method requires a column that the rows do not have.
    """
    parameters = inspect.signature(function).parameters.values()
    for p in parameters:
        needed = p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
        if needed and (p.name not in columns or p.kind is p.POSITIONAL_ONLY):
            raise UserError(
                f"{where} needs an argument '{p.name}', but the rows have no such column; they have: "
                f"{', '.join(sorted(columns)) or 'none'}. Give it a default value, or rename it."
            )
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return dict(columns)
    return {p.name: columns[p.name] for p in parameters if p.name in columns}
