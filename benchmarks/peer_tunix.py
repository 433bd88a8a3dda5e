"""The peer's side of a case, run in the peer's environment: google-tunix 0.1.7 through its public classes.

Its rollouts are those of its vanilla engine, which its learner uses. Its update is the one that its learner passes to
its trainer. Its step is its learner's training loop. Its defaults are kept, except for settings that make the work of
both sides equal: no warm-up and no clipping, the same estimate of the KL, float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from tunix.models.qwen3.model import ModelConfig, Qwen3
from tunix.models.qwen3.params import create_model_from_safe_tensors
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner, TrainExample
from tunix.rl.rl_cluster import ClusterConfig, RLCluster, RLTrainingConfig, Role
from tunix.rl.rollout.base_rollout import CacheConfig, RolloutConfig
from tunix.rl.rollout.vanilla_rollout import VanillaRollout

from benchmarks.cases import Case
from benchmarks.worker import Gate, serve

LEARNING_RATE = 1e-6
FOREVER = 10**6


class WordTokenizer:
    """A tokenizer with words `t0`, `t1`, ... for the ids. 0 is padding, and no token starts a prompt."""

    def encode(self, text: str, **_: Any) -> list[int]:
        return [int(word[1:]) for word in text.split()]

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return " ".join(f"t{i}" for i in ids)

    def bos_id(self) -> int:
        return 0

    def eos_id(self) -> int:
        return 1

    def pad_id(self) -> int:
        return 0


def run_case(case: Case, gate: Gate, folder: Path | None) -> None:
    """Repeats the case until the gate raises `Finished`."""
    assert folder is not None, "the peer reads its weights from a folder"
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    kinds = {"rollout": _rollout, "update": _update, "step": _step, "logits": _logits}
    with mesh:
        kinds[case.kind](case, mesh, gate, folder)


def _load(case: Case, mesh: Mesh, folder: Path) -> Qwen3:
    shape = case.model
    config = ModelConfig(
        num_layers=shape.layers,
        vocab_size=shape.vocab,
        embed_dim=shape.width,
        hidden_dim=shape.inner,
        num_heads=shape.heads,
        head_dim=shape.head,
        num_kv_heads=shape.kv_heads,
        rope_theta=1_000_000,
        norm_eps=1e-6,
        use_tied_embedding=True,
    )
    return create_model_from_safe_tensors(str(folder), config, mesh)


def _texts(case: Case) -> list[str]:
    return [WordTokenizer().decode(prompt) for prompt in case.batch().prompts.tolist()]


def _rollout_config(case: Case, **more: Any) -> RolloutConfig:
    return RolloutConfig(
        max_tokens_to_generate=case.max_tokens,
        max_prompt_length=case.prompt_length,
        kv_cache_size=case.prompt_length + case.max_tokens,
        temperature=1.0,
        top_p=case.top_p,
        eos_tokens=case.eos_ids(),
        **more,
    )


def _useful(case: Case, tokens: Sequence[np.ndarray]) -> int:
    """Returns the number of sampled tokens. It includes the end token of a completion, which the peer's output does not
    contain."""
    return sum(min(len(row) + 1, case.max_tokens) for row in tokens)


def _rollout(case: Case, mesh: Mesh, gate: Gate, folder: Path) -> None:
    model, shape = _load(case, mesh, folder), case.model
    cache = CacheConfig(case.prompt_length + case.max_tokens, shape.layers, shape.kv_heads, shape.head)
    engine = VanillaRollout(model, WordTokenizer(), cache)
    prompts = [text for text in _texts(case) for _ in range(case.group)]
    gate.begin()
    for repeat in range(FOREVER):
        out = engine.generate(prompts, _rollout_config(case, seed=repeat))
        gate.end(_useful(case, out.tokens))


def _learner(case: Case, mesh: Mesh, folder: Path, lengths: list[int]) -> GRPOLearner:
    """Returns a learner as its users create one. `lengths` gets the useful tokens of every batch that is scored."""
    micro = case.peer_prompts
    training = RLTrainingConfig(
        actor_optimizer=optax.adamw(LEARNING_RATE),
        eval_every_n_steps=FOREVER,
        max_steps=FOREVER,
        mini_batch_size=None if micro is None else case.prompts,
        train_micro_batch_size=micro,
    )
    cluster = RLCluster(
        actor=_load(case, mesh, folder),
        reference=_load(case, mesh, folder) if case.beta else None,
        tokenizer=WordTokenizer(),
        cluster_config=ClusterConfig(
            role_to_mesh={role: mesh for role in (Role.ACTOR, Role.REFERENCE, Role.ROLLOUT)},
            rollout_engine="vanilla",
            training_config=training,
            rollout_config=_rollout_config(case),
        ),
    )
    rewards = case.batch().rewards

    def reward(prompts: Sequence[str], completions: Sequence[str], **_: Any) -> list[float]:
        encode = WordTokenizer().encode
        lengths.append(_useful(case, [np.array(encode(text)) for text in completions]))
        return rewards.tolist()

    algorithm = GRPOConfig(num_generations=case.group, beta=case.beta, kl_loss_mode="low_var_kl")
    return GRPOLearner(rl_cluster=cluster, algo_config=algorithm, reward_fns=reward)


def _gradient_norm(learner: GRPOLearner) -> dict[str, float]:
    """Returns the norm of the first update's gradient, after the trainer has logged it (one step late)."""
    log = learner.rl_cluster.actor_trainer.metrics_logger
    if not log.metric_exists("actor", "grad_norm", "train"):
        return {}
    return {"grad_norm": float(log.get_metric_history("actor", "grad_norm", "train")[0])}


def _update(case: Case, mesh: Mesh, gate: Gate, folder: Path) -> None:
    learner, batch = _learner(case, mesh, folder, []), case.batch()
    groups = batch.rewards.reshape(case.prompts, case.group)
    centred = groups - groups.mean(axis=1, keepdims=True)
    advantages = (centred / (groups.std(axis=1, ddof=1, keepdims=True) + 1e-6)).reshape(-1)
    prompts = np.repeat(batch.prompts, case.group, axis=0)
    completions, lengths = batch.completions.reshape(case.rows, -1), batch.lengths.reshape(-1)
    size = case.rows if case.peer_prompts is None else case.peer_prompts * case.group

    def example(rows: slice) -> TrainExample:
        return TrainExample(
            prompt_ids=jnp.asarray(prompts[rows]),
            prompt_mask=jnp.ones(prompts[rows].shape, bool),
            completion_ids=jnp.asarray(completions[rows]),
            completion_mask=jnp.asarray(np.arange(case.length) < lengths[rows, None]),
            advantages=jnp.asarray(advantages[rows]),
            ref_per_token_logps=None,
            old_per_token_logps=None,
        )

    examples = [example(slice(start, start + size)) for start in range(0, case.rows, size)]
    tokens = int(lengths.sum())
    gate.begin()
    while True:
        for one in examples:  # as in its learner's loop, one call for each micro-batch
            learner.rl_cluster.update_actor([one], None)
        gate.end(tokens, **_gradient_norm(learner))


def _step(case: Case, mesh: Mesh, gate: Gate, folder: Path) -> None:
    lengths: list[int] = []
    learner = _learner(case, mesh, folder, lengths)
    prompts = np.array(_texts(case))

    def batches() -> Iterator[dict[str, np.ndarray]]:
        """Yields batches. The learner asks for the next batch when the previous step is complete."""
        yield {"prompts": prompts}
        while True:
            gate.end(lengths[-1], **_gradient_norm(learner))
            yield {"prompts": prompts}

    gate.begin()
    learner.train(batches())


def _logits(case: Case, mesh: Mesh, gate: Gate, folder: Path) -> None:
    model = _load(case, mesh, folder)
    tokens = jnp.asarray(case.batch().prompts[:1])
    positions = jnp.arange(tokens.shape[1])[None]
    mask = jnp.tril(jnp.ones((1, tokens.shape[1], tokens.shape[1]), bool))
    gate.begin()
    while True:
        logits = np.asarray(model(tokens, positions, None, mask)[0], np.float64)
        gate.end(tokens.size, mean=logits.mean(), deviation=logits.std(), last=logits[0, -1, -1])


if __name__ == "__main__":
    serve(run_case)
