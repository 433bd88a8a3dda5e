"""Runs environments in a separate program, which loads the user's module once and forks one child process per
trajectory.

The program is a fresh interpreter and not a fork of the training process, so the program has no locks, threads or
devices of the training process. The program itself runs user code only while it loads the module. Afterwards it only
starts, reaps and kills child processes. Each child process answers the calls of one trajectory on its own socket. The
training process enforces deadlines and the memory limit (`pool.py`).
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import os
import pickle
import selectors
import signal
import socket
import struct
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tunix_like.errors import UserError
from tunix_like.rewards.worker import HEADER, die_with, go_first, message, process_control, read_exactly, send_pending
from tunix_like.rollout.environments import deadline
from tunix_like.rollout.environments.adapters import Adapted, Trajectory, as_environment
from tunix_like.rollout.environments.failures import failure_of
from tunix_like.rollout.environments.process_tree import children_of
from tunix_like.rollout.environments.registry import ENVIRONMENTS, environment_place
from tunix_like.runtime.user_code import load_function

START = (
    "import json, sys; given = json.loads(sys.argv[1]); sys.path[:] = given['path']; "
    "from tunix_like.rollout.environments.fork_server import serve; "
    "serve(given['socket'], given['places'], given['parent'])"
)
"""Code that starts the fork server, as the argument of `python -c`. `rewards.worker.START` has the same form."""

ORDER = struct.Struct("!cQ")
"""Binary format of an order to the fork server: `BEGIN` or `END`, and the number of the child process to start or kill.
A socket for the child process is sent with `BEGIN`."""

BEGIN, END = b"b", b"e"

TOOLS_PREFIX = "tools:"
"""Prefix of the location of a tool. The location of an environment has no prefix."""

_PR_SET_CHILD_SUBREAPER = 36
_SIGNALS = (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM)


def places_of(place: str | Sequence[str], arguments: Mapping[str, Any] | None) -> list[str]:
    """Converts the location of an environment with its arguments, or the locations of tools, to a list of texts. With
    this list, `load` loads the environment or the tools in another process.

    Args:
      place: the name or location of an environment, or the locations of tools.

    Raises:
      UserError: another process cannot import the environment, the arguments cannot be written as JSON, or arguments
        are given for tools.
    """
    if not isinstance(place, str):
        if arguments:
            raise UserError("environment.arguments: tools take no arguments; set environment.name to a class.")
        return [f"{TOOLS_PREFIX}{tool}" for tool in place]
    if place in ENVIRONMENTS:
        place = environment_place(place, ENVIRONMENTS[place])
    try:
        return [place, json.dumps(dict(arguments))] if arguments else [place]
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(
            f"environment.arguments: they cannot be written as JSON ({error}); use plain values."
        ) from error


def load(places: list[str]) -> Adapted:
    """Loads an environment, or functions that are tools.

    Args:
      places: the location of an environment, followed by its arguments as JSON if there are any; or the locations of
        tools, each with the prefix `TOOLS_PREFIX`.

    Raises:
      UserError: the code cannot be loaded (see `load_function`), or cannot be an environment or a tool (see
        `as_environment`).
    """
    if not places[0].startswith(TOOLS_PREFIX):
        place, *arguments = places
        return as_environment(load_function(place, "Environment"), json.loads(arguments[0]) if arguments else None)
    return as_environment([load_function(place.removeprefix(TOOLS_PREFIX), "Tool") for place in places])


def serve(number: int, places: list[str], parent: int) -> None:
    """Runs the fork server: loads the environment, and then starts and kills child processes as the training process
    requests.

    The first message to the training process is `{"tools": [...]}`, or `{"error": text, "kind": kind}` if the
    environment cannot be loaded. Then the training process sends the orders `BEGIN` (fork a child process) and `END`
    (kill a child process). Each order contains a number that identifies the child process. The start of a child process
    is reported as `{"begun": number, "pid": pid}`. Its end is reported as `{"ended": number, "status": exit status or
    -signal}`. Each `END` is answered with `{"stopped": number}`. When the socket is closed or the training process has
    ended, the fork server kills all child processes and ends.

    Args:
      number: file descriptor of the socket to the training process.
      places: the argument of `load`.
      parent: process id of the training process.
    """
    die_with(parent)
    go_first()
    _adopt_orphans()
    channel = socket.socket(fileno=number)
    try:
        adapted = load(places)
        ready: dict[str, Any] = {"tools": adapted.tools()}
        content = json.dumps(ready)
    except BaseException as error:  # includes SystemExit
        channel.sendall(message(_failed(_name(places), error)))
        return
    with contextlib.suppress(AttributeError, ValueError, OSError):
        # line buffering, so that lines of several children do not mix
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(line_buffering=True, write_through=False)  # type: ignore[union-attr]
    _Server(channel, adapted, parent).run(message(content.encode()))


def _name(places: list[str]) -> str:
    return places[0].removeprefix(TOOLS_PREFIX)


class _Server:
    """Forks and kills child processes as the training process requests."""

    def __init__(self, channel: socket.socket, adapted: Adapted, parent: int):
        self.channel, self.adapted, self.parent = channel, adapted, parent
        self.children: dict[int, int] = {}  # numbers of the children by process id
        self.pids: dict[int, int] = {}
        self.older = set(children_of(os.getpid()))  # processes that the user's module started
        self.out = b""
        self.closed = False

    def run(self, ready: bytes) -> None:
        """Sends the message `ready` to the training process. Then forks and kills child processes as the training
        process requests, until the socket is closed or the training process has ended."""
        waker, woken = socket.socketpair()
        for end in (waker, woken, self.channel):
            end.setblocking(False)
        for number in _SIGNALS:  # any of these signals can come from a child
            signal.signal(number, lambda *_: None)
        die_with(self.parent, signal.SIGTERM)  # not SIGKILL, so that `_end` can kill all children first
        signal.set_wakeup_fd(woken.fileno(), warn_on_full_buffer=False)
        self.private = (waker, woken)
        gc.collect()
        gc.freeze()  # so that the collector does not copy memory pages that the children share
        self.out = ready
        while not self.closed and os.getppid() == self.parent:
            with selectors.DefaultSelector() as selector:
                selector.register(waker, selectors.EVENT_READ)
                selector.register(self.channel, selectors.EVENT_READ | (selectors.EVENT_WRITE if self.out else 0))
                selector.select()
            with contextlib.suppress(BlockingIOError):
                waker.recv(4096)
            self._follow()
            self._reap()
            self._send()
        self._end()

    def _end(self) -> None:
        """Kills all descendants of this process, waits until they have ended, and kills this process."""
        for number in list(self.pids):
            self._kill(number)
        with contextlib.suppress(ChildProcessError):
            while True:
                self._kill_all(children_of(os.getpid()))  # includes processes whose parent has ended
                os.waitpid(-1, 0)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(0, signal.SIGKILL)  # includes processes that the user's module started in this group

    def _follow(self) -> None:
        """Handles the requests that have arrived on the socket: forks (`BEGIN`) or kills (`END`) child processes."""
        while True:
            try:
                order, descriptors, _, _ = socket.recv_fds(self.channel, ORDER.size, 1)
            except BlockingIOError:
                return
            except OSError:
                order = b""
            if len(order) < ORDER.size:  # an incomplete order: the training process has ended
                self.closed = True
                return
            what, number = ORDER.unpack(order)
            if what == BEGIN:
                self._begin(number, descriptors[0])
            else:
                self._kill(number)
                self._tell({"stopped": number})

    def _begin(self, number: int, descriptor: int) -> None:
        """Forks the child process with the number `number`. `descriptor` is the file descriptor of the child's
        socket."""
        own = os.getpid()
        try:
            with warnings.catch_warnings():
                # If the user's module imported jax, a fork warns about threads of jax. The import alone starts no
                # threads.
                warnings.simplefilter("ignore")
                pid = os.fork()
        except OSError as error:
            os.close(descriptor)
            self._tell({"ended": number, "error": f"no process could be started ({error})"})
            return
        if pid == 0:
            try:
                self._be_child(descriptor, own)
            finally:
                os._exit(0)
        os.close(descriptor)
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)  # also set here, because the child may be killed before it sets its group
        self.children[pid], self.pids[number] = number, pid
        self._tell({"begun": number, "pid": pid})

    def _be_child(self, descriptor: int, parent: int) -> None:
        os.setpgid(0, 0)  # a process group, so that all its processes can be killed at once
        die_with(parent)
        _adopt_orphans()
        signal.set_wakeup_fd(-1)
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self.channel.close()
        for end in self.private:
            end.close()
        faulthandler.enable()  # prints a traceback on a crash in C code
        if random := sys.modules.get("numpy.random"):
            random.seed()  # otherwise all children draw the same numbers; Python reseeds `random` itself
        answer_calls(socket.socket(fileno=descriptor), self.adapted)

    def _kill(self, number: int) -> None:
        """Kills the child process with the number `number` and all processes of its process group."""
        if (pid := self.pids.get(number)) is not None:
            self._kill_all([pid])  # the child may have left its group; `_reap` kills its processes
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)

    def _kill_all(self, pids: Iterable[int]) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)

    def _reap(self) -> None:
        """Tells the training process which child processes have ended, and kills all processes that these child
        processes have started."""
        ended = False
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            ended = True
            if (number := self.children.pop(pid, None)) is not None:
                del self.pids[number]
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)
                self._tell({"ended": number, "status": os.waitstatus_to_exitcode(status)})
        if ended:  # processes that had left the group of an ended child are now children of this process
            self._kill_all(set(children_of(os.getpid())) - self.older - set(self.children))

    def _tell(self, what: dict[str, Any]) -> None:
        self.out += message(json.dumps(what).encode())

    def _send(self) -> None:
        try:
            self.out = send_pending(self.channel, self.out)
        except OSError:
            self.closed = True


def answer_calls(channel: socket.socket, adapted: Adapted) -> None:
    """Answers the calls of one trajectory until the trajectory is finished or the socket is closed.

    A call is a pickled `("reset", columns, seconds)`, `("step", text, seconds)` or `("finish", None, seconds)`.
    `seconds` is the time limit of the call. An answer is a JSON object: `{"observation": ...}` for `reset`, all fields
    of an `EnvStepResult` for `step`, `{"reward": ...}` for `finish`, or `{"error": text, "kind": kind of the failure}`.
    An error ends the trajectory.
    """
    own = os.getpid()
    trajectory: Trajectory | None = None
    while (length := read_exactly(channel, HEADER.size)) is not None:
        request = read_exactly(channel, HEADER.unpack(length)[0])
        if request is None:
            return
        what = "reset"
        try:
            what, given, seconds = pickle.loads(request)
            deadline.set_limit(seconds)
            if what == "reset":
                trajectory = adapted.start(given)
            assert trajectory is not None
            answer = _answer(trajectory, what, given)
            if what == "finish":
                trajectory = None  # frees the object within the time limit of the call
            content = json.dumps(answer, ensure_ascii=False).encode()
        except BaseException as error:  # includes SystemExit and KeyboardInterrupt
            content = _failed(adapted.name, error)
            what = "finish"
        if os.getpid() != own:
            return  # this is a child that the environment forked; only its parent answers
        channel.sendall(message(content))
        if what == "finish":
            with contextlib.suppress(Exception):
                sys.stdout.flush()
            return


def _failed(name: str, error: BaseException) -> bytes:
    failure = failure_of(name, error)
    return json.dumps({"error": failure.reason, "kind": failure.kind}).encode()


def _answer(trajectory: Trajectory, what: str, given: Any) -> dict[str, Any]:
    if what == "reset":
        return {"observation": trajectory.reset(given)}
    if what == "finish":
        return {"reward": trajectory.finish()}
    return trajectory.step(given)._asdict()


def _adopt_orphans() -> None:
    """Makes this process the new parent of all its descendants whose parent has ended (Linux only)."""
    if sys.platform == "linux":
        process_control(_PR_SET_CHILD_SUBREAPER, 1)
