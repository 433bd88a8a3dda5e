"""Samples completions in this process with continuous batching.

The cost of sampling is about proportional to the number of sampled tokens.

A prompt is prefilled once and placed in one or more slots of the arrays. Each row of a slot holds one completion of its
prompt. A free row gets a waiting completion of the same prompt, and an empty slot gets the next prompt. When no
completion waits, the sampler moves the unfinished completions to arrays with fewer rows. The cache is a ring buffer
that grows by powers of two.

The random numbers of a completion are derived from the key, the number of the request, the index of the completion in
its group and the position of the token. The tokens thus do not depend on the rows in which completions are sampled. The
weights are an argument of `generate`, so the sampler keeps no copy that must be synchronised with the trainer. `place`
converts the weights to the form and the layout in which the sampler reads them, once for several calls of `generate`.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.sharding import Mesh
from jaxtyping import Array

from tunix_like.models.quantized_base import dequantized_graph, dequantized_kernels, with_kernels
from tunix_like.models.sharding import parameter_shardings, scope
from tunix_like.rollout import decoding
from tunix_like.rollout.schedule import RowSchedule, SamplerSettings
from tunix_like.rollout.turns import TurnSchedule
from tunix_like.runtime import progress
from tunix_like.types import Request, Responder, Sample, SamplingParams


def sampled_params(graphdef: Any, params: Any, dequantizes: bool) -> Any:
    """Returns the weights of a decoder in the form in which they are sampled with: matrices in its compute dtype, and
    quantised projections as they are, or with `dequantizes` in the compute dtype too."""
    if not dequantizes:
        return decoding.cast_params(graphdef, params)
    params = with_kernels(graphdef, params, dequantized_kernels(graphdef, params))
    return decoding.cast_params(dequantized_graph(graphdef), params)


def jit_place(graphdef: Any, params: Any, mesh: Mesh, dequantizes: bool) -> Any:
    """Returns the jitted function `(graphdef, params, dequantizes) -> params` with which `Sampler.place` converts the
    weights for sampling on a mesh.

    The function computes `sampled_params`, and shards them over `mesh`. The argument `params` of `jit_place` may
    contain arrays or shapes.
    """
    shapes = jax.eval_shape(functools.partial(sampled_params, graphdef, dequantizes=dequantizes), params)
    return jax.jit(sampled_params, static_argnums=(0, 2), out_shardings=parameter_shardings(shapes, mesh))


def _copy_to(graphdef: Any, params: Any, mesh: Mesh, dequantizes: bool) -> Any:
    """Returns a function `(graphdef, params, dequantizes) -> params` that converts weights for sampling, if they are
    not on the devices of `mesh`.

    The function casts the matrices to the compute dtype on the devices that hold them, and then copies the weights to
    `mesh`. Quantised matrices are dequantised there, so they are copied with few bits.
    """
    cast = jax.jit(decoding.cast_params, static_argnums=0)
    shapes = jax.eval_shape(functools.partial(decoding.cast_params, graphdef), params)
    shardings = parameter_shardings(shapes, mesh)
    there = jit_place(graphdef, shapes, mesh, dequantizes)

    def copy(graphdef: Any, params: Any, dequantizes: bool) -> Any:
        params = jax.device_put(cast(graphdef, params), shardings)
        return there(graphdef, params, dequantizes) if dequantizes else params

    return copy


class _Rate:
    """Tokens per second between two reports, and the number of tokens of finished completions."""

    def __init__(self) -> None:
        self.finished = 0
        self._tokens = 0
        self._time = time.perf_counter()

    def take(self, tokens: int) -> str:
        now = time.perf_counter()
        rate = (tokens - self._tokens) / max(now - self._time, 1e-9)
        self._tokens = tokens
        self._time = now
        return f", {rate:,.0f} tokens/s" if rate > 0 else ""


class Sampler:
    """The in-process `Engine`: samples completions with a decoder's graph and the weights passed to `generate`.

    Args:
      graphdef: graph of a `Decoder` (`nnx.split(model)`).
      eos_ids: end-of-sequence token ids. A completion ends with the first sampled end-of-sequence token; this token is
        part of the completion.
      max_prompt_length, max_tokens: maximum length of a prompt and of a completion, in tokens.
      max_concurrent_rows: maximum number of completions that are sampled at the same time, or a function that returns
        it for a number of prompts and a number of completions per prompt; None means no limit.
      mesh: the device mesh. Prompts are sharded over the axes `data`, `fsdp` and `ep`, attention heads over `tp`. None
        means a single device.
      record_experts: whether samples have the experts that processed their tokens.
      dequantizes: whether `place` dequantises the projections of a quantised decoder. Otherwise each step of the decode
        loop does.

    Attributes:
      graphdef: the graph of the decoder with the weights that `place` returns.
      row_steps: number of completion tokens that the model has computed so far, including tokens that are not used
        (e.g. after the end of a completion). The fraction of useful work in a rollout is the number of its sampled
        tokens divided by the increase of `row_steps` during the rollout.
    """

    def __init__(
        self,
        graphdef: Any,
        eos_ids: Sequence[int],
        *,
        max_prompt_length: int,
        max_tokens: int,
        max_concurrent_rows: int | Callable[[int, int], int] | None = None,
        mesh: Mesh | None = None,
        record_experts: bool = False,
        dequantizes: bool = False,
    ):
        self.graphdef = dequantized_graph(graphdef) if dequantizes else graphdef
        self._trained_graph = graphdef
        self._dequantizes = dequantizes
        self.record_experts = record_experts
        self.eos_ids = tuple(int(i) for i in eos_ids)
        self.max_prompt_length = max_prompt_length
        self.max_tokens = max_tokens
        self.max_concurrent_rows = max_concurrent_rows
        self.mesh = mesh
        self.row_steps = 0
        self._place: Any = None

    def place(self, params: Any) -> Any:
        """Converts the weights for sampling: matrices to the compute dtype, and all weights to the layout of the
        sampler's mesh.

        Without a mesh, only quantised matrices are dequantised, if this sampler does so; each call of a compiled
        sampling function casts the others.
        """
        graphdef = self._trained_graph
        if self.mesh is None:
            if not self._dequantizes:
                return params
            return jax.block_until_ready(with_kernels(graphdef, params, dequantized_kernels(graphdef, params)))
        if self._place is None:
            here = jax.tree.leaves(params)[0].sharding.device_set
            make = jit_place if here == set(self.mesh.devices.flat) else _copy_to
            self._place = make(graphdef, params, self.mesh, self._dequantizes)
        return jax.block_until_ready(self._place(graphdef, params, self._dequantizes))

    def generate(
        self,
        params: Any,
        requests: Sequence[Request],
        key: Array,
        sampling: SamplingParams,
        responder: Responder | None = None,
    ) -> Iterator[Sample]:
        """Samples the completions of all requests; see `types.Engine.generate`. All requests must ask for the same
        number of completions."""
        # The key is copied to the host, because it may be on the trainer's mesh.
        data = jax.device_get(jax.random.key_data(key))
        kind = jax.random.key_impl(key)
        settings = SamplerSettings(
            self.graphdef,
            self.eos_ids,
            self.max_prompt_length,
            self.max_tokens,
            self.max_concurrent_rows,
            self.mesh,
            self.record_experts,
        )
        with progress.task("sampling", sum(request.samples for request in requests)) as advance:
            with scope(self.mesh):
                key = jax.random.wrap_key_data(data, impl=kind)
                if responder is None:
                    schedule = RowSchedule(settings, params, requests, key, sampling)
                else:
                    schedule = TurnSchedule(settings, params, requests, key, sampling, responder)
            rate = _Rate()

            def report(samples: Sequence[Sample] = ()) -> None:
                rate.finished += sum(len(sample.tokens) for sample in samples)
                speed = rate.take(rate.finished + int(schedule.ages.sum()))
                advance(len(samples), f"up to {schedule.ages.max()} of {self.max_tokens} tokens{speed}")

            while not schedule.done:
                with scope(self.mesh):  # ends before `yield`, so it does not affect the caller
                    samples = schedule.step(report)
                self.row_steps += schedule.row_steps
                schedule.row_steps = 0
                report(samples)
                yield from samples
