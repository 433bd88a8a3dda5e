"""Adapts environments of this library, of google-tunix and of TRL, and functions that are tools, to one interface."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from tunix_like.environments.protocol import (
    MOST_CHARACTERS,
    EnvStepResult,
    checked_number,
    checked_observation,
    checked_step,
    show,
)
from tunix_like.environments.tools import ToolCalls, ToolResult, schema_of, tool_message
from tunix_like.errors import UserError
from tunix_like.runtime.moment import NAMES, START, UNKNOWN, Moment, asked_numbers
from tunix_like.runtime.user_code import check_arguments
from tunix_like.text.tool_calls import ToolCall

if TYPE_CHECKING:
    from tunix_like.types import Message

Kind = Literal["steps", "tunix", "tools"]

_NOT_TOOLS = ("reset", "get_reward")


@runtime_checkable
class Trajectory(Protocol):
    """The environment of one trajectory. Its methods check the values that user code returns, and do not catch
    exceptions of user code."""

    def reset(self, columns: Mapping[str, Any], moment: Moment = START) -> str | Sequence[Message] | None: ...

    def step(self, completion: str) -> EnvStepResult: ...

    def finish(self) -> float:
        """Ends the trajectory, and returns the reward that the environment gives at the end, or 0."""


def kind_of(kind: type) -> Kind | None:
    """Returns which interface the class `kind` implements: "steps" (a method `step`), "tunix" (a `BaseTaskEnv` of
    google-tunix) or "tools" (methods that are tools, as in TRL). Returns None if the class implements none of these
    interfaces."""
    if callable(getattr(kind, "_initial_observation", None)) and callable(getattr(kind, "_step_impl", None)):
        return "tunix"
    if callable(getattr(kind, "step", None)):
        return "steps"
    if callable(getattr(kind, "reset", None)) and tool_methods(kind):
        return "tools"
    return None


def check_class(kind: type) -> None:
    """Raises UserError if objects of a class cannot be environments: it has no `reset`, neither `step` nor tools, a
    method that is async or a generator, or a tool without docstring or type hints."""
    name = kind.__name__
    how = kind_of(kind)
    if how is None or (how != "tunix" and not callable(getattr(kind, "reset", None))):
        missing = "reset" if how is not None else "step"
        form = {
            "step": "def step(self, completion: str), which returns EnvStepResult(observation, reward, done)",
            "reset": "def reset(self, **columns), which returns the first observation or None",
        }[missing]
        other = ", or public methods with type hints and docstrings as tools" if missing == "step" else ""
        raise UserError(f"Environment '{name}' has no method '{missing}'; add {form}{other}.")
    for method in ("reset", "step", "get_reward", "_step_impl", "_initial_observation"):
        function = getattr(kind, method, None)
        if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
            raise UserError(
                f"Environment '{name}': the method '{method}' is async, which is not supported; write a plain def, "
                "which may use asyncio.run."
            )
        if inspect.isgeneratorfunction(function):
            raise UserError(f"Environment '{name}': the method '{method}' is a generator (it has a yield); use return.")
    if how == "tools":
        method_schemas(kind)


class Adapted:
    """Makes the environments of trajectories from the user's factory: a class, a function, or functions that are tools.

    Args:
      arguments: passed to the factory by name.

    Attributes:
      name: the name of the environment in error messages.
    """

    def __init__(
        self, factory: Callable[..., Any] | Sequence[Callable[..., Any]], arguments: Mapping[str, Any] | None = None
    ):
        self._arguments = dict(arguments or {})
        self._functions: dict[str, Callable[..., Any]] | None = None
        self._factory: Any = factory
        self._schemas: Mapping[str, Mapping[str, Any]] = {}
        if isinstance(factory, list | tuple):
            self._schemas = schemas_of(factory)
            self._functions = dict(zip(self._schemas, factory, strict=True))
            self.name = "tools"
            return
        self.name = getattr(factory, "__name__", type(factory).__name__)
        if not callable(factory):
            raise UserError(f"Environment '{self.name}' is {show(factory)}, which is not callable; pass the class.")
        if inspect.iscoroutinefunction(factory):
            raise UserError(f"Environment '{self.name}' is an async function; write a plain def.")
        if isinstance(factory, type):
            check_class(factory)
        self._task = _task_parameter(factory)

    def tools(self) -> list[Mapping[str, Any]]:
        """Returns the JSON schemas of the tools of the environment; an empty list if there are no tools. A factory that
        is not a class, or a class with the method `tool_schemas`, is called once to get the schemas.

        Raises:
          UserError: the factory does not make an environment, or does not accept the arguments.
          Exception: any exception that the factory raised.
        """
        if self._functions is not None:
            return list(self._schemas.values())
        by_position, by_name = self._task == "by position", self._task == "by name"
        check_arguments(
            "environment.arguments",
            self.name,
            self._factory,
            self._arguments,
            int(by_position),
            ("task",) if by_name else (),
        )
        if callable(getattr(self._factory, "tool_schemas", None)):
            return list(self._make({}).tool_schemas())
        if isinstance(self._factory, type):
            if kind_of(self._factory) != "tools":
                return []
            return list(method_schemas(self._factory).values())
        environment = self._make({})
        check_class(type(environment))
        if kind_of(type(environment)) == "tools":
            return list(method_schemas(type(environment)).values())
        return _tunix_tools(environment)

    def start(self, columns: Mapping[str, Any]) -> Trajectory:
        """Makes the environment of one trajectory; `columns` are the columns of the trajectory's data row."""
        if self._functions is not None:
            return _ToolEnvironment(self._functions, self._schemas)
        environment = self._make(columns)
        kind = type(environment)
        if not isinstance(self._factory, type):
            check_class(kind)
        how = kind_of(kind)
        if how == "tunix":
            return _TunixEnvironment(environment)
        if how == "tools":
            self._schemas = self._schemas or method_schemas(kind)
            functions = {name: getattr(environment, name) for name in self._schemas}
            return _ToolEnvironment(functions, self._schemas, environment)
        return _StepEnvironment(environment)

    def _make(self, columns: Mapping[str, Any]) -> Any:
        if self._task is None:
            return self._factory(**self._arguments)
        if self._task == "by position":  # as google-tunix does
            return self._factory(dict(columns), **self._arguments)
        return self._factory(task=dict(columns), **self._arguments)


def as_environment(
    factory: Callable[..., Any] | Sequence[Callable[..., Any]] | Adapted, arguments: Mapping[str, Any] | None = None
) -> Adapted:
    """Converts a factory of environments, or a list of functions that are tools, to an `Adapted` object.

    Raises:
      UserError: `factory` cannot make environments (see `check_class`), or a function cannot be a tool.
    """
    return factory if isinstance(factory, Adapted) else Adapted(factory, arguments)


def _task_parameter(factory: Callable[..., Any]) -> Literal["by position", "by name"] | None:
    """Returns how a factory takes the columns of a data row: as its first argument or as the argument `task`; None if
    it does not take them."""
    try:
        parameters = inspect.signature(factory).parameters
    except ValueError:  # some classes of extension modules have no signature
        return None
    is_tunix = isinstance(factory, type) and kind_of(factory) == "tunix"
    if not is_tunix and "task" not in parameters and "single_example" not in parameters:
        return None
    first = next(iter(parameters.values()), None)
    positional = first is not None and first.kind in (first.POSITIONAL_ONLY, first.POSITIONAL_OR_KEYWORD)
    return "by position" if positional else "by name"


def schemas_of(functions: Sequence[Callable[..., Any]]) -> dict[str, Mapping[str, Any]]:
    """Returns the schemas of functions that are tools, by name. Raises UserError if two have the same name."""
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
    return {name: schema_of(method, f"{kind.__name__}.{name}") for name, method in tool_methods(kind).items()}


class _StepEnvironment:
    """An environment with the methods `reset(**columns)`, `step(completion)` and perhaps `close`."""

    def __init__(self, environment: Any):
        self.environment = environment
        self.name = type(environment).__name__

    def reset(self, columns: Mapping[str, Any], moment: Moment = START) -> str | Sequence[Message] | None:
        return _reset(self.environment, columns, moment)

    def step(self, completion: str) -> EnvStepResult:
        return checked_step(self.environment.step(completion), f"{self.name}.step")

    def finish(self) -> float:
        close = getattr(self.environment, "close", None)
        if callable(close):
            close()
        return 0.0


class _ToolEnvironment:
    """Turns that call functions: plain functions, or the public methods of an object, as with `environment_factory` in
    TRL. The object may have a method `get_reward`; plain functions give no reward."""

    def __init__(
        self,
        functions: Mapping[str, Callable[..., Any]],
        schemas: Mapping[str, Mapping[str, Any]],
        environment: Any = None,
    ):
        self.environment = environment
        self._functions = functions
        self._calls = ToolCalls(schemas)

    def reset(self, columns: Mapping[str, Any], moment: Moment = START) -> str | Sequence[Message] | None:
        return None if self.environment is None else _reset(self.environment, columns, moment)

    def step(self, completion: str) -> EnvStepResult:
        return self._calls.step(completion, self._run)

    def _run(self, call: ToolCall) -> ToolResult:
        try:
            return ToolResult(str(self._functions[call.name](**call.arguments))[:MOST_CHARACTERS])
        except Exception as error:
            return ToolResult(f"error: {type(error).__name__}: {error}"[:MOST_CHARACTERS], failed=True)

    def finish(self) -> float:
        reward = getattr(self.environment, "get_reward", None)
        where = f"{type(self.environment).__name__}.get_reward: reward"
        return checked_number(reward(), where) if callable(reward) else 0.0


class _TunixEnvironment(_StepEnvironment):
    """A google-tunix `BaseTaskEnv`. `BaseTaskEnv.step` counts the steps, and ends the episode after `max_steps` steps.

    A `ToolEnvironment` of google-tunix gets the tool calls of a turn in the form that the agent of google-tunix uses. A
    turn without tool calls is the final answer, which the environment gets as text.
    """

    def __init__(self, environment: Any):
        super().__init__(environment)
        self._calls = ToolCalls() if hasattr(environment, "tool_manager") else None

    def reset(self, columns: Mapping[str, Any], moment: Moment = START) -> str | Sequence[Message] | None:
        result = self.environment.reset()
        if not (isinstance(result, tuple) and len(result) == 2):
            raise UserError(f"{self.name}.reset returned {show(result)}; return the tuple (observation, info).")
        observation = result[0]
        if observation is getattr(self.environment, "task", None):
            return None  # the observation is the data row, whose prompt the policy already has
        return checked_observation(_from_tunix(observation, {}), f"{self.name}.reset")

    def step(self, completion: str) -> EnvStepResult:
        calls = [] if self._calls is None else self._calls.read(completion)
        counts = {} if self._calls is None else self._calls.counts()
        if wrong := [call for call in calls if call.error is not None]:
            return EnvStepResult([tool_message(call.name, f"error: {call.error}") for call in wrong], info=counts)
        result = self.environment.step(_tunix_action(completion, calls))
        if isinstance(result, tuple) and result:
            names = {f"call_{i}": call.name for i, call in enumerate(calls)}
            result = (_from_tunix(result[0], names), *result[1:])
        step = checked_step(result, f"{self.name}.step")
        return step._replace(info={**step.info, **counts})


def _reset(environment: Any, columns: Mapping[str, Any], moment: Moment) -> str | Sequence[Message] | None:
    """Calls `reset` with the columns of a data row for which it has parameters (with `**kwargs`: all columns) and the
    numbers of the run that it asks for, and checks the observation.

    Raises:
      UserError: `reset` requires a column that the rows do not have.
    """
    numbers = {name: moment[name] for name in asked_numbers(environment.reset, moment, columns)}
    where = f"{type(environment).__name__}.reset"
    parameters = inspect.signature(environment.reset).parameters.values()
    for p in parameters:
        needed = p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
        missing = needed and (p.name not in {*columns, *numbers} or p.kind is p.POSITIONAL_ONLY)
        if missing and p.name in {*NAMES} - {*moment}:
            raise UserError(f"{where} needs an argument '{p.name}': {UNKNOWN}")
        if missing:
            raise UserError(
                f"{where} needs an argument '{p.name}', but the rows have no such column; they have: "
                f"{', '.join(sorted(columns)) or 'none'}. Give it a default value, or rename it."
            )
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        columns = {p.name: columns[p.name] for p in parameters if p.name in columns}
    return checked_observation(environment.reset(**columns, **numbers), where)


def _tunix_action(completion: str, calls: Sequence[Any]) -> Any:
    """Converts the text of a turn and its tool calls to an action of a google-tunix `ToolEnvironment`."""
    if not calls:
        return completion
    return [
        {"id": f"call_{i}", "function": {"name": call.name, "arguments": json.dumps(call.arguments)}}
        for i, call in enumerate(calls)
    ]


def _from_tunix(observation: Any, names: Mapping[str, str]) -> Any:
    """Converts an observation of google-tunix to text or messages, as the agents of google-tunix do.

    A dict with the key `prompts` or `question` becomes the text that is stored under this key. A dict with
    `tool_outputs` becomes one message per tool call. An empty dict becomes None. Any other dict is written as JSON.

    Args:
      names: the names of the called tools, by the id of the tool call.
    """
    if not isinstance(observation, Mapping):
        return observation
    for key in ("prompts", "question"):
        if key in observation:
            return observation[key]
    if isinstance(outputs := observation.get("tool_outputs"), Mapping):
        ordered = sorted(outputs, key=list(names).index) if set(outputs) <= set(names) else list(outputs)
        return [tool_message(names.get(call, ""), str(outputs[call])) for call in ordered]
    return json.dumps(dict(observation), default=str, ensure_ascii=False) if observation else None


def _tunix_tools(environment: Any) -> list[Mapping[str, Any]]:
    manager = getattr(environment, "tool_manager", None)
    return [] if manager is None else list(manager.get_json_schema())
