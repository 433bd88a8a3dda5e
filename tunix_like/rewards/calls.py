"""One call of one reward function: what it is given, what it may return, and what becomes of a call that fails.

It runs functions in this process, without a deadline (`pool.py` has workers and deadlines). It does NOT know where
functions come from, or how several are added up.
"""

from __future__ import annotations

import inspect
import math
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from tunix_like.errors import UserError

if TYPE_CHECKING:
    from numpy.typing import NDArray

LARGEST = 1e15
"""Rewards beyond this are refused: sums and squares of them lose every digit in float32."""

LONGEST_REASON = 20_000
"""Characters of what is told about a failure: a message may hold megabytes."""

_OWN_FILES = {str(Path(__file__).with_name(name)) for name in ("calls.py", "worker.py", "by_source.py")}


class WrongCount(UserError):
    """A function returned something else than one value per completion, so that none belongs to any of them."""


class Failure(NamedTuple):
    """Why a function gave no reward for a completion."""

    kind: Literal["timeout", "error"]
    reason: str


class Marks(NamedTuple):
    """What one function made of n completions: [n] rewards, NaN where there is none, and the failures among these by
    index; the others were None or NaN."""

    rewards: NDArray[np.float64]
    failures: dict[int, Failure]


def check_form(name: str, function: Any) -> None:
    """Raises UserError where this cannot be called for rewards: it is no function, has no signature, or a call only
    makes a coroutine or a generator."""
    if not callable(function):
        raise UserError(
            f"Reward function '{name}' is {_show(function)}, which cannot be called; its form is "
            "f(prompts, completions, **columns)."
        )
    forms = (function, function.__call__)  # an object's own __call__ may be what is async
    if any(map(inspect.iscoroutinefunction, forms)) or any(map(inspect.isasyncgenfunction, forms)):
        raise UserError(
            f"Reward function '{name}' is async, and nothing would wait for its result; write a plain def, which may "
            "use asyncio.run."
        )
    if any(map(inspect.isgeneratorfunction, forms)):
        raise UserError(f"Reward function '{name}' is a generator (it has a yield); return a list of one number each.")
    try:
        inspect.signature(function)
    except ValueError:  # some of Python's own functions have no signature
        raise UserError(
            f"Reward function '{name}' takes no arguments by name; its form is f(prompts, completions, **columns)."
        ) from None


def arguments_of(name: str, function: Callable[..., Any], columns: Collection[str]) -> list[str]:
    """Those of the columns (`prompts` and `completions` among them) that the function accepts by keyword.

    Raises:
      UserError: it needs another one, or has another form than that of a reward function.
    """
    check_form(name, function)
    parameters = inspect.signature(function).parameters.values()
    needed = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    missing = [p.name for p in needed if p.name not in columns or p.kind is p.POSITIONAL_ONLY]
    if missing:
        cure = " data.answer_template makes it out of others, e.g. '{column}'." if missing[0] == "answer" else ""
        raise UserError(
            f"Reward function '{name}' needs an argument '{missing[0]}', which is no column of the rows; there are: "
            f"{', '.join(sorted(columns))}.{cure} Its form is f(prompts, completions, **columns)."
        )
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return list(columns)
    return [p.name for p in parameters if p.name in columns]


def call(name: str, function: Callable[..., Any], arguments: Mapping[str, Sequence[Any]], count: int) -> Marks:
    """Calls a function once for `count` completions, with its own copy of each list. A value that is no finite number,
    None or NaN, or beyond 1e15 in size, is a failure for its completion.

    Raises:
      WrongCount: it returned a wrong number of values, or no list.
      Exception: whatever it raises.
    """
    values = function(**{key: list(column) for key, column in arguments.items()})
    if hasattr(values, "tolist"):  # numpy and jax arrays
        values = values.tolist()
    if not isinstance(values, list | tuple):
        raise WrongCount(
            f"Reward function '{name}' must return one number per completion; it returned {_show(values)}."
        )
    if len(values) != count:
        raise WrongCount(f"Reward function '{name}' returned {len(values)} values for {count} completions.")
    marks = Marks(np.full(count, np.nan), {})
    for i, value in enumerate(values):
        reward, problem = _number(value)
        marks.rewards[i] = reward
        if problem is not None:
            reason = f"Reward function '{name}': value {i}, {_show(value)}, {problem}."
            marks.failures[i] = Failure("error", reason)
    return marks


def _number(value: Any) -> tuple[float, str | None]:
    """The reward, NaN where there is none, and what is wrong with the value."""
    number = value.item() if getattr(value, "ndim", None) == 0 else value  # scalars of numpy and jax
    if number is None:
        return math.nan, None
    if isinstance(number, str | bytes):  # float() reads them
        return math.nan, "is not a number"
    try:
        reward = float(number)
    except OverflowError:
        reward = math.inf
    except (TypeError, ValueError):
        return math.nan, "is not a number"
    if abs(reward) > LARGEST:  # infinities too; false for NaN
        return math.nan, f"is not within +-{LARGEST:.0e}"
    return reward, None


def call_in_process(
    name: str, function: Callable[..., Any], arguments: Mapping[str, Sequence[Any]], count: int, group_size: int
) -> Marks:
    """The marks of `count` completions. The function is called once with all of them; if that fails, with each group,
    and of a group that fails with each completion, so that those alone stay unscored for which it fails. A group for
    which it returns a wrong number of values stays unscored whole."""
    marks = Marks(np.full(count, np.nan), {})

    def attempt(rows: range) -> None:
        try:
            found = call(name, function, slices(arguments, rows), len(rows))
        except (Exception, SystemExit) as error:  # Ctrl-C is the user's
            reason, of_all = explain(name, error), isinstance(error, WrongCount) and len(rows) <= group_size
        else:
            return put(marks, rows, found)
        if of_all or len(rows) == 1:
            return marks.failures.update(dict.fromkeys(rows, Failure("error", reason)))
        finer = group_size if len(rows) > group_size else 1
        for start in range(rows.start, rows.stop, finer):
            attempt(range(start, min(start + finer, rows.stop)))

    if count:
        attempt(range(count))
    return marks


def put(marks: Marks, rows: range, found: Marks) -> None:
    """Enters what was found for these completions."""
    marks.rewards[rows.start : rows.stop] = found.rewards
    marks.failures.update({rows[i]: failure for i, failure in found.failures.items()})


def slices(arguments: Mapping[str, Sequence[Any]], rows: range) -> dict[str, Sequence[Any]]:
    """The given completions' part of every column."""
    return {key: column[rows.start : rows.stop] for key, column in arguments.items()}


def explain(name: str, error: BaseException) -> str:
    """What went wrong in a call of the function `name`, with the function's own part of the traceback."""
    if isinstance(error, UserError):
        return str(error)[:LONGEST_REASON]
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    trace = error.__traceback__
    for _ in range(max((i + 1 for i, f in enumerate(frames) if f.f_code.co_filename in _OWN_FILES), default=0)):
        assert trace is not None
        trace = trace.tb_next
    what = "".join(traceback.format_exception_only(error)).strip()
    text = f"Reward function '{name}' raised {what}"
    if trace is not None:
        text = f"{text[: LONGEST_REASON // 2]}\n{''.join(traceback.format_exception(error.with_traceback(trace)))}"
    return text[:LONGEST_REASON].strip()


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}... ({len(text)} characters)"
