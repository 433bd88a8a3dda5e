"""RL post-training of language models in JAX and Flax NNX, with group-based advantage estimators.

Public names are imported lazily on first access, so `import tunix_like` does not import jax.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.3.0"

if TYPE_CHECKING:
    from tunix_like.algorithms.advantages import compute_advantages as compute_advantages
    from tunix_like.algorithms.advantages import register_advantage_estimator as register_advantage_estimator
    from tunix_like.algorithms.losses import register_policy_loss_fn as register_policy_loss_fn
    from tunix_like.algorithms.mixtures import fit_weight as fit_weight
    from tunix_like.algorithms.turns import turn_advantages as turn_advantages
    from tunix_like.config.schema import AlgorithmConfig as AlgorithmConfig
    from tunix_like.config.schema import CriticConfig as CriticConfig
    from tunix_like.config.schema import EnvironmentConfig as EnvironmentConfig
    from tunix_like.config.schema import EvalConfig as EvalConfig
    from tunix_like.config.schema import LoraConfig as LoraConfig
    from tunix_like.config.schema import OptimizerConfig as OptimizerConfig
    from tunix_like.config.schema import PreferenceConfig as PreferenceConfig
    from tunix_like.config.schema import RLTrainingConfig as RLTrainingConfig
    from tunix_like.config.schema import RolloutConfig as RolloutConfig
    from tunix_like.config.schema import SFTConfig as SFTConfig
    from tunix_like.config.schema import TeacherConfig as TeacherConfig
    from tunix_like.data.curriculum import Curriculum as Curriculum
    from tunix_like.environments.local import LocalEnvironments as LocalEnvironments
    from tunix_like.environments.pool import EnvironmentPool as EnvironmentPool
    from tunix_like.environments.program import Program as Program
    from tunix_like.environments.protocol import EnvStepResult as EnvStepResult
    from tunix_like.environments.registry import register_environment as register_environment
    from tunix_like.errors import EnvironmentUnavailable as EnvironmentUnavailable
    from tunix_like.errors import UserError as UserError
    from tunix_like.models.decoder import add_scalar_head as add_scalar_head
    from tunix_like.models.loading import export_model as export_model
    from tunix_like.models.lora import add_lora as add_lora
    from tunix_like.models.lora import load_adapter as load_adapter
    from tunix_like.models.lora import merge_lora as merge_lora
    from tunix_like.models.lora import save_adapter as save_adapter
    from tunix_like.rewards import register_reward_fn as register_reward_fn
    from tunix_like.runs.recipe import run as run
    from tunix_like.runs.trained import load_model as load_model
    from tunix_like.session.callbacks import Callback as Callback
    from tunix_like.session.callbacks import EarlyStopping as EarlyStopping
    from tunix_like.session.callbacks import RateProbe as RateProbe
    from tunix_like.session.callbacks import RunControl as RunControl
    from tunix_like.session.display import LiveCurves as LiveCurves
    from tunix_like.text.tokenizer import Tokenizer as Tokenizer
    from tunix_like.training.generation import generate as generate
    from tunix_like.training.learner import Learner as Learner
    from tunix_like.training.learners import LEARNERS as LEARNERS
    from tunix_like.training.learners import CustomConfig as CustomConfig
    from tunix_like.training.learners import CustomLearner as CustomLearner
    from tunix_like.training.learners import DistillationConfig as DistillationConfig
    from tunix_like.training.learners import DistillationLearner as DistillationLearner
    from tunix_like.training.learners import DrGRPOConfig as DrGRPOConfig
    from tunix_like.training.learners import DrGRPOLearner as DrGRPOLearner
    from tunix_like.training.learners import GDPOConfig as GDPOConfig
    from tunix_like.training.learners import GDPOLearner as GDPOLearner
    from tunix_like.training.learners import GRPOConfig as GRPOConfig
    from tunix_like.training.learners import GRPOLearner as GRPOLearner
    from tunix_like.training.learners import MaxKMixConfig as MaxKMixConfig
    from tunix_like.training.learners import MaxKMixLearner as MaxKMixLearner
    from tunix_like.training.learners import MaxPOConfig as MaxPOConfig
    from tunix_like.training.learners import MaxPOLearner as MaxPOLearner
    from tunix_like.training.learners import MaxRLConfig as MaxRLConfig
    from tunix_like.training.learners import MaxRLLearner as MaxRLLearner
    from tunix_like.training.learners import OPOConfig as OPOConfig
    from tunix_like.training.learners import OPOLearner as OPOLearner
    from tunix_like.training.learners import OrderStatisticConfig as OrderStatisticConfig
    from tunix_like.training.learners import OrderStatisticLearner as OrderStatisticLearner
    from tunix_like.training.learners import OTBConfig as OTBConfig
    from tunix_like.training.learners import OTBLearner as OTBLearner
    from tunix_like.training.learners import PassKConfig as PassKConfig
    from tunix_like.training.learners import PassKLearner as PassKLearner
    from tunix_like.training.learners import PKPOConfig as PKPOConfig
    from tunix_like.training.learners import PKPOLearner as PKPOLearner
    from tunix_like.training.learners import PPOConfig as PPOConfig
    from tunix_like.training.learners import PPOLearner as PPOLearner
    from tunix_like.training.learners import ReinforcePPConfig as ReinforcePPConfig
    from tunix_like.training.learners import ReinforcePPLearner as ReinforcePPLearner
    from tunix_like.training.learners import RLOOConfig as RLOOConfig
    from tunix_like.training.learners import RLOOLearner as RLOOLearner
    from tunix_like.training.preferences import DPOLearner as DPOLearner
    from tunix_like.training.preferences import RewardModelLearner as RewardModelLearner
    from tunix_like.training.reward_model import AnswerLikelihood as AnswerLikelihood
    from tunix_like.training.reward_model import RewardModel as RewardModel
    from tunix_like.training.sft import SFTTrainer as SFTTrainer

_NAMES_OF_MODULE = {
    "tunix_like.config.schema": (
        "AlgorithmConfig CriticConfig EnvironmentConfig EvalConfig LoraConfig OptimizerConfig PreferenceConfig "
        "RLTrainingConfig RolloutConfig SFTConfig TeacherConfig"
    ),
    "tunix_like.errors": "EnvironmentUnavailable UserError",
    "tunix_like.models.decoder": "add_scalar_head",
    "tunix_like.models.loading": "export_model",
    "tunix_like.models.lora": "add_lora load_adapter merge_lora save_adapter",
    "tunix_like.rewards": "register_reward_fn",
    "tunix_like.algorithms.advantages": "compute_advantages register_advantage_estimator",
    "tunix_like.environments.local": "LocalEnvironments",
    "tunix_like.environments.pool": "EnvironmentPool",
    "tunix_like.environments.program": "Program",
    "tunix_like.environments.protocol": "EnvStepResult",
    "tunix_like.environments.registry": "register_environment",
    "tunix_like.runs.recipe": "run",
    "tunix_like.runs.trained": "load_model",
    "tunix_like.session.callbacks": "Callback EarlyStopping RateProbe RunControl",
    "tunix_like.session.display": "LiveCurves",
    "tunix_like.training.generation": "generate",
    "tunix_like.training.learner": "Learner",
    "tunix_like.training.learners": (
        "LEARNERS CustomConfig CustomLearner DistillationConfig DistillationLearner DrGRPOConfig DrGRPOLearner "
        "GDPOConfig GDPOLearner GRPOConfig GRPOLearner MaxKMixConfig MaxKMixLearner MaxPOConfig MaxPOLearner "
        "MaxRLConfig MaxRLLearner OPOConfig OPOLearner OTBConfig OTBLearner OrderStatisticConfig "
        "OrderStatisticLearner PKPOConfig PKPOLearner PPOConfig PPOLearner "
        "PassKConfig PassKLearner RLOOConfig RLOOLearner ReinforcePPConfig "
        "ReinforcePPLearner"
    ),
    "tunix_like.algorithms.losses": "register_policy_loss_fn",
    "tunix_like.algorithms.turns": "turn_advantages",
    "tunix_like.algorithms.mixtures": "fit_weight",
    "tunix_like.training.preferences": "DPOLearner RewardModelLearner",
    "tunix_like.training.reward_model": "AnswerLikelihood RewardModel",
    "tunix_like.training.sft": "SFTTrainer",
    "tunix_like.data.curriculum": "Curriculum",
    "tunix_like.text.tokenizer": "Tokenizer",
}
_MODULE_OF_NAME = {name: module for module, names in _NAMES_OF_MODULE.items() for name in names.split()}
__all__ = [*_MODULE_OF_NAME, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF_NAME:
        from tunix_like.config.argument_names import hint

        further = f". {hint(name, _MODULE_OF_NAME)}" if name[:1].isalpha() else ""
        raise AttributeError(f"module 'tunix_like' has no attribute '{name}'{further}")
    return getattr(importlib.import_module(_MODULE_OF_NAME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
