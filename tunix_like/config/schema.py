"""Declares every config key with its name, type, default, allowed values and one line of documentation.

All defaults are defined in the dataclasses below: `base_config.yaml` is generated from them, and YAML files are loaded
into them (`load.py`). `None` means unset: the documentation of the key describes the default that is then used.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from tunix_like.config.keys import Checked, key
from tunix_like.config.urls import check_server_url
from tunix_like.errors import UserError, nearest

LOSS_AGG_MODES = ("token-mean", "sequence-mean-token-mean", "seq-mean-token-sum", "sequence-mean-token-scale")
ATTENTIONS = ("auto", "plain", "blocked", "cudnn", "splash")
KL_LOSS_MODES = ("kl", "mse_kl", "low_var_kl")
QUANTIZATIONS = ("int8", "nf4")
OVERLONG = ("skip", "error")
LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclasses.dataclass(frozen=True)
class ModelConfig(Checked):
    section = "model"
    path: str | None = key(doc="folder or hub id of a Hugging Face model (config.json, tokenizer, safetensors)")
    init: str = key(
        "pretrained",
        doc="pretrained: load the weights; random: initialise them at random",
        choices=("pretrained", "random"),
    )
    config: dict[str, Any] | None = key(
        doc="content of a Hugging Face config.json, used instead of `path` if init is random; if vocab_size is not "
        "set, it is the size of the data source's vocabulary"
    )
    dtype: str | None = key(
        doc="compute dtype; unset: bfloat16 on TPU and GPU, float32 on CPU", choices=("float32", "bfloat16")
    )
    param_dtype: str = key(
        "float32",
        doc="dtype of the weights; trained weights need float32; frozen weights (with lora.rank) may be bfloat16",
        choices=("float32", "bfloat16"),
    )
    attention: str = key(
        "auto",
        doc="plain: all scores in one array; blocked: scores in blocks, less memory; cudnn: kernel for NVIDIA with "
        "bfloat16; splash: kernel for TPU; auto: the kernel of the device if there is one, else plain for small inputs "
        "and blocked for large inputs",
        choices=ATTENTIONS,
    )
    quantize: str | None = key(
        doc="store the projections of the frozen base model in 8 or 4 bits; training then needs lora.rank; unset: "
        "store them in param_dtype",
        choices=QUANTIZATIONS,
    )


@dataclasses.dataclass(frozen=True)
class LoraConfig(Checked):
    """Low-rank adapters on frozen weights (LoRA, arXiv 2106.09685)."""

    section = "lora"
    rank: int | None = key(
        doc="rank of the trained adapters; all other weights are frozen; unset: train all weights", at_least=1
    )
    alpha: float | None = key(doc="adapters are scaled by alpha / rank (unset: alpha = rank)", above=0)
    targets: list[str] | None = key(
        doc="projections with an adapter: q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj; unset: all "
        "seven (mixture-of-experts model: the first four)"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.targets or ():
            if name not in LORA_TARGETS:
                raise UserError(f"lora.targets: unknown projection '{name}'. {nearest(name, LORA_TARGETS)}")
        if self.targets is not None and (not self.targets or len(set(self.targets)) != len(self.targets)):
            raise UserError(f"lora.targets: list at least one projection, each once; got {self.targets}.")


@dataclasses.dataclass(frozen=True)
class DataConfig(Checked):
    section = "data"
    name: str = key(
        "maze",
        doc="data source: maze, gsm8k, reverse_text, maze_steps, guess, calculator, jsonl, hub, verifiers (an "
        "environment of that package), or mix (the sources listed in `sources`)",
    )
    sources: list[dict[str, Any]] | None = key(
        doc="mix: list of sources, each a mapping with `name` and the data keys of that source; optional keys: label "
        "(name in metrics), weight (share of the prompts), and the estimator for the groups of this source: "
        "advantage_estimator, k, truncation_order, ddof"
    )
    path: str | None = key(
        doc="local file or folder, or hub dataset id, for sources that read files; verifiers: id of the environment, "
        "or FILE.py"
    )
    arguments: dict[str, Any] | None = key(
        doc="verifiers: configuration of the environment, with the keys that the package verifiers defines, e.g. "
        "{taskset: {split: train}, agent: {harness: {id: my_harness}}}"
    )
    eval_arguments: dict[str, Any] | None = key(
        doc="verifiers: arguments of the taskset for the held-out rows, e.g. {split: test}; unset: the "
        "last tasks of the training taskset"
    )
    split: str = key("train", doc="split to train on")
    eval_split: str = key("test", doc="split to evaluate on")
    prompt_template: str | None = key(doc="Python format string over the row's columns, e.g. '{question}'")
    answer_template: str | None = key(
        doc="jsonl, hub: format string that builds the column `answer` from other columns, e.g. '{the sum}'; SFT and "
        "exact_match read this column"
    )
    system_prompt: str | None = key(doc="system message; implies the chat template", blank=True)
    apply_chat_template: bool | None = key(
        doc="wrap the prompt as a user message; unset: only if there is a system prompt or the rows contain messages"
    )
    chat_template_args: dict[str, Any] | None = key(
        doc="variables for the chat template, e.g. {enable_thinking: false}"
    )
    batch_size: int = key(8, doc="prompts per training step", at_least=1)
    shuffle: bool = key(True, doc="shuffle the data anew in every epoch, seeded by training.seed")
    seed: int = key(0, doc="seed of the rows, for sources that generate rows", at_least=0)
    overlong_prompts: str = key(
        "skip",
        doc="for training and evaluation prompts that are empty or longer than rollout.max_prompt_length; skip: skip "
        "and count them; error: raise an error",
        choices=OVERLONG,
    )
    train_size: int | None = key(doc="training rows to use or to generate; unset: the source's default", at_least=1)
    eval_size: int | None = key(doc="held-out rows to use or to generate; unset: the source's default", at_least=1)
    maze_size: int | None = key(
        doc="maze, maze_steps: side length in squares, walls included; must be odd (unset: 9)", at_least=5, at_most=255
    )
    text_length: int | None = key(doc="reverse_text: maximum string length (unset: 4)", at_least=2, at_most=1000)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AlgorithmConfig(Checked):
    """Settings of the learner; unset keys take the default of the selected learner (see `training/learners.py`)."""

    section = "algorithm"
    advantage_estimator: str | None = key(
        doc="selects the learner: grpo, drgrpo, rloo, maxrl, maxpo, pkpo, passk, opo, reinforce_pp, or FILE.py:function"
    )
    num_generations: int = key(8, doc="completions per prompt (group size G)", at_least=2)
    num_iterations: int = key(1, doc="number of passes over one rollout batch", at_least=1)
    k: int | None = key(doc="maxpo, pkpo: k of max@k; passk: k of pass@k; required; 1..G-1, for pkpo 1..G", at_least=1)
    truncation_order: int | None = key(
        doc="maxrl: order at which the log-likelihood is truncated, 1..G-1; unset: Algorithm 1 of arXiv 2602.02710, "
        "whose order is G-1",
        at_least=1,
    )
    ddof: int | None = key(doc="grpo: divisor of the group variance; 1: G-1; 0: G (unset: 1)", at_least=0, at_most=1)
    estimator_params: dict[str, Any] | None = key(doc="keyword parameters of a custom estimator")
    binarize: bool = key(
        False,
        doc="replace each total reward by 1 if it reaches rewards.success_threshold, else by 0, before the advantages",
    )
    policy_loss_fn: str | None = key(doc="ppo_clip, reinforce, gspo, cispo, dppo, or FILE.py:function")
    loss_params: dict[str, Any] | None = key(doc="keyword parameters of a custom loss")
    loss_agg_mode: str | None = key(doc="weighting of the tokens in the loss", choices=LOSS_AGG_MODES)
    epsilon: float | None = key(
        doc="ppo_clip, gspo, cispo: lower clip range (unset: 0.2; gspo 3e-4)", above=0, at_most=1
    )
    epsilon_high: float | None = key(doc="ppo_clip, gspo, cispo: upper clip range (unset: epsilon; gspo 4e-4)", above=0)
    epsilon_c: float | None = key(doc="ppo_clip, gspo: dual-clip bound for negative advantages (unset: off)", above=1)
    dppo_mask_high: float | None = key(
        doc="dppo: drop the policy term of tokens with A > 0 whose probability exceeds the sampler's probability by "
        "more than this (unset: 0.2)",
        above=0,
        at_most=1,
    )
    dppo_mask_low: float | None = key(
        doc="dppo: drop the policy term of tokens with A <= 0 whose probability is below the sampler's probability by "
        "more than this (unset: 0.2)",
        above=0,
        at_most=1,
    )
    kl_tau: float | None = key(doc="dppo: weight of the squared log-ratio to the sampler (unset: 1e-3)", at_least=0)
    beta: float = key(
        0.0, doc="weight of the KL divergence to the reference model; 0: no reference model is kept", at_least=0
    )
    kl_loss_mode: str | None = key(
        doc="KL estimate: kl (k1), mse_kl (k2), low_var_kl (k3); unset: k1 in the reward, k3 in the loss",
        choices=KL_LOSS_MODES,
    )
    kl_in_reward: bool | None = key(doc="subtract beta * KL from the reward instead of adding it to the loss")
    entropy_coef: float = key(0.0, doc="weight of the entropy bonus; the entropy is per token, in nats", at_least=0)
    sampler_is: str | None = key(
        doc="importance weights if sampler and trained policy differ: the ratio of their probabilities (trained policy "
        "/ sampler) of each token (token, token_mask) or of each completion (sequence, sequence_mask); token, "
        "sequence: ratios are truncated to sampler_is_min and sampler_is_threshold; token_mask, sequence_mask: ratios "
        "outside these bounds become 0 (unset: off)",
        choices=("token", "sequence", "token_mask", "sequence_mask"),
    )
    sampler_is_threshold: float | None = key(
        doc="sampler_is: upper bound of the ratio (unset: 2; for masks 3)", above=0
    )
    sampler_is_min: float | None = key(doc="sampler_is: lower bound of the ratio (unset: none)", above=0, below=1)
    sampler_is_kl: bool = key(False, doc="sampler_is: multiply the KL in the loss by importance weights too")
    overlong: str | None = key(
        doc="treatment of overlong completions; mask: completions that the token limit truncated do not count in the "
        "loss; penalty: reduce the reward of completions that end within the last overlong_buffer tokens before the "
        "limit (soft penalty of DAPO) (unset: neither)",
        choices=("mask", "penalty"),
    )
    overlong_buffer: int | None = key(
        doc="overlong: the penalty grows from 0 to overlong_penalty over this many tokens before the limit", at_least=1
    )
    overlong_penalty: float | None = key(doc="overlong: penalty of a completion at the limit (unset: 1)", above=0)
    dynamic_sampling: bool = key(
        False, doc="replace groups whose rewards are all equal by groups of further prompts; changes the objective"
    )
    max_extra_batches: int | None = key(
        doc="dynamic_sampling: maximum number of further rollout batches per step (unset: 4)", at_least=1
    )


@dataclasses.dataclass(frozen=True)
class RolloutConfig(Checked):
    section = "rollout"
    max_prompt_length: int = key(512, doc="maximum prompt length in tokens", at_least=1)
    max_tokens_to_generate: int = key(
        256, doc="maximum completion length in tokens, end-of-sequence included", at_least=1
    )
    temperature: float = key(1.0, doc="sampling temperature; 0 is greedy (evaluation only)", at_least=0)
    top_p: float = key(
        1.0, doc="sample from the most probable tokens that together have this probability", above=0, at_most=1
    )
    top_k: int | None = key(doc="sample from the k most probable tokens; unset: from all", at_least=1)
    max_concurrent_rows: int | str = key(
        "auto",
        doc="number of completions sampled at once; it limits the size of the KV cache; auto: all completions of a "
        "step, or as many as fit in memory",
        choices=("auto",),
        at_least=1,
    )
    mesh: list[int] | str = key(
        "auto",
        doc="devices along data, fsdp and tp while sampling, e.g. [8, 1, 1]; auto: every device has all weights; if "
        "the weights do not fit, they are split over as few devices as possible, first along tp, then along fsdp",
    )
    eos_tokens: list[int] | None = key(
        doc="token ids that end a completion; unset: the ids of the tokenizer and of generation_config.json"
    )
    max_staleness: int = key(
        0,
        doc="number of updates by which the sampling weights may be older than the trained ones; 1: the completions of "
        "the next step are sampled during the update, by servers or on the devices of rollout.devices",
        at_least=0,
        at_most=1,
    )
    devices: int | None = key(
        doc="number of devices that only sample (the last devices); the other devices only train; unset: all devices "
        "do both",
        at_least=1,
    )
    engine: str = key(
        "local",
        doc="where completions are sampled during RL; local: in this process; vllm: on the servers of `urls`. SFT and "
        "the command `eval` always sample in this process",
        choices=("local", "vllm"),
    )
    urls: list[str] | None = key(doc="addresses of vLLM servers, e.g. [http://127.0.0.1:8000]; for engine: vllm")
    weights_folder: str | None = key(
        doc="engine: vllm: folder for the weights of each step, which all servers can read under the same name; unset: "
        "engine_weights in the run folder"
    )
    request_timeout_seconds: float = key(
        600.0, doc="engine: vllm: time limit of one request, which samples one turn of a completion", above=0
    )
    wait_for_servers_seconds: float = key(
        600.0, doc="with engine vllm: the run is saved and stops if it has no working server for this time", above=0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.engine == "vllm" and not self.urls:
            raise UserError(
                "rollout.urls: rollout.engine=vllm needs the addresses of servers, e.g. [http://127.0.0.1:8000]."
            )
        for url in self.urls or ():
            check_server_url("rollout.urls", url, "VLLM_API_KEY")
        if self.engine != "vllm" and (self.urls or self.weights_folder):
            name = "urls" if self.urls else "weights_folder"
            raise UserError(f"rollout.{name}: it needs rollout.engine=vllm; set it, or omit rollout.{name}.")
        if self.engine == "vllm" and self.devices is not None:
            raise UserError("rollout.devices: with rollout.engine=vllm the servers sample; omit it.")
        sizes = self.mesh if isinstance(self.mesh, list) else []
        if self.mesh != "auto" and (len(sizes) != 3 or any(type(size) is not int or size < 1 for size in sizes)):
            raise UserError(
                f"rollout.mesh: got {self.mesh!r}; give auto, or the numbers of devices along data, fsdp and tp, e.g. "
                "[8, 1, 1]."
            )


@dataclasses.dataclass(frozen=True)
class RewardsConfig(Checked):
    section = "rewards"
    functions: list[dict[str, Any]] | None = key(
        doc="list of {name, weight}; a name is maze, gsm8k, gsm8k_lenient, exact_match or FILE.py:function; "
        "unset: the function of the data source"
    )
    success_threshold: float = key(1.0, doc="a completion succeeds (pass@k) when its total reward reaches this")
    workers: int | None = key(
        doc="number of worker processes for reward functions; 0: functions run in the training process; unset: up to 4 "
        "for gsm8k, gsm8k_lenient and functions of files and modules, 0 for the other functions",
        at_least=0,
    )
    timeout_seconds: float = key(
        30.0, doc="time limit in a worker for one function call, which scores the completions of one prompt", above=0
    )
    memory_gb: float = key(4.0, doc="a worker that uses more than this many GB of memory is replaced", above=0)


@dataclasses.dataclass(frozen=True)
class EnvironmentConfig(Checked):
    """Settings of trajectories with several turns, and of the environment that answers the turns of the model."""

    section = "environment"
    name: str | None = key(
        doc="maze_steps, guess, calculator, openenv, FILE.py:NAME or package.module:NAME, where NAME is a class or a "
        "function that makes environments (classes of google-tunix and TRL also work); unset: completions have a "
        "single turn"
    )
    arguments: dict[str, Any] | None = key(
        doc="keyword arguments of the class or factory, e.g. {url: http://127.0.0.1:8000} for openenv"
    )
    tools: list[str] | None = key(
        doc="functions that the model may call as tools, as FILE.py:function or package.module:function; they need "
        "type hints and a docstring; set either this key or name"
    )
    max_turns: int = key(8, doc="maximum number of turns of the policy in a trajectory", at_least=1)
    max_observation_tokens: int = key(
        256,
        doc="maximum number of tokens that are appended after a turn; tokens of the chat template count too",
        at_least=1,
    )
    overlong_observation: str = key(
        "cut",
        doc="for observations longer than max_observation_tokens; cut: shorten the text and mark where it was cut; "
        "unscored: end the trajectory without a reward",
        choices=("cut", "unscored"),
    )
    history: str = key(
        "sampled",
        doc="how the model sees earlier turns; sampled: as the sampled tokens; template: the chat template renders the "
        "whole conversation again at each turn, and may change the earlier turns",
        choices=("sampled", "template"),
    )
    mode: str = key(
        "lockstep",
        doc="lockstep: sampling continues when all environments have answered; the result can be repeated bit for bit; "
        "eager: a trajectory continues as soon as its environment has answered",
        choices=("lockstep", "eager"),
    )
    workers: int | None = key(
        doc="maximum number of environment steps that run at the same time; unset: up to 4 (openenv: 32). Each "
        "trajectory has its own process; if this key is unset, maze_steps, guess and calculator run in the training "
        "process",
        at_least=1,
    )
    timeout_seconds: float = key(
        20.0, doc="time limit of one environment step; if a step takes longer, its trajectory is unscored", above=0
    )
    memory_gb: float = key(4.0, doc="an environment that uses more than this many GB of memory is stopped", above=0)


@dataclasses.dataclass(frozen=True)
class OptimizerConfig(Checked):
    """Settings of AdamW with linear warm-up and a learning-rate schedule."""

    section = "optimizer"
    learning_rate: float = key(1e-6, doc="peak learning rate", above=0)
    schedule: str = key(
        "constant", doc="learning-rate schedule after the warm-up", choices=("constant", "linear", "cosine")
    )
    warmup_steps: int = key(0, doc="optimizer steps of linear warm-up", at_least=0)
    end_fraction: float = key(
        0.1, doc="linear, cosine: final learning rate as a share of the peak", at_least=0, at_most=1
    )
    weight_decay: float = key(0.0, doc="decoupled weight decay, applied to matrices only", at_least=0)
    b1: float = key(0.9, doc="decay rate of the first moment", at_least=0, below=1)
    b2: float = key(0.99, doc="decay rate of the second moment", at_least=0, below=1)
    eps: float = key(1e-8, doc="added to the square root of the second moment", above=0)
    max_grad_norm: float | None = key(1.0, doc="clip the global gradient norm; null: off", above=0)


@dataclasses.dataclass(frozen=True)
class SFTConfig(Checked):
    section = "sft"
    max_steps: int = key(0, doc="steps of supervised fine-tuning on the column `answer`; 0: none", at_least=0)
    batch_size: int = key(32, doc="examples per supervised step", at_least=1)
    stop_at_success: float | None = key(
        doc="end SFT once held-out pass@1 reaches this value (checked every eval_every_n_steps)", above=0, at_most=1
    )
    eval_every_n_steps: int = key(25, doc="steps between the checks of stop_at_success", at_least=1)
    optimizer: OptimizerConfig = dataclasses.field(
        default_factory=lambda: OptimizerConfig(learning_rate=1e-5), metadata={}
    )


@dataclasses.dataclass(frozen=True)
class EvalConfig(Checked):
    section = "eval"
    samples: int = key(16, doc="completions per held-out problem", at_least=1)
    k: list[int] | None = key(doc="values of k for pass@k and maj@k; unset: 1, 2, 4, ... up to eval.samples")
    max_problems: int | None = key(doc="maximum number of held-out problems to evaluate; unset: all", at_least=1)
    batch_size: int = key(32, doc="problems sampled at once", at_least=1)
    temperature: float = key(1.0, doc="sampling temperature of evaluation; 0 is greedy", at_least=0)
    top_p: float = key(1.0, doc="top-p of evaluation (nucleus sampling)", above=0, at_most=1)


@dataclasses.dataclass(frozen=True)
class RLTrainingConfig(Checked):
    section = "training"
    output_dir: str | None = key(doc="run folder; unset: runs/<config>-<estimator>-s<seed> (CLI), none (Python)")
    max_steps: int | None = key(doc="training steps (rollout batches); unset: one epoch of the data", at_least=1)
    seed: int = key(0, doc="seed of weight initialisation, sampling and evaluation", at_least=0)
    mini_batch_size: int | None = key(doc="prompts per optimizer update; unset: data.batch_size", at_least=1)
    train_micro_batch_size: int | str = key(
        "auto",
        doc="number of completions of full length per forward and backward pass; auto: as many as fit into memory, "
        "with at most 512 tokens on a CPU and 16384 per device on other devices",
        choices=("auto",),
        at_least=1,
    )
    logprob_chunk_size: int = key(1024, doc="tokens whose logits are in memory at once in the update", at_least=1)
    eval_every_n_steps: int | None = key(
        doc="evaluate every n steps; unset: only before and after training", at_least=1
    )
    checkpoint_every_n_steps: int = key(
        50, doc="steps between checkpoints; a checkpoint is also written at the end", at_least=1
    )
    max_checkpoints_to_keep: int = key(2, doc="number of newest checkpoints to keep", at_least=1)
    best_metric: str | None = key(
        doc="evaluation metric, e.g. eval/pass@1. A higher value must be better. The step with the highest value is "
        "saved after its evaluation and kept in addition to the newest checkpoints. Needs eval_every_n_steps; unset: "
        "only the newest checkpoints are kept"
    )
    log_rollouts_every_n_steps: int = key(10, doc="steps between files of completions in rollouts/", at_least=1)
    log_samples_every_n_steps: int | None = key(
        50, doc="steps between printed tables of a prompt's best and worst completion; null: none", at_least=1
    )
    loggers: list[str] = key(
        ["tensorboard"],
        doc="where metrics are logged in addition to metrics.jsonl: tensorboard (event files in the run folder), "
        "wandb, trackio; []: only metrics.jsonl",
    )
    profile_steps: list[int] | None = key(
        doc="first and last step of a profiler trace, e.g. [5, 6]; it is written to profile/ in the run folder"
    )
    max_skipped_updates: int = key(
        5,
        doc="the run stops when this many consecutive updates were skipped because of a non-finite loss or gradient",
        at_least=1,
    )
    max_logprob_gap: float | None = key(
        0.1,
        doc="maximum of the mean absolute difference between the log-probabilities of sampler and trainer, in nats per "
        "token; if the first update of the run exceeds it, the run stops; null: off",
        above=0,
    )
    remat: bool = key(False, doc="recompute each layer in the backward pass: less memory, about a third more compute")
    actor_optimizer: Any = key(
        doc="an OptimizerConfig or an optax.GradientTransformation; unset: the `optimizer` section", python_only=True
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(set(self.loggers)) != len(self.loggers):
            raise UserError(f"training.loggers: list each logger once; got {self.loggers}.")


@dataclasses.dataclass(frozen=True)
class MeshConfig(Checked):
    section = "mesh"
    shape: list[int] | str = key("auto", doc="devices along each axis; auto: all devices along the first axis")
    axis_names: list[str] = key(
        ["fsdp", "tp"],
        doc="names of the axes: any of data (splits prompts), fsdp (splits prompts and weights), tp (splits heads and "
        "features)",
    )


@dataclasses.dataclass(frozen=True)
class Config:
    """The configuration of one run. Each section is a mapping in the YAML file."""

    model: ModelConfig = ModelConfig()
    lora: LoraConfig = LoraConfig()
    data: DataConfig = DataConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    rollout: RolloutConfig = RolloutConfig()
    rewards: RewardsConfig = RewardsConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    sft: SFTConfig = dataclasses.field(default_factory=SFTConfig)
    eval: EvalConfig = EvalConfig()
    training: RLTrainingConfig = RLTrainingConfig()
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
