"""What the site needs of the pages: links to files of the repository that are no pages become their names."""

import re
from typing import Any

_OUTSIDE = re.compile(r"\[([^\]]+)\]\((\.\./[^)#]+)[^)]*\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    return _OUTSIDE.sub(lambda link: f"{link[1]} (`{link[2].removeprefix('../')}`)", markdown)
