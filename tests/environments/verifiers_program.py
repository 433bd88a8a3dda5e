"""A stand-in for the program that runs an environment of the package `verifiers`: each episode sends one long request
after a while, and at its end the program prints more than a pipe holds and then creates the file `path`."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path
from typing import Any

from tunix_like.workers.child import send
from tunix_like.workers.messages import receive
from tunix_like.workers.routes import CHAT


def main(channel: socket.socket, settings: dict[str, Any]) -> None:
    send(channel, {"kind": "ready"})
    body = {"messages": [{"role": "user", "content": "x" * 60_000}]}
    while (content := receive(channel)) is not None:
        if (told := json.loads(content))["kind"] == "run":
            time.sleep(0.05)
            send(
                channel,
                {"kind": "request", "episode": told["episode"], "call": told["episode"], "route": CHAT, "body": body},
            )
    print("." * 500_000, flush=True)
    Path(settings["path"]).touch()
