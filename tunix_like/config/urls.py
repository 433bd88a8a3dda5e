"""Checks the addresses of servers in a config, and ids of the Hugging Face hub."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import urlsplit

from tunix_like.errors import UserError

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB = "hf://"


def plain_hub_id(name: Any, key: str, kind: str = "models") -> Any:
    """Returns `hf://OWNER/NAME` as `OWNER/NAME`, and any other value unchanged.

    Args:
      key: what has the value, for the error message.
      kind: `models`, or `datasets`, whose ids may begin with `hf://datasets/` and end with `:CONFIGURATION`.
    """
    if not isinstance(name, str) or not name.startswith(_HUB):
        return name
    found = name.removeprefix(_HUB)
    of_data = kind == "datasets"
    found = found.removeprefix("datasets/") if of_data else found
    if not HUB_ID.fullmatch(found.partition(":")[0] if of_data else found):
        raise UserError(f"{key}: got {name!r}; give hf://{'datasets/' if of_data else ''}OWNER/NAME.")
    return found


def is_server(path: str | None) -> bool:
    """Returns whether the path of a model is the address of a server."""
    return path is not None and path.startswith(("http://", "https://"))


def check_server_url(key: str, url: str, key_variable: str) -> None:
    """Raises UserError if the value `url` of a config key is not the address of a server, or contains a password.

    Args:
      key_variable: name of the environment variable for the API key, for the error message.
    """
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and parts.hostname and not parts.query and not parts.fragment
        usable = usable and parts.port != 0
    except ValueError:  # the port is not a number
        usable = False
    if not usable:
        raise UserError(f"{key}: got {url!r}; give an address such as http://127.0.0.1:8000.")
    if parts.username is not None or parts.password is not None:
        raise UserError(
            f"{key}: the address of {parts.hostname} contains a user name or a key; set the environment variable "
            f"{key_variable} instead."
        )
    if parts.path.rstrip("/").endswith("/v1"):
        raise UserError(f"{key}: got {url!r}; give the address of the server without /v1.")
