"""What the site needs of the pages: links to files of the repository that are no pages become their names, formulas
become MathML, and the title has the version."""

import html
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert

_OUTSIDE = re.compile(r"\[([^\]]+)\]\((\.\./[^)#]+)[^)]*\)")
_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.S)
_VERSION = re.compile(r'^__version__ = "(.+)"$', re.M)


def on_config(config: Any, **_: Any) -> Any:
    package = Path(config.config_file_path).parent / "tunix_like" / "__init__.py"
    config.site_name += " " + _VERSION.search(package.read_text(encoding="utf-8"))[1]
    return config


def on_page_markdown(markdown: str, **_: Any) -> str:
    def named(link: re.Match[str]) -> str:
        text, path = link[1], link[2].removeprefix("../")
        return text if path in text else f"{text} (`{path}`)"

    return _OUTSIDE.sub(named, markdown)


def on_page_content(content: str, **_: Any) -> str:
    def mathml(formula: re.Match[str]) -> str:
        made = convert(html.unescape(formula[2]), display="block" if formula[1] == "div" else "inline")
        return made.replace("<mi>log</mi>", '<mo lspace="0.17em" rspace="0.17em">log</mo>')  # `log p`, not `logp`

    return _FORMULA.sub(mathml, content)
