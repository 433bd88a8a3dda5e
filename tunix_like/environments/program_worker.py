"""Runs the program of one trajectory, in a process of this trajectory (see `pool.py`), and passes its requests on.

The program is a command, or an async function of the user. Its requests arrive at an `Endpoint` in this process. The
calls of the training process alternate with them: `reset` starts the program and returns its first request, and `step`
answers a request and returns the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import queue
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from tunix_like.environments.agent_calls import FULL, answer_of, count_of, refusal_of
from tunix_like.environments.endpoint import Asked, Endpoint
from tunix_like.environments.outcomes import TimeLimitExceeded
from tunix_like.environments.protocol import EnvStepResult, checked_number
from tunix_like.errors import UserError
from tunix_like.runtime.moment import asked_numbers
from tunix_like.runtime.user_code import load_function
from tunix_like.workers.process import how_ended
from tunix_like.workers.routes import COUNT, LOCAL

ROW_VARIABLE = "TUNIX_LIKE_ROW"
"""Environment variable with the path of a file with the data row, as JSON."""

MOMENT_VARIABLES = {"step": "TUNIX_LIKE_STEP", "progress": "TUNIX_LIKE_PROGRESS"}
"""Environment variables with the numbers of the run."""

MOST_OUTPUT = 1 << 16
"""Number of bytes that are kept of what a program has printed: the last ones."""

_SHOWN = 4_000  # characters of the output in a failure
_LAST_OUTPUT_SECONDS = 0.5  # programs that a program has left behind may hold its output open


@dataclasses.dataclass
class Answer:
    """What the training process sends to the program, as the text of a step.

    Attributes:
      text: the turn of the policy.
      reason: "stop" or "length" (see `answer_of`).
      tokens: the numbers of tokens that the answer reports.
      refusal: why the request is refused; None if it is not.
      last: whether the trajectory ends: all further requests are refused.
    """

    text: str = ""
    reason: str = "stop"
    tokens: tuple[int, int] = (0, 0)
    refusal: str | None = None
    last: bool = False

    def packed(self) -> str:
        return json.dumps(dataclasses.asdict(self))


class ProgramTrajectory:
    """A program that plays one trajectory (see `Environment`).

    Args:
      command: a list of words, or a line for the shell; None if the program is a function.
      function: the location of an async function (`user_code.place_of`), which gets an `openai.AsyncOpenAI`, the data
        row and `arguments`. It may return the reward.
      seconds: time limit from the start to the first request, and from an answer to the next request or the end.

    Attributes:
      output: the end of what the program has printed on its standard output.
    """

    def __init__(
        self, command: str | Sequence[str] | None, function: str | None, arguments: Mapping[str, Any], seconds: float
    ):
        self._command = command
        self._function = None if function is None else load_function(function, "Environment")
        self._arguments = arguments
        self._seconds = seconds
        self._started: _Started | None = None
        self._asked: Asked | None = None
        self._over = False
        self.output = ""

    def tool_schemas(self) -> list[Any]:
        """Returns no tools. Before the processes of trajectories are forked, it is called once, so that they need not
        import the function and its client again."""
        if self._function is not None:
            client = _client("none")
            _ = client.chat.completions, client.responses  # imported at the first access
        return []

    def reset(self, row: str, step: float = 0, progress: float | None = None) -> str:
        """Starts the program. Returns its first request.

        Args:
          row: path of the file with the data row.
          step, progress: the moment of the run; `progress` is None if it is not known.
        """
        numbers = {"step": step} if progress is None else {"step": step, "progress": progress}
        news: queue.SimpleQueue[Any] = queue.SimpleQueue()
        endpoint = Endpoint(news)
        variables = {
            "OPENAI_BASE_URL": f"{endpoint.url}/v1",
            "OPENAI_API_KEY": endpoint.key,
            "ANTHROPIC_BASE_URL": endpoint.url,
            "ANTHROPIC_API_KEY": endpoint.key,
            ROW_VARIABLE: row,
            **{MOMENT_VARIABLES[name]: str(number) for name, number in numbers.items()},
        }
        if self._function is None:
            assert self._command is not None
            self._started = _Started.command(self._command, variables, news)
        else:
            asked = asked_numbers(self._function, numbers, self._arguments)
            arguments = {**self._arguments, **{name: numbers[name] for name in asked}}
            self._started = _Started.function(self._function, arguments, variables, news)
        endpoint.start()
        result = self._next()
        if result.done:
            raise UserError(f"the program has ended without a request to the model.{self._shown_output()}")
        return str(result.observation)

    def step(self, completion: str) -> EnvStepResult:
        """Answers the latest request with an `Answer`, and waits for the next request or the end of the program."""
        answer = Answer(**json.loads(completion))
        assert self._asked is not None
        call = self._asked.call
        self._over = answer.last
        if answer.refusal is not None:
            self._asked.answer(refusal_of(call.id, call.route, 400, answer.refusal))
        elif call.route == COUNT:
            self._asked.answer(count_of(call, answer.tokens[0]))
        else:
            tokens = answer.tokens[0], answer.tokens[1]
            self._asked.answer(answer_of(call, answer.text, answer.reason, tokens))
        return self._next()

    def _next(self) -> EnvStepResult:
        """Waits for the next request or for the end of the program. The observation is the request as text."""
        assert self._started is not None
        deadline = time.monotonic() + self._seconds
        while True:
            try:
                asked = self._started.news.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                what = "ended" if self._over else "sent a request or ended"
                raise TimeLimitExceeded(
                    f"the program has not {what} within environment.timeout_seconds={self._seconds:g}."
                    + self._shown_output()
                ) from None
            if asked is None:
                return self._end(self._started.status)
            if self._started.status is not None or asked.is_abandoned():
                continue  # nobody reads the answer
            if self._over:
                asked.answer(refusal_of(asked.call.id, asked.call.route, 400, FULL))
                continue
            self._asked = asked
            return EnvStepResult(asked.text)

    def _end(self, status: int | None) -> EnvStepResult:
        """Returns the reward of a program that has ended. Its status counts unless its requests were refused."""
        assert self._started is not None and status is not None
        if status and not self._over:
            raise UserError(f"the program {how_ended(status)}.{self._shown_output()}")
        self.output = self._started.stdout.text()
        lines = self.output.rstrip().rsplit("\n", 1)
        try:
            said = json.loads(lines[-1])
        except (ValueError, RecursionError):
            said = None
        reward = said["reward"] if isinstance(said, dict) and "reward" in said else 0.0
        return EnvStepResult(reward=checked_number(reward, "the program's last line: reward"), done=True)

    def _shown_output(self) -> str:
        """Returns a sentence with the last line of the output, and below it the last lines."""
        assert self._started is not None
        text = self._started.output.text().rstrip()[-_SHOWN:]
        if not text:
            return " It printed nothing."
        return f" The last line of its output: {text.splitlines()[-1]}\nIts last output was:\n{text}"


class _Tail:
    """The last bytes of what a program prints."""

    def __init__(self) -> None:
        self._bytes = b""
        self._lock = threading.Lock()

    def add(self, part: bytes) -> None:
        with self._lock:
            self._bytes = (self._bytes + part)[-MOST_OUTPUT:]

    def text(self) -> str:
        return self._bytes.decode(errors="replace")


class _Started:
    """A program that was started.

    Attributes:
      news: gets None at the end of the program.
      status: the exit status, or the negative number of the signal that ended the program; None while it runs.
      stdout: the end of what it has printed on its standard output.
      output: the end of what it has printed on its standard output and its standard error.
    """

    def __init__(self, wait: Callable[[], int], pipes: tuple[int, int], news: queue.SimpleQueue[Any]):
        self.news = news
        self.status: int | None = None
        self.stdout = _Tail()
        self.output = _Tail()
        readers = [
            threading.Thread(target=_read, args=(pipes[0], [self.stdout, self.output]), daemon=True),
            threading.Thread(target=_read, args=(pipes[1], [self.output]), daemon=True),
        ]

        def watch() -> None:
            status = wait()
            for reader in readers:
                reader.join(_LAST_OUTPUT_SECONDS)
            self.status = status
            news.put(None)

        for thread in (*readers, threading.Thread(target=watch, daemon=True)):
            thread.start()

    @staticmethod
    def command(command: str | Sequence[str], variables: Mapping[str, str], news: queue.SimpleQueue[Any]) -> _Started:
        """Starts a command: a list of words, or a line for the shell."""
        with _Pipe() as out, _Pipe() as err:
            process = subprocess.Popen(
                command,
                shell=isinstance(command, str),
                stdin=subprocess.DEVNULL,
                stdout=out.write,
                stderr=err.write,
                env={**os.environ, **surroundings(), **variables},
            )
        return _Started(process.wait, (out.read, err.read), news)

    @staticmethod
    def function(
        function: Callable[..., Any],
        arguments: Mapping[str, Any],
        variables: Mapping[str, str],
        news: queue.SimpleQueue[Any],
    ) -> _Started:
        """Starts an async function in a fork of this process, which has no threads yet."""
        with _Pipe() as out, _Pipe() as err:
            pid = os.fork()
            if pid == 0:
                os.dup2(out.write, 1)
                os.dup2(err.write, 2)
                os.environ.update({**surroundings(), **variables})
                _play(function, arguments)
        return _Started(lambda: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), (out.read, err.read), news)


class _Pipe:
    """A pipe whose end `write` is closed after the `with` block, in which the program gets it."""

    def __enter__(self) -> _Pipe:
        self.read, self.write = os.pipe()
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.write)


def surroundings() -> dict[str, str]:
    """Returns environment variables that a program gets besides those of the run: the commands of the run's Python come
    first, and requests to this machine take no proxy."""
    paths = [str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]
    local = {
        name: ",".join(filter(None, [os.environ.get(name), LOCAL, "localhost"])) for name in ("no_proxy", "NO_PROXY")
    }
    return {"PATH": os.pathsep.join(paths), **local}


def _play(function: Callable[..., Any], arguments: Mapping[str, Any]) -> NoReturn:
    """Runs the function and ends this process. The reward is printed as the last line, as a command does it."""

    async def play() -> Any:
        row = json.loads(Path(os.environ[ROW_VARIABLE]).read_text())
        async with _client(os.environ["OPENAI_API_KEY"]) as client:
            return await function(client, row, **arguments)

    status = 1
    try:
        reward = asyncio.run(play())
        if reward is not None:
            print("\n" + json.dumps({"reward": checked_number(reward, "the function's reward")}))
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _client(key: str) -> Any:
    """Returns the client of an async function. It reads no certificates, because no request leaves this machine."""
    import openai

    http = openai.DefaultAsyncHttpxClient(verify=False, trust_env=False)
    return openai.AsyncOpenAI(api_key=key, http_client=http)


def _read(pipe: int, tails: Sequence[_Tail]) -> None:
    """Reads what a program prints, until its end."""
    while part := os.read(pipe, MOST_OUTPUT):
        for tail in tails:
            tail.add(part)
