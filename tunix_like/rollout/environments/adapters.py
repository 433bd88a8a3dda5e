"""Adapts environments of this library, of google-tunix and of TRL, and functions that are tools, to one interface."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from tunix_like.errors import UserError
from tunix_like.rollout.environments.protocol import EnvStepResult
from tunix_like.rollout.environments.results import checked_observation, checked_step, show
from tunix_like.rollout.environments.tool_calls import tool_calls
from tunix_like.rollout.environments.tool_environment import (
    ToolFunctions,
    ToolObject,
    accepted,
    method_schemas,
    schemas_of,
    tool_methods,
)

if TYPE_CHECKING:
    from tunix_like.types import Message

Kind = Literal["steps", "tunix", "tools"]


@runtime_checkable
class Trajectory(Protocol):
    """The environment of one trajectory. Its methods check the values that user code returns, and do not catch
    exceptions of user code."""

    def reset(self, columns: Mapping[str, Any]) -> str | Sequence[Message] | None:
        """Resets the environment with the columns of a data row, and returns the first observation."""

    def step(self, completion: str) -> EnvStepResult:
        """Passes the text of one turn to the environment, and returns the result of the step."""

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
    """Checks that objects of a class can be environments.

    Raises:
      UserError: the class has no `reset`, the class has neither `step` nor tools, a method is async or a generator, or
        a tool has no docstring or no type hints.
    """
    name, how = kind.__name__, kind_of(kind)
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
          UserError: an object that the factory made is not an environment, or the factory does not accept the
            arguments.
          Exception: any exception that the factory raised.
        """
        if self._functions is not None:
            return list(self._schemas.values())
        check_arguments(self.name, self._factory, self._arguments, self._task is not None)
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
        """Makes the environment of one trajectory; `columns` are the columns of the trajectory's data row.

        Raises:
          UserError: the factory returned an object that is not an environment.
          Exception: any exception that the factory raised.
        """
        if self._functions is not None:
            return ToolFunctions(self._functions, self._schemas)
        environment = self._make(columns)
        kind = type(environment)
        if not isinstance(self._factory, type):
            check_class(kind)
        how = kind_of(kind)
        if how == "tunix":
            return _TunixEnvironment(environment)
        if how == "tools":
            self._schemas = self._schemas or method_schemas(kind)
            return ToolObject(environment, self._schemas)
        return _StepEnvironment(environment)

    def _make(self, columns: Mapping[str, Any]) -> Any:
        """Calls the user's factory with the configured arguments. A factory that takes the columns of a data row (see
        `_task_parameter`) also gets `columns`."""
        if self._task is None:
            return self._factory(**self._arguments)
        if self._task == "by position":  # as google-tunix does
            return self._factory(dict(columns), **self._arguments)
        return self._factory(task=dict(columns), **self._arguments)


def as_environment(
    factory: Callable[..., Any] | Sequence[Callable[..., Any]] | Adapted, arguments: Mapping[str, Any] | None = None
) -> Adapted:
    """Converts a factory of environments, or a list of functions that are tools, to an `Adapted` object, which makes
    the environments of trajectories. An `Adapted` object is returned unchanged.

    Args:
      arguments: passed to the factory by name. They have no effect on a list of functions.

    Raises:
      UserError: `factory` cannot make environments (see `check_class`), or a function cannot be a tool.
    """
    return factory if isinstance(factory, Adapted) else Adapted(factory, arguments)


def check_arguments(name: str, factory: Callable[..., Any], arguments: Mapping[str, Any], takes_task: bool) -> None:
    """Checks that a factory can be called with `arguments`.

    Args:
      takes_task: whether the factory also gets the columns of a data row (as its first parameter or as the parameter
        `task`).

    Raises:
      UserError: the factory has no parameter with the name of an argument, or a parameter without a default gets no
        value.
    """
    try:
        parameters = inspect.signature(factory).parameters
    except ValueError:  # some classes of extension modules have no signature
        return
    named = {n: p for n, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    if takes_task:
        named.pop("task" if "task" in named else next(iter(named), "task"), None)
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for argument in arguments:
        if argument not in named and not takes_all:
            raise UserError(
                f"environment.arguments: '{name}' has no parameter '{argument}'; it has: {', '.join(named) or 'none'}."
            )
    missing = [n for n, p in named.items() if p.default is p.empty and n not in arguments]
    if missing:
        raise UserError(
            f"environment.arguments: '{name}' needs a value for {', '.join(missing)}; set environment.arguments."
            f"{missing[0]}."
        )


def _task_parameter(factory: Callable[..., Any]) -> Literal["by position", "by name"] | None:
    """Returns how a factory takes the columns of a data row: "by position" as the first argument, or "by name" as the
    argument `task`. Returns None if the factory does not take the columns."""
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


class _StepEnvironment:
    """Wraps an environment with the methods `reset(**columns)` and `step(completion)`. `finish` calls the environment's
    method `close` if there is one."""

    def __init__(self, environment: Any):
        self.environment, self.name = environment, type(environment).__name__

    def reset(self, columns: Mapping[str, Any]) -> str | Sequence[Message] | None:
        where = f"{self.name}.reset"
        reset = self.environment.reset
        return checked_observation(reset(**accepted(reset, columns, where)), where)

    def step(self, completion: str) -> EnvStepResult:
        return checked_step(self.environment.step(completion), f"{self.name}.step")

    def finish(self) -> float:
        _close(self.environment)
        return 0.0


class _TunixEnvironment:
    """A google-tunix `BaseTaskEnv`. `BaseTaskEnv.step` counts the steps, and ends the episode after `max_steps` steps.

    A `ToolEnvironment` of google-tunix gets the tool calls of a turn in the form that the agent of google-tunix uses. A
    turn without tool calls is the final answer, which the environment gets as text.
    """

    def __init__(self, environment: Any):
        self.environment, self.name = environment, type(environment).__name__
        self.calls = self.malformed = 0

    def reset(self, columns: Mapping[str, Any]) -> str | Sequence[Message] | None:
        result = self.environment.reset()
        if not (isinstance(result, tuple) and len(result) == 2):
            raise UserError(f"{self.name}.reset returned {show(result)}; return the tuple (observation, info).")
        observation = result[0]
        if observation is getattr(self.environment, "task", None):
            return None  # the observation is the data row, whose prompt the policy already has
        return checked_observation(_from_tunix(observation, {}), f"{self.name}.reset")

    def step(self, completion: str) -> EnvStepResult:
        where = f"{self.name}.step"
        if not hasattr(self.environment, "tool_manager"):
            action, names = completion, {}
        else:
            calls = tool_calls(completion)
            self.calls += len(calls)
            if wrong := [call for call in calls if call.error is not None]:
                self.malformed += len(wrong)
                messages = [{"role": "tool", "content": f"error: {call.error}"} for call in wrong]
                return EnvStepResult(messages, 0.0, False, self._counts())
            names = {f"call_{i}": call.name for i, call in enumerate(calls)}
            action = _tunix_action(completion, calls)
        result = self.environment.step(action)
        if isinstance(result, tuple) and result:
            result = (_from_tunix(result[0], names), *result[1:])
        step = checked_step(result, where)
        return step._replace(info={**step.info, **self._counts()}) if names or self.calls else step

    def finish(self) -> float:
        _close(self.environment)
        return 0.0

    def _counts(self) -> dict[str, float]:
        return {"tool_calls": float(self.calls), "tool_errors": float(self.malformed)}


def _close(environment: Any) -> None:
    close = getattr(environment, "close", None)
    if callable(close):
        close()


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
        return [
            {"role": "tool", "content": str(outputs[call])} | ({"name": names[call]} if call in names else {})
            for call in ordered
        ]
    return json.dumps(dict(observation), default=str, ensure_ascii=False) if observation else None


def _tunix_tools(environment: Any) -> list[Mapping[str, Any]]:
    manager = getattr(environment, "tool_manager", None)
    return [] if manager is None else list(manager.get_json_schema())
