"""Tests the shipped environments by scripted episodes with right, wrong and invalid turns, and the calculator against
Python."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from tests.process import ROOT
from tunix_like.config.load import load
from tunix_like.data import maze
from tunix_like.environments.adapters import as_environment
from tunix_like.environments.calculator import MOST_BITS, Calculator, calculator
from tunix_like.environments.guess import COST, Guess
from tunix_like.environments.kinds import environments_of
from tunix_like.environments.local import LocalEnvironments
from tunix_like.environments.maze_steps import MazeSteps
from tunix_like.environments.pool import EnvironmentPool
from tunix_like.environments.registry import ENVIRONMENTS, resolve
from tunix_like.errors import UserError
from tunix_like.runs.build import assemble, make_evaluator
from tunix_like.storage.metrics import rows as metric_rows
from tunix_like.tasks.guess import MOST_GUESSES, NUMBERS
from tunix_like.tasks.maze import MOST_MOVES
from tunix_like.training.engine import make_engine

NAMES = {"guess": Guess, "maze_steps": MazeSteps, "calculator": Calculator}


def test_the_shipped_environments_are_registered():
    assert {name: resolve(name) for name in ENVIRONMENTS if name in NAMES} == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_loading_an_environment_does_not_import_jax(name):
    code = (
        "import sys; from tunix_like.environments.worker import load; "
        f"load({{'environment': 'tunix_like.environments.{name}:{resolve(name).__name__}', 'arguments': {{}}}}); "
        "print({'jax', 'flax', 'tokenizers'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.strip() == "set()", done.stderr


@pytest.mark.parametrize(
    ("environment", "rewards", "told"),
    [
        ("name: calculator", "{}", True),
        ("tools: [tunix_like.environments.calculator:calculator]", "{}", True),
        ("name: calculator", "{functions: [{name: gsm8k}]}", False),
        ("name: tests.environments.test_tasks:Rewarded", "{}", False),
    ],
)
def test_tools_without_rewards_are_told(tmp_path, caplog, environment, rewards, told):
    file = tmp_path / "run.yaml"
    file.write_text(
        "model: {init: random, config: {model_type: qwen2, hidden_size: 16, intermediate_size: 16, num_hidden_layers: "
        "1, num_attention_heads: 2, num_key_value_heads: 2, max_position_embeddings: 1024}}\n"
        "data: {name: calculator, train_size: 16, eval_size: 8}\nalgorithm: {advantage_estimator: rloo}\n"
        f"environment: {{{environment}, workers: 0}}\nrewards: {rewards}\n"
    )
    assemble(load(file), abstract=True)
    assert ("set rewards.functions, for this data [{name: gsm8k}]" in caplog.text) == told


def test_an_evaluation_renders_the_tools_of_the_environment():
    parts = assemble(load(ROOT / "examples" / "environments" / "calculator.yaml", ["data.eval_size=8"]), abstract=True)
    tokenizer = parts.source.tokenizer
    engine = make_engine(nnx.split(parts.model)[0], tokenizer, parts.config.rollout, None)
    made = parts.config, parts.config.eval, engine, tokenizer, parts.source, [], parts.environments
    evaluator = make_evaluator(*made)
    assert "# Tools\ncalculator(expression)" in evaluator.problems[0].text


class Rewarded(Calculator):
    def get_reward(self) -> float:
        return 1.0


@pytest.mark.parametrize("name", NAMES)
def test_environments_run_in_this_process_unless_workers_are_set(name):
    yaml_file = ROOT / "examples" / "environments" / f"{name}.yaml"
    assert isinstance(environments_of(load(yaml_file)), LocalEnvironments)
    pool = environments_of(load(yaml_file, ["environment.workers=3"]))
    assert isinstance(pool, EnvironmentPool) and pool.workers == 3
    assert pool.settings["environment"] == f"tunix_like.environments.{name}:{resolve(name).__name__}"
    assert [tool["function"]["name"] for tool in pool.tools] == (["calculator"] if name == "calculator" else [])
    pool.close()


OWN = """
class Env:
    def reset(self):
        return None
    def step(self, completion):
        return None, 0.0, True
def add(a: int) -> int:
    '''Adds.

    Args:
        a: a number
    '''
    return a
"""


def test_own_environments_and_tools_run_in_this_process_with_workers_0(tmp_path):
    (tmp_path / "mine.py").write_text(OWN)
    for setting in (f"environment.name={tmp_path}/mine.py:Env", f"environment.tools=[{tmp_path}/mine.py:add]"):
        assert isinstance(environments_of(load(None, [setting])), EnvironmentPool)
        assert isinstance(environments_of(load(None, [setting, "environment.workers=0"])), LocalEnvironments)
        with pytest.raises(UserError, match="environment.memory_gb"):
            environments_of(load(None, [setting, "environment.workers=0", "environment.memory_gb=1"]))
    with pytest.raises(UserError, match="environment.workers"):
        environments_of(load(None, ["environment.name=openenv", "environment.workers=0"]))


def test_limits_without_an_effect_are_rejected():
    """Limits that the environment does not use are rejected. The default values of a saved config are accepted."""
    yaml_file = ROOT / "examples" / "environments" / "guess.yaml"
    for key in ("timeout_seconds", "memory_gb"):
        message = f"environment.{key}: guess runs in the training process, where it has no limits; set environment.work"
        with pytest.raises(UserError, match=message):
            environments_of(load(yaml_file, [f"environment.{key}=1"]))
    pool = environments_of(load(yaml_file, ["environment.timeout_seconds=1", "environment.workers=2"]))
    assert isinstance(pool, EnvironmentPool) and pool.timeout_seconds == 1


def bisect(number):
    """Returns the number of turns of bisection."""
    game, low, high = Guess(), 0, NUMBERS - 1
    game.reset(number)
    while True:
        middle = (low + high) // 2
        result = game.step(f"{middle} END")
        if result.done:
            assert result.reward == pytest.approx(1 - COST * (game.turns - 1)) and result.info["solved"] == 1
            assert result.info["turns_to_success"] == game.turns
            return game.turns
        assert result.reward == 0 and result.observation in ("HIGHER", "LOWER")
        low, high = (middle + 1, high) if result.observation == "HIGHER" else (low, middle - 1)


def test_bisection_takes_5_125_turns_on_average():
    """In the search tree of 64 numbers each depth d up to 5 has 2**d of them, and the next depth has one. No number
    needs eight turns."""
    turns = [bisect(number) for number in range(NUMBERS)]
    assert sum(turns) == sum((depth + 1) * 2**depth for depth in range(6)) + 7 == 328
    assert max(turns) == MOST_GUESSES and sum(turns) / NUMBERS == 5.125


def test_wrong_and_invalid_guesses():
    game = Guess()
    game.reset(20)
    said = ["I think 3", "63", "64", "", "-20", "20.5"]
    seen = [game.step(text).observation for text in said]
    assert seen == ["HIGHER", "LOWER", "INVALID", "INVALID", "INVALID", "INVALID"]
    last = game.step("HIGHER")
    info = {"turns_to_success": MOST_GUESSES + 1.0, "solved": 0.0, "state": "4-62 after 7"}
    assert last == (None, 0.0, True, info)
    game.reset(20)
    assert game.step("not 7 but 20").done and game.turns == 1


GRID = "#######\n#S..#.#\n###.#.#\n#...#.#\n#.###.#\n#....G#\n#######"


def walk(*words):
    environment = MazeSteps()
    return environment.reset(GRID), [environment.step(word) for word in words]


def test_a_walk_to_the_goal():
    first, results = walk("RIGHT", "DOWN END", "LEFT", "I go DOWN", "RIGHT", "RIGHT")
    views = ["DOWN+LEFT", "UP+LEFT", "DOWN+RIGHT", "UP+RIGHT", "LEFT+RIGHT", None]
    assert first == " RIGHT" and [result.observation for result in results] == views
    assert [result.reward for result in results] == [0, 0, 0, 0, 0, 1]
    assert [result.done for result in results] == [False] * 5 + [True]
    assert results[-1].info == {"moves": 6.0, "blocked": 0.0, "state": "5,5"}


def test_wrong_and_invalid_walks():
    _, results = walk(*["UP", "LEFT", "DOWN", "NORTH", "", "right", "RIGHT RIGHT"], *["UP"] * (MOST_MOVES - 7))
    assert {result.observation for result in results[:-1]} == {"RIGHT"} and not any(r.reward for r in results)
    assert results[-1].done and results[-1].observation is None
    assert results[-1].info == {"moves": MOST_MOVES, "blocked": MOST_MOVES, "state": "1,1"}


def test_the_solutions_of_mazes_reach_the_goal():
    import random

    rng = random.Random(3)
    for _ in range(100):
        grid = maze.make(7, rng)
        environment = MazeSteps()
        environment.reset(grid)
        results = [environment.step(move) for move in maze.solve(grid)[::2]]  # two cells of the grid are one move
        assert results[-1].reward == 1.0 and results[-1].done


NUMBER = st.one_of(
    st.integers(0, 10**6).map(str),
    st.floats(0, 1e6, allow_nan=False).map(repr).filter(lambda text: "e" not in text),
)
EXPRESSION = st.recursive(
    NUMBER,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["+", "-", "*", "/", "//", "%"]), inner).map("".join),
        st.tuples(inner, st.sampled_from(["**2", "**3", "**-1", "**0.5"])).map("".join),
        inner.map(lambda text: f"({text})"),
        inner.map(lambda text: f"-{text}"),
    ),
    max_leaves=6,
).filter(lambda text: len(text) <= 200)


@given(EXPRESSION)
def test_calculator_equals_the_arithmetic_of_python(expression):
    try:
        value = eval(expression, {"__builtins__": {}})
    except (ZeroDivisionError, OverflowError):
        value = None
    try:
        text = calculator(expression)
    except ValueError as error:
        large = isinstance(value, int) and value.bit_length() > MOST_BITS // 4
        bad = value is None or isinstance(value, complex) or not math.isfinite(value) or large
        # A number can be too large although the value of the expression is small.
        assert bad or "too large" in str(error) or "not a real number" in str(error)
        return
    assert value is not None
    assert (int(text) if text.lstrip("-").isdigit() else float(text)) == value


@given(st.text(max_size=60))
def test_calculator_rejects_other_text_without_repeating_it(text):
    try:
        result = calculator(text)
    except ValueError as error:
        assert len(str(error)) < 80 and "####" not in str(error)
    else:
        float(result)


ERRORS = {
    "9**9**9": "a number is too large",
    "(-8)**0.5": "the value is not a real number",
    "1/0": "division by zero",
    "0**-1": "division by zero",
    "1e999": "a number is too large",
    "2.0**9999": "a number is too large",
    "10**100*10**100": "a number is too large",
    "1//0": "division by zero",
    "x + 1": "only numbers, + - * / // % ** and parentheses are allowed",
    "abs(1)": "only numbers",
    "'a' * 3": "only numbers",
    "True": "only numbers",
    "1j": "only numbers",
    "1,000": "only numbers",
    "1 << 9": "only numbers",
    "~1": "only numbers",
    "[1]": "only numbers",
    "1 +": "it is not an arithmetic expression",
    "": "it is not an arithmetic expression",
    "\0": "it is not an arithmetic expression",
    "(" * 150 + "1" + ")" * 40: "it is not an arithmetic expression",
    "1" * 201: "the expression has more than 200 characters",
}


@pytest.mark.parametrize("expression", ERRORS)
def test_errors_of_the_calculator(expression):
    with pytest.raises(ValueError, match=rf"^{ERRORS[expression].replace('+', '[+]').replace('*', '[*]')}"):
        calculator(expression)


@pytest.mark.parametrize(
    ("expression", "value"),
    [("123 * 456", "56088"), ("8 / 2", "4"), (" 7/2 ", "3.5"), ("-(2 + 3) ** 2", "-25"), ("7 // 2 % 2", "1"),
     ("2 ** -1", "0.5"), ("1e3", "1000"), ("1" * 200, "1" * 200), ("1e20 * 1", "1e+20"), ("+5", "5")],
)  # fmt: skip
def test_values_of_the_calculator(expression, value):
    assert calculator(expression) == value


def call(expression):
    return '<tool_call>{"name": "calculator", "arguments": {"expression": "' + expression + '"}}</tool_call>'


def test_the_calculator_in_an_episode():
    adapted = as_environment(Calculator)
    (schema,) = adapted.tools()
    assert schema["function"]["name"] == "calculator"
    assert schema["function"]["parameters"]["required"] == ["expression"]
    episode = adapted.start({"gold": "56088"})
    assert episode.reset({"gold": "56088"}) is None
    right = episode.step(call("123 * 456"))
    assert right.observation == [{"role": "tool", "content": "56088", "name": "calculator"}] and not right.done
    wrong = episode.step(call("1/0"))
    assert wrong.observation[0]["content"] == "error: ValueError: division by zero" and not wrong.done
    nonsense = episode.step("<tool_call>56088")
    assert nonsense.observation[0]["content"].startswith("error: ") and not nonsense.done
    last = episode.step("#### 56088")
    assert last.done and last.info == {"tool_calls": 3.0, "tool_errors": 2.0} and episode.finish() == 0.0


@pytest.mark.slow
def test_a_short_run_learns_to_walk(tmp_path):
    """The run starts from random legal walks, and only the direction of the reward is asserted. The process has
    optimized programs and one device."""
    small = ["data.maze_size=7", "data.train_size=150", "data.eval_size=32", "model.config.num_hidden_layers=2",
             "sft.max_steps=80", "training.max_steps=25", "eval.samples=8", "eval.k=[1]"]  # fmt: skip
    yaml_file = str(ROOT / "examples" / "environments" / "maze_steps.yaml")
    command = [sys.executable, "-m", "tunix_like", "train", yaml_file, "training.output_dir=run", *small]
    subprocess.run(command, cwd=tmp_path, env=os.environ | {"XLA_FLAGS": "", "PYTHONPATH": str(ROOT)}, check=True)
    found = [row for row in metric_rows(tmp_path / "run") if "step" in row and "eval/pass@1" in row]
    first, last = found[0], found[-1]
    assert (first["step"], last["step"]) == (0, 25)
    assert last["eval/pass@1"] > first["eval/pass@1"] + 0.1
    assert last["eval/environment/blocked"] < 1 and last["eval/turns/max"] <= MOST_MOVES


SHARED = """
from tunix_like.environments.outcomes import Outcome

class Shared:
    tools = ()

    def __init__(self, bonus=0.0):
        self.bonus, self._ready, self.steps = bonus, [], 0

    def reset(self, number, columns):
        self._ready.append(Outcome(number))

    def step(self, number, completion):
        self.steps += 1
        self._ready.append(Outcome(number, reward=len(completion) % 2 + self.bonus, done=True))

    def finish(self, number):
        self._ready.append(Outcome(number))

    def outcomes(self, wait):
        ready, self._ready = self._ready, []
        return ready

    def close(self):
        self._ready = []
"""


def test_a_class_that_runs_all_trajectories_is_chosen_by_its_name(tmp_path):
    (tmp_path / "mine.py").write_text(SHARED)
    name = f"environment.name={tmp_path}/mine.py:Shared"
    made = environments_of(load(None, [name, "environment.arguments={bonus: 0.5}", "environment.max_turns=2"]))
    assert type(made).__name__ == "Shared" and made.bonus == 0.5
    assert made is not environments_of(load(None, [name]))
    for setting in ("environment.workers=2", "environment.timeout_seconds=1", "environment.memory_gb=1"):
        with pytest.raises(UserError, match=f"{setting.partition('=')[0]}: environment.name=.*does not read it; it"):
            environments_of(load(None, [name, setting]))
    with pytest.raises(UserError, match="environment.arguments: .* has no parameter 'size'; it has: bonus"):
        environments_of(load(None, [name, "environment.arguments={size: 1}"]))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["environment.name=gues"], "environment.name: Environment 'gues' is unknown. Did you mean 'guess'"),
        (["environment.name=verifiers"], "environment.name: Environment 'verifiers' is unknown"),
        (["environment.name=guess", "environment.tools=[a.py:f]"], "environment.tools: environment.name is set too"),
        (["environment.tools=[]"], "environment.tools: the list is empty"),
        (["environment.tools=[a.py:f]", "environment.arguments={a: 1}"], "environment.arguments: environment.tools do"),
        (["environment.tools=[a.py:f]", "environment.arguments={a: 1}"], "it reads tools, max_turns"),
        (["data.name=verifiers", "environment.name=guess"], "data.path and data.arguments set the environment itself"),
        (["environment.max_turns=3"], "environment.max_turns: it needs an environment"),
    ],
)
def test_unknown_names_and_keys_without_an_effect_are_rejected(keys, message):
    with pytest.raises(UserError, match=message):
        environments_of(load(None, keys))
