"""Tests that invalid calls of the Python interface raise a one-line message that names the argument, before any
compilation.

The calls run in a separate process. In this process beartype would reject a wrong type before the library does.
"""

from __future__ import annotations

import json

import pytest

from tests.process import python

pytestmark = pytest.mark.slow

SCRIPT = """
import functools, json, sys
import jax
import tunix_like
from tests.tiny_model import HF
from tunix_like import *
from tunix_like.data import reverse_text
from tunix_like.rollout.sampler import Sampler
from tunix_like.rewards import pooled, verl_compatible

def good(prompts, completions, **columns):
    return [1.0 for _ in completions]

def yields(prompts, completions, **columns):
    yield 1.0

@register_policy_loss_fn("scalar")
def scalar(logprobs, old_logprobs, advantages, mask):
    return (-logprobs * advantages).sum()

@register_policy_loss_fn("nothing")
def nothing(logprobs, old_logprobs, advantages, mask):
    -logprobs * advantages

@register_policy_loss_fn("per_completion")
def per_completion(logprobs, old_logprobs, advantages, mask):
    return -logprobs * advantages.squeeze(-1)[..., None], {}

@register_advantage_estimator("by_group")
def by_group(rewards, *, scored, lengths):
    return rewards.mean(axis=1)

model, _ = tunix_like.load_model(HF, init="random")
given = {"model": model, "tokenizer": reverse_text.tokenizer(), "reward_fns": good,
         "rollout_config": RolloutConfig(max_prompt_length=8, max_tokens_to_generate=4),
         "algo_config": RLOOConfig(num_generations=4)}
learner = lambda **changed: RLOOLearner(**given | changed)
loss = lambda name: learner(algo_config=RLOOConfig(num_generations=4, policy_loss_fn=name))
sft = lambda **changed: SFTTrainer(**{"model": model, "tokenizer": given["tokenizer"],
    "sft_config": SFTConfig(max_steps=1), "rollout_config": given["rollout_config"]} | changed)
calls = {
    "model": lambda: learner(model="Qwen/Qwen2.5-0.5B"),
    "model and tokenizer": lambda: learner(model=(model, given["tokenizer"])),
    "reference": lambda: learner(ref_model="model"),
    "no reward": lambda: learner(reward_fns=None),
    "a number": lambda: learner(reward_fns=[good, 3]),
    "a name": lambda: learner(reward_fns="exact_match"),
    "a named number": lambda: learner(reward_fns={"length": 3}),
    "none in the list": lambda: learner(reward_fns=[]),
    "generator": lambda: learner(reward_fns=yields),
    "built in": lambda: learner(reward_fns=max),
    "weights": lambda: learner(reward_weights=["1"]),
    "weight": lambda: learner(reward_weights=[float("nan")]),
    "metric": lambda: learner(metric_fns=good),
    "rollout": lambda: learner(rollout_config={"max_tokens_to_generate": 4}),
    "training": lambda: learner(training_config="runs/x"),
    "eval": lambda: learner(eval_config=4),
    "mesh": lambda: learner(mesh=[8, 1]),
    "metric of no function": lambda: learner(metric_fns=[3]),
    "no metrics": lambda: learner(metric_fns=None),
    "engine": lambda: learner(engine="vllm"),
    "threshold": lambda: learner(success_threshold="1"),
    "sources": lambda: learner(source_estimators=["maxpo"]),
    "teachers of sources": lambda: learner(source_teachers=["model"]),
    "a teacher of a source": lambda: learner(source_teachers={"maze": 3.5}),
    "held-out rows": lambda: learner().train([{"prompt": "ab>"}] * 8, 3),
    "no rows": lambda: learner().evaluate(None),
    "batch of none": lambda: learner().train([{"prompt": "ab>"}] * 8, batch_size=0),
    "batch of text": lambda: learner().train([{"prompt": "ab>"}] * 8, batch_size="4"),
    "model of a number": lambda: tunix_like.load_model(3),
    "folder": lambda: learner(training_config=RLTrainingConfig(output_dir="a\\0b")),
    "scalar": lambda: loss("scalar"),
    "loss for advantages per completion": lambda: learner(teacher=model, algo_config=RLOOConfig(
        num_generations=4, policy_loss_fn="per_completion")),
    "nothing": lambda: loss("nothing"),
    "by_group": lambda: CustomLearner(**given | {"algo_config": CustomConfig(
        advantage_estimator="by_group", num_generations=4)}),
    "sft model": lambda: sft(model="Qwen/Qwen2.5-0.5B"),
    "sft config": lambda: sft(sft_config={"max_steps": 1}),
    "export": lambda: tunix_like.export_model("model", given["tokenizer"], "out"),
    "add_lora": lambda: tunix_like.add_lora("model", LoraConfig(rank=2)),
    "save_adapter": lambda: tunix_like.save_adapter("model", "out"),
}
Sampler.generate = lambda *_, **__: sys.exit("sampled")
jax.jit = lambda *_, **__: sys.exit("compiled")
said = {}
for name, call in calls.items():
    try:
        said[name] = repr(call())
    except UserError as error:
        said[name] = f"UserError {error}"
    except BaseException as error:
        said[name] = f"{type(error).__name__} {error}"
print(json.dumps(said))
"""

DECODER = "give a Decoder; tunix_like.load_model(folder) returns one"
WORDS = {
    "model": ["model: got str", DECODER],
    "model and tokenizer": ["model: got tuple", DECODER],
    "reference": ["ref_model: got str", DECODER],
    "no reward": ["reward_fns: got NoneType", "give a function f(prompts, completions, **columns), a list"],
    "a number": ["Reward function 'int' is 3, which is not callable", "f(prompts, completions, **columns)"],
    "a name": ["reward_fns: got str", "a list of functions"],
    "a named number": ["Reward function 'length' is 3"],
    "none in the list": ["reward_fns: give at least one"],
    "generator": ["Reward function 'yields' is a generator", "return a list"],
    "built in": ["Reward function 'max' does not accept keyword arguments"],
    "weights": ["reward_weights[0]: got str", "one finite number per reward function"],
    "weight": ["reward_weights[0]: got nan"],
    "metric": ["metric_fns: got function", "give a list of functions"],
    "rollout": ["rollout_config: got dict", "tunix_like.RolloutConfig("],
    "training": ["training_config: got str", "tunix_like.RLTrainingConfig("],
    "eval": ["eval_config: got int", "tunix_like.EvalConfig("],
    "mesh": ["mesh: got list", "give a jax.sharding.Mesh"],
    "metric of no function": ["metric_fns[0]: got int", "give a list of functions"],
    "no metrics": ["metric_fns: got NoneType", "give a list of functions"],
    "engine": ["engine: got str", "generate"],
    "threshold": ["success_threshold: got str", "give a number"],
    "sources": ["source_estimators: got list", "{data source: {'advantage_estimator': ...}}"],
    "teachers of sources": ["source_teachers: got list", "{data source: model}"],
    "a teacher of a source": ["data source 'maze': teacher: got float", "give a Decoder"],
    "held-out rows": ["eval_ds: got int", "give a list of rows"],
    "no rows": ["eval_ds: got NoneType", "give a list of rows"],
    "batch of none": ["batch_size: got 0", "at least 1"],
    "batch of text": ["batch_size: got str", "at least 1"],
    "model of a number": ["load_model: got int", "a hub id"],
    "folder": ["training.output_dir", "NUL character"],
    "scalar": ["policy loss 'scalar' returned one number", "one number per token, [2, 4, 4]", "Return (loss, metrics)"],
    "loss for advantages per completion": ["policy loss 'per_completion'", "squeeze"],
    "nothing": ["policy loss 'nothing' returned None", "Return (loss, metrics)"],
    "by_group": ["'by_group' returned an array of shape [2]", "for rewards of shape [2, 4]"],
    "sft model": ["model: got str", DECODER],
    "sft config": ["sft_config: got dict", "tunix_like.SFTConfig("],
    "export": ["model: got str", DECODER],
    "add_lora": ["model: got str", DECODER],
    "save_adapter": ["model: got str", DECODER],
}


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    done = python("-c", SCRIPT, cwd=tmp_path_factory.mktemp("calls"))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_every_call_of_the_interface_is_covered(said):
    assert said.keys() == WORDS.keys()


@pytest.mark.parametrize("name", WORDS)
def test_invalid_call_raises_a_one_line_message_that_names_the_argument(name, said):
    assert said[name].startswith("UserError ") and "\n" not in said[name], said[name]
    for word in WORDS[name]:
        assert word in said[name]
