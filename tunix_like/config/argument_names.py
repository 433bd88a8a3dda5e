"""Errors for unknown names of arguments in Python: the nearest name, or the counterpart of a name of TRL or Tunix."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

from tunix_like.errors import UserError, nearest

ELSEWHERE = {
    # arguments of trainers
    "processing_class": "tokenizer",
    "reward_funcs": "reward_fns",
    "args": "algo_config, rollout_config and training_config",
    "peft_config": "tunix_like.add_lora",
    "train_dataset": "Learner.train",
    "eval_dataset": "Learner.train",
    "callbacks": "Learner.train",
    "optimizers": "RLTrainingConfig.actor_optimizer",
    "tools": "environment",
    "environment_factory": "environment",
    "rollout_func": "engine",
    "rl_cluster": "model, tokenizer and training_config",
    "reference": "ref_model",
    "actor": "model",
    # their configurations
    "max_completion_length": "RolloutConfig.max_tokens_to_generate",
    "max_response_length": "RolloutConfig.max_tokens_to_generate",
    "max_prompt_length": "RolloutConfig.max_prompt_length",
    "temperature": "RolloutConfig.temperature",
    "top_p": "RolloutConfig.top_p",
    "top_k": "RolloutConfig.top_k",
    "kv_cache_size": "RolloutConfig.max_concurrent_rows",
    "num_train_epochs": "RLTrainingConfig.max_steps",
    "num_epochs": "RLTrainingConfig.max_steps",
    "max_steps": "RLTrainingConfig.max_steps",
    "eval_steps": "RLTrainingConfig.eval_every_n_steps",
    "save_steps": "RLTrainingConfig.checkpoint_every_n_steps",
    "save_total_limit": "RLTrainingConfig.max_checkpoints_to_keep",
    "checkpoint_root_directory": "RLTrainingConfig.output_dir",
    "output_dir": "RLTrainingConfig.output_dir",
    "report_to": "RLTrainingConfig.loggers",
    "metrics_logging_options": "RLTrainingConfig.loggers",
    "seed": "RLTrainingConfig.seed",
    "gradient_accumulation_steps": "RLTrainingConfig.train_micro_batch_size",
    "per_device_train_batch_size": "Learner.train",
    "learning_rate": "OptimizerConfig.learning_rate",
    "lr_scheduler_type": "OptimizerConfig.schedule",
    "warmup_steps": "OptimizerConfig.warmup_steps",
    "weight_decay": "OptimizerConfig.weight_decay",
    "adam_beta1": "OptimizerConfig.b1",
    "adam_beta2": "OptimizerConfig.b2",
    "adam_epsilon": "OptimizerConfig.eps",
    "max_grad_norm": "OptimizerConfig.max_grad_norm",
    "loss_type": "AlgorithmConfig.loss_agg_mode and AlgorithmConfig.policy_loss_fn",
    "importance_sampling_level": "AlgorithmConfig.policy_loss_fn",
    "mask_truncated_completions": "AlgorithmConfig.overlong",
    "use_vllm": "RolloutConfig.engine",
    "r": "LoraConfig.rank",
    "lora_alpha": "LoraConfig.alpha",
    "target_modules": "LoraConfig.targets",
    # classes
    "GRPOTrainer": "tunix_like.GRPOLearner",
    "RLOOTrainer": "tunix_like.RLOOLearner",
    "DPOTrainer": "tunix_like.DPOLearner",
    "ORPOTrainer": "tunix_like.DPOLearner",
    "RewardTrainer": "tunix_like.RewardModelLearner",
    "PeftTrainer": "tunix_like.SFTTrainer",
    "TrainingConfig": "tunix_like.RLTrainingConfig",
    "RLCluster": "Learner",
    "ClusterConfig": "tunix_like.RLTrainingConfig and tunix_like.RolloutConfig",
}
"""Maps names of TRL and Tunix to their counterparts; docs/from_tunix.md says how these differ."""

P = ParamSpec("P")
R = TypeVar("R")


def hint(name: str, valid: Iterable[str]) -> str:
    """Returns what the unknown `name` may stand for."""
    return f"Its counterpart here is {ELSEWHERE[name]}." if name in ELSEWHERE else nearest(name, valid)


class NamedArguments:
    """Base of classes whose constructor raises UserError for an unknown argument."""

    def __new__(cls, *args: Any, **named: Any) -> Any:
        _check(cls.__name__, cls.__init__, named)
        return super().__new__(cls)


def named_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator of a function or method: raises UserError for an unknown argument."""

    @functools.wraps(function)
    def checked(*args: P.args, **named: P.kwargs) -> R:
        _check(function.__qualname__, function, named)
        return function(*args, **named)

    return checked


def _check(where: str, function: Callable[..., Any], named: dict[str, Any]) -> None:
    names, free = _arguments(function)
    if not free and (unknown := [name for name in named if name not in names]):
        raise UserError(f"{where}: unknown argument '{unknown[0]}'. {hint(unknown[0], names)}")


@functools.cache
def _arguments(function: Callable[..., Any]) -> tuple[tuple[str, ...], bool]:
    """Returns the names of a function's arguments, and whether it takes any other name."""
    found = inspect.signature(function).parameters.values()
    names = tuple(each.name for each in found if each.kind is not each.VAR_KEYWORD and each.name != "self")
    return names, any(each.kind is each.VAR_KEYWORD for each in found)
