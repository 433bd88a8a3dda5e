"""Renders chat templates in a separate process; this is the program of that process.

A template is untrusted code that can loop forever or exhaust the memory. `chat_templates.py` therefore starts this
program in a separate interpreter, with limits that the operating system enforces. A request is a pickled tuple
`(source, variables, most)`; `most` is the maximum number of characters of the rendered text. An answer is a status and
a UTF-8 text. Requests and answers begin with a header that contains their length.
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

from tunix_like.runtime.chat_templates import ANSWER, FAILED, NO_MEMORY, RENDERED, REQUEST, TOO_LONG


def serve(seconds: float, memory: int) -> None:
    """Reads requests from standard input and answers them until standard input is closed.

    Args:
      seconds: CPU time limit of one rendering. If a rendering exceeds the limit, SIGPROF ends the process.
      memory: limit of the address space of the process in bytes.
    """
    with contextlib.suppress(ValueError, OSError):  # not every system supports this limit
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
    except Exception as error:  # a template may raise anything
        return FAILED, f"{type(error).__name__}: {error}"[:1000]
    return (RENDERED, text) if len(text) <= most else (TOO_LONG, "")


class _Generation(jinja2.ext.Extension):
    """Jinja extension that renders the body of `{% generation %} ... {% endgeneration %}` and ignores the two tags,
    which mark assistant text for other programs."""

    tags: set[str] = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Any) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@functools.lru_cache(maxsize=16)
def _compile(source: str) -> jinja2.Template:
    """Compiles a template in the Hugging Face jinja dialect. Must run under the time and memory limits of rendering,
    because jinja evaluates constant expressions during compilation."""

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
