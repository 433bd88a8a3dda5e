"""Checks the address of the coordinator (process 0) of a run before jax starts it or connects to it.

The coordinator service of jax crashes with a segmentation fault if its port is in use, and the client of jax aborts the
process if no coordinator answers. Neither error can be caught. This module does not import jax.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time

from tunix_like.errors import UserError

ANSWER_SECONDS = 20.0
"""An error is raised if a server accepts connections but does not answer for this number of seconds."""

_RETRY_SECONDS = 0.25
_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
"""The connection preface of an HTTP/2 client (RFC 9113, section 3.4): fixed text and an empty SETTINGS frame."""

_SETTINGS, _FRAME_TYPE, _FRAME_HEADER = 4, 3, 9
"""The type of a SETTINGS frame, the index of the type in a frame header, and the size of a frame header in bytes. The
first frame of a server must be a SETTINGS frame."""


def check_port(address: str) -> None:
    """Raises UserError if process 0 cannot listen on the port of `address` (`host:port`)."""
    port = _split(address)[1]
    if "JAX_COORDINATOR_BIND_ADDRESS" in os.environ:  # jax listens on the address in this variable instead of `address`
        return
    dualstack = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dualstack else socket.AF_INET
    try:
        socket.create_server(("", port), family=family, dualstack_ipv6=dualstack).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UserError(
                f"--coordinator {address}: port {port} is in use by another run or program on this machine; give all "
                "processes another port."
            ) from None
        raise UserError(f"--coordinator {address}: cannot listen on port {port}: {error.strerror or error}.") from None


def wait_for(address: str, seconds: float) -> None:
    """Waits until a server at `address` answers with HTTP/2, as a coordinator of jax does.

    Raises:
      UserError: no server listens at `address` within `seconds`, or the server is not a coordinator.
    """
    host, port = _split(address)
    end, silent_since = time.monotonic() + seconds, None
    while True:
        try:
            answer = _first_bytes(host, port)
        except OSError as error:  # the server has not started, or its host name cannot be resolved yet
            why, silent_since = str(error.strerror or error), None
        else:
            if len(answer) == _FRAME_HEADER and answer[_FRAME_TYPE] == _SETTINGS:
                return
            if answer:
                raise UserError(
                    f"--coordinator {address}: the server at this address is not process 0 of a run (it answered "
                    f"{answer!r}); give the host and port of process 0."
                )
            why, silent_since = "connected, but no answer", silent_since or time.monotonic()
        if silent_since is not None and time.monotonic() - silent_since > ANSWER_SECONDS:
            raise UserError(
                f"--coordinator {address}: the server at this address does not answer like process 0 of a run; "
                "give the host and port of process 0."
            )
        if time.monotonic() > end:
            raise UserError(
                f"--coordinator {address}: no answer after {seconds:g} seconds ({why}). Start process 0 on that host "
                "with the same address, and check that the port can be reached from this machine."
            )
        time.sleep(_RETRY_SECONDS)


def _first_bytes(host: str, port: int) -> bytes:
    """Connects to a server and sends the fixed text with which an HTTP/2 client begins. Returns the first bytes of the
    answer; empty if the connection ends or times out.

    Raises:
      OSError: the connection cannot be opened.
    """
    with socket.create_connection((host, port), timeout=min(5.0, ANSWER_SECONDS)) as peer:
        answer = b""
        with contextlib.suppress(OSError):
            peer.sendall(_GREETING)
            while len(answer) < _FRAME_HEADER and (more := peer.recv(_FRAME_HEADER - len(answer))):
                answer += more
        return answer


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not 0 < int(port) < 65536:
        raise UserError(f"--coordinator {address}: port {port} is not valid; give one from 1 to 65535.")
    return host.strip("[]"), int(port)
