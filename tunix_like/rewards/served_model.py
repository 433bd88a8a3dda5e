"""The base of reward functions that ask a model behind an OpenAI-compatible server."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tunix_like.config.urls import check_server_url
from tunix_like.errors import UserError, one_line
from tunix_like.rewards.services import Limits, WaitingFunction
from tunix_like.workers.failures import Failure

if TYPE_CHECKING:
    from aiohttp import ClientSession

SECONDS_TO_CONNECT = 5.0

MOST_BYTES = 4 << 20
"""Maximum size of an answer."""


class ServedModel(WaitingFunction):
    """Sends requests to a model behind a server.

    Args:
      url: the server, with or without `/v1`.
      model: the name of the model; None: the first that the server lists.
      key_env: environment variable with the key.
      options: further fields of a request.
    """

    def __init__(
        self,
        name: str,
        url: str,
        model: str | None,
        key_env: str,
        options: Mapping[str, Any],
        limits: Limits | None,
    ):
        super().__init__(name, limits)
        self.url = url.rstrip("/").removesuffix("/v1")
        check_server_url(f"{name}: url", self.url, key_env)
        try:
            import aiohttp  # noqa: F401
        except ImportError as error:
            raise UserError(f"{name} needs aiohttp ({one_line(error)}): pip install 'tunix-like[judge]'") from None
        self.model = model
        self.key_env = key_env
        self.options = dict(options)
        self._served: str | None = model
        self._session: ClientSession | None = None

    async def ask(self, route: str, messages: Sequence[Mapping[str, Any]]) -> Any:
        """Returns the answer to a chat."""
        if self._served is None:
            await self.find()
        body = {"model": self._served, "messages": messages} | self.options
        return await self._request("POST", route, json=body)

    def check(self) -> str:
        """Returns the model of the server. Raises UserError if the server does not answer or refuses the key."""
        (found,) = self.wait_for(self.__name__, [self.probe])
        self.close()
        self.take_counts()  # these calls are of no step
        if isinstance(found, Failure):
            raise UserError(f"{found.reason}. Start the server, or correct url, model or ${self.key_env}.")
        return str(found)

    async def probe(self) -> str | Failure:
        """Returns the model, or why it cannot be used."""
        return await self.find()

    async def find(self) -> str:
        """Finds the model, unless it is named: not every server lists its models."""
        import aiohttp

        try:
            models = (await self._request("GET", "v1/models"))["data"]
        except aiohttp.ClientResponseError as error:
            if self.model is None or error.status != 404:
                raise
            models = [{"id": self.model}]
        self._served = self.model or str(models[0]["id"])
        return self._served

    async def _request(self, method: str, route: str, **more: Any) -> Any:
        import aiohttp

        if self._session is None:
            key = os.environ.get(self.key_env)
            self._session = aiohttp.ClientSession(
                # A small compressed answer could take gigabytes, so compressed ones are not wanted and not read.
                headers={"accept-encoding": "identity"} | ({} if key is None else {"authorization": f"Bearer {key}"}),
                auto_decompress=False,
                connector=aiohttp.TCPConnector(limit=0),  # the calls are limited already
                timeout=aiohttp.ClientTimeout(sock_connect=SECONDS_TO_CONNECT),
            )
        async with self._session.request(method, f"{self.url}/{route}", **more) as response:
            answer = bytearray()
            async for part in response.content.iter_any():
                answer += part
                if len(answer) > MOST_BYTES:
                    raise UserError(f"the answer to {route} has more than {MOST_BYTES >> 20} MiB")
            if response.status >= 400:
                text = answer[:500].decode(errors="replace")
                raise aiohttp.ClientResponseError(
                    response.request_info, (), status=response.status, message=text, headers=response.headers
                )
            return json.loads(answer)

    def close(self) -> None:
        """Closes the connections. A later call opens new ones."""
        if self._session is not None:
            self.wait_for(self.__name__, [self._session.close])
            self._session = None

    def explain(self, name: str, error: BaseException) -> str:
        return f"Reward '{name}': {self.url}: {one_line(error)}"


def without_control(text: str) -> str:
    """Returns a text that a policy wrote without control tokens of the served model, such as `<|im_end|>`."""
    return text.replace("<|", "< |")
