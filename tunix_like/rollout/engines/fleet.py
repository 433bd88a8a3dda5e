"""Tracks which servers of an engine have the current weights, and chooses the server for each request."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from tunix_like.errors import EngineLost
from tunix_like.rollout.engines.server import SampledTokens, Server, Unavailable, WrongAnswer

logger = logging.getLogger("tunix_like")

POLL_SECONDS = 1.0
"""Interval in seconds between checks of a server that does not answer."""

MOST_WRONG = 3
"""The run stops if one request gets this many malformed answers, or this many answers that were not sampled with the
current weights."""

MOST_FAILED = 12
"""The run stops if servers fail this many times, and once more for each server, while they answer one request. For
example, its prompt may crash them. A network outage is not such a failure: all servers fail once in it."""

Admit = Callable[[Server], Awaitable[None]]
"""`f(server)`: checks a server that has loaded new weights. Raises UserError if the server computes wrong
log-probabilities."""


class Fleet:
    """A group of servers with the same weights. All methods run in one event loop.

    A server is usable while it has the current weights. A server that fails is checked every `POLL_SECONDS` until it is
    healthy. The server then loads the current weights and is usable again. Until then, the requests of the failed
    server are sent to usable servers. If no server is usable, requests wait.

    Args:
      wait_seconds: maximum time in seconds for which requests wait for a usable server. Afterwards they fail.
      vocab_size: an answer with a token id that is not below this number is malformed.
    """

    def __init__(self, servers: Sequence[Server], wait_seconds: float, vocab_size: int):
        self.servers = list(servers)
        self.wait_seconds = wait_seconds
        self.vocab_size = vocab_size
        self.folder = ""
        self.version = ""
        self._admit: Admit
        self._groups: dict[int, Server] = {}
        self._repairs: dict[Server, asyncio.Task[None]] = {}
        self._is_usable = asyncio.Event()  # set if a server is usable or an error must be raised
        self._problems: dict[Server, str] = {}  # why a server lacks the current weights
        self._error: Exception | None = None

    async def update(self, folder: str, version: str, admit: Admit) -> None:
        """Makes all servers load the weights in `folder`. Servers that do not answer load these weights later.

        Args:
          version: name of these weights. The servers send this name with their answers.
          admit: function that checks a server after the server has loaded the weights.

        Raises:
          EngineLost: no server has loaded the weights within the time limit `wait_seconds` of this `Fleet`.
          UserError: a server refuses a request, or computes wrong log-probabilities with these weights.
        """
        self.folder = folder
        self.version = version
        self._admit = admit
        self._groups.clear()
        self._problems.clear()
        self._is_usable.clear()
        for server in self.servers:
            server.version = None
            self._repair(server)
        await self._until_usable()
        while waiting := [task for server, task in self._repairs.items() if server.alive and not task.done()]:
            await asyncio.wait(waiting, timeout=POLL_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        self._raise_error()

    async def sample(self, group: int, tokens: Sequence[int], parameters: Mapping[str, Any]) -> SampledTokens:
        """Samples the tokens that follow `tokens`, with the current weights.

        Args:
          group: index of the `types.Request` to which `tokens` belong. All calls with the same `group` use the same
            server until this server fails or sends a wrong answer.

        Raises:
          EngineLost: no server has the current weights within the time limit `wait_seconds` of this `Fleet`, servers
            failed too many times (`MOST_FAILED`), `MOST_WRONG` answers are malformed (`WrongAnswer`), or `MOST_WRONG`
            answers were not sampled with the current weights.
          UserError: a server refused the request.
        """
        failed = wrong = other = 0
        while True:
            server = await self._choose(group)
            try:
                answer = await server.sample(tokens, parameters)
                if unknown := [token for token in answer.tokens if not 0 <= token < self.vocab_size]:
                    raise WrongAnswer(f"its answer has the token id {unknown[0]}, which is not in the vocabulary")
            except Unavailable as error:
                failed += 1
                if failed == MOST_FAILED + len(self.servers):
                    raise EngineLost(
                        f"rollout.urls: the server {server.url}: {error}. This was failure {failed} of one request; "
                        "the log of the server may say why."
                    ) from None
                self._lose(server, str(error))
                continue
            except WrongAnswer as error:
                wrong += 1
                if wrong == MOST_WRONG:
                    raise EngineLost(f"rollout.urls: the server {server.url}: {error}.") from None
                logger.warning("the server %s: %s; the request is sent again", server.url, error)
                self._groups.pop(group, None)
                continue
            if answer.versions == [self.version]:
                return answer
            # The server was restarted, or another client has changed its weights.
            problem = f"it sampled with the weights {answer.versions} instead of {self.version!r}"
            other += 1
            if other == MOST_WRONG:
                raise EngineLost(
                    f"rollout.urls: the server {server.url}: {problem}, for the {other}rd time in one request. Another "
                    "run may use this server; give each run servers of its own."
                )
            self._lose(server, problem)

    async def close(self) -> None:
        """Cancels the tasks that wait for failed servers, and closes the connections to all servers."""
        for task in self._repairs.values():
            task.cancel()
        await asyncio.gather(*self._repairs.values(), return_exceptions=True)
        for server in self.servers:
            await server.close()

    def _usable(self) -> list[Server]:
        return [server for server in self.servers if server.version == self.version]

    async def _choose(self, group: int) -> Server:
        """Returns the server that samples the completions of the `types.Request` with the index `group`. If no server
        with the current weights is assigned to this index, first assigns the one with the fewest unanswered
        requests."""
        server = self._groups.get(group)
        if server is None or server not in self._usable():
            server = self._groups[group] = min(await self._until_usable(), key=lambda server: server.running)
        return server

    async def _until_usable(self) -> list[Server]:
        """Waits until at least one server has the current weights, and returns all servers with these weights."""
        while not (usable := self._usable()):
            self._raise_error()
            try:
                await asyncio.wait_for(self._is_usable.wait(), self.wait_seconds)
            except TimeoutError:
                problems = [self._problems.get(server, "it does not answer") for server in self.servers]
                urls = ", ".join(f"{server.url} ({why})" for server, why in zip(self.servers, problems, strict=True))
                raise EngineLost(
                    f"rollout.urls: no server has answered for {self.wait_seconds:g} s "
                    f"(rollout.wait_for_servers_seconds): {urls}. Start the servers, then start the run with the same "
                    "command; it resumes."
                ) from None
        return usable

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _lose(self, server: Server, why: str) -> None:
        """Marks a server as not usable, logs the reason `why`, and starts a task that makes the server usable again."""
        if server.version is None:
            return
        server.version = None
        left = len(self._usable())
        logger.warning("the server %s is not used until it has the current weights: %s", server.url, why)
        if not left:
            self._is_usable.clear()
            logger.warning("no server is left; waiting up to %g s for a server", self.wait_seconds)
        self._repair(server)

    def _repair(self, server: Server) -> None:
        task = self._repairs.get(server)
        if task is None or task.done():
            self._repairs[server] = asyncio.create_task(self._until_repaired(server))

    async def _until_repaired(self, server: Server) -> None:
        """Waits until a server is healthy, and makes the server load the current weights. Tries again after each
        failure."""
        reported = False
        while server.version != self.version:
            # These are copies, because the attributes can change during an await.
            folder = self.folder
            version = self.version
            admit = self._admit
            problem = "it does not answer"
            try:
                server.alive = await server.is_healthy()
                if server.alive:
                    await server.reload(folder, version)
                    await admit(server)
                    server.version = version
                    continue  # `self.version` may have changed meanwhile
            except (Unavailable, WrongAnswer) as error:
                server.alive = False
                problem = str(error)
            except Exception as error:  # `_until_usable` raises it, so that requests do not wait longer
                server.alive = False
                self._error = error
                self._is_usable.set()
            server.version = None
            self._problems[server] = problem
            if self._error is not None:
                return
            if not reported:
                logger.warning("the server %s does not have the current weights: %s; trying again", server.url, problem)
                reported = True
            await asyncio.sleep(POLL_SECONDS)
        if reported:
            logger.warning("the server %s is used again", server.url)
        self._is_usable.set()
