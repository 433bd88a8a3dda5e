"""Renders chat templates in the dialect of Hugging Face, in the sandbox of jinja."""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
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


class TemplateFailed(Exception):
    """A template raised an exception or rendered too much text. The message gives the reason."""


def render(source: str, variables: Mapping[str, Any], size: int) -> str:
    """Renders a chat template with plain values of `size` characters in total."""
    most, length, pieces = MOST + GROWTH * size, 0, []
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
    return "".join(pieces)


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

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.datetime.now().strftime(format)
    return environment.from_string(source)


def template_error(turns: Sequence[Mapping[str, Any]], failure: Exception) -> UserError:
    """Returns the error to raise if the chat template failed on a conversation."""
    roles = [str(turn["role"]) for turn in turns]
    cure = " If it rejects system messages, unset data.system_prompt and put its text into data.prompt_template."
    return UserError(
        f"The tokenizer's chat template failed on a conversation ({', '.join(roles)}): "
        f"{failure}.{cure if 'system' in roles else ''}"
    )
