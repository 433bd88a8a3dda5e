"""Makes the models beside a policy in training: the reference of the KL and the teachers. The critic, which is
trained too, is `critic.Critic`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
from flax import nnx

from tunix_like.config.schema import SELF, TeacherConfig
from tunix_like.config.sources import OF_OTHER_SOURCES
from tunix_like.errors import UserError, one_line
from tunix_like.models.decoder import Decoder, check_decoder
from tunix_like.models.lora import without_adapters
from tunix_like.models.sharding import check_divides, fetch, place_params, without_shared
from tunix_like.planning.sizes import teacher_work
from tunix_like.training.teacher import Teacher, Teachers, check_positions, check_scorer, check_served
from tunix_like.training.trainer import Trainer


class Reference(NamedTuple):
    """Graph and weights of the reference model."""

    graphdef: Any
    params: Any


def make_reference(trainer: Trainer, ref_model: Decoder | None) -> Reference:
    """Returns the reference model: `ref_model`, or the trainer's current model if `ref_model` is None.

    Weights that share memory with trained weights are copied, because trained weights are donated to the compiled step.
    If `ref_model` is None and the adapters are newly initialised, the reference is the frozen weights without adapters,
    and nothing is copied.
    """
    graphdef = trainer.graphdef
    params = trainer.params
    trained = trainer.state.params
    if ref_model is not None:
        graphdef, state = nnx.split(ref_model)
        params = place_params(nnx.to_pure_dict(state), trainer.mesh)
    elif trainer.frozen and not any(fetch([leaf.any() for leaf in _second_halves(trained)], trainer.mesh)):
        return Reference(without_adapters(graphdef), trainer.frozen)
    return Reference(graphdef, without_shared(params, trained))


def _second_halves(adapters: Any) -> list[jax.Array]:
    """Returns the B matrices of LoRA adapters. If all B matrices are 0, the adapters do not change the model."""
    leaves = jax.tree_util.tree_leaves_with_path(adapters)
    return [leaf for path, leaf in leaves if path[-1].key == "lora_b"]


def make_teachers(
    trainer: Trainer,
    settings: TeacherConfig,
    model: Decoder | None,
    of_sources: Mapping[str, Decoder | str],
    plays: bool,
) -> Teachers:
    """Checks and builds the teachers of a trainer's model, the policy. Sources with the same model or path share one.

    Args:
      model: that of `settings.path`, see `make_teacher`.
      of_sources: for each data source with a teacher of its own this model, the address of a server, or `self`.
      plays: whether environments answer the policy.
    """
    default = None if settings.path is None else make_teacher(trainer, model, settings, plays)
    made = dict[Any, Teacher]()
    if default is not None:
        made[settings.path if model is None else id(model)] = default
    by_source = {}
    for source, given in of_sources.items():
        key = f"data source '{source}': teacher"
        path, scorer = (given, None) if isinstance(given, str) else (key, given)
        own = settings.with_path(path, key)
        place = own.path if scorer is None else id(scorer)
        if place not in made:
            made[place] = make_teacher(trainer, scorer, own, plays, key)
        by_source[source] = made[place]
    return Teachers(settings, default, by_source)


def make_teacher(
    trainer: Trainer, model: Decoder | None, settings: TeacherConfig, plays: bool, key: str = OF_OTHER_SOURCES
) -> Teacher:
    """Checks and builds a teacher of a trainer's model, the policy.

    Args:
      model: the teacher; None if `settings.path` is `self` or a server.
      plays: whether environments answer the policy.
      key: names the teacher in error messages.
    """
    policy = trainer.model
    argument = key.removesuffix(".path")
    check_served(settings, trainer.rollout_config, key)
    if settings.served:
        if model is not None:
            raise UserError("teacher: teacher_config.path is a server; leave teacher unset.")
        try:
            from tunix_like.training.served_teacher import ServedTeacher  # imports aiohttp
        except ImportError as error:
            raise UserError(
                f"{key}: a server needs more packages ({one_line(error)}); run pip install 'tunix-like[vllm]'."
            ) from None
        return ServedTeacher(settings, policy.config, trainer.tokenizer, trainer.rollout_config, plays, key)
    if settings.path == SELF:
        if model is not None:
            raise UserError("teacher: teacher_config.path='self' takes no model; leave teacher unset.")
        kinds = policy.config, policy.param_dtype, policy.quantized
    else:
        if model is None:
            raise UserError(
                f"{argument}: give the model of {settings.path!r} itself, e.g. tunix_like.load_model(folder)[0]."
            )
        check_decoder(argument, model)
        check_divides(trainer.mesh, model.config)
        check_scorer(key, model.config, trainer.tokenizer)
        if settings.quantize not in (None, model.quantized):
            raise UserError("teacher.quantize: the model has other weights; give load_model(folder, quantize=...).")
        kinds = model.config, model.param_dtype, model.quantized
    # With the current weights of the policy there is nothing to hold; other weights must not be those that are trained.
    held = Reference(trainer.graphdef, None) if settings.of_policy else make_reference(trainer, model)
    check_positions(settings, kinds[0], trainer.rollout_config, key)
    work = teacher_work(settings, trainer.rollout_config, policy, kinds, trainer.mesh)
    return Teacher(settings, *held, kinds[0], trainer.tokenizer, work, work.prompt_width, plays)
