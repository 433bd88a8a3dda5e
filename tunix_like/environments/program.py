"""Runs programs as agents: any command or async function that asks a model for its answers plays a trajectory.

Each trajectory has a process of its own under the limits of an `EnvironmentPool`, in which `program_worker.py` starts
the program and answers its requests with the turns of the policy.
"""

from __future__ import annotations

import importlib.util
import inspect
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunix_like.data.source import HIDDEN_COLUMN
from tunix_like.environments.agent_calls import FULL
from tunix_like.environments.endpoint import unpacked_call
from tunix_like.environments.outcomes import Outcome
from tunix_like.environments.pool import EnvironmentPool
from tunix_like.environments.program_worker import Answer, surroundings
from tunix_like.errors import UserError, check_type
from tunix_like.runtime.moment import NAMES, START, Moment
from tunix_like.runtime.user_code import check_arguments, place_of
from tunix_like.workers.failures import Failure
from tunix_like.workers.routes import COUNT

if TYPE_CHECKING:
    from tunix_like.environments.agent_calls import Call
    from tunix_like.environments.agents import AgentPlayer

GOLD_COLUMNS = frozenset({"answer", "gold", HIDDEN_COLUMN})
"""Columns that a program does not see unless `columns` names them: what rewards compare with."""

MOST_WORKERS = 32

_WORKERS_PER_CORE = 4
_PATIENCE = 5.0  # seconds for the process of a trajectory to report that its program took too long
_PLACE = "tunix_like.environments.program_worker:ProgramTrajectory"


def default_workers() -> int:
    """Returns how many programs run at the same time while the policy waits for them. They wait for each other's cores
    when they start, so the number is small on small machines."""
    return min(MOST_WORKERS, _WORKERS_PER_CORE * (os.cpu_count() or 1))


class Program:
    """Lets a program play each trajectory (see `Environments`): it asks the policy as it would ask a model of OpenAI or
    Anthropic, until it ends.

    The last line that it prints can be its reward, `{"reward": 1.0}`. A program that ends with another status than 0,
    or exceeds a limit, leaves its trajectory unscored.

    Args:
      command: a list of words, a line for the shell, or an async function `agent(client, row)`, which gets an
        `openai.AsyncOpenAI` and may return the reward.
      arguments: further arguments of the function, by name.
      columns: the columns of the data that the program sees; unset: all but `GOLD_COLUMNS`.
      one_conversation: whether every request begins with the first request of its trajectory, and this one is the same
        in all trajectories of a row. The trajectories of a row then share it as their prompt, which saves time and
        memory. A request that does not begin so leaves its trajectory unscored.
      workers: maximum number of programs that run while the policy waits for them.
      timeout_seconds: time limit from the start to the first request, and from an answer to the next request or the
        end.
      memory_gb: memory limit in GB (10^9 bytes) of a program with the processes that it starts (Linux only).

    Raises:
      UserError: the command does not exist, or the function cannot be used.
    """

    tools: Sequence[Mapping[str, Any]] = ()
    reads_prompt = True
    """Whether `reset` gets the prompt as a column."""

    def __init__(
        self,
        command: Any,
        *,
        arguments: Mapping[str, Any] | None = None,
        columns: Sequence[str] | None = None,
        one_conversation: bool = False,
        workers: int | None = None,
        timeout_seconds: float = 20.0,
        memory_gb: float = 4.0,
    ):
        check_type("environment.arguments.one_conversation", one_conversation, bool, "write true or false")
        if columns is not None:
            check_type("environment.arguments.columns", columns, (list, tuple), "give a list of names")
        settings: dict[str, Any] = {"command": None, "function": None, "arguments": dict(arguments or {})}
        name = "program"
        if callable(command):
            settings["function"] = _checked_function(command, arguments or {})
            name = command.__name__
        elif arguments:
            raise UserError("Program: `arguments` are those of an async function; write those of a command in it.")
        else:
            settings["command"] = _checked_command(command)
        self.subject = f"Environment '{name}'"
        self.one_conversation = one_conversation
        self.timeout_seconds = timeout_seconds
        self.memory_gb = memory_gb
        self.workers = default_workers() if workers is None else workers
        self._columns = None if columns is None else frozenset(columns)
        self._pool = EnvironmentPool(
            _PLACE,
            arguments={**settings, "seconds": timeout_seconds},
            workers=self.workers,
            timeout_seconds=timeout_seconds + _PATIENCE,
            memory_gb=memory_gb,
        )
        self._pool.name = name
        self._names = itertools.count()
        self._count: Callable[[Call], int] = lambda call: 0  # number of tokens of a request
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._clear()

    @property
    def where(self) -> str:
        return f"{self.workers} programs at a time, {self.timeout_seconds:g} s a request"

    def make_player(self, *given: Any) -> AgentPlayer:
        from tunix_like.environments.agents import AgentPlayer

        player = AgentPlayer(self, *given)
        self._count = lambda call: len(player.tokens(call))
        return player

    def _clear(self) -> None:
        self.calls: dict[int, Call] = {}
        self.tokens: dict[int, tuple[int, int]] = {}
        self._running: set[int] = set()  # trajectories whose programs run
        self._rows: dict[int, Path] = {}
        self._last: dict[int, Answer] = {}  # truncated turns, which `finish` sends
        self._closing: set[int] = set()  # trajectories whose programs end because of `finish`
        self._rewards: dict[int, float] = {}  # of these programs, until their processes have ended
        self._ready: list[Outcome] = []

    def reset(self, number: int, columns: Mapping[str, Any], moment: Moment = START) -> None:
        """Starts the program of a trajectory. Its first request becomes the first observation."""
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="tunix_like_rows_")
        shown = {
            name: value
            for name, value in columns.items()
            if (name not in GOLD_COLUMNS if self._columns is None else name in self._columns or name == "prompt")
        }
        row = Path(self._folder.name) / f"{next(self._names)}.json"
        row.write_text(json.dumps(shown, default=_plain))
        self.calls.pop(number, None)
        self._rows[number] = row
        self._running.add(number)
        self._pool.reset(number, {"row": str(row)}, moment)

    def step(self, number: int, completion: str, reason: str = "stop") -> None:
        """Answers the latest request of a trajectory (see `AgentEnvironments.step`)."""
        answer = Answer(completion, reason, self.tokens.pop(number, (0, 0)), last=reason == "length")
        if answer.last:
            self._last[number] = answer
        else:
            self._pool.step(number, answer.packed())

    def finish(self, number: int) -> None:
        """Ends a trajectory: refuses the requests of its program, and waits for the end of the program."""
        if number in self._running:
            self._closing.add(number)
            answer = self._last.pop(number, Answer(refusal=FULL, last=True))
            self._pool.step(number, answer.packed())
        else:
            self._pool.finish(number)

    def outcomes(self, wait: bool) -> list[Outcome]:
        """Returns the outcomes of `reset`, `step` and `finish` that are ready and were not returned before; see
        `Environments.outcomes`."""
        while True:
            found = self._pool.outcomes(wait)
            for outcome in found:
                self._take(outcome)
            if self._ready or not wait or not found:
                ready = self._ready
                self._ready = []
                return ready

    def cancel(self, number: int) -> None:
        """Stops the program of a trajectory, which gets no outcome. No call may be unanswered."""
        self._drop(number)
        self._pool.cancel(number)

    def close(self) -> None:
        """Stops all programs. Unanswered calls get no outcome."""
        self._pool.close()
        self._clear()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _take(self, outcome: Outcome) -> None:
        """Handles an outcome of the process of a trajectory."""
        number = outcome.number
        if outcome.failure is not None or number not in self._running:  # the process has ended
            reward = outcome.reward + self._rewards.pop(number, 0.0)
            self._drop(number)
            self._ready.append(outcome._replace(reward=reward))
        elif outcome.done:
            self._running.discard(number)
            if number in self._closing:
                self._rewards[number] = outcome.reward
                self._pool.finish(number)
            else:
                self._ready.append(outcome)
        else:
            self._take_request(outcome)

    def _take_request(self, outcome: Outcome) -> None:
        try:
            call = unpacked_call(str(outcome.observation))
        except (ValueError, TypeError, RecursionError):  # an async function can write to the socket of its process
            self.cancel(outcome.number)
            failure = Failure("error", "the process of the program sent what is not a request.")
            self._ready.append(Outcome(outcome.number, failure=failure))
            return
        if call.route != COUNT:
            self.calls[outcome.number] = call
            self._ready.append(outcome._replace(observation=call.latest))
            return
        try:
            answer = Answer(tokens=(self._count(call), 0))
        except UserError as error:
            answer = Answer(refusal=str(error))
        self._pool.step(outcome.number, answer.packed())

    def _drop(self, number: int) -> None:
        """Forgets a trajectory."""
        self._running.discard(number)
        self._closing.discard(number)
        self._last.pop(number, None)
        if (row := self._rows.pop(number, None)) is not None:
            row.unlink(missing_ok=True)


def _checked_command(command: Any) -> str | list[str]:
    """Returns a command that exists."""
    where = "environment.arguments.command"
    if isinstance(command, list | tuple) and command and all(isinstance(word, str) for word in command):
        words = list(command)
    elif isinstance(command, str) and command.strip():
        words = command.split()
    else:
        raise UserError(f"{where}: got {command!r:.80}; give a list of words ([python, agent.py]) or a shell line.")
    # Only the shell can tell what the words of a line are.
    if (isinstance(command, str) and len(words) > 1) or shutil.which(words[0], path=surroundings()["PATH"]):
        return command if isinstance(command, str) else words
    raise UserError(f"{where}: there is no command '{words[0]:.200}'; write its path, or install it.")


def _checked_function(function: Callable[..., Any], arguments: Mapping[str, Any]) -> str:
    """Returns the location of an async function that can be an agent."""
    name = getattr(function, "__name__", type(function).__name__)
    if not inspect.iscoroutinefunction(function):
        raise UserError(f"Environment '{name}': an agent is a command or an async function; write async def.")
    if importlib.util.find_spec("openai") is None:
        raise UserError(f"Environment '{name}': the client of an async agent needs openai; run pip install openai.")
    check_arguments("environment.arguments", name, function, arguments, 2, {*NAMES} - {*arguments})
    return place_of(name, function, "Environment", "write it as a program of its own")


def _plain(value: Any) -> Any:
    """Returns a value of a row as JSON can represent it."""
    return value.tolist() if hasattr(value, "tolist") else str(value)
