"""Generates completions with vLLM servers over HTTP. Requests have token ids; answers have token ids and
log-probabilities."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import queue
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from flax import nnx
from jaxtyping import Array

from tunix_like.config.schema import RolloutConfig
from tunix_like.errors import UserError
from tunix_like.models.decoder import Decoder
from tunix_like.models.loading import save_model
from tunix_like.models.lora import join_params, merge_lora, part_params, save_adapter
from tunix_like.models.sharding import fetch, scope
from tunix_like.rollout.decoding import cast_params
from tunix_like.rollout.engines.fleet import Fleet
from tunix_like.rollout.engines.probe import Probe
from tunix_like.rollout.engines.registry import EngineSetup
from tunix_like.rollout.engines.rows import RowStates
from tunix_like.rollout.engines.server import SampledTokens, Server
from tunix_like.runtime import progress
from tunix_like.runtime.processes import by_first, is_first
from tunix_like.text.tokenizer import Tokenizer
from tunix_like.types import Request, Responder, Sample, SamplingParams

logger = logging.getLogger("tunix_like")

_TEXT = "Tokens in, tokens out: 12 + 34 = 46."
"""A text that the tokenizer of each server must encode to the same ids as the tokenizer of the run."""


class VLLMEngine:
    """An `Engine` whose completions are sampled by vLLM servers.

    The servers must be started with the folder of the model that is trained, with `VLLM_SERVER_DEV_MODE=1` and
    `--enable-scale-out`. Before each rollout the weights are written to a folder that the servers read: only the
    adapters, if adapters are trained on a base that is not quantised and all servers can load them
    (`Server.without_lora`), otherwise whole weights with merged adapters. The engine checks that every sample comes
    from these weights only. The servers use random numbers of their own, so a run cannot be repeated bit for bit.

    Args:
      model: the model that is trained. The engine keeps the structure of the model and not the weights.
      rollout: config with the addresses of the servers (`urls`), lengths, sampling parameters and time limits.
      weights_folder: a folder that all servers can read under the same path. Each version of the weights gets a
        subfolder, and the subfolder of the previous version is removed.
      max_gap: largest allowed mean difference between the log-probabilities of a server and of this process, in nats.
        If `max_gap` is None, nothing is compared.

    Attributes:
      transfer_metrics: bytes that the newest transfer of weights wrote, and its seconds, by the names of metrics.

    Raises:
      UserError: a server cannot be reached or used, or vLLM does not support the sampling parameters. The error message
        gives the reason.
    """

    row_steps = 0

    def __init__(
        self,
        model: Decoder,
        tokenizer: Tokenizer,
        rollout: RolloutConfig,
        weights_folder: str | Path,
        *,
        max_gap: float | None = 0.1,
        mesh: jax.sharding.Mesh | None = None,
    ):
        _check_sampling(rollout)
        self.max_prompt_length = rollout.max_prompt_length
        self.mesh = mesh
        self.tokenizer = tokenizer
        self.rollout = rollout
        self.graphdef = nnx.split(model)[0]
        self.folder = Path(weights_folder).absolute()
        self.eos_ids = list(rollout.eos_tokens or tokenizer.eos_ids)
        self._rank = _adapter_rank(model)
        self.probe = Probe(self.graphdef, rollout, self.eos_ids, max_gap, mesh)
        self._run = uuid.uuid4().hex[:8]
        self._number = 0
        self._placed: list[Any] = []
        self.transfer_metrics: dict[str, float] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._fleet: Fleet | None = None
        self._adapters_only = by_first(self._open)

    def place(self, params: Any) -> str:
        """Makes the servers load the weights `params`, and returns the version of these weights. Sends nothing if the
        servers already have these weights, i.e. if the previous call got the same array objects.

        Raises:
          EngineLost: no server answers for `rollout.wait_for_servers_seconds`.
          UserError: the folder of the weights cannot be written, or a server computes wrong log-probabilities with
            these weights.
        """
        leaves = jax.tree.leaves(params)
        if len(leaves) == len(self._placed) and all(a is b for a, b in zip(leaves, self._placed, strict=True)):
            return self._version
        began = time.perf_counter()
        with scope(self.mesh):
            expected = self.probe.logprobs(params)
            save = self._adapter_writer(params) if self._adapters_only else self._weights_writer(params)
        self._number = self._number + 1
        self._placed = []
        size = by_first(functools.partial(self._publish, save, expected))
        self.transfer_metrics = {
            "perf/weights_sent_bytes": float(size),
            "perf/weights_sent_sec": time.perf_counter() - began,
        }
        self._placed = leaves
        return self._version

    def generate(
        self,
        params: str,
        requests: Sequence[Request],
        key: Array,
        sampling: SamplingParams,
        responder: Responder | None = None,
    ) -> Iterator[Sample]:
        """Samples the completions of all requests (see `types.Engine`); `params` is the result of `place`.

        Raises:
          EngineLost: no server answers for `rollout.wait_for_servers_seconds`.
          UserError: a server refused a request.
          ValueError: `params` is not the version of the weights that the servers have.
        """
        if params != self._version:
            raise ValueError(f"The servers have the weights {self._version}, not {params}.")
        rows = RowStates(requests, self.rollout.max_tokens_to_generate, responder)
        answers: queue.SimpleQueue[tuple[int, SampledTokens | BaseException]] = queue.SimpleQueue()
        tasks: set[Any] = set()
        try:
            with progress.task("sampling", len(rows.rows)) as advance:
                while not rows.done:
                    for index in rows.to_send():
                        if is_first():
                            self._send(index, rows, sampling, answers, tasks)
                    wait = functools.partial(_collect, answers, rows.wanted, not rows.has_replies)
                    samples = rows.take({int(i): SampledTokens(*answer) for i, answer in by_first(wait)})
                    advance(len(samples))
                    yield from samples
        finally:
            for task in list(tasks):
                task.cancel()

    def close(self) -> None:
        """Closes the connections and removes the folders of weights that this engine wrote. The servers keep
        running."""
        if self._loop is not None and self._fleet is not None and self._thread is not None:
            self._wait(self._fleet.close())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
            self._loop = None
            self._fleet = None
            self._remove_weights()
            with contextlib.suppress(OSError):  # the folder is not empty or does not exist
                self.folder.rmdir()
        self._placed = []

    @property
    def _version(self) -> str:
        return f"{self._run}-{self._number}"

    def _adapter_writer(self, params: Any) -> Callable[[Path], None]:
        """Returns a function that writes the adapters to a folder."""
        trained, frozen = part_params(params)
        model = nnx.merge(self.graphdef, join_params(fetch(trained, self.mesh), frozen))
        return functools.partial(save_adapter, model)

    def _weights_writer(self, params: Any) -> Callable[[Path], None]:
        """Returns a function that writes the whole weights to a folder, in the compute dtype and with merged
        adapters."""
        model = merge_lora(nnx.merge(self.graphdef, params))
        graphdef, state = nnx.split(model)
        weights = jax.jit(cast_params, static_argnums=0)(graphdef, nnx.to_pure_dict(state))
        if jax.process_count() > 1:
            weights = fetch(weights, self.mesh)
        return functools.partial(save_model, weights, model.config, self.tokenizer)

    def _open(self) -> bool:
        """Starts the thread for the connections to the servers, and checks all servers. Returns whether only adapters
        are sent."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm", daemon=True)
        self._thread.start()
        self._fleet = self._wait(self._make_fleet())
        try:
            return bool(self._wait(self._check()))
        except BaseException:
            self.close()
            raise

    async def _make_fleet(self) -> Fleet:
        servers = [Server(url, self.rollout.request_timeout_seconds) for url in self.rollout.urls or ()]
        config = nnx.merge(self.graphdef, [None] * self.graphdef.num_leaves).config
        return Fleet(servers, self.rollout.wait_for_servers_seconds, config.vocab_size)

    async def _check(self) -> bool:
        """Checks all servers. Returns whether only adapters are sent, and prepares the servers for them."""
        assert self._fleet is not None
        servers = self._fleet.servers
        expected = _expected(self.rollout, self.tokenizer, self._rank)
        await asyncio.gather(*(server.check(*expected) for server in servers))
        unable = [server for server in servers if server.without_lora]
        if unable:
            logger.warning(
                "rollout.urls: each step sends the whole weights and not only the adapters, because of the server "
                "%s: %s", unable[0].url, unable[0].without_lora,
            )  # fmt: skip
        elif self._rank is not None:
            for server in servers:
                server.adapter_rank = self._rank
        return self._rank is not None and not unable

    def _publish(self, save: Callable[[Path], None], expected: Any) -> int:
        """Writes the weights to a folder, makes the servers load these weights, and compares the log-probabilities of
        the servers with `expected`, the log-probabilities that this process computed.

        Afterwards removes the folder of the previous weights. Returns the number of bytes written.
        """
        assert self._fleet is not None
        folder = self.folder / self._version
        try:
            save(folder)
            check = functools.partial(self.probe.check, expected)
            self._wait(self._fleet.update(str(folder), self._version, check))
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        self._remove_weights(but=self._version)
        return sum(file.stat().st_size for file in folder.iterdir())

    def _remove_weights(self, but: str = "") -> None:
        """Removes all folders of weights that this engine wrote, except the folder `but`. Folders of other runs are
        kept."""
        for folder in self.folder.glob(f"{self._run}-*"):
            if folder.name != but:
                shutil.rmtree(folder, ignore_errors=True)

    def _send(self, index: int, rows: RowStates, sampling: SamplingParams, answers: Any, tasks: set[Any]) -> None:
        """Requests the next turn of the completion `index` from a server, and does not wait for the answer. Later, a
        background task puts the answer or the error into the queue `answers`."""
        assert self._fleet is not None and self._loop is not None
        row = rows.rows[index]
        parameters = {
            "max_tokens": rows.limit - len(row.tokens),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": 0 if sampling.top_k is None else sampling.top_k,
            "logprobs": 0,
            "stop_token_ids": self.eos_ids,
            "ignore_eos": True,
            "skip_special_tokens": False,
            "detokenize": False,
        }
        call = self._fleet.sample(row.request, row.context, parameters)
        task = asyncio.run_coroutine_threadsafe(call, self._loop)
        tasks.add(task)

        def done(task: Any) -> None:
            tasks.discard(task)
            if not task.cancelled():
                answers.put((index, task.exception() or task.result()))

        task.add_done_callback(done)

    def _wait(self, call: Coroutine[Any, Any, Any]) -> Any:
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(call, self._loop).result()


def _adapter_rank(model: Decoder) -> int | None:
    """Returns the rank of the adapters if they can be sent alone; None without adapters. The base on the servers is not
    quantised, so with a quantised base the sum of base and adapters is sent."""
    return None if model.adapters is None or model.quantized else model.adapters.rank


def _expected(rollout: RolloutConfig, tokenizer: Tokenizer, rank: int | None) -> tuple[int, str, list[int], int | None]:
    """Returns the arguments of `Server.check`."""
    tokens = [token for token in tokenizer.encode(_TEXT) if token != tokenizer.bos_id]
    return rollout.max_prompt_length + rollout.max_tokens_to_generate, _TEXT, tokens, rank


def make(setup: EngineSetup) -> VLLMEngine:
    """Makes the engine of a run. Weights that a killed process left in the run folder are removed."""
    own = setup.folder / "engine_weights"
    if is_first():
        shutil.rmtree(own, ignore_errors=True)
    folder = setup.rollout.weights_folder or own
    return VLLMEngine(setup.model, setup.tokenizer, setup.rollout, folder, max_gap=setup.max_gap, mesh=setup.mesh)


def ask_servers(setup: EngineSetup) -> list[tuple[str, str | UserError]]:
    """Asks each server of `rollout.urls` whether the run can use it, and changes nothing on it.

    Returns the address of each server, with a text about it or the error that a run would end with.

    Raises:
      UserError: vLLM cannot return the log-probabilities for the sampling parameters of `rollout`.
    """
    rollout = setup.rollout
    _check_sampling(rollout)

    async def ask(url: str) -> str | UserError:
        server = Server(url, rollout.request_timeout_seconds)
        try:
            found = await server.check(*_expected(rollout, setup.tokenizer, _adapter_rank(setup.model)))
            return found + (f"; whole weights, not only adapters: {server.without_lora}" if server.without_lora else "")
        except UserError as error:
            return error
        finally:
            await server.close()

    async def ask_all() -> list[str | UserError]:
        return await asyncio.gather(*map(ask, rollout.urls or ()))

    return list(zip(rollout.urls or (), asyncio.run(ask_all()), strict=True))


def _check_sampling(rollout: RolloutConfig) -> None:
    """Raises UserError if vLLM cannot return the log-probabilities that training needs: the log-probabilities after the
    division of the logits by the temperature, and before the truncation by top-k or top-p."""
    truncation = "top_p" if rollout.top_p < 1 else "top_k" if rollout.top_k is not None else None
    if rollout.temperature != 1 and truncation is not None:
        raise UserError(
            f"rollout.{truncation}: with a temperature other than 1, vLLM gives the log-probabilities after the "
            "truncation, but training needs the log-probabilities before the truncation; set rollout.temperature=1, or "
            f"omit rollout.{truncation}."
        )


def _collect(answers: Any, wanted: int, patient: bool) -> list[tuple[int, Any]]:
    """Takes the answers of servers from the queue `answers`. Returns each answer with the index of its completion.

    Waits until there are at least `wanted` answers. If `patient` is False, stops the wait when no answer arrives for
    0.05 s.

    Raises:
      UserError, EngineLost: a request failed, and its error was in the queue.
    """
    collected: list[tuple[int, Any]] = []
    while True:
        try:
            block = len(collected) < wanted
            index, answer = answers.get(block, None if patient else 0.05)
        except queue.Empty:
            return collected
        if isinstance(answer, BaseException):
            raise answer
        collected.append((index, answer))
