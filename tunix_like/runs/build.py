"""Builds the parts of a run from a config: data, model, tokenizer, rewards and learner class."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax.sharding import Mesh

from tunix_like.algorithms.sources import source_estimators
from tunix_like.config.schema import SELF, Config, EvalConfig, ModelConfig
from tunix_like.config.sources import OF_OTHER_SOURCES, NamedTeacher, entries, teachers_of, template_variables
from tunix_like.data import DataSource, check_parts, load_source
from tunix_like.data.shared import warn_text_prompts
from tunix_like.environments.arguments import check_turn_rewards, make_player, with_tools
from tunix_like.environments.kinds import environments_of, gives_no_rewards, kind_of
from tunix_like.environments.outcomes import Environments, are_agents
from tunix_like.errors import UserError
from tunix_like.evaluation.evaluate import EVAL_KEY, Evaluator, check_best_metric, eval_problems
from tunix_like.models.decoder import Decoder, add_scalar_head
from tunix_like.models.loading import check_fit
from tunix_like.models.lora import add_lora, resolve_adapters
from tunix_like.models.opening import (
    kinds_of,
    load_abstract,
    load_config,
    load_model,
    load_tokenizer,
    loaded,
    with_pinned_checkpoints,
)
from tunix_like.models.sharding import build_mesh, check_experts, check_model
from tunix_like.planning.sizes import described_companions
from tunix_like.rollout.rollouts import WeightedReward
from tunix_like.runs.checks import check_batches, check_config
from tunix_like.runs.reward_functions import reward_functions
from tunix_like.text.tokenizer import Tokenizer
from tunix_like.training.critic import check_critic, new_critic
from tunix_like.training.engine import (
    check_routing_replay,
    make_engine,
    training_devices,
    warn_of_settings,
)
from tunix_like.training.learner import Learner
from tunix_like.training.preferences import DPOLearner, check_columns
from tunix_like.training.teacher import check_positions, check_scorer, check_tokenizers
from tunix_like.types import Engine

logger = logging.getLogger("tunix_like")


class Parts(NamedTuple):
    """The loaded parts of a run.

    Attributes:
      weights: empty if the weights are loaded. If the model is abstract (shapes only), a text about its weights: the
        result of the comparison of the shapes with the stored weights, or that they are initialised at random.
      teacher: the model of `teacher.path`; None without one, and if it is a server or the policy itself.
      source_teachers: the teachers of data sources that have their own, see `Learner`.
      critic: the model of `critic.path`, with a scalar head and, like the policy, adapters; None without one.
      first_observation: the text or the messages that the environment adds to the prompt of the first data row; None
        without an environment.
    """

    config: Config
    learner: type[Learner] | type[DPOLearner]
    source: DataSource
    model: Decoder
    tokenizer: Tokenizer
    rewards: list[WeightedReward]
    mesh: Mesh | None
    weights: str = ""
    environments: Environments | None = None
    first_observation: Any = None
    teacher: Decoder | None = None
    source_teachers: Mapping[str, Decoder | str] | None = None
    critic: Decoder | None = None

    def evaluator(self, settings: EvalConfig) -> Evaluator:
        """Builds an evaluator for the held-out problems of the run. `settings` replaces the config section `eval`."""
        graphdef = nnx.split(self.model)[0]
        companions = described_companions(self.config, self.model, self.mesh)
        training = dataclasses.replace(self.config.training, actor_optimizer=self.config.optimizer)
        engine = make_engine(graphdef, self.tokenizer, self.config.rollout, self.mesh, companions, training)
        return make_evaluator(
            self.config, settings, engine, self.tokenizer, self.source, self.rewards, self.environments
        )

    @property
    def judged(self) -> bool:
        """Whether completions get rewards, so that they can be evaluated. Distillation needs none."""
        return bool(self.rewards) or self.environments is not None

    @property
    def source_estimators(self) -> dict[str, dict[str, Any]]:
        """Maps the label of a data source to its advantage estimator and the estimator's parameters. Has only those
        sources of a mix that set the estimator or a parameter."""
        return source_estimators(self.config.data, self.config.algorithm)


def assemble(config: Config, *, abstract: bool = False) -> Parts:
    """Checks a config and loads the parts of its run. Data and rewards are checked before weights are loaded.

    If `abstract` is True, the model has shapes only, and no weights are read, initialised or downloaded.
    """
    config, learner = check_config(config)
    if abstract and not config.trains_pairs:  # otherwise the learner does
        warn_of_settings(config.algorithm, config.rollout)
    config = with_pinned_checkpoints(config)
    mesh = build_mesh(config.mesh, training_devices(config.rollout))
    check_batches(config, mesh)
    source = load_source(config.data)
    if config.trains_pairs:
        check_columns(source.train[0], "training")
    config, rewards = _with_rewards(config, source, mesh)
    model, tokenizer, weights = load_policy(config, chosen_tokenizer(config, source), abstract, mesh)
    _check_policy(config, model, tokenizer, mesh)
    check_parts(source, tokenizer, config.rollout.max_prompt_length, needs_answer=config.sft.max_steps > 0)
    if not rewards and config.teacher.path is None and gives_no_rewards(config):
        named = f", for this data [{{name: {source.reward}}}]" if source.reward else ""
        logger.warning(
            "the environment has tools and no rewards, and rewards.functions is unset: every reward is 0, which trains "
            "nothing; set rewards.functions%s", named,
        )  # fmt: skip
    environments = environments_of(config)
    warn_of_text(config, source, tokenizer, environments)
    tokenizer = with_tools(tokenizer, environments)
    player = make_player(environments, config.environment, tokenizer, config.rollout)
    # Also checks that the prompts of the data can have several turns.
    first = None if player is None else player.check(source.train, config.rollout.max_prompt_length)
    teacher, source_teachers = _load_teachers(config, model, tokenizer, abstract, mesh)
    critic = _load_critic(config, tokenizer, abstract, mesh)
    parts = Parts(
        config, learner, source, model, tokenizer, rewards, mesh, weights, environments, first,
        teacher, source_teachers, critic,
    )  # fmt: skip
    if config.training.best_metric is not None and not config.trains_pairs:
        # Checked here, because SFT can run before the learner is built.
        check_best_metric(config.training, parts.evaluator(config.eval) if len(source.eval) and parts.judged else None)
    return parts


def _with_rewards(config: Config, source: DataSource, mesh: Mesh | None) -> tuple[Config, list[WeightedReward]]:
    """Returns the reward functions, and the config with an entry for each of them."""
    rewards = reward_functions(config, source, mesh)
    check_turn_rewards(rewards, config.algorithm, kind_of(config) is not None)
    given = [{"weight": 1.0} | entry for entry in config.rewards.functions or ()]
    entries = given or [{"name": name, "weight": weight} for name, _, weight in rewards]
    # A run with an environment can have no reward functions. The key then stays unset, because an empty list is
    # invalid.
    functions = entries or None
    return dataclasses.replace(config, rewards=dataclasses.replace(config.rewards, functions=functions)), rewards


def _check_policy(config: Config, model: Decoder, tokenizer: Tokenizer, mesh: Mesh | None) -> None:
    """Raises UserError if a model does not fit to the tokenizer, the lengths or the mesh of a run."""
    check_fit(model.config, tokenizer, config.rollout)
    check_experts("mesh.axis_names", mesh, model.config)
    check_routing_replay(config.rollout, model.config)
    check_model(mesh, model.config, nnx.to_pure_dict(nnx.split(model)[1]))


def warn_of_text(config: Config, source: DataSource, tokenizer: Tokenizer, environments: Environments | None) -> None:
    """Warns of text prompts (`warn_text_prompts`) of each data source for which `apply_chat_template` is not false."""
    if are_agents(environments) and not config.sft.max_steps:
        return
    sections = {entry.label: entry.config for entry in entries(config.data)}
    for label, part in (source.parts or {"": source}).items():
        if sections.get(label, config.data).apply_chat_template is not False:
            warn_text_prompts(part.train, tokenizer)


_TOKENIZER = "Set model.tokenizer to a folder or hub id with a tokenizer."


def chosen_tokenizer(config: Config, source: DataSource) -> Tokenizer | None:
    """Returns the tokenizer of `model.tokenizer` or of the data source; None means that of `model.path`."""
    if config.model.tokenizer is None:
        pretrained = config.model.path is not None and config.model.init != "random"
        return None if source.chats and pretrained else source.tokenizer
    if source.tokenizer is not None:
        raise UserError(f"model.tokenizer: data.name={config.data.name} has its own tokenizer; leave it unset.")
    return load_tokenizer(config.model.tokenizer)


def named_model(section: ModelConfig, own: Tokenizer | None) -> str | dict[str, Any]:
    """Returns the model argument of `load_model`: a path or hub id, or a Hugging Face config as a dict. `own` (from
    `chosen_tokenizer`) gives a config without `vocab_size` its vocabulary size."""
    if section.path is not None:
        if section.config is not None:
            raise UserError(
                "model.path: model.config describes another model; for the model of model.path add model.config=null "
                "model.init=pretrained, for its tokenizer alone set model.tokenizer instead of model.path."
            )
        return section.path
    if section.init != "random":
        raise UserError("model.init: model.config has no weights to load; set model.init=random.")
    fields = dict(section.config or {})
    if own is None and "vocab_size" not in fields:
        raise UserError(f"model.config: it has no vocab_size, and there is no tokenizer. {_TOKENIZER}")
    return fields if own is None else {"vocab_size": own.vocab_size} | fields


def load_policy(
    config: Config, own: Tokenizer | None, abstract: bool, mesh: Mesh | None
) -> tuple[Decoder, Tokenizer, str]:
    section = config.model
    what = named_model(config.model, own)
    if config.lora.rank is not None:
        resolve_adapters(load_config(what), config.lora)  # checked before weights are read, which can take minutes
    if abstract:
        model, tokenizer, weights = load_abstract(
            what, init=section.init, quantize=section.quantize, **kinds_of(config)
        )
    else:
        model, tokenizer = loaded(config, what, mesh)
        weights = ""
    if config.algorithm.advantage_estimator == "reward_model":
        model = add_scalar_head(model, config.training.seed)
    if config.lora.rank is not None:
        model = add_lora(model, config.lora, config.training.seed)
    pretrained = section.init != "random" and section.tokenizer is None
    if own is not None and tokenizer is not None and pretrained and not own.has_same_tokens(tokenizer):
        raise UserError(
            f"model.path: {section.path} has another tokenizer than data.name={config.data.name}, whose rows have a "
            "vocabulary of their own; use a model that was trained on this data, or other data."
        )
    tokenizer = own or tokenizer
    if tokenizer is None:
        model_key = "model.config: it" if section.path is None else f"model.path: {section.path}"
        raise UserError(f"{model_key} has no tokenizer, and data.name={config.data.name} has none. {_TOKENIZER}")
    return model, tokenizer.with_template_variables(template_variables(config.data)), weights


def _load_teachers(
    config: Config, policy: Decoder, tokenizer: Tokenizer, abstract: bool, mesh: Mesh | None
) -> tuple[Decoder | None, dict[str, Decoder | str]]:
    """Loads the teachers, after the checks of all that need no weights. Their weights have the compute dtype of the
    policy.

    Returns:
      the model of `teacher.path`, and for each source with a teacher of its own this model, or its path, if this is
      `self` or a server.
    """
    named = teachers_of(config)
    kinds = kinds_of(config) | {"param_dtype": policy.dtype}
    models = dict[str, Decoder]()
    for each in named:
        if (model := _checked_teacher(each, config, policy, tokenizer, kinds)) is not None:
            models[str(each.settings.path)] = model
    for path in () if abstract else models:
        models[path], _ = load_model(path, quantize=config.teacher.quantize, mesh=mesh, **kinds)
    by_source = dict[str, Decoder | str]()
    for each in named:
        path = str(each.settings.path)
        if each.key != OF_OTHER_SOURCES:
            by_source |= dict.fromkeys(each.sources, models.get(path, path))
    return models.get(str(config.teacher.path)), by_source


def _checked_teacher(
    teacher: NamedTeacher, config: Config, policy: Decoder, tokenizer: Tokenizer, kinds: Mapping[str, Any]
) -> Decoder | None:
    """Returns the abstract model of a teacher after its checks; None if it is a server or the policy itself.

    Args:
      kinds: further arguments of `load_abstract`.
    """
    key = teacher.key
    settings = teacher.settings
    if settings.served:
        return None
    if settings.path == SELF:
        check_positions(settings, policy.config, config.rollout, key)
        return None
    path = str(settings.path)
    described = load_config(path, key)
    check_positions(settings, described, config.rollout, key)
    check_scorer(key, described, tokenizer)
    model, theirs, _ = load_abstract(path, quantize=settings.quantize, **kinds)
    check_tokenizers(theirs, tokenizer, key)
    return model


def _load_critic(config: Config, tokenizer: Tokenizer, abstract: bool, mesh: Mesh | None) -> Decoder | None:
    """Loads the model of `critic.path`, if it is set, after the checks that need no weights, with the dtypes, the
    quantisation and the adapters of the policy."""
    path = config.critic.path
    if path is None:
        return None
    check_critic(load_config(path, "critic.path"), tokenizer, config.rollout)
    kinds = kinds_of(config) | {"quantize": config.model.quantize}
    model, theirs, _ = load_abstract(path, **kinds)
    check_tokenizers(theirs, tokenizer, "critic.path")
    if not abstract:
        model, _ = load_model(path, mesh=mesh, **kinds)
    return new_critic(model, None if config.lora.rank is None else config.lora, config.training.seed)


def make_evaluator(
    config: Config,
    settings: EvalConfig,
    engine: Engine,
    tokenizer: Tokenizer,
    source: DataSource,
    rewards: list[WeightedReward],
    environments: Environments | None,
) -> Evaluator:
    """Builds an evaluator for the held-out rows of a data source."""
    rollout = config.rollout
    player = make_player(environments, config.environment, tokenizer, rollout)
    tokenizer = tokenizer if player is None else player.tokenizer  # with the tools of the environment
    problems, skipped = eval_problems(
        source.eval, tokenizer, rollout.max_prompt_length, settings.max_problems, config.data.overlong_prompts
    )
    return Evaluator(
        engine,
        tokenizer,
        problems,
        rewards,
        settings,
        config.rewards.success_threshold,
        jax.random.fold_in(jax.random.key(config.training.seed), EVAL_KEY),
        skipped=skipped,
        player=player,
    )
