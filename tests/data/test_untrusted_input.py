"""Tests that files from other sources are read and never executed: the package contains no call that could execute
foreign code, and only the named functions of the user are called."""

from __future__ import annotations

import ast

import pytest

from tests.test_architecture import MODULES, imports_of
from tunix_like import UserError
from tunix_like.algorithms.registry import find_estimator
from tunix_like.config.load import load, read_section, save
from tunix_like.config.schema import Config
from tunix_like.rewards import pooled, resolve, score

TAGS = (
    "!!python/object/apply:os.mkdir [{}]",
    "!!python/object/new:os.mkdir [{}]",
    "!!python/name:os.mkdir",
    "!!python/module:this",
    "!!python/tuple [1]",
    "!!binary aGk=",
    "!!set {{a}}",
    "!!str 010",
)
CALLERS = {name: {"pickle"} for name in ("workers/messages", "rewards/worker", "environments/worker")}
"""The modules that may import a library that unpickles objects: both ends of the connection between a run and the
workers that it started. Only the workers unpickle."""


@pytest.mark.parametrize("tag", TAGS)
def test_yaml_tags_are_rejected(tag, tmp_path):
    value = tag.format(tmp_path / "made")
    (tmp_path / "a.yaml").write_text(f"model: {{config: {{x: {value} }}}}\n")
    with pytest.raises(UserError, match=r"a\.yaml, line 1: tags "):
        load(tmp_path / "a.yaml")
    for key in ("model.config.x", "data.sources", "training.max_steps"):
        with pytest.raises(UserError, match=r"tags \(!...\) are not supported"):
            load(None, [f"{key}={value}"])
    assert load(None, [f"model.path={value}"]).model.path == value, "a key of text holds it as text"
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("text", ["!!binary aGk=", "\n!!set {a}", "!!map {model: {}}"])
def test_yaml_with_a_tag_at_the_top_level_is_rejected(text, tmp_path):
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(UserError, match=rf"a\.yaml, line {text.count(chr(10)) + 1}: tags .* write a plain value"):
        load(tmp_path / "a.yaml")


BOMB = "[&a [1], " + ", ".join(f"&{chr(98 + i)} [{', '.join([f'*{chr(97 + i)}'] * 10)}]" for i in range(9)) + "]"
ALIASES = {"endless": "&a {x: *a}", "bomb": BOMB, "merged": "{k: &a {b: 1}, <<: *a}", "plain": "[&a 1, *a]"}


@pytest.mark.parametrize("name", ALIASES)
def test_yaml_aliases_are_rejected(name, tmp_path):
    """Covers 10^9 elements in 400 characters, and an alias to its own container."""
    (tmp_path / "a.yaml").write_text(f"model:\n  config: {ALIASES[name]}\n")
    with pytest.raises(UserError, match=r"a\.yaml, line 2: '\*a' is an alias, .* write the value itself"):
        load(tmp_path / "a.yaml")
    with pytest.raises(UserError, match=r"model\.config=.*'\*a' is an alias"):
        load(None, [f"model.config={ALIASES[name]}"])
    assert load(None, ["data.path=*a"]).data.path == "*a", "a key of text holds it as text"


@pytest.mark.slow
@pytest.mark.parametrize("levels", [2_000, 100_000])
def test_yaml_that_is_nested_too_deeply(levels, tmp_path):
    (tmp_path / "a.yaml").write_text("model: {config: {x: " + "[" * levels + "]" * levels + "}}\n")
    with pytest.raises(UserError, match=r"a\.yaml: nested too deeply"):
        load(tmp_path / "a.yaml")
    with pytest.raises(UserError, match="nested too deeply"):
        load(None, ["model.config.x=" + "[" * levels])


def calls_of(tree):
    """Yields the dotted name of each called function, and the keywords with constant values."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            keywords = {each.arg: each.value for each in node.keywords}
            yield ast.unparse(node.func), {k: v.value for k, v in keywords.items() if isinstance(v, ast.Constant)}, node


@pytest.mark.parametrize("name", sorted(MODULES))
def test_package_neither_unpickles_objects_nor_executes_text(name):
    tree = ast.parse(MODULES[name].read_text(encoding="utf-8"))
    readers = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "torch"}
    assert {each.split(".")[0] for each in imports_of(tree)} & readers == CALLERS.get(name, set())
    for called, constants, node in calls_of(tree):
        assert called not in ("eval", "exec", "compile", "__import__", "os.system", "os.popen"), called
        assert not constants.get("allow_pickle") and not constants.get("shell"), called
        assert not constants.get("trust_remote_code"), called
        assert called not in ("np.load", "numpy.load") or constants.get("allow_pickle") is False
        if called in ("yaml.load", "yaml.load_all", "yaml.dump"):
            loader = [ast.unparse(each.value) for each in node.keywords if each.arg in ("Loader", "Dumper")]
            assert loader in (["Loader"], ["Dumper"]), "a subclass of the safe one"
        assert called.removeprefix("yaml.") not in ("unsafe_load", "full_load", "unsafe_load_all", "full_load_all")


def test_saved_configs_are_plain_yaml(tmp_path):
    """`yaml.safe_load` can read the saved configs without this package."""
    save(read_section(Config, {}, "x"), tmp_path / "a.yaml")
    assert "!!" not in (tmp_path / "a.yaml").read_text() and load(tmp_path / "a.yaml") == Config()


OWN = """
from math import factorial
def note(name):
    with open(FILE, "a") as file:
        file.write(name + "\\n")
def named(completions): note("named"); return [1.0 for _ in completions]
def reward(prompts, completions, **columns): note("reward"); return [0.0 for _ in completions]
def main(): note("main")
def exact_match(completions): note("exact_match"); return [0.0 for _ in completions]
def estimator(rewards, *, scored, lengths): note("estimator"); return rewards
def register(): note("register")
if __name__ == "__main__": main()
class Public:
    def __init__(self): note("Public")
    def __call__(self, completions): note("Public()"); return [0.0]
"""


def test_only_the_named_function_of_a_file_is_called(tmp_path):
    (tmp_path / "own.py").write_text(OWN.replace("FILE", repr(str(tmp_path / "called"))))
    (tmp_path / "beside.py").write_text("raise SystemExit('was run')")
    (tmp_path / "conftest.py").write_text("raise SystemExit('was run')")
    name = f"{tmp_path / 'own.py'}:named"
    function = resolve(name)
    assert find_estimator(f"{tmp_path / 'own.py'}:estimator") is not None
    assert not (tmp_path / "called").exists(), "nothing is called until there is something to score"
    for reward in (function, pooled({name: function}, workers=1)[name]):
        columns = {"answer": ["x"], "name": ["reward"], "main": [1]}
        found = score([(name, reward, 1.0)], ["p"], ["c"], columns)
        assert found.total.tolist() == [1.0] and not found.errors.any()
    assert (tmp_path / "called").read_text() == "named\nnamed\n"
