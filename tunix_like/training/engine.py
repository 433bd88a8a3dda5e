"""Builds the in-process engine that samples completions, and checks the samples of an engine that the user provides."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import Mesh

from tunix_like.algorithms.losses import find_policy_loss
from tunix_like.config.schema import AlgorithmConfig, RLTrainingConfig, RolloutConfig
from tunix_like.environments.arguments import check_credit
from tunix_like.errors import UserError
from tunix_like.models.config import DecoderConfig
from tunix_like.planning.memory import ALONE, Companions
from tunix_like.planning.sizes import Planner
from tunix_like.rollout.engines.registry import check_engine
from tunix_like.rollout.rollouts import Task
from tunix_like.rollout.sampler import Sampler
from tunix_like.text.tokenizer import Tokenizer
from tunix_like.types import Engine, Request, Responder, Sample, SamplingParams

logger = logging.getLogger("tunix_like")


def make_engine(
    graphdef: Any,
    tokenizer: Tokenizer,
    rollout: RolloutConfig,
    mesh: Mesh | None = None,
    companions: Companions = ALONE,
    training: RLTrainingConfig | None = None,
) -> Sampler:
    """Builds the sampler for a model, its tokenizer and the `rollout` section of a config.

    Args:
      graphdef: graph of a `Decoder` (`nnx.split(model)[0]`).
      companions: the models that are held in memory beside it.
      training: has the optimizer whose state is held in memory; None: AdamW.

    Raises:
      UserError: the device memory is too small for a single completion, or `rollout.mesh` does not match the devices or
        the model.
    """
    model = nnx.merge(graphdef, [None] * graphdef.num_leaves)  # a module without weights
    planner = Planner(model, mesh, training or RLTrainingConfig(), rollout, companions)
    layout = planner.layout()
    sampling_mesh = None if layout is None else layout.mesh
    dequantizes = planner.dequantizes(layout)
    rows = functools.partial(planner.rows, sampling_mesh=sampling_mesh, dequantizes=dequantizes)
    rows(1, 1)  # checks that one completion fits, before anything is compiled
    return Sampler(
        graphdef,
        rollout.eos_tokens or tokenizer.eos_ids,
        max_prompt_length=rollout.max_prompt_length,
        max_tokens=rollout.max_tokens_to_generate,
        max_concurrent_rows=rows,
        mesh=sampling_mesh,
        record_experts=rollout.routing_replay,
        dequantizes=dequantizes,
    )


def training_devices(rollout: RolloutConfig) -> list[Any] | None:
    """Returns the devices for training, without the `rollout.devices` that only sample; None: all devices."""
    if rollout.devices is None:
        return None
    devices = jax.devices()
    if rollout.devices >= len(devices):
        raise UserError(
            f"rollout.devices: got {rollout.devices}, but there are {len(devices)} devices, and the training needs at "
            "least one; lower it or omit it."
        )
    return devices[: -rollout.devices]


def check_routing_replay(rollout: RolloutConfig, model: DecoderConfig) -> None:
    """Raises UserError if `rollout.routing_replay` is set, and the model has no experts."""
    if rollout.routing_replay and model.experts is None:
        raise UserError("rollout.routing_replay: this model has no experts; set it to false.")


def check_settings(
    algorithm: AlgorithmConfig, rollout: RolloutConfig, training: RLTrainingConfig, *, plays: bool, elsewhere: bool
) -> None:
    """Checks the settings of a learner that depend on each other.

    Args:
      plays: whether completions are trajectories in environments.
      elsewhere: whether an engine other than the in-process sampler generates the completions.
    """
    if rollout.temperature == 0:
        raise UserError("rollout.temperature: got 0 (greedy decoding); set it above 0 for training.")
    check_credit(algorithm, plays)
    check_engine(rollout)
    _check_staleness(rollout, training, elsewhere)


def warn_of_settings(algorithm: AlgorithmConfig, rollout: RolloutConfig) -> None:
    """Warns of settings with which completions are no samples of the policy that is trained."""
    if rollout.top_p < 1 or rollout.top_k is not None:
        logger.warning("rollout.top_p, top_k: they truncate sampling, so completions are not samples of the policy")
    corrected = (
        algorithm.sampler_is is not None or find_policy_loss(str(algorithm.policy_loss_fn)).behaviour != "trainer"
    )
    if rollout.max_staleness and not corrected:
        logger.warning(
            "rollout.max_staleness: %d: completions are sampled with weights that lack the newest updates, and nothing "
            "corrects the difference; set algorithm.sampler_is, e.g. token (docs/off_policy.md)",
            rollout.max_staleness,
        )


def _check_staleness(rollout: RolloutConfig, training: RLTrainingConfig, elsewhere: bool) -> None:
    """Checks the settings of a run with `rollout.max_staleness`, which samples completions during updates.

    Raises:
      UserError: the completions would be sampled on the devices that are used for training, the run has several
        processes, or a difference of log-probabilities, which is not compared for old completions, is to stop the run.
    """
    if not rollout.max_staleness:
        return
    name = f"rollout.max_staleness: {rollout.max_staleness}"
    if jax.process_count() > 1:
        raise UserError(f"{name} works in runs of one process only; set it to 0.")
    if not elsewhere and rollout.devices is None:
        raise UserError(
            f"{name} needs devices that only sample; set rollout.devices to their number, or rollout.engine=vllm."
        )
    if training.later_logprob_gap == "error":
        raise UserError(
            f"training.later_logprob_gap: error has no effect with {name}, because older weights sample the "
            "completions; use warn."
        )


class WrappedEngine:
    """Base of engines that wrap another engine. Subclasses implement `generate`."""

    def __init__(self, engine: Engine):
        self.engine = engine

    @property
    def max_prompt_length(self) -> int:
        return self.engine.max_prompt_length

    @property
    def row_steps(self) -> int:
        return self.engine.row_steps

    @property
    def transfer_metrics(self) -> dict[str, float]:
        """Bytes and seconds of the newest transfer of weights to servers; empty for an engine without servers."""
        found: dict[str, float] = getattr(self.engine, "transfer_metrics", {})
        return found

    def place(self, params: Any) -> Any:
        return self.engine.place(params)


class CheckedEngine(WrappedEngine):
    """Wraps an engine of the user, and checks its samples."""

    def __init__(self, engine: Engine, model: DecoderConfig, task: Task):
        super().__init__(engine)
        self.vocab_size = model.vocab_size
        self.max_tokens = task.rollout_config.max_tokens_to_generate
        self.model = model
        self.replays = task.rollout_config.routing_replay

    def generate(
        self,
        params: Any,
        requests: Sequence[Request],
        key: Array,
        sampling: SamplingParams,
        responder: Responder | None = None,
    ) -> Iterator[Sample]:
        """Yields the samples of the wrapped engine.

        Raises:
          UserError: a sample has a wrong type, shape or value, or the engine does not yield exactly one sample for each
            requested completion.
        """
        name = f"engine {type(self.engine).__name__}"
        missing = {(i, j) for i, request in enumerate(requests) for j in range(request.samples)}
        # Only an engine that supports several turns needs the parameter `responder`.
        samples: Iterator[Any] = self.engine.generate(
            params, requests, key, sampling, *(() if responder is None else (responder,))
        )
        for sample in samples:
            if not isinstance(sample, Sample):
                kind = type(sample).__name__
                raise UserError(f"{name}: `generate` must yield tunix_like.types.Sample; it yielded a {kind}.")
            index = sample.request, sample.sample
            where = f"completion {sample.sample} of request {sample.request}"
            if index not in missing:
                raise UserError(f"{name}: {where} came twice or was not requested.")
            missing.remove(index)
            try:
                checked = self._checked(sample, responder is not None)
                checked = self._with_experts(checked, len(requests[sample.request].tokens))
            except _WrongSampleError as error:
                raise UserError(f"{name}: {where}: {error}.") from None
            yield checked
        if missing:
            request, number = min(missing)
            raise UserError(
                f"{name}: {len(missing)} completions were not yielded; the first is completion {number} of request "
                f"{request}."
            )

    def _checked(self, sample: Sample, several_turns: bool) -> Sample:
        """Returns the sample with NumPy arrays. Raises _WrongSampleError if it has a wrong type, shape or value."""
        tokens = _array("tokens", sample.tokens, np.integer, "integers")
        length = len(tokens)
        most = self.vocab_size - 1
        if length > self.max_tokens:
            raise _WrongSampleError(f"it has {length} tokens; the limit of a completion is {self.max_tokens}")
        _check_all("tokens", tokens, (tokens >= 0) & (tokens <= most), f"token ids between 0 and {most}")
        logprobs = _array("logprobs", sample.logprobs, np.floating, "floating-point numbers", length)
        _check_all("logprobs", logprobs, np.isfinite(logprobs), "finite log-probabilities")
        if not isinstance(sample.finished, bool | np.bool_):
            raise _WrongSampleError(f"`finished` must be True or False; it is {sample.finished!r}")
        mask = sample.token_mask
        if mask is not None:
            mask = _array("token_mask", mask, np.bool_, "booleans", length)
        elif several_turns:
            raise _WrongSampleError("`token_mask` must mark the sampled tokens, because completions have several turns")
        start = sample.segment_start
        if start is not None:
            start = _array("segment_start", start, np.integer, "integers", length)
            # A token begins a segment or belongs to the segment of the token before it.
            before = np.concatenate([[0], start[:-1]])
            right = (start == before) | (start == np.arange(length))
            _check_all("segment_start", start, right, "0 at first, then the token's index or the value before it")
        checked = sample._replace(tokens=tokens, logprobs=logprobs, finished=bool(sample.finished))
        return checked._replace(token_mask=mask, segment_start=start)

    def _with_experts(self, sample: Sample, prompt: int) -> Sample:
        """Returns the sample with checked experts (none without `rollout.routing_replay`); those of the prompt may be
        padded on the right."""
        if not self.replays or self.model.experts is None:
            return sample._replace(experts=None, prompt_experts=None)
        layers = sum(map(self.model.has_experts, range(self.model.num_layers)))
        found = dict[str, Any]()
        for name, length in (("experts", len(sample.tokens)), ("prompt_experts", prompt)):
            shape = (length, layers, self.model.experts.per_token)
            array = np.asarray(getattr(sample, name))
            array = array[:length] if array.ndim == 3 else array
            if array.shape != shape or not np.issubdtype(array.dtype, np.integer):
                raise _WrongSampleError(
                    f"`{name}` must be integers of the shape {list(shape)}, because of rollout.routing_replay; it has "
                    f"the shape {list(array.shape)} and the dtype {array.dtype}"
                )
            most = self.model.experts.number - 1
            if array.size and not (array.min() >= 0 and array.max() <= most):
                raise _WrongSampleError(f"`{name}` must be indices of experts between 0 and {most}")
            found[name] = array.astype(self.model.experts.index_dtype)
        return sample._replace(**found)


class _WrongSampleError(Exception):
    """Raised if a sample has a wrong type, shape or value. The message describes the error."""


def _array(field: str, values: Any, kind: type, expected: str, length: int | None = None) -> np.ndarray:
    """Returns the values of a field of `Sample` as a one-dimensional array of a subtype of `kind`, with `length`
    entries (None: any number)."""
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and not np.issubdtype(array.dtype, kind)):
        found = f"it has the shape {list(array.shape)} and the dtype {array.dtype}"
        raise _WrongSampleError(f"`{field}` must be a one-dimensional array of {expected}; {found}")
    if length is not None and len(array) != length:
        raise _WrongSampleError(f"`{field}` must have one entry per token ({length}); it has {len(array)}")
    return array


def _check_all(field: str, values: np.ndarray, right: np.ndarray, expected: str) -> None:
    if not right.all():
        place = int(np.argmin(right))
        raise _WrongSampleError(f"`{field}` must be {expected}; token {place} has {values[place]}")
