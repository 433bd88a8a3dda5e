"""Defines the tool `calculator`, which evaluates arithmetic expressions, and the environment with this tool."""

from __future__ import annotations

import ast
import math
import operator
import warnings
from collections.abc import Callable
from typing import Any

LONGEST = 200
"""Maximum number of characters of an expression."""

MOST_BITS = 512
"""Maximum number of bits of the integer result of an operation. This bounds the time of a call."""

_OPERATIONS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_SIGNS: dict[type[ast.unaryop], Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


def calculator(expression: str) -> str:
    """Evaluates an arithmetic expression with numbers, + - * / // % ** and parentheses.

    Args:
      expression: the expression, such as (12 + 3) * 4 / 5

    Returns:
      the value as text; a whole number is written without a decimal point.

    Raises:
      ValueError: the text is not an arithmetic expression or is too long, it divides by zero, its value is not a real
        number, or a number is too large.
    """
    value = _evaluate(_parsed(expression))
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError("a number is too large")
        return str(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(value)
    return str(value)


class Calculator:
    """An environment with the tool `calculator`. A turn that does not call the tool ends the trajectory.

    The environment gives no rewards. Rewards come from the reward functions of the run.
    """

    def reset(self) -> None:
        """Starts an episode. There is no first observation, so the prompt stays unchanged."""

    def calculator(self, expression: str) -> str:
        """Evaluates an arithmetic expression with numbers, + - * / // % ** and parentheses.

        Args:
          expression: the expression, such as (12 + 3) * 4 / 5
        """
        return calculator(expression)


def _parsed(expression: str) -> ast.expr:
    # Error messages do not repeat the expression, because reward functions read the text of the trajectory.
    if len(expression) > LONGEST:
        raise ValueError(f"the expression has more than {LONGEST} characters")
    try:
        with warnings.catch_warnings():  # e.g. the warning about "1if"
            warnings.simplefilter("ignore")
            return ast.parse(expression.strip(), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise ValueError("it is not an arithmetic expression") from None


def _evaluate(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value
    if isinstance(node, ast.UnaryOp) and type(node.op) in _SIGNS:
        return _SIGNS[type(node.op)](_evaluate(node.operand))
    if not isinstance(node, ast.BinOp) or type(node.op) not in _OPERATIONS:
        raise ValueError("only numbers, + - * / // % ** and parentheses are allowed")
    left, right = _evaluate(node.left), _evaluate(node.right)
    if _bits(node.op, left, right) > MOST_BITS:
        raise ValueError("a number is too large")
    try:
        value = _OPERATIONS[type(node.op)](left, right)
    except ZeroDivisionError:
        raise ValueError("division by zero") from None
    except OverflowError:
        raise ValueError("a number is too large") from None
    if isinstance(value, complex):
        raise ValueError("the value is not a real number")
    return value


def _bits(operation: ast.operator, left: Any, right: Any) -> int:
    """Returns an upper bound of the number of bits of a power or product of two integers. Returns 0 for other
    operations or operands."""
    if not isinstance(left, int) or not isinstance(right, int):
        return 0
    if isinstance(operation, ast.Pow):
        return left.bit_length() * abs(right) if abs(left) > 1 else 0
    return left.bit_length() + right.bit_length() if isinstance(operation, ast.Mult) else 0
