"""Environments for trajectories with several turns and with tools.

Start with `protocol.py`, which says what an environment is, and `trajectories.py`, which passes the turns of the policy
to environments and turns their answers into tokens (`history.py`, `bridge.py`). `kinds.py` makes the environments of a
configuration: in this process (`local.py`) or in worker processes (`pool.py`, `worker.py`). `calculator.py`, `guess.py`
and `maze_steps.py` are environments; `registry.py` finds others by name, file or module. An agent, a program or a
function, asks for turns by chat requests: `program.py` starts it, `endpoint.py` receives its requests and `agents.py`
turns them into tokens. It and the server of `serve` share the protocols of `chat_messages.py`, `responses_api.py` and
`messages_api.py`.
"""

from __future__ import annotations

from tunix_like.environments.calculator import Calculator
from tunix_like.environments.guess import Guess
from tunix_like.environments.maze_steps import MazeSteps
from tunix_like.environments.registry import register_environment

register_environment("calculator")(Calculator)
register_environment("guess")(Guess)
register_environment("maze_steps")(MazeSteps)
