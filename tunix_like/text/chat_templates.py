"""Renders chat templates in the dialect of Hugging Face, in the sandbox of jinja."""

from __future__ import annotations

import contextvars
import datetime
import functools
import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

from tunix_like.errors import UserError

MOST = 10_000_000
"""A rendered text may have at most `MOST` characters, plus `GROWTH` times the number of characters in the inserted
values. A million tokens have about 5 million characters."""

GROWTH = 8

SECONDS = 10.0
"""A template of a few messages takes less than a millisecond. A foreign one could have loops without an end."""

_deadline = contextvars.ContextVar("_deadline", default=math.inf)


class TemplateFailed(Exception):
    """A template raised an exception or rendered too much text. The message gives the reason."""


def render(source: str, variables: Mapping[str, Any], size: int) -> str:
    """Renders a chat template with plain values of `size` characters in total."""
    most = MOST + GROWTH * size
    length = 0
    pieces = []
    token = _deadline.set(time.monotonic() + SECONDS)
    try:
        for piece in _compile(source).generate(variables):
            length += len(piece)
            if length > most:
                raise TemplateFailed(f"it renders more than {MOST} characters")
            pieces.append(piece)
    except TemplateFailed:
        raise
    except Exception as error:  # a template may raise anything
        raise TemplateFailed(f"{type(error).__name__}: {error}"[:1000]) from error
    finally:
        _deadline.reset(token)
    return "".join(pieces)


def _check_time() -> None:
    if time.monotonic() > _deadline.get():
        raise TemplateFailed(f"it takes more than {SECONDS:g} seconds")


def _timed(items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        _check_time()
        yield item


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Checks the time at each call and each item of a loop, and the size of products and powers before they are
    computed."""

    intercepted_binops = frozenset(("*", "**"))

    def call(self, *args: Any, **values: Any) -> Any:
        _check_time()
        return super().call(*args, **values)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if _size(operator, left, right) > MOST:
            raise TemplateFailed(f"a result of {operator} has more than {MOST} characters")
        return super().call_binop(context, operator, left, right)


def _size(operator: str, left: Any, right: Any) -> int:
    """Returns the characters or bits of a product or power of whole numbers, or of a text and a number."""
    if isinstance(left, int) and isinstance(right, int):
        return left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
    pairs = ((left, right), (right, left))
    return max((len(value) * n for value, n in pairs if isinstance(value, Sequence) and isinstance(n, int)), default=0)


class _Generation(jinja2.ext.Extension):
    """Ignores the tags `{% generation %} ... {% endgeneration %}`, which mark assistant text for other programs."""

    tags: set[str] = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Any) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@functools.lru_cache(maxsize=16)
def _compile(source: str) -> jinja2.Template:
    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
        # the filter of jinja escapes HTML characters, but models are trained without these escapes
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)

    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.datetime.now().strftime(format)
    environment.filters["timed"] = _timed
    tree = environment.parse(source)
    for loop in list(tree.find_all(jinja2.nodes.For)):
        loop.iter = jinja2.nodes.Filter(loop.iter, "timed", [], [], None, None).set_lineno(loop.lineno)
    return environment.from_string(tree)


def template_error(turns: Sequence[Mapping[str, Any]], failure: Exception) -> UserError:
    """Returns the error to raise if the chat template failed on a conversation."""
    roles = [str(turn["role"]) for turn in turns]
    cure = " If it rejects system messages, unset data.system_prompt and put its text into data.prompt_template."
    return UserError(
        f"The tokenizer's chat template failed on a conversation ({', '.join(roles)}): "
        f"{failure}.{cure if 'system' in roles else ''}"
    )
