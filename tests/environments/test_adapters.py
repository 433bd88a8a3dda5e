"""Tests environments of every kind in this process: those of this library, of google-tunix and of TRL, and plain
tools."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from typing import Any

import pytest

from tunix_like.environments.adapters import as_environment
from tunix_like.environments.local import LocalEnvironments
from tunix_like.environments.outcomes import Outcome, reset_arguments
from tunix_like.environments.protocol import EnvStepResult
from tunix_like.environments.registry import (
    ENVIRONMENTS,
    environment_place,
    register_environment,
    resolve,
    resolve_tools,
)
from tunix_like.errors import UserError
from tunix_like.runtime.moment import moment_of
from tunix_like.types import Problem


def call(name, **arguments):
    return "<tool_call>" + json.dumps({"name": name, "arguments": arguments}) + "</tool_call>"


class Own:
    def reset(self, start, other=2):
        self.total = start + other
        return f"at {self.total}"

    def step(self, completion):
        return EnvStepResult(completion, self.total, completion == "end")


class All(Own):
    def reset(self, **columns):
        return [{"role": "user", "content": ",".join(sorted(columns))}]


def test_reset_gets_the_columns_that_it_takes():
    assert as_environment(Own).start({}).reset({"start": 1, "unused": 5}) == "at 3"
    assert as_environment(All).start({}).reset({"b": 1, "a": 5}) == [{"role": "user", "content": "a,b"}]
    assert as_environment(lambda: All()).start({}).reset({"b": 1}) == [{"role": "user", "content": "b"}]
    with pytest.raises(UserError, match="Own.reset needs an argument 'start', but the rows have no such column; .*: x"):
        as_environment(Own).start({}).reset({"x": 1})


class Annealed(Own):
    def reset(self, step, progress=-1.0, **columns):
        assert not columns, "these numbers are no columns"
        return f"{step} {progress}"


def test_reset_gets_the_numbers_of_the_run_that_it_names():
    trajectory = as_environment(Annealed).start({})
    assert trajectory.reset({}, moment_of(3, 2, 4)) == "3 0.5"
    assert trajectory.reset({"step": 7}, moment_of(3, 2, 4)) == "7 0.5", "a column goes first"
    assert trajectory.reset({}, moment_of(3, 2, None)) == "3 -1.0"
    assert as_environment(All).start({}).reset({"b": 1}, moment_of(3, 2, 4)) == [{"role": "user", "content": "b"}]


def test_reset_that_needs_an_unknown_progress():
    class Needs(Own):
        def reset(self, progress):
            pass

    with pytest.raises(UserError, match="Needs.reset needs an argument 'progress': the number of steps of this run"):
        as_environment(Needs).start({}).reset({}, moment_of(3, 2, None))


def test_an_object_that_runs_all_trajectories_may_take_the_moment():
    environments = LocalEnvironments(Own)
    problem = Problem(0, "p", [1], {"start": 1}, "p", moment=moment_of(3, 2, 4))
    assert reset_arguments(environments, problem) == ({"start": 1}, {"step": 3, "progress": 0.5})
    environments.reset = lambda number, row: None
    assert reset_arguments(environments, problem) == ({"start": 1},)


def test_steps_of_an_environment_of_this_library():
    trajectory = as_environment(Own).start({})
    trajectory.reset({"start": 1})
    assert trajectory.step("a") == EnvStepResult("a", 3.0, False, {}) and trajectory.step("end").done
    assert trajectory.finish() == 0.0 and as_environment(Own).tools() == []


class Calculator:
    """A TRL environment. `total` is a property, which TRL does not evaluate."""

    def __init__(self):
        self.value = None

    @property
    def total(self):
        raise AssertionError("evaluated")

    def reset(self, start=0, **columns):
        self.value = start
        return f"You have {start}."

    def add(self, number: int) -> int:
        """Adds a number.

        Args:
            number: what to add
        """
        self.value += number
        return self.value

    def divide(self, number: int) -> float:
        """Divides by a number.

        Args:
            number: the divisor
        """
        self.value /= number
        return self.value

    def _hidden(self):
        return 3

    def get_reward(self):
        return self.value


def test_tools_and_reward_of_a_trl_environment():
    environment = as_environment(Calculator)
    assert [tool["function"]["name"] for tool in environment.tools()] == ["add", "divide"]
    trajectory = environment.start({})
    assert trajectory.reset({"start": 4, "other": 1}) == "You have 4."
    step = trajectory.step(f"First {call('add', number=2)} then {call('divide', number=3)}")
    assert step.observation == [
        {"role": "tool", "content": "6", "name": "add"},
        {"role": "tool", "content": "2.0", "name": "divide"},
    ]
    assert (step.reward, step.done, step.info) == (0.0, False, {"tool_calls": 2.0, "tool_errors": 0.0})
    step = trajectory.step("It is 2.")
    assert (step.observation, step.done) == (None, True) and trajectory.finish() == 2.0


def test_tool_error_does_not_end_the_episode():
    trajectory = as_environment(Calculator).start({})
    trajectory.reset({})
    turns = {
        call("divide", number=0): "error: ZeroDivisionError: ",
        call("add"): "error: the argument 'number' is missing",
        call("add", number="2"): "error: the argument 'number' must be of type integer",
        call("_hidden"): "error: there is no tool '_hidden'; valid: add, divide",
        call("get_reward"): "error: there is no tool 'get_reward'",
        call("reset"): "error: there is no tool 'reset'",
        "<tool_call>{</tool_call>": "error: the tool call is not valid JSON",
    }
    for i, (turn, error) in enumerate(turns.items()):
        step = trajectory.step(turn)
        assert step.observation[0]["role"] == "tool" and step.observation[0]["content"].startswith(error)
        assert not step.done and step.info == {"tool_calls": i + 1.0, "tool_errors": i + 1.0}
    assert trajectory.step(call("add", number=2)).observation[0]["content"] == "2"


def test_factories_of_trl():
    """A function that returns the object, and an object without a reward."""

    class Plain(Calculator):
        get_reward = None

    assert as_environment(Plain).start({}).finish() == 0.0
    made = []

    def factory():
        made.append(Calculator())
        return made[-1]

    environment = as_environment(factory)
    assert len(environment.tools()) == 2 and len(made) == 1
    first, second = environment.start({}), environment.start({})
    first.reset({"start": 1})
    second.reset({"start": 5})
    first.step(call("add", number=1))
    assert (first.finish(), second.finish(), len(made)) == (2.0, 5.0, 3)


def test_reward_that_is_not_a_number_raises():
    class Wrong(Calculator):
        def get_reward(self):
            return "much"

    trajectory = as_environment(Wrong).start({})
    with pytest.raises(UserError, match="Wrong.get_reward: reward 'much' is not a number"):
        trajectory.finish()


def double(number: int) -> int:
    """Doubles a number.

    Args:
        number: what to double
    """
    return 2 * number


def test_plain_functions():
    environment = as_environment([double])
    assert [tool["function"]["name"] for tool in environment.tools()] == ["double"]
    trajectory = environment.start({"x": 1})
    assert trajectory.reset({"x": 1}) is None
    step = trajectory.step('{"name": "double", "parameters": {"number": 4}}')
    assert step.observation == [{"role": "tool", "content": "8", "name": "double"}] and not step.done
    assert trajectory.step("8").done and trajectory.finish() == 0.0
    with pytest.raises(UserError, match="Two tools have the name 'double'"):
        as_environment([double, double])


@dataclasses.dataclass
class TunixResult:
    observation: Any
    reward: float
    done: bool
    info: dict


class TunixBase:
    """Behaves as google-tunix's `BaseTaskEnv`, without its imports."""

    def __init__(self, task=None, *, reward_fn=None, max_steps=1, **kwargs):
        self.task, self.reward_fn, self.max_steps, self.step_count = task or {}, reward_fn, max_steps, 0

    def reset(self):
        self.step_count = 0
        return self._initial_observation(), {}

    def step(self, action):
        self.step_count += 1
        result = self._step_impl(action)
        return result.observation, result.reward, result.done or self.step_count >= self.max_steps, result.info


def tunix_classes():
    """Returns the stand-in, and the class of google-tunix if it is installed."""
    bases = [TunixBase]
    try:
        from tunix.rl.agentic.environments.base_environment import BaseTaskEnv
    except ImportError:
        return bases
    return [*bases, BaseTaskEnv]


@pytest.mark.parametrize("base", tunix_classes())
def test_environments_of_google_tunix(base):
    class Count(base):
        def __init__(self, task, **kwargs):
            super().__init__(task, max_steps=2, **kwargs)

        def _initial_observation(self):
            return {"question": f"Count to {self.task['to']}."}

        def _step_impl(self, action):
            observation = {} if action == "nothing" else {"state": [action]}
            return TunixResult(observation, len(action), False, {"response": action, "length": len(action)})

    trajectory = as_environment(Count).start({"to": 3})
    assert trajectory.reset({"to": 3}) == "Count to 3."
    assert trajectory.step("one") == EnvStepResult('{"state": ["one"]}', 3.0, False, {"length": 3.0})
    assert trajectory.step("nothing") == EnvStepResult(None, 7.0, True, {"length": 7.0}), "max_steps ends it"
    assert trajectory.finish() == 0.0


def test_constructor_of_a_google_tunix_environment_gets_the_row():
    class Plain(TunixBase):
        def _initial_observation(self):
            return self.task  # the whole row; the policy already has its prompt

        def _step_impl(self, action):
            return TunixResult(str(self.task["x"]), 1.0, True, {})

    class Named(Plain):
        def __init__(self, *, task):
            super().__init__(task)

    class Other(Plain):
        def __init__(self, single_example, **kwargs):
            super().__init__(task=single_example, **kwargs)

    def factory(task):
        return Plain(task, max_steps=3)

    for how in (Plain, Named, Other, factory):
        trajectory = as_environment(how).start({"x": 7})
        assert trajectory.reset({"x": 7}) is None and trajectory.step("a").observation == "7"


def test_tool_environment_of_google_tunix():
    """Uses a stand-in for its `ToolEnvironment`, which receives the calls of its agent and answers by their ids."""

    class Tools(TunixBase):
        tool_manager = type("Manager", (), {"get_json_schema": lambda self: [{"type": "function"}]})()

        def _initial_observation(self):
            return self.task

        def _step_impl(self, action):
            if isinstance(action, str):
                return TunixResult({}, 1.0, True, {})
            outputs = {c["id"]: f"{c['function']['name']} {c['function']['arguments']}" for c in reversed(action)}
            return TunixResult({"tool_outputs": outputs}, 0.0, False, {})

    environment = as_environment(lambda task: Tools(task, max_steps=9))
    assert environment.tools() == [{"type": "function"}]
    trajectory = environment.start({"x": 1})
    step = trajectory.step(call("f", a=1) + call("g"))
    assert step.observation == [
        {"role": "tool", "content": 'f {"a": 1}', "name": "f"},
        {"role": "tool", "content": "g {}", "name": "g"},
    ]
    step = trajectory.step("<tool_call>{</tool_call>")
    assert step.observation[0]["content"].startswith("error: ") and not step.done
    assert step.info == {"tool_calls": 3.0, "tool_errors": 1.0}
    assert trajectory.step("done") == EnvStepResult(None, 1.0, True, {"tool_calls": 3.0, "tool_errors": 1.0})


class NoStep:
    def reset(self):
        return None


class NoReset:
    def step(self, completion):
        return None, 0.0, True


class Async:
    def reset(self):
        return None

    async def step(self, completion):
        return None, 0.0, True


class Generator:
    def reset(self):
        yield 1

    def step(self, completion):
        return None, 0.0, True


class NoHint:
    def reset(self):
        return None

    def add(self, number):
        """Adds.

        Args:
            number: what
        """


class NoDocstring:
    def reset(self):
        return None

    def add(self, number: int):
        return 1


REFUSED = {
    NoStep: "Environment 'NoStep' has no method 'step'; add def step",
    NoReset: "Environment 'NoReset' has no method 'reset'; add def reset",
    Async: "Environment 'Async': the method 'step' is async",
    Generator: "Environment 'Generator': the method 'reset' is a generator",
    NoHint: "Tool 'NoHint.add': the parameter 'number' has no type hint; add one, e.g. 'number: str'",
    NoDocstring: "Tool 'NoDocstring.add' has no docstring; add one",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_class_that_is_not_an_environment_is_rejected(kind):
    with pytest.raises(UserError) as caught:
        as_environment(kind)
    assert REFUSED[kind] in str(caught.value)
    with pytest.raises(UserError) as caught:
        as_environment(lambda: kind()).tools()
    assert REFUSED[kind] in str(caught.value)


def test_local_environments():
    environments = LocalEnvironments(Own)
    environments.reset(0, {"start": 1})
    environments.reset(1, {})
    first, second = environments.outcomes(True)
    assert (first.number, first.observation, second.number) == (0, "at 3", 1)
    assert "Own.reset needs an argument 'start'" in second.failure.reason and environments.outcomes(True) == []
    with pytest.raises(ValueError, match="Trajectory 1 has no environment"):
        environments.step(1, "a")
    with pytest.raises(ValueError, match="Trajectory 0 already has an environment"):
        environments.reset(0, {"start": 1})
    environments.step(0, "end")
    (outcome,) = environments.outcomes(False)
    assert outcome._replace(called=None) == Outcome(0, "end", 3.0, True)
    environments.finish(0)
    environments.finish(1)
    first, second = environments.outcomes(False)
    assert first[:6] == (0, None, 0.0, False, {}, None) and isinstance(first.environment, Own)
    assert second._replace(called=None) == Outcome(1)
    environments.reset(0, {"start": 1})
    environments.close()
    assert environments.outcomes(True) == []
    environments.reset(0, {"start": 1})
    assert len(environments.outcomes(True)) == 1 and environments.tools == []


class Raises(Own):
    def step(self, completion):
        if completion == "interrupt":
            raise KeyboardInterrupt
        raise {"exit": SystemExit(3), "cancel": asyncio.CancelledError()}.get(completion, KeyError("no such key"))


def test_local_failure_names_the_line_of_the_error():
    environments = LocalEnvironments(Raises)
    for number, turn in enumerate(("key", "exit", "cancel")):
        environments.reset(number, {"start": 1})
        environments.step(number, turn)
        _, outcome = environments.outcomes(True)
        assert outcome.failure.kind == "error" and "test_adapters.py" in outcome.failure.reason
        assert outcome.failure.reason.startswith("Environment 'Raises' raised") and "local.py" not in str(outcome)
    environments.reset(3, {"start": 1})
    with pytest.raises(KeyboardInterrupt):
        environments.step(3, "interrupt")


def test_registry_of_environments(tmp_path, monkeypatch):
    monkeypatch.setattr("tunix_like.environments.registry.ENVIRONMENTS", dict(ENVIRONMENTS))
    assert register_environment("mine")(Own) is Own and resolve("mine") is Own
    with pytest.raises(UserError, match="environment 'mine' is already registered"):
        register_environment("mine")(Own)
    with pytest.raises(UserError, match="environment 'a:b': names with ':' are reserved"):
        register_environment("a:b")(Own)
    with pytest.raises(UserError, match="has no method 'step'"):
        register_environment("other")(NoStep)
    with pytest.raises(UserError, match="Environment 'min' is unknown. Did you mean 'mine'"):
        resolve("min")
    file = tmp_path / "mine.py"
    file.write_text("class Env:\n    def reset(self): ...\n    def step(self, c): ...\nclass Bad: ...\ndef f(a): ...\n")
    environment = resolve(f"{file}:Env")
    assert environment.__name__ == "Env" and environment_place(f"{file}:Env", environment) == f"{file}:Env"
    assert environment_place("Own", Own).endswith("test_adapters:Own")
    with pytest.raises(UserError, match="Environment 'mine' cannot run in a worker.*or run it in this process with"):
        environment_place("mine", lambda: Own())
    for name, message in {
        f"{file}:Bad": "Environment 'Bad' has no method 'step'",
        f"{file}:Missing": "has no function 'Missing'",
        f"{tmp_path}/none.py:Env": "none.py",
        "no_such_module:Env": "failed to import",
    }.items():
        with pytest.raises(UserError, match=message):
            resolve(name)
    with pytest.raises(UserError, match="Tool 'f' has no docstring"):
        resolve_tools([f"{file}:f"])
    with pytest.raises(UserError, match="Tool 'f': write path/to/file.py:function"):
        resolve_tools(["f"])
    assert resolve_tools([f"{__file__}:double"])[0](2) == 4
