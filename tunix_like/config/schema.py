"""Declares every config key with its name, type, default, allowed values and one line of documentation.

All defaults are defined in the dataclasses below: `base_config.yaml` is generated from them, and YAML files are loaded
into them (`load.py`). `None` means unset: the documentation of the key describes the default that is then used.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from tunix_like.config.keys import Checked, key
from tunix_like.config.schedules import read_schedule
from tunix_like.config.urls import check_server_url, is_server
from tunix_like.errors import UserError, nearest

LOSS_AGG_MODES = ("token-mean", "sequence-mean-token-mean", "seq-mean-token-sum", "sequence-mean-token-scale")
ATTENTIONS = ("auto", "plain", "blocked", "cudnn", "splash")
KL_LOSS_MODES = ("kl", "mse_kl", "low_var_kl")
QUANTIZATIONS = ("int8", "nf4")
PAIR_LEARNERS = ("dpo", "reward_model")
"""Values of `algorithm.advantage_estimator` whose learner trains on pairs of completions instead of rollouts."""
SELF = "self"
"""Value of `teacher.path`: the policy itself is the teacher."""
OVERLONG = ("skip", "error")
ATTENTION_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP_TARGETS = ("gate_proj", "up_proj", "down_proj")
RECURRENT_TARGETS = ("in_proj_qkv", "in_proj_z", "out_proj")
LORA_TARGETS = (*ATTENTION_TARGETS, *MLP_TARGETS, *RECURRENT_TARGETS)

OPTIMIZER_KEYS: dict[str, frozenset[str]] = {
    "adamw": frozenset({"b1", "b2", "eps", "moments_dtype"}),
    "muon": frozenset({"b1", "b2", "eps", "moments_dtype"}),
    "lion": frozenset({"b1", "b2", "moments_dtype"}),
    "adafactor": frozenset(),
}
"""Maps the values of `optimizer.name` to the keys that the optimizer reads beside those that all of them read."""
LARGEST_BFLOAT16_DECAY = 1 - 2**-8
"""Largest decay of a moment in bfloat16. Rounding to the nearest of 8 significant bits changes a number by up to
2**-8 of it; a moment that loses less than this in an update would keep its value."""


@dataclasses.dataclass(frozen=True)
class ModelConfig(Checked):
    section = "model"
    path: str | None = key(
        doc="folder, hub id or address (gs://, s3://) of a Hugging Face model; FILE.gguf; package:NAME; a run",
        hub="models",
    )
    tokenizer: str | None = key(
        doc="folder, hub id, FILE.gguf or package:NAME; unset: that of the data source, else of path", hub="models"
    )
    init: str = key(
        "pretrained",
        doc="pretrained: load the weights; random: initialise them",
        choices=("pretrained", "random"),
    )
    config: dict[str, Any] | None = key(
        doc="with init random, instead of path: content of a config.json; vocab_size unset: that of the tokenizer"
    )
    dtype: str | None = key(doc="compute dtype; unset: bfloat16, on a CPU float32", choices=("float32", "bfloat16"))
    param_dtype: str = key(
        "float32",
        doc="dtype of the weights; bfloat16 only for frozen weights (lora.rank)",
        choices=("float32", "bfloat16"),
    )
    attention: str = key(
        "auto",
        doc="plain: all scores at once; blocked: in blocks, less memory; cudnn: NVIDIA kernel, bfloat16; splash: TPU "
        "kernel; auto: the device's kernel, else plain or, for large inputs, blocked",
        choices=ATTENTIONS,
    )
    quantize: str | None = key(
        doc="projections of the frozen base in 8 or 4 bits; needs lora.rank to train",
        choices=QUANTIZATIONS,
    )


@dataclasses.dataclass(frozen=True)
class LoraConfig(Checked):
    """Low-rank adapters on frozen weights (LoRA, arXiv 2106.09685)."""

    section = "lora"
    rank: int | None = key(doc="unset: all weights are trained", at_least=1)
    alpha: float | None = key(doc="adapters are scaled by alpha / rank; unset: rank", above=0)
    targets: list[str] | None = key(
        doc="of q_proj, k_proj, v_proj, o_proj (attention), gate_proj, up_proj, down_proj (MLPs, also shared experts), "
        "in_proj_qkv, in_proj_z, out_proj (recurrent layers); unset: all that the model has"
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
        doc="maze, maze_pairs, gsm8k, reverse_text, sums, maze_steps, guess, calculator, reasoning_gym, jsonl, hub, "
        "verifiers, or mix (of sources)",
    )
    sources: list[dict[str, Any]] | None = key(
        doc="of a mix: each has name, the data keys of its source and, optionally, label, weight, teacher, "
        "advantage_estimator and its parameters"
    )
    path: str | None = key(
        doc="file, folder, address (gs://, s3://) or hub id; verifiers: id of the environment or FILE.py",
        hub="datasets",
    )
    task: str | None = key(doc="reasoning_gym: e.g. chain_sum")
    arguments: dict[str, Any] | None = key(
        doc="reasoning_gym: of the task; verifiers: configuration of the environment, e.g. {taskset: {split: train}}"
    )
    eval_arguments: dict[str, Any] | None = key(
        doc="verifiers: of the taskset, for held-out rows; unset: the last tasks"
    )
    split: str = key("train", doc="split of the data set that is used for training")
    eval_split: str = key("test", doc="split of the data set that is used for evaluation")
    prompt_template: str | None = key(doc="format string over columns, e.g. '{question}'")
    answer_template: str | None = key(
        doc="jsonl, hub: format string for the column answer, read by SFT and exact_match"
    )
    system_prompt: str | None = key(doc="implies the chat template", blank=True)
    apply_chat_template: bool | None = key(
        doc="prompt as a user message; unset: if there is a system prompt or rows have messages"
    )
    chat_template_args: dict[str, Any] | None = key(doc="template variables, e.g. {enable_thinking: false}")
    batch_size: int = key(8, doc="prompts per step", at_least=1)
    shuffle: bool = key(True, doc="in every epoch, seeded by training.seed")
    seed: int = key(0, doc="of generated rows", at_least=0)
    overlong_prompts: str = key(
        "skip",
        doc="prompts that are empty or longer than rollout.max_prompt_length; skip: count them; error: stop",
        choices=OVERLONG,
        may_change=True,
    )
    curriculum: bool = key(
        False, doc="draw prompts by the estimated probability that their completions both succeed and fail"
    )
    curriculum_correct: bool | None = key(
        doc="curriculum: weight the loss of each prompt so that the expected gradient is that of uniform draws (unset: "
        "true)"
    )
    curriculum_floor: float | None = key(
        doc="curriculum: fraction of the draws that are uniform (unset: 0.2)", above=0, at_most=1
    )
    curriculum_discount: float | None = key(
        doc="curriculum: factor of a prompt's earlier results at each draw (unset: 0.9)", at_least=0, at_most=1
    )
    train_size: int | None = key(doc="rows used or generated; unset: the source's default", at_least=1)
    eval_size: int | None = key(doc="held-out rows used or generated; unset: the source's default", at_least=1)
    maze_size: int | None = key(
        doc="maze, maze_pairs, maze_steps: side length with walls, odd (unset: 9)", at_least=5, at_most=255
    )
    text_length: int | None = key(doc="reverse_text: maximum length (unset: 4)", at_least=2, at_most=1000)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AlgorithmConfig(Checked):
    """Settings of the learner; unset keys take the default of the selected learner (see `training/learners.py`)."""

    section = "algorithm"
    advantage_estimator: str | None = key(
        doc="selects the learner: grpo, drgrpo, rloo, maxrl, maxpo, maxk_mix, order_statistic, pkpo, passk, opo, "
        "otb, reinforce_pp, gdpo, ppo (with a critic), distillation (no reward; needs teacher.path), or "
        "FILE.py:function; on pairs: dpo, reward_model"
    )
    num_generations: int = key(8, doc="completions per prompt (G); 1 only with ppo and distillation", at_least=1)
    num_iterations: int = key(1, doc="passes over a rollout batch", at_least=1)
    k: int | dict[str, Any] | None = key(
        doc="maxpo, order_statistic, pkpo, passk (required): 1..G-1, for pkpo 1..G; or {start, end, steps}", at_least=1
    )
    truncation_order: int | dict[str, Any] | None = key(
        doc="maxrl: 1..G-1; unset: Algorithm 1 of arXiv 2602.02710 (order G-1); or {start, end, steps}",
        at_least=1,
    )
    alpha: float | dict[str, Any] | None = key(
        doc="maxk_mix: weight p^-alpha, a series up to order G-1; 0 is rloo, 1 maxrl; or {start, end, steps}",
        at_least=0,
    )
    coefficients: list[float] | None = key(
        doc="maxk_mix, instead of alpha: c_1, c_2, ... of the weight sum c_k (1-p)^(k-1)"
    )
    weights: list[float] | None = key(doc="order_statistic: of the k sorted rewards, largest first")
    statistic: str | None = key(
        doc="order_statistic, instead of weights: top_mean:M, upper_tail_mean:Q, lower_tail_mean:Q, median, "
        "quantile:Q, trimmed_mean:Q"
    )
    ddof: int | None = key(doc="grpo: variance divided by G - ddof (unset: 1)", at_least=0, at_most=1)
    estimator_params: dict[str, Any] | None = key(doc="of your own estimator")
    credit: str = key(
        "trajectory",
        doc="of a trajectory of several turns; trajectory: each token gets the advantage of all rewards; turn: that of "
        "the rewards from its turn on",
        choices=("trajectory", "turn"),
    )
    gamma: float | None = key(doc="credit turn: discount per turn (unset: 1)", at_least=0, at_most=1)
    turn_baseline: str | None = key(
        doc="credit turn: fixed_index: mean over all others, 0 for those that ended; reached: over those that reach "
        "the turn; state: over their turns that begin in an equal state (unset: fixed_index)",
        choices=("fixed_index", "reached", "state"),
    )
    turn_coef: float | None = key(
        doc="credit turn, estimators other than rloo, grpo, drgrpo: weight of the rewards before the last (unset: 1)",
        at_least=0,
    )
    binarize: bool = key(
        False,
        doc="1 if the reward reaches rewards.success_threshold, else 0",
    )
    policy_loss_fn: str | None = key(
        doc="ppo_clip, reinforce, gspo, cispo, dppo, dppo_kl, sapo, gmpo, vespo, or FILE.py:function"
    )
    loss_params: dict[str, Any] | None = key(doc="of your own loss")
    loss_agg_mode: str | None = key(doc="weights of tokens in the loss", choices=LOSS_AGG_MODES)
    epsilon: float | None = key(
        doc="ppo_clip, gspo, cispo, gmpo: lower clip range (unset: 0.2; gspo 3e-4, gmpo 0.4)", above=0, at_most=1
    )
    epsilon_high: float | None = key(
        doc="ppo_clip, gspo, cispo, gmpo: upper clip range (unset: epsilon; gspo 4e-4)", above=0
    )
    epsilon_c: float | None = key(doc="ppo_clip, gspo: dual clip of negative advantages (unset: off)", above=1)
    dppo_mask_high: float | None = key(
        doc="dppo: tokens with A > 0 whose probability exceeds the sampler's by more are dropped (unset: 0.2); "
        "dppo_kl: in nats of KL (unset: 0.05)",
        above=0,
        at_most=1,
    )
    dppo_mask_low: float | None = key(
        doc="dppo: tokens with A <= 0 whose probability is lower by more are dropped (unset: 0.2); dppo_kl: in nats of "
        "KL (unset: 0.05)",
        above=0,
        at_most=1,
    )
    kl_tau: float | None = key(
        doc="dppo, dppo_kl: weight of the squared log-ratio to the sampler (unset: 1e-3)", at_least=0
    )
    sapo_tau_pos: float | None = key(doc="sapo: how fast the gradient decays, A > 0 (unset: 1)", above=0)
    sapo_tau_neg: float | None = key(doc="sapo: the same, A <= 0 (unset: 1.05)", above=0)
    vespo_k_pos: float | None = key(doc="vespo: power of the ratio, A >= 0 (unset: 2)", at_least=0)
    vespo_lambda_pos: float | None = key(doc="vespo: its decay, A >= 0 (unset: 3)", above=0)
    vespo_k_neg: float | None = key(doc="vespo: power of the ratio, A < 0 (unset: 3)", at_least=0)
    vespo_lambda_neg: float | None = key(doc="vespo: its decay, A < 0 (unset: 2)", above=0)
    beta: float = key(0.0, doc="weight of the KL to the reference; 0: no reference", at_least=0)
    kl_loss_mode: str | None = key(
        doc="kl (k1), mse_kl (k2), low_var_kl (k3); unset: k1 in the reward, k3 in the loss",
        choices=KL_LOSS_MODES,
    )
    kl_in_reward: bool | None = key(doc="KL in the reward instead of the loss")
    entropy_coef: float = key(0.0, doc="weight of the entropy bonus", at_least=0)
    sampler_is: str | None = key(
        doc="importance weights, trainer / sampler, per token or completion; clipped to the bounds, with mask 0 outside"
        " them (unset: off)",
        choices=("token", "sequence", "token_mask", "sequence_mask"),
    )
    sampler_is_threshold: float | None = key(doc="sampler_is: upper bound (unset: 2; masks 3)", above=0)
    sampler_is_min: float | None = key(doc="sampler_is: lower bound (unset: none)", above=0, below=1)
    sampler_is_kl: bool = key(False, doc="sampler_is: the KL in the loss too")
    off_policy_mask_threshold: float | None = key(
        doc="completions with A < 0 leave the policy loss if the sampler's log-probabilities exceed the current ones "
        "by more, in nats per token on average (unset: off)",
        above=0,
    )
    overlong: str | None = key(
        doc="mask: truncated completions leave the loss; penalty: DAPO's soft penalty (unset: neither)",
        choices=("mask", "penalty"),
    )
    overlong_buffer: int | None = key(doc="tokens before the limit in which the penalty grows", at_least=1)
    overlong_penalty: float | None = key(doc="penalty at the limit (unset: 1)", above=0)
    dynamic_sampling: bool = key(False, doc="groups of equal rewards are replaced; changes the objective")
    max_extra_batches: int | None = key(doc="dynamic_sampling: per step (unset: 4)", at_least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("k", "truncation_order", "alpha"):
            if isinstance(value := getattr(self, name), Mapping):
                schedule = read_schedule(value, f"{self.section}.{name}", whole=name != "alpha")
                for end in (schedule.start, schedule.end):
                    given: dict[str, Any] = {name: end}
                    AlgorithmConfig(**given)  # checks the range


@dataclasses.dataclass(frozen=True)
class PreferenceConfig(Checked):
    """Settings of learning from pairs of completions, the columns `chosen` and `rejected`."""

    section = "preference"
    loss: str = key("sigmoid", doc="dpo: the loss of a pair", choices=("sigmoid", "ipo", "orpo"))
    beta: float = key(0.1, doc="dpo: scale of the log-ratios to the reference; orpo: weight of the odds ratio", above=0)
    label_smoothing: float = key(
        0.0, doc="dpo, sigmoid: assumed fraction of pairs whose completions are swapped", at_least=0, below=0.5
    )
    reference_free: bool = key(False, doc="dpo: the reference is uniform, no model (orpo never has one)")
    center_rewards: float | None = key(
        doc="reward_model: weight of the squared sum of the two rewards of a pair (unset: 0)", above=0
    )


@dataclasses.dataclass(frozen=True)
class TeacherConfig(Checked):
    """Settings of a teacher, which scores every token that the policy samples (on-policy distillation)."""

    section = "teacher"
    path: str | None = key(
        doc="folder or hub id of a model with the vocabulary of the policy, or the address of a vLLM server that has "
        "it, or self: the policy with teacher.prompt; unset: no teacher",
        hub="models",
    )
    quantize: str | None = key(doc="projections of the teacher in 8 or 4 bits", choices=QUANTIZATIONS)
    weights: str | None = key(
        doc="self: current (unset) or initial weights of the policy, without a gradient",
        choices=("current", "initial"),
    )
    prompt: str | None = key(
        doc="format string over columns and {prompt}, in place of the prompt's text (of the last message of the user), "
        "e.g. '{prompt} {solution}'; required by self"
    )
    max_prompt_length: int | None = key(doc="tokens of that prompt (unset: rollout.max_prompt_length)", at_least=1)
    divergence: str = key(
        "reverse_kl",
        doc="reverse_kl: advantage log teacher - log policy of the sampled token; jsd: generalised Jensen-Shannon "
        "divergence of the next-token distributions in the loss",
        choices=("reverse_kl", "jsd"),
    )
    beta: float | None = key(
        doc="jsd: 0 KL(teacher | policy), 1 KL(policy | teacher), between them the mixture (unset: 0.5)",
        at_least=0,
        at_most=1,
    )
    coef: float = key(1.0, doc="weight of the teacher's term", above=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.path == SELF and self.prompt is None:
            raise UserError(
                "teacher.prompt: teacher.path=self needs what the teacher sees more than the policy; set a format "
                "string over columns, e.g. '{prompt} {solution}'."
            )
        if self.path == SELF and self.quantize is not None:
            raise UserError("teacher.quantize: teacher.path=self has the weights of the policy; unset it.")
        if self.served:
            check_server_url("teacher.path", str(self.path), "VLLM_API_KEY")
            if self.quantize is not None:
                raise UserError("teacher.quantize: teacher.path is a server, which has its own weights; unset it.")
            if self.divergence != "reverse_kl":
                raise UserError(
                    f"teacher.divergence: {self.divergence} needs all next-token probabilities, and a server gives "
                    "those of the sampled tokens; set reverse_kl."
                )
        if self.path not in (None, SELF) and self.weights is not None:
            raise UserError("teacher.weights: only teacher.path=self reads it; unset it.")
        if self.max_prompt_length is not None and self.prompt is None:
            raise UserError("teacher.max_prompt_length: it needs teacher.prompt; set it or unset max_prompt_length.")
        if self.divergence != "jsd" and self.beta is not None:
            raise UserError("teacher.beta: only teacher.divergence=jsd reads it; unset it, or set that divergence.")

    def with_path(self, path: str, key: str) -> TeacherConfig:
        """Returns the settings of another teacher, which the config key `key` names. Raises UserError if a setting does
        not fit it."""
        try:
            return dataclasses.replace(self, path=path)
        except UserError as error:
            raise UserError(str(error).replace("teacher.path", key)) from None

    @property
    def of_policy(self) -> bool:
        """Whether the teacher has the current weights of the policy."""
        return self.path == SELF and self.weights != "initial"

    @property
    def served(self) -> bool:
        """Whether `path` is the address of a server."""
        return is_server(self.path)

    @property
    def mixture(self) -> float | None:
        """`beta` of the Jensen-Shannon divergence; None with another divergence."""
        return (0.5 if self.beta is None else self.beta) if self.divergence == "jsd" else None


@dataclasses.dataclass(frozen=True)
class CriticConfig(Checked):
    """Settings of a critic, which estimates the value of each token's state (PPO, arXiv 1707.06347)."""

    section = "critic"
    path: str | None = key(
        doc="ppo: folder or hub id of the critic at the start, such as a reward model; unset: the policy (with "
        "lora.rank its frozen base) with a head that gives 0",
        hub="models",
    )
    learning_rate: float = key(1e-5, doc="peak learning rate; all else as in optimizer", above=0)
    gamma: float = key(1.0, doc="discount per token that the policy samples", above=0, at_most=1)
    gae_lambda: float = key(
        1.0,
        doc="0: advantages from the next value (biased); 1: from the return (unbiased)",
        at_least=0,
        at_most=1,
    )
    value_clip: float | None = key(
        0.2,
        doc="clip range: a new value may differ from the old one by at most this; null: no clipping",
        above=0,
    )
    warmup_steps: int = key(0, doc="first steps, in which only the critic learns", at_least=0)


@dataclasses.dataclass(frozen=True)
class RolloutConfig(Checked):
    section = "rollout"
    max_prompt_length: int = key(512, doc="tokens", at_least=1)
    max_tokens_to_generate: int = key(256, doc="tokens of a completion, with its end-of-sequence token", at_least=1)
    temperature: float = key(1.0, doc="0 (greedy): evaluation only", at_least=0)
    top_p: float = key(1.0, doc="1: off", above=0, at_most=1)
    top_k: int | None = key(doc="unset: off", at_least=1)
    max_concurrent_rows: int | str = key(
        "auto",
        doc="completions sampled at once; auto: all of a step that fit in memory",
        choices=("auto",),
        at_least=1,
        may_change=True,
    )
    mesh: list[int] | str = key(
        "auto",
        doc="devices along data, fsdp, tp (or data, fsdp, ep, tp) while sampling, e.g. [8, 1, 1]; auto: predicted "
        "fastest that fits, without ep",
        may_change=True,
    )
    eos_tokens: list[int] | None = key(doc="ids; unset: those of tokenizer and generation_config.json")
    max_staleness: int = key(
        0,
        doc="steps that sampling is ahead of the updates, on servers or rollout.devices",
        at_least=0,
    )
    routing_replay: bool = key(
        False,
        doc="experts: the trainer uses those that the sampler chose for each token (R3)",
    )
    devices: int | None = key(
        doc="the last N only sample, the others only train; unset: all do both",
        at_least=1,
    )
    engine: str = key(
        "local",
        doc="of RL: local (this process), vllm (servers of urls), FILE.py:NAME or package.module:NAME; SFT and eval "
        "sample here",
    )
    engine_arguments: dict[str, Any] | None = key(doc="of an engine of your own, by name", may_change=True)
    urls: list[str] | None = key(doc="vllm: e.g. [http://127.0.0.1:8000]", may_change=True)
    weights_folder: str | None = key(
        doc="vllm: shared with all servers; unset: engine_weights in the run folder", may_change=True
    )
    request_timeout_seconds: float = key(600.0, doc="vllm: of one turn of a completion", above=0, may_change=True)
    wait_for_servers_seconds: float = key(
        600.0, doc="vllm: without a working server, then the run is saved and stops", above=0, may_change=True
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for url in self.urls or ():
            check_server_url("rollout.urls", url, "VLLM_API_KEY")
        if self.routing_replay and self.engine == "vllm":
            raise UserError(
                "rollout.routing_replay: experts of vLLM servers are not read; set rollout.engine=local, or an engine "
                "of your own whose samples have `experts` and `prompt_experts`."
            )
        sizes = self.mesh if isinstance(self.mesh, list) else []
        if self.mesh != "auto" and (
            len(sizes) not in (3, 4) or any(type(size) is not int or size < 1 for size in sizes)
        ):
            raise UserError(
                f"rollout.mesh: got {self.mesh!r}; give auto, or the numbers of devices along data, fsdp and tp, e.g. "
                "[8, 1, 1], or along data, fsdp, ep and tp, e.g. [2, 1, 4, 1]."
            )


@dataclasses.dataclass(frozen=True)
class RewardsConfig(Checked):
    section = "rewards"
    functions: list[dict[str, Any]] | None = key(
        doc="list of {name, weight, per}; a name is maze, gsm8k, gsm8k_lenient, last_number, reasoning_gym, "
        "exact_match, FILE.py:function, judge (with url and rubric), served_reward_model (with url); per: completion, "
        "turn or potential (of turns); unset: that of the data source"
    )
    success_threshold: float = key(1.0, doc="total reward that counts as success")
    workers: int | None = key(
        doc="processes; 0: the training process; unset: 0 for maze, exact_match, last_number and functions registered "
        "in Python, else up to 4",
        at_least=0,
        may_change=True,
    )
    timeout_seconds: float = key(
        30.0,
        doc="of a worker, for the completions of one prompt; of an attempt of an async function or server",
        above=0,
        may_change=True,
    )
    memory_gb: float = key(4.0, doc="a worker that uses more is replaced", above=0, may_change=True)
    concurrency: int = key(64, doc="calls of an async function or server at the same time", at_least=1, may_change=True)
    retries: int = key(
        4, doc="attempts after a failed one, of an async function or server", at_least=0, may_change=True
    )


@dataclasses.dataclass(frozen=True)
class EnvironmentConfig(Checked):
    """Settings of trajectories with several turns, and of the environment that answers the turns of the model."""

    section = "environment"
    name: str | None = key(
        doc="maze_steps, guess, calculator, openenv, program, FILE.py:NAME or package.module:NAME (class, factory or "
        "async function); unset: one turn"
    )
    arguments: dict[str, Any] | None = key(
        doc="of the class, factory or function, e.g. {url: http://127.0.0.1:8000} for openenv, "
        "{command: [python, my_agent.py]} for program"
    )
    tools: list[str] | None = key(doc="functions, as FILE.py:function or package.module:function, instead of name")
    max_turns: int = key(8, doc="turns of the policy", at_least=1)
    max_observation_tokens: int = key(
        256,
        doc="after one turn, with those of the chat template",
        at_least=1,
    )
    overlong_observation: str = key(
        "cut",
        doc="longer observations; cut: shortened, with a mark; unscored: end without reward",
        choices=("cut", "unscored"),
    )
    history: str = key(
        "sampled",
        doc="earlier turns; sampled: as sampled; template: rendered again by the chat template at each turn",
        choices=("sampled", "template"),
    )
    mode: str = key(
        "lockstep",
        doc="lockstep: wait for all environments, repeatable bit for bit; eager: each continues at once",
        choices=("lockstep", "eager"),
    )
    workers: int | None = key(
        doc="steps at the same time, each trajectory in its own process; unset: up to 4 (openenv, verifiers: 32; "
        "program: 4 per core, at most 32); 0: "
        "in the training process, without limits (default of maze_steps, guess, calculator)",
        at_least=0,
        may_change=True,
    )
    timeout_seconds: float = key(20.0, doc="of one step; its trajectory is then unscored", above=0, may_change=True)
    memory_gb: float = key(4.0, doc="an environment that uses more is stopped", above=0, may_change=True)


@dataclasses.dataclass(frozen=True)
class OptimizerConfig(Checked):
    """Settings of an optimizer with linear warm-up and a learning-rate schedule."""

    section = "optimizer"
    learning_rate: float = key(1e-6, doc="peak learning rate", above=0)
    schedule: str = key("constant", doc="after the warm-up", choices=("constant", "linear", "cosine", "exponential"))
    warmup_steps: int = key(0, doc="linear warm-up", at_least=0)
    end_fraction: float = key(
        0.1, doc="linear, cosine, exponential: last rate / peak; above 1 (rising) only exponential", at_least=0
    )
    weight_decay: float = key(0.0, doc="of matrices only", at_least=0)
    b1: float = key(0.9, doc="decay of the first moment", at_least=0, below=1)
    b2: float = key(0.99, doc="decay of the second moment", at_least=0, below=1)
    eps: float = key(1e-8, doc="added to the root of the second moment", above=0)
    max_grad_norm: float | None = key(1.0, doc="of the global norm; null: off", above=0)
    name: str = key(
        "adamw", doc="muon: for matrices of layers, with adamw for other weights", choices=tuple(OPTIMIZER_KEYS)
    )
    moments_dtype: str = key(
        "float32",
        doc="dtype in which moments are stored; they are computed in float32",
        choices=("float32", "bfloat16"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_unread()
        self._check_decays()
        exponential = self.schedule == "exponential"
        if self.end_fraction > 1 and not exponential:
            raise UserError(f"{self.section}.end_fraction: got {self.end_fraction}; it must be at most 1.")
        if self.end_fraction == 0 and exponential:
            raise UserError(f"{self.section}.end_fraction: got 0; with the schedule 'exponential' set it above 0.")

    def _check_unread(self) -> None:
        """Raises UserError for a key that is set and that the optimizer does not read."""
        optional = set().union(*OPTIMIZER_KEYS.values())
        for field in dataclasses.fields(self):
            unread = field.name in optional and field.name not in OPTIMIZER_KEYS[self.name]
            if unread and getattr(self, field.name) != field.default:
                raise UserError(f"{self.section}.{field.name}: the optimizer '{self.name}' does not read it. Unset it.")

    def _check_decays(self) -> None:
        """Raises UserError for a decay that bfloat16 would round away, so that a moment would never decrease."""
        if self.moments_dtype != "bfloat16":
            return
        for name in ("b1", "b2"):
            if name in OPTIMIZER_KEYS[self.name] and getattr(self, name) > LARGEST_BFLOAT16_DECAY:
                raise UserError(
                    f"{self.section}.{name}: got {getattr(self, name)}; with moments_dtype=bfloat16 it must be at most "
                    f"{LARGEST_BFLOAT16_DECAY}, because a smaller change is rounded away."
                )


@dataclasses.dataclass(frozen=True)
class SFTConfig(Checked):
    section = "sft"
    max_steps: int = key(0, doc="supervised steps on the column answer; 0: none", at_least=0)
    batch_size: int = key(32, doc="examples per step", at_least=1)
    stop_at_success: float | None = key(doc="held-out pass@1 that ends SFT", above=0, at_most=1)
    eval_every_n_steps: int = key(25, doc="between checks of stop_at_success", at_least=1)
    optimizer: OptimizerConfig = dataclasses.field(
        default_factory=lambda: OptimizerConfig(learning_rate=1e-5), metadata={}
    )


@dataclasses.dataclass(frozen=True)
class EvalConfig(Checked):
    section = "eval"
    samples: int = key(16, doc="completions per problem", at_least=1, may_change=True)
    k: list[int] | None = key(doc="of pass@k and maj@k; unset: 1, 2, 4, ... up to samples", may_change=True)
    max_problems: int | None = key(doc="unset: all", at_least=1, may_change=True)
    batch_size: int = key(32, doc="problems sampled at once", at_least=1, may_change=True)
    temperature: float = key(1.0, doc="0: greedy", at_least=0, may_change=True)
    top_p: float = key(1.0, doc="1: off", above=0, at_most=1, may_change=True)


@dataclasses.dataclass(frozen=True)
class RLTrainingConfig(Checked):
    section = "training"
    output_dir: str | None = key(
        doc="run folder or address (gs://, s3://), {a.b} is the value of that key; unset: "
        "runs/<config>-<estimator>-s<seed>, in Python none",
        address=True,
        may_change=True,
    )
    max_steps: int | None = key(doc="rollout batches; unset: one epoch", at_least=1, may_change=True)
    seed: int = key(0, doc="of initial weights, sampling, evaluation", at_least=0)
    mini_batch_size: int | None = key(
        doc="prompts per update (in a smaller last update of a batch, each prompt weighs more); unset: data.batch_size",
        at_least=1,
    )
    train_micro_batch_size: int | str = key(
        "auto",
        doc="completions of full length per pass; auto: as many as fit, up to 16384 tokens per device (CPU: 512)",
        choices=("auto",),
        at_least=1,
        may_change=True,
    )
    logprob_chunk_size: int = key(1024, doc="tokens whose logits are in memory at once", at_least=1)
    eval_every_n_steps: int | None = key(doc="unset: only before and after training", at_least=1, may_change=True)
    checkpoint_every_n_steps: int = key(50, doc="also written at the end", at_least=1, may_change=True)
    changed_inputs: str = key(
        "warn",
        doc="resumed with other reward code or rows; warn: continue; error: stop",
        choices=("warn", "error"),
        may_change=True,
    )
    max_checkpoints_to_keep: int = key(2, doc="newest", at_least=1, may_change=True)
    best_metric: str | None = key(
        doc="e.g. eval/pass@1: its best checkpoint is kept too; needs eval_every_n_steps", may_change=True
    )
    log_rollouts_every_n_steps: int = key(10, doc="completions in rollouts/", at_least=1, may_change=True)
    log_samples_every_n_steps: int | None = key(
        50, doc="printed best and worst completion; null: none", at_least=1, may_change=True
    )
    loggers: list[str] = key(
        ["tensorboard"],
        doc="of tensorboard, wandb, trackio, prometheus; metrics.jsonl is always written",
        may_change=True,
    )
    callbacks: list[dict[str, Any]] | None = key(
        doc="list of {name, <its parameters>}; a name is early_stopping, rate_probe, FILE.py:CLASS or "
        "package.module:CLASS",
        may_change=True,
    )
    profile_steps: list[int] | None = key(
        doc="first and last step of a trace in profile/, e.g. [5, 6]", may_change=True
    )
    max_skipped_updates: int = key(
        5,
        doc="consecutive non-finite updates that stop the run",
        at_least=1,
    )
    max_unscored_steps: int = key(
        5,
        doc="consecutive steps without any reward that save and stop the run (status 75)",
        at_least=1,
        may_change=True,
    )
    max_logprob_gap: float | None = key(
        0.1,
        doc="mean difference between sampler and trainer, in nats per token, that stops the first step; null: off",
        above=0,
        may_change=True,
    )
    later_logprob_gap: str = key(
        "warn",
        doc="a difference above max_logprob_gap in a later step; warn: continue; error: save and stop",
        choices=("warn", "error"),
        may_change=True,
    )
    remat: bool = key(False, doc="recompute layers in the backward pass: less memory, a third more compute")
    actor_optimizer: Any = key(
        doc="an OptimizerConfig or an optax.GradientTransformation; unset: the `optimizer` section", python_only=True
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(set(self.loggers)) != len(self.loggers):
            raise UserError(f"training.loggers: list each logger once; got {self.loggers}.")
        if self.later_logprob_gap == "error" and self.max_logprob_gap is None:
            raise UserError("training.later_logprob_gap: error needs a limit; set training.max_logprob_gap.")

    def prompts_per_update(self, batch_size: int) -> int:
        """Returns the number of prompts of an optimizer update, of `batch_size` prompts of a step."""
        return min(self.mini_batch_size or batch_size, batch_size)


@dataclasses.dataclass(frozen=True)
class MeshConfig(Checked):
    section = "mesh"
    shape: list[int] | str = key(
        "auto", doc="devices along each axis; auto: all along the first, TPU slices along data"
    )
    axis_names: list[str] = key(
        ["fsdp", "tp"],
        doc="of data (prompts), fsdp (prompts and weights), ep (prompts and experts), cp (tokens in training), tp "
        "(heads and features)",
    )


@dataclasses.dataclass(frozen=True)
class Config:
    """The configuration of one run. Each section is a mapping in the YAML file."""

    model: ModelConfig = ModelConfig()
    lora: LoraConfig = LoraConfig()
    data: DataConfig = DataConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    preference: PreferenceConfig = PreferenceConfig()
    teacher: TeacherConfig = TeacherConfig()
    critic: CriticConfig = CriticConfig()
    rollout: RolloutConfig = RolloutConfig()
    rewards: RewardsConfig = RewardsConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    sft: SFTConfig = dataclasses.field(default_factory=SFTConfig)
    eval: EvalConfig = EvalConfig()
    training: RLTrainingConfig = RLTrainingConfig()
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)

    @property
    def trains_pairs(self) -> bool:
        """Whether the run trains on pairs of completions instead of rollouts."""
        return self.algorithm.advantage_estimator in PAIR_LEARNERS

    @property
    def has_reference(self) -> bool:
        """Whether the run holds a second model, its reference, in memory."""
        if not self.trains_pairs:
            return self.algorithm.beta > 0
        free = self.preference.reference_free or self.preference.loss == "orpo"
        return self.algorithm.advantage_estimator == "dpo" and not free
