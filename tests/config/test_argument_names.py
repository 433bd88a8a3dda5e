"""Unknown names of arguments and classes raise an error with the nearest name, or with the counterpart of TRL's and
Tunix's names."""

from __future__ import annotations

import copy
import pickle

import pytest

import tunix_like
from tunix_like import GRPOLearner, Learner, MaxRLConfig, RolloutConfig, UserError
from tunix_like.config import schema
from tunix_like.config.argument_names import ELSEWHERE, _arguments
from tunix_like.training.generation import with_rollout


@pytest.mark.parametrize(
    ("call", "named", "said"),
    [
        (GRPOLearner, "processing_class", r"GRPOLearner: .* is tokenizer\."),
        (GRPOLearner, "reward_fn", "Did you mean 'reward_fns'"),
        (tunix_like.SFTTrainer, "args", "sft_config|training_config"),
        (tunix_like.DPOLearner, "tokeniser", "Did you mean 'tokenizer'"),
        (MaxRLConfig, "num_generation", "MaxRLConfig: .* Did you mean 'num_generations'"),
        (RolloutConfig, "max_completion_length", r"RolloutConfig\.max_tokens_to_generate"),
        (tunix_like.LoraConfig, "r", r"LoraConfig\.rank"),
        (tunix_like.OptimizerConfig, "learningrate", "Did you mean 'learning_rate'"),
        (tunix_like.load_model, "quantise", "load_model: .* Did you mean 'quantize'"),
        (tunix_like.run, "override", "Did you mean 'overrides'"),
        (tunix_like.add_lora, "rank", "add_lora: .*config"),
        (Learner.train, "batchsize", r"Learner\.train: .* Did you mean 'batch_size'"),
        (tunix_like.SFTTrainer.train, "num_epochs", r"RLTrainingConfig\.max_steps"),
        (tunix_like.DPOLearner.train, "batchsize", "Did you mean 'batch_size'"),
        (lambda **named: with_rollout(RolloutConfig(), named), "temprature", "Did you mean 'temperature'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unknown_arguments(call, named, said):
    with pytest.raises(UserError, match=said):
        call(**{named: 1})


def test_counterparts_exist():
    """A counterpart is an argument of a learner, a public name, or `CLASS.NAME` with a field or method of the class."""
    own, _ = _arguments(Learner.__init__)
    for counterpart in ELSEWHERE.values():
        for name in counterpart.replace(",", " and").split(" and "):
            place, _, last = name.strip().rpartition(".")
            if place in ("", "tunix_like"):
                assert last in own or hasattr(tunix_like, last), name
            else:
                kind = getattr(tunix_like, place, None) or getattr(schema, place)
                assert last in _arguments(kind.__init__)[0] or hasattr(kind, last), name


def test_classes_of_other_libraries():
    with pytest.raises(AttributeError, match=r"tunix_like\.GRPOLearner"):
        tunix_like.GRPOTrainer  # noqa: B018
    with pytest.raises(AttributeError, match="Did you mean 'MaxRLLearner'"):
        tunix_like.MaxRlLearner  # noqa: B018
    assert not hasattr(tunix_like, "__no_such__")


def test_subclasses_may_pass_names_on_and_configs_can_be_copied():
    class Own(schema.Checked):
        def __init__(self, **named):
            self.named = named

        def __post_init__(self): ...

    assert Own(anything=1).named == {"anything": 1}
    config = RolloutConfig(top_k=3)
    assert pickle.loads(pickle.dumps(config)) == copy.deepcopy(config) == config
