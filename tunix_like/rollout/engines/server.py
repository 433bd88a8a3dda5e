"""Sends requests to one vLLM server over HTTP: to sample or score tokens, to update the weights and to check the
health."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import aiohttp

from tunix_like.errors import UserError, one_line

KEY_VARIABLE = "VLLM_API_KEY"
"""Environment variable with the API key of the servers (the value of `vllm serve --api-key`)."""

LOWEST_VERSION = (0, 32)

_QUICK_SECONDS = 30.0
"""Time limit in seconds for requests that need no computation of the model, such as `/version`."""

MOST_BYTES = 128 * 1024**2
"""Maximum size in bytes of an answer, after decompression. A token with its log-probability has a few hundred bytes."""

_LEAST = -3e38
_ROUNDING = 1e-3
"""Smallest and largest log-probability of a valid answer: finite in float32, and at most 0 up to rounding errors."""

_START = "start it with VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --enable-scale-out"

_UNCHANGED = "default"
"""vLLM's label of the weights with which a server was started."""

_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values that vLLM accepts for `--max-lora-rank`."""


class Unavailable(Exception):
    """The server cannot be reached, has failed or does not answer in time. The same request to another server may
    succeed."""


class WrongAnswer(Exception):
    """The answer of the server does not fit the request; the error message says why."""


class SampledTokens(NamedTuple):
    """The tokens that a server sampled.

    Attributes:
      logprobs: log-probability of each token in nats.
      stopped: True if an end-of-sequence token ended the answer; False if the token limit did.
      versions: the versions of the weights with which the server sampled the tokens, without duplicates.
      top: log-probabilities of the most probable tokens at each position, by token id.
    """

    tokens: list[int]
    logprobs: list[float]
    stopped: bool
    versions: list[str]
    top: list[dict[int, float]]


class Server:
    """A vLLM server. All methods run in the event loop of the `VLLMEngine` or teacher that uses the server.

    Args:
      key: the config key with the address, for the error messages.

    Attributes:
      model: its model; None before a check.
      url: the address of the server, without a slash at the end.
      version: the version of the weights that the server has; None if the server must load weights before it can be
        used.
      without_lora: why the server cannot load the adapters of the run; None if it can.
      adapter_rank: rank of the adapters, if the server gets adapters only; None if it gets whole weights.
      alive: False if the last health check of the server or the last update of its weights failed.
      running: number of unanswered requests to the server.
    """

    def __init__(self, url: str, request_seconds: float, key: str = "rollout.urls"):
        self.url = url.rstrip("/")
        self.request_seconds = request_seconds
        self.key = key
        self.model: str | None = None
        self.version: str | None = None
        self.without_lora: str | None = None
        self.adapter_rank: int | None = None
        self._adapter: str | None = None  # the adapter that requests for tokens name
        self.alive = True
        self.running = 0
        self._session: aiohttp.ClientSession | None = None

    async def check(self, least_length: int, text: str, tokens: Sequence[int], rank: int | None = None) -> str:
        """Checks version, routes, length limit and tokenizer of the server. Returns a text with the version, the model
        and the length limit. Sets `without_lora`.

        Args:
          least_length: the server must accept sequences of this many tokens: the sum of the maximum lengths of prompt
            and completion.
          text, tokens: a text, and its token ids by the tokenizer of this process.
          rank: the rank of the adapters that the server should load; None if there are none.

        Raises:
          UserError: the server cannot be reached or used; the error message says why.
        """
        with self._as_errors("Start it, or remove it from the list"):
            found = await self._check(least_length, text, tokens)
            self.without_lora = None if rank is None else await self._lora_problem(rank)
            return found

    async def check_scorer(self, least_length: int, text: str, tokens: Sequence[int]) -> None:
        """Checks length limit and tokenizer of a server that only scores tokens (`score`); see `check`."""
        with self._as_errors("Start it"):
            await self._check_model(least_length, text, tokens)

    @contextlib.contextmanager
    def _as_errors(self, cure: str) -> Iterator[None]:
        try:
            yield
        except (Unavailable, WrongAnswer) as error:
            raise self._unfit(f"{error}. {cure}") from None
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise self._unfit(f"its answers are not those of vLLM ({one_line(error)})") from None

    async def _check(self, least_length: int, text: str, tokens: Sequence[int]) -> str:
        version = str((await self._get("/version")).get("version"))
        numbers = [int(part) for part in re.findall(r"\d{1,9}", version)[:2]]
        if tuple(numbers) < LOWEST_VERSION:
            raise self._unfit(f"it runs vLLM {version}; use {'.'.join(map(str, LOWEST_VERSION))} or later")
        if "weight_version" not in await self._get("/weight_info", missing={}):
            raise self._unfit(f"it has no route to update weights; {_START}")
        if await self._status("/inference/v1/generate") == 404:
            raise self._unfit(f"it has no route /inference/v1/generate; {_START}")
        limit = await self._check_model(least_length, text, tokens)
        length = "a length limit that it does not report" if limit is None else f"up to {limit} tokens"
        return f"vLLM {version}, model {self.model}, {length}"

    async def _check_model(self, least_length: int, text: str, tokens: Sequence[int]) -> int | None:
        """Checks length limit and tokenizer, and sets `model`. Returns the limit."""
        described = (await self._get("/v1/models"))["data"][0]
        self.model = described["id"]
        limit = described.get("max_model_len")
        if limit is not None and limit < least_length:
            raise self._unfit(
                f"it was started with --max-model-len {limit}; max_prompt_length and "
                f"rollout.max_tokens_to_generate need {least_length}"
            )
        body = {"model": self.model, "prompt": text, "add_special_tokens": False}
        theirs = (await self._post("/tokenize", body, missing={})).get("tokens")
        if theirs is not None and list(theirs) != list(tokens):
            raise self._unfit(
                f"it has another tokenizer: the text {text!r} has the token ids {list(tokens)} here and {theirs} "
                "there; start it with the folder of this model"
            )
        return limit

    async def _lora_problem(self, rank: int) -> str | None:
        """Returns why the server cannot load adapters of this rank, and the remedy; None if it can."""
        if rank > _RANKS[-1]:
            return f"vLLM loads adapters up to rank {_RANKS[-1]}, and lora.rank is {rank}"
        info = await self._get("/server_info?config_format=json", missing={})
        lora = info.get("vllm_config", {}).get("lora_config")
        if lora is None:
            why = "it was started without --enable-lora"
        elif lora.get("max_lora_rank", 0) < rank:
            why = f"it was started with --max-lora-rank {lora.get('max_lora_rank')}, and lora.rank is {rank}"
        elif not info.get("vllm_env", {}).get("VLLM_ALLOW_RUNTIME_LORA_UPDATING"):
            why = "it was started without VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"
        elif await self._has_other_weights(await self._adapters()):
            why = "it holds whole weights that a run has sent, and not those it was started with"
        else:
            return None
        least = next(each for each in _RANKS if each >= rank)
        return (
            f"{why}; start it with VLLM_SERVER_DEV_MODE=1 VLLM_ALLOW_RUNTIME_LORA_UPDATING=True vllm serve MODEL "
            f"--enable-scale-out --enable-lora --max-lora-rank {least}"
        )

    async def _adapters(self) -> list[str]:
        return [str(model["id"]) for model in (await self._get("/v1/models"))["data"] if model.get("parent")]

    async def _has_other_weights(self, adapters: Sequence[str]) -> bool:
        """Returns whether the label of the weights is neither that of a new server nor an adapter."""
        return (await self._get("/weight_info")).get("weight_version") not in (_UNCHANGED, *adapters)

    async def reload(self, folder: str, version: str) -> None:
        """Makes the server load the weights or the adapter in a folder and label them with `version`.

        Raises:
          Unavailable: the server failed or did not answer in time.
          WrongAnswer: the server reports another version afterwards.
          UserError: the server refused a request, or was started again without adapters.
        """
        if self.adapter_rank is None:
            await self._load_weights(folder, version)
        else:
            await self._load_adapter(folder, version, self.adapter_rank)
        held = (await self._get("/weight_info")).get("weight_version")
        if held != version:
            raise WrongAnswer(f"its weights have the version {held!r} after an update to {version!r}")

    async def _load_weights(self, folder: str, version: str) -> None:
        await self._post("/pause?mode=keep", {})
        body = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
        await self._post("/collective_rpc", body, seconds=self.request_seconds)
        await self._post("/update_weight_version", {"new_version": version})
        await self._post("/reset_prefix_cache", {})
        await self._post("/resume", {})

    async def _load_adapter(self, folder: str, version: str, rank: int) -> None:
        """Loads the adapter in `folder` under the name `version`, and unloads those of earlier versions of the run.

        The names differ because vLLM keeps key-value caches by the name and the path of an adapter, and keeps those of
        an adapter that is loaded again from the same path. Requests of earlier versions are aborted because vLLM, which
        has replaced their adapter, would read its folder again, and ends if the folder is gone.
        """
        held = await self._adapters()
        if await self._has_other_weights(held):
            raise self._unfit("it holds whole weights that another run has sent; start it again")
        if version not in held:
            await self._post("/pause?mode=abort", {})
            route = "/v1/load_lora_adapter"
            body = {"lora_name": version, "lora_path": folder}
            status, content = await self._request("POST", route, body, self.request_seconds)
            if status != 200:
                await self._post("/resume", {})  # for other clients
                if why := await self._lora_problem(rank):
                    raise self._unfit(why)
                raise Unavailable(f"it cannot load the adapter in {folder}: status {status}: {_beginning(content)}")
        run = version.rpartition("-")[0]
        for name in held:
            if name != version and name.rpartition("-")[0] == run:
                await self._request("POST", "/v1/unload_lora_adapter", {"lora_name": name}, _QUICK_SECONDS)
        self._adapter = version
        await self._post("/update_weight_version", {"new_version": version})
        await self._post("/resume", {})

    async def is_healthy(self) -> bool:
        """Returns whether the route `/health` of the server answers with status 200."""
        try:
            return await self._status("/health", get=True) == 200
        except Unavailable:
            return False

    async def sample(self, tokens: Sequence[int], parameters: Mapping[str, Any]) -> SampledTokens:
        """Samples the tokens that follow `tokens`.

        Args:
          tokens: all tokens that the model sees.
          parameters: sampling parameters of vLLM, which must include `logprobs`, `max_tokens` and `stop_token_ids`.

        Raises:
          Unavailable: the server failed, or its answer took longer than the time limit `request_seconds`.
          WrongAnswer: the answer has no tokens or more than `max_tokens` tokens, or its log-probabilities or finish
            reason do not fit its tokens.
          UserError: the server refused the request.
        """
        self.running += 1
        try:
            route = "/inference/v1/generate"
            body = {"token_ids": list(tokens), "sampling_params": dict(parameters)}
            if self._adapter is not None:
                body["model"] = self._adapter
            status, content = await self._request("POST", route, body, self.request_seconds)
            if self._adapter is not None and status == 404:  # it was started again
                raise Unavailable(f"it does not have the adapter {self._adapter}")
            return _read(self._content(route, None, status, content), parameters)
        finally:
            self.running -= 1

    async def score(self, tokens: Sequence[int]) -> list[float]:
        """Returns the log-probability of each token but the first, given those before it, at temperature 1.

        Raises:
          Unavailable, WrongAnswer, UserError: see `sample`.
        """
        body = {"model": self.model, "prompt": list(tokens), "max_tokens": 1, "prompt_logprobs": 0}
        answer = await self._post("/v1/completions", body, seconds=self.request_seconds)
        try:
            entries = answer["choices"][0]["prompt_logprobs"]
            found = [float(entry[str(token)]["logprob"]) for entry, token in zip(entries, tokens, strict=True) if entry]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise WrongAnswer(f"its answer lacks log-probabilities of the prompt ({one_line(error)})") from None
        if len(found) != len(tokens) - 1 or not all(_LEAST <= value <= _ROUNDING for value in found):
            raise WrongAnswer("its answer lacks log-probabilities of the prompt, or has one that is not finite")
        return found

    async def close(self) -> None:
        """Closes the connections to the server."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _unfit(self, why: str) -> UserError:
        return UserError(f"{self.key}: the server {self.url} cannot be used: {why}.")

    async def _status(self, route: str, get: bool = False) -> int:
        """Sends a request without parameters and returns the HTTP status of the answer."""
        status, _ = await self._request("GET" if get else "POST", route, {}, _QUICK_SECONDS)
        return status

    async def _get(self, route: str, missing: Any = None) -> Any:
        return self._content(route, missing, *await self._request("GET", route, None, _QUICK_SECONDS))

    async def _post(self, route: str, body: Any, missing: Any = None, seconds: float = _QUICK_SECONDS) -> Any:
        return self._content(route, missing, *await self._request("POST", route, body, seconds))

    def _content(self, route: str, missing: Any, status: int, content: bytes) -> Any:
        """Returns the parsed JSON of a server's answer. If the server does not have the requested route (status 404,
        405 or 501) and `missing` is not None, returns `missing`."""
        if missing is not None and status in (404, 405, 501):
            return missing
        said = _beginning(content)
        if status >= 500 or status in (408, 429):
            raise Unavailable(f"{route} answered with status {status}: {said}")
        if status == 401:
            raise self._unfit(f"it requires an API key; set the environment variable {KEY_VARIABLE}")
        if status >= 400:
            raise self._unfit(f"{route} answered with status {status}: {said}")
        try:
            return json.loads(content)
        except (ValueError, RecursionError):
            raise WrongAnswer(f"{route} answered with something that is not JSON: {said!r}") from None

    async def _request(self, method: str, route: str, body: Any, seconds: float) -> tuple[int, bytes]:
        if self._session is None:
            key = os.environ.get(KEY_VARIABLE)
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            # The number of connections is not limited, because the server queues requests. Each request opens a new
            # connection, because the server can close an idle connection at the moment when the next request uses it.
            connector = aiohttp.TCPConnector(limit=0, force_close=True)
            self._session = aiohttp.ClientSession(headers=headers, connector=connector)
        try:
            limit = aiohttp.ClientTimeout(total=seconds)
            async with self._session.request(method, self.url + route, json=body, timeout=limit) as answer:
                content = bytearray()
                async for part in answer.content.iter_any():
                    content += part
                    if len(content) > MOST_BYTES:
                        raise WrongAnswer(f"{route} answered with more than {MOST_BYTES} bytes")
                return answer.status, bytes(content)
        except TimeoutError:
            raise Unavailable(f"{route} did not answer within {seconds:g} s") from None
        except aiohttp.ClientConnectorError as error:
            raise Unavailable(f"cannot connect ({one_line(error.os_error)})") from error
        except (aiohttp.ClientError, OSError, asyncio.IncompleteReadError) as error:
            raise Unavailable(one_line(error)) from error


def _beginning(content: bytes) -> str:
    return content[:300].decode(errors="replace").replace("\n", " ")


def _read(content: Any, parameters: Mapping[str, Any]) -> SampledTokens:
    """Reads the sampled tokens in the JSON answer of the route `/inference/v1/generate`. Raises WrongAnswer if a part
    of the answer is missing, or contradicts another part or the sampling parameters of the request (`parameters`)."""
    try:
        (choice,) = content["choices"]
        tokens = choice["token_ids"]
        entries = choice["logprobs"]["content"]
        logprobs = [float(entry["logprob"]) for entry in entries]
        top = [{each["token_id"]: float(each["logprob"]) for each in entry["top_logprobs"]} for entry in entries]
        versions = list(dict.fromkeys(str(span["version"]) for span in choice["weight_versions"]))
        reason = choice["finish_reason"]
        ids = [entry["token_id"] for entry in entries]
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise WrongAnswer(f"its answer lacks tokens, log-probabilities or versions ({one_line(error)})") from None
    if not tokens or not all(type(token) is int for token in tokens):
        raise WrongAnswer(f"its answer has no tokens, or tokens that are not integers: {tokens!r:.60}")
    if not all(_LEAST <= logprob <= _ROUNDING for logprob in logprobs):  # false for NaN too
        raise WrongAnswer("its answer has a log-probability that is not finite in float32 or is above 0")
    if ids != tokens:
        raise WrongAnswer(
            f"its answer has {len(tokens)} tokens, and {len(ids)} log-probabilities that do not belong to them in order"
        )
    if len(tokens) > parameters["max_tokens"] or reason not in ("stop", "length"):
        raise WrongAnswer(
            f"its answer has {len(tokens)} of at most {parameters['max_tokens']} tokens, and finish reason {reason!r}"
        )
    if (tokens[-1] in parameters["stop_token_ids"]) != (reason == "stop"):
        raise WrongAnswer(
            f"its answer has the finish reason {reason!r}, which does not fit its last token {tokens[-1]}"
        )
    return SampledTokens(tokens, logprobs, reason == "stop", versions, top)
