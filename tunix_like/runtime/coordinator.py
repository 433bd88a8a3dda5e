"""What is known of a run's coordinator (process 0) by its address, before jax is asked to start or to join it.

jax's own service ends with a segmentation fault on a port in use, and its client aborts the process where no
coordinator answers: neither can be caught. It knows sockets and the first bytes of HTTP/2. It does NOT import jax.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time

from tunix_like.errors import UserError

ANSWER_SECONDS = 20.0
"""How long something that accepts connections may go without an answer."""

_RETRY_SECONDS = 0.25
_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
"""A client's connection preface (RFC 9113, section 3.4): fixed text and an empty SETTINGS frame."""

_SETTINGS, _FRAME_TYPE, _FRAME_HEADER = 4, 3, 9
"""The server's first frame must be SETTINGS; place of the type in a frame's header; bytes of that header."""


def check_port(address: str) -> None:
    """Raises UserError where process 0 cannot listen on the port of `address` (`host:port`)."""
    port = _split(address)[1]
    if "JAX_COORDINATOR_BIND_ADDRESS" in os.environ:  # jax listens there, and the port of `address` is forwarded to it
        return
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        socket.create_server(("", port), family=family, dualstack_ipv6=both).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UserError(
                f"--coordinator {address}: port {port} is in use on this machine, by another run or program; give all "
                "processes another port."
            ) from None
        raise UserError(f"--coordinator {address}: cannot listen on port {port}: {error.strerror or error}.") from None


def wait_for(address: str, seconds: float) -> None:
    """Returns when what listens at `address` speaks HTTP/2, as a coordinator does.

    Raises:
      UserError: nothing listens there after so many seconds, or what does is no coordinator.
    """
    host, port = _split(address)
    end, silent_since = time.monotonic() + seconds, None
    while True:
        try:
            answer = _first_bytes(host, port)
        except OSError as error:  # not there yet, or its name is not known yet
            why, silent_since = str(error.strerror or error), None
        else:
            if len(answer) == _FRAME_HEADER and answer[_FRAME_TYPE] == _SETTINGS:
                return
            if answer:
                raise UserError(
                    f"--coordinator {address}: what answers there is no process 0 of a run (it says {answer!r}); give "
                    "host and port of process 0."
                )
            why, silent_since = "it says nothing", silent_since or time.monotonic()
        if silent_since is not None and time.monotonic() - silent_since > ANSWER_SECONDS:
            raise UserError(
                f"--coordinator {address}: something listens there and does not answer as a process 0 of a run does; "
                "give host and port of process 0."
            )
        if time.monotonic() > end:
            raise UserError(
                f"--coordinator {address}: nothing answers there after {seconds:g} seconds ({why}). Start process 0 on "
                "that host, with the same address, and see that the port can be reached from here."
            )
        time.sleep(_RETRY_SECONDS)


def _first_bytes(host: str, port: int) -> bytes:
    """The first bytes of the answer to a greeting, none where the connection ends or nothing comes in time. Raises
    OSError where there is no connection."""
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
        raise UserError(f"--coordinator {address}: port {port} is none; give one from 1 to 65535.")
    return host.strip("[]"), int(port)
