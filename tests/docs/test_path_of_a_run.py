"""Tests the path of a run in docs/architecture.md: the functions of its table call each other, from the command to the
gradient."""

from __future__ import annotations

import json
import re

import pytest

from tests.process import ROOT, python

TRACE = """
import json, os, sys, traceback
import jax, tunix_like
from tunix_like.cli.main import main
from tunix_like.training.updates import Updates

Updates.compile_ahead = lambda *_: None  # which would trace the gradient before the update does

package, calls, gradient = os.path.dirname(tunix_like.__file__) + os.sep, [], jax.grad

def traced(*arguments, **options):
    frames = [(frame.filename, frame.name) for frame in traceback.extract_stack()]
    calls.append([(file.removeprefix(package), name) for file, name in frames if file.startswith(package)])
    return gradient(*arguments, **options)

jax.grad = traced
if status := main(sys.argv[1:]):
    sys.exit(status)
print(json.dumps(calls))
"""

NESTED = {"step", "one_set", "one_chunk"}
"""Functions inside `jit_train_step` and `gradient`: the jitted function and the bodies of the two loops."""

COMPREHENSION = "<listcomp>"  # a frame of its own in Python 3.11

DECORATORS = "config/argument_names.py"
"""Checks the names of arguments before the decorated function."""


@pytest.mark.slow
def test_the_documented_functions_are_the_calls_from_the_command_to_the_gradient(tmp_path):
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \d+ \| `([\w/.]+)` \| `(?:\w+\.)?(\w+)` \|", page, re.MULTILINE)
    small = ("sft.max_steps=0", "training.max_steps=1", "eval.max_problems=4", f"training.output_dir={tmp_path}/run")
    ended = python("-c", TRACE, "train", str(ROOT / "examples/debug/reverse_text.yaml"), *small, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    called = [
        [
            (file, name)
            for file, name in calls
            if file != DECORATORS and name != COMPREHENSION and (file != "step/train_step.py" or name not in NESTED)
        ]
        for calls in json.loads(ended.stdout.splitlines()[-1])
    ]
    assert called and called == [rows] * len(called)
