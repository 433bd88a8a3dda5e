"""The program that renders chat templates: a template is a program of a stranger, and may loop for ever or grow.

It is started by `chat_templates.py` as an interpreter of its own, with limits that the operating system enforces in
the middle of an operation too. A request is a pickled `(source, variables, most)`, an answer a status and UTF-8 text,
each with its length in front. It knows jinja2 in the Hugging Face dialect. It does NOT know any tokenizer.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
import pickle
import resource
import signal
import sys
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

from tunix_like.data.chat_templates import ANSWER, FAILED, NO_MEMORY, RENDERED, REQUEST, TOO_LONG


def serve(seconds: float, memory: int) -> None:
    """Answers requests on standard input until it is closed. SIGPROF ends the process in the middle of a rendering
    that takes more than so many seconds of processor time.

    Args:
      memory: bytes of address space that the process may have.
    """
    with contextlib.suppress(ValueError, OSError):  # not every system has this limit
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    while len(header := requests.read(REQUEST.size)) == REQUEST.size:
        source, variables, most = pickle.loads(requests.read(*REQUEST.unpack(header)))
        signal.setitimer(signal.ITIMER_PROF, seconds)
        status, text = _answer(source, variables, most)
        signal.setitimer(signal.ITIMER_PROF, 0)
        content = text.encode("utf-8", "surrogatepass")
        del text
        answers.write(ANSWER.pack(status, len(content)) + content)
        answers.flush()


def _answer(source: str, variables: dict[str, Any], most: int) -> tuple[int, str]:
    try:
        text = _compile(source).render(variables)
    except MemoryError:
        return NO_MEMORY, ""
    except Exception as error:  # whatever a template raises is about its input
        return FAILED, f"{type(error).__name__}: {error}"[:1000]
    return (RENDERED, text) if len(text) <= most else (TOO_LONG, "")


class _Generation(jinja2.ext.Extension):
    """`{% generation %} ... {% endgeneration %}` marks the assistant's words for other tools; here it is its body."""

    tags: set[str] = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Any) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@functools.lru_cache(maxsize=16)
def _compile(source: str) -> jinja2.Template:
    """The Hugging Face jinja dialect. Constant expressions are computed here, so this needs the limits too."""

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
        # jinja's own filter escapes HTML characters, which a model never saw in training
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.datetime.now().strftime(format)
    return environment.from_string(source)
