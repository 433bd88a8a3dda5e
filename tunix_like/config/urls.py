"""Checks the addresses of servers in a config."""

from __future__ import annotations

from urllib.parse import urlsplit

from tunix_like.errors import UserError


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
