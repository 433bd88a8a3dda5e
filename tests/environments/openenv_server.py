"""Servers for tests, made with OpenEnv's own helpers: python openenv_server.py KIND SESSIONS [PORT].

The script prints its port and serves. The tests run it as a process and do not import it.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from typing import Any

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation


class Message(Action):
    message: str


class Move(Action):
    steps: int
    direction: str


class Number(Action):
    number: int


class Seen(Observation):
    text: str = ""
    turns: int = 0


class _Base(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.turns, self.target, self.is_reset = 0, 0, False

    def reset(self, seed: Any = None, episode_id: Any = None, number: int = 0, rule: str = "") -> Observation:
        self.turns, self.target, self.is_reset = 0, number, True
        return Seen(text=rule, done=rule == "over")

    @property
    def state(self) -> State:
        return State(step_count=self.turns)


class Guess(_Base):
    """Answers HIGHER or LOWER to the number in the message. Some words cause a fault."""

    def step(self, action: Any, timeout_s: Any = None, **given: Any) -> Observation:
        assert self.is_reset, "a step without a reset"
        self.turns += 1
        text = getattr(action, "message", None) or ""
        if "die" in text:
            os._exit(3)
        if "hang" in text:
            time.sleep(60)
        if "raise" in text:
            raise RuntimeError("the game is broken")
        numbers = [word for word in text.split() if word.isdigit()]
        guess = int(numbers[0]) if numbers else -1
        if guess == self.target:
            return Seen(turns=self.turns, done=True, reward=1.0, metadata={"solved": 1, "note": "right"})
        return Seen(text="HIGHER" if guess < self.target else "LOWER", reward=None, metadata={"solved": 0})


class Walk(_Base):
    def step(self, action: Any, timeout_s: Any = None, **given: Any) -> Observation:
        return Seen(text=f"{action.steps} {action.direction}", turns=7, reward=0.5)


class Exact(_Base):
    def step(self, action: Any, timeout_s: Any = None, **given: Any) -> Observation:
        return Seen(text=repr(action.number), reward=float(action.number == 3), done=action.number == 3)


class Sums(MCPEnvironment):
    """Serves tools as OpenEnv does. The reward is 1 for a sum of 12."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        server = FastMCP("sums")

        @server.tool
        def add(a: int, b: int) -> int:
            """Adds two numbers."""
            if a < 0:
                raise ValueError("a is negative")
            return a + b

        super().__init__(server)

    def reset(self, seed: Any = None, episode_id: Any = None, **columns: Any) -> Observation:
        return Observation()

    def step(self, action: Any, timeout_s: Any = None, **given: Any) -> Observation:
        return self._rewarded(super().step(action, timeout_s, **given))

    async def step_async(self, action: Any, timeout_s: Any = None, **given: Any) -> Observation:
        return self._rewarded(await super().step_async(action, timeout_s, **given))

    def _rewarded(self, seen: Observation) -> Observation:
        if isinstance(seen, CallToolObservation):
            seen.reward = 1.0 if "12" in str(seen.result) else 0.0
        return seen

    def _step_impl(self, action: Any, timeout_s: Any = None, **given: Any) -> Observation:
        raise ValueError("only tools")

    @property
    def state(self) -> State:
        return State()


KINDS: dict[str, Any] = {
    "guess": (Guess, Message, Seen),
    "walk": (Walk, Move, Seen),
    "exact": (Exact, Number, Seen),
    "sums": (Sums, CallToolAction, CallToolObservation),
}

if __name__ == "__main__":
    kind, action, observation = KINDS[sys.argv[1]]
    app = create_fastapi_app(kind, action, observation, max_concurrent_envs=int(sys.argv[2]))
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.bind(("127.0.0.1", int(sys.argv[3]) if len(sys.argv) > 3 else 0))
    print(listening.getsockname()[1], flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listening])
