"""The critic of PPO: a second model in training, whose scalar head estimates the value of each token's state."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Bool

from tunix_like.algorithms.ppo import PPO, Estimates, ValueObjective
from tunix_like.config.schema import (
    AlgorithmConfig,
    CriticConfig,
    LoraConfig,
    RLTrainingConfig,
    RolloutConfig,
)
from tunix_like.errors import UserError, check_type
from tunix_like.models.config import DecoderConfig
from tunix_like.models.counts import parameter_count
from tunix_like.models.decoder import Decoder, add_scalar_head, check_decoder
from tunix_like.models.loading import check_fit
from tunix_like.models.lora import add_lora, fingerprint, part_params, without_adapters
from tunix_like.models.sharding import check_divides, without_shared
from tunix_like.planning.sizes import critic_work
from tunix_like.step.optimizer import critic_optimizer
from tunix_like.step.packing import Packed
from tunix_like.step.train_step import step_inputs
from tunix_like.text.tokenizer import Tokenizer
from tunix_like.training.arguments import likelihood_options
from tunix_like.training.trainer import ModelInTraining, Trainer
from tunix_like.types import GroupBatch


class Critic(ModelInTraining):
    """The critic of a trainer.

    Args:
      model: has a scalar head; None: `new_critic` of the policy. Its trained weights are donated to the compiled step,
        and written back to the model at the end of training.
      held: weights of the other models beside the policy.

    Attributes:
      work: what the memory estimate needs.
    """

    def __init__(self, settings: CriticConfig, trainer: Trainer, model: Decoder | None, held: Sequence[Any]):
        self.settings = settings
        policy = trainer.model
        own_base = model is not None or policy.adapters is None
        if model is None and settings.path is not None:
            raise UserError(
                f"critic: give the model of critic_config.path={settings.path!r}, e.g. "
                "critic=tunix_like.add_scalar_head(tunix_like.load_model(folder)[0])."
            )
        if model is None:
            model = new_critic(policy, _lora_of(policy), trainer.training.seed)
        else:
            check_decoder("critic", model)
            if not model.config.scalar_head:
                raise UserError("critic: it has no scalar head; call tunix_like.add_scalar_head(model).")
            check_critic(model.config, trainer.tokenizer, trainer.rollout_config)
            check_divides(trainer.mesh, model.config)
        super().__init__(model, trainer.mesh)
        kinds = model.param_dtype, model.adapters, model.quantized
        optimizer = critic_optimizer(trainer.training.actor_optimizer, settings.learning_rate)
        self.work = critic_work(model.config, kinds, own_base, trainer.mesh, optimizer)
        # Each compiled step deletes the arrays that it replaces, so no other model may have them.
        self.state = self.state._replace(params=without_shared(self.state.params, (trainer.params, *held)))
        self.frozen = without_shared(self.frozen, trainer.state.params)
        self.write_back()

    def identity(self) -> dict[str, Any]:
        """Returns the settings that a run and its checkpoint must share, with a fingerprint of frozen weights."""
        fields = dataclasses.asdict(self.settings) | {"parameters": parameter_count(self.model.config)}
        del fields["path"]  # the weights are in the checkpoint
        base = {"base": fingerprint(self.model.config, self.frozen, self.mesh)["all"]} if self.frozen else {}
        return fields | {"adapters": self.model.adapters and str(self.model.adapters)} | base

    def compile(self, training: RLTrainingConfig, updates: int | None) -> None:
        """Builds the optimizer (`critic_optimizer`) and the compiled step."""
        optimizer = critic_optimizer(training.actor_optimizer, self.settings.learning_rate)
        self._compile(ValueObjective(self.settings.value_clip), likelihood_options(training), optimizer, updates)

    def begin(self, resumes: bool) -> None:
        """Takes the current weights of the model. `resumes`: a run folder exists, whose checkpoint has the optimizer
        state."""
        self._take_weights()
        if resumes:
            self.state = self.state._replace(opt_state=None)

    def update(
        self, batch: GroupBatch, in_update: Bool[np.ndarray, "P"], packed: Packed, estimates: Estimates
    ) -> dict[str, Any]:
        """Replaces the train state by that after one update with the groups `in_update`. Returns its metrics, on the
        device.

        Args:
          batch, packed, estimates: placed on the devices.
        """
        batch = batch._replace(rollout_logprobs=None)
        packed = packed._replace(experts=None, prompt_experts=None)  # those of the policy
        # In the step, values have the place of log-probabilities, and returns that of advantages (`ValueObjective`).
        inputs = step_inputs(
            batch, in_update, packed, old_logprobs=estimates.values, token_advantages=estimates.returns
        )
        metrics: dict[str, Any]
        self.state, metrics, _ = self.programs.train_step(self.state, inputs, self.frozen)
        return metrics

    def restore(self, saved: Any) -> None:
        """Restores weights and optimizer state from what `to_save` returned."""
        self._restore_state(saved)


def metrics_to_log(metrics: Mapping[str, float]) -> dict[str, float]:
    """Returns the metrics of a critic's updates as a step logs them."""
    names = {"loss": "loss", "grad_norm": "grad_norm", "clipfrac": "clipfrac", "update/skipped": "skipped"}
    return {f"critic/{name}": metrics[key] for key, name in names.items() if key in metrics}


def new_critic(model: Decoder, lora: LoraConfig | None, seed: int) -> Decoder:
    """Returns a critic with the weights of `model`, without its adapters, and with new adapters if `lora` is given.

    A model with a scalar head, such as a reward model, keeps it; the head of another model gives 0. Other arrays are
    shared with the model, and may be abstract (shapes only).
    """
    if model.adapters is not None:
        graphdef, state = nnx.split(model)
        model = nnx.merge(without_adapters(graphdef), part_params(nnx.to_pure_dict(state))[1])
    critic = add_scalar_head(model, seed)
    if model.score is None:
        assert critic.score is not None and critic.score.kernel is not None
        kernel = critic.score.kernel.get_value()
        if not isinstance(kernel, jax.ShapeDtypeStruct):
            critic.score.kernel.set_value(jnp.zeros_like(kernel))
    return critic if lora is None else add_lora(critic, lora, seed)


def _lora_of(model: Decoder) -> LoraConfig | None:
    adapters = model.adapters
    return None if adapters is None else LoraConfig(adapters.rank, adapters.alpha, list(adapters.targets))


def check_critic(config: DecoderConfig, tokenizer: Tokenizer, rollout: RolloutConfig) -> None:
    """Raises UserError if a critic does not fit to the tokenizer and the lengths of a run."""
    try:
        check_fit(config, tokenizer, rollout)
    except UserError as error:
        raise UserError(f"critic.path: {error}") from None


def resolve_critic(model: Any, settings: CriticConfig | None, algorithm: AlgorithmConfig) -> CriticConfig:
    """Returns the settings of a critic (None: the defaults). Raises UserError if they have no effect, because the
    estimator needs no critic."""
    settings = CriticConfig() if settings is None else settings
    check_type("critic_config", settings, CriticConfig, "give a tunix_like.CriticConfig(...)")
    if algorithm.advantage_estimator == PPO:
        return settings
    only = f"only algorithm.advantage_estimator={PPO} (PPOLearner) has a critic. Unset it."
    if model is not None:
        raise UserError(f"critic: {only}")
    for field in dataclasses.fields(settings):
        if getattr(settings, field.name) != field.default:
            raise UserError(f"critic.{field.name}: {only}")
    return settings
