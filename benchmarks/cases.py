"""What is timed: models, cases, the batch of each and its arithmetic. Both sides of a comparison read it.

It imports numpy and nothing else, because it also runs in the peer's environment; it knows neither library.

Lengths are forced without touching a library. Under random weights the next token is near uniform, so a set of
`V * hazard` end tokens gives geometric lengths; an end token that is not in the vocabulary gives full ones. Where a row
must end at an exact token before the limit, the weights are made to count (`counting_weights`).
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

MEAN_SHARE = 55 / 128
"""Mean length of EOS-spread completions, as a share of the longest."""

START = 1
"""Last prompt token for weights that count: completions are START + 1, START + 2, ..."""


@dataclasses.dataclass(frozen=True)
class Model:
    """A Qwen3 shape with a tied head."""

    layers: int
    width: int
    inner: int
    heads: int
    kv_heads: int
    head: int
    vocab: int

    def hf_config(self) -> dict[str, Any]:
        """Returns its Hugging Face `config.json`. The base of the rotations is 1e6, because the peer ignores the
        config's value."""
        return {
            "model_type": "qwen3",
            "vocab_size": self.vocab,
            "hidden_size": self.width,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head,
            "rope_theta": 1e6,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
            "max_position_embeddings": 8192,
        }

    @property
    def layer_matrices(self) -> int:
        """Returns the number of matrix entries that a token is multiplied with in the layers."""
        attention = self.width * self.head * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.width * self.inner)


MODELS = {
    "tiny": Model(layers=4, width=256, inner=768, heads=4, kv_heads=2, head=64, vocab=512),
    "mid": Model(layers=8, width=512, inner=1536, heads=8, kv_heads=4, head=64, vocab=32768),
    "qwen3_0.6b": Model(layers=28, width=1024, inner=3072, heads=16, kv_heads=8, head=128, vocab=151936),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One thing to time.

    Attributes:
      kind: `rollout`, `update` (one optimizer step on given completions) or `step` (a whole training step); `logits`
        and `matmul` are for checks.
      prompts, group, prompt_length, length: P, G, S, T.
      spread: lengths are geometric with a mean of `MEAN_SHARE` of T, instead of all T.
      room: tokens (prompt and completion) that the sampler must be ready for; None is S + T. Completions end at T all
        the same.
      top_p: nucleus of the sampling.
      beta: weight of the KL to a reference model.
      counting: the model counts tokens, so that a row ends at a chosen length.
      peer_prompts: prompts of one of the peer's micro-batches; None is its default, the whole batch.
      dtype: of the matrix products; None is what the library takes by itself.
    """

    model: Model
    kind: str
    prompts: int = 4
    group: int = 8
    prompt_length: int = 64
    length: int = 128
    spread: bool = False
    room: int | None = None
    top_p: float = 1.0
    beta: float = 0.0
    counting: bool = False
    peer_prompts: int | None = None
    dtype: str | None = None

    @property
    def rows(self) -> int:
        return self.prompts * self.group

    @property
    def max_tokens(self) -> int:
        """Returns the completion tokens that the sampler must have space for."""
        return self.length if self.room is None else self.room - self.prompt_length

    def eos_ids(self) -> list[int]:
        if self.counting:
            return [START + self.length]
        if not self.spread:
            return [self.model.vocab]  # no token has this id
        count = max(1, round(self.model.vocab * _hazard(self.length)))
        return (1 + np.random.default_rng(1).permutation(self.model.vocab - 1)[:count]).tolist()

    def batch(self) -> Batch:
        """Returns the batch, which is the same for both sides. Token 0 is not used, because the peer treats it as
        padding."""
        rng = np.random.default_rng(2)
        prompts = rng.integers(1, self.model.vocab, (self.prompts, self.prompt_length), np.int32)
        shape = (self.prompts, self.group)
        completions = rng.integers(1, self.model.vocab, (*shape, self.length), np.int32)
        lengths = np.full(shape, self.length, np.int32)
        if self.counting:
            prompts[:, -1] = START
        if self.spread:
            lengths = np.minimum(rng.geometric(_hazard(self.length), shape), self.length).astype(np.int32)
        completions[np.arange(self.length) >= lengths[..., None]] = 0
        # All rewards differ, so that every group has a signal and neither side can omit one.
        return Batch(prompts, completions, lengths, rng.permutation(self.rows).astype(np.float32))

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Case:
        fields = json.loads(text)
        return cls(**fields | {"model": Model(**fields["model"])})


class Batch(NamedTuple):
    """`prompts [P, S]`, `completions [P, G, T]` (0 beyond their end), `lengths [P, G]`, `rewards [P * G]`."""

    prompts: np.ndarray
    completions: np.ndarray
    lengths: np.ndarray
    rewards: np.ndarray


_LONG = {"prompt_length": 512, "length": 64, "prompts": 1}
_LARGE = {"prompts": 64, "group": 16, "prompt_length": 256, "length": 1024, "spread": True}

CASES: dict[str, dict[str, Any]] = {
    "rollout": {"kind": "rollout"},
    "rollout_eos": {"kind": "rollout", "spread": True},
    "rollout_room_256": {"kind": "rollout", "room": 256, "counting": True},
    "rollout_room_1024": {"kind": "rollout", "room": 1024, "counting": True},
    "rollout_room_4096": {"kind": "rollout", "room": 4096, "counting": True},
    "rollout_top_p": {"kind": "rollout", "top_p": 0.95},
    "rollout_s512": {"kind": "rollout"} | _LONG | {"prompts": 4},
    "rollout_s512_g1": {"kind": "rollout", "group": 1} | _LONG,
    "rollout_s512_g8": {"kind": "rollout", "group": 8} | _LONG,
    "rollout_s512_g64": {"kind": "rollout", "group": 64} | _LONG,
    "update": {"kind": "update"},
    "update_split": {"kind": "update", "peer_prompts": 1},
    "update_eos": {"kind": "update", "spread": True},
    "update_2x16_s256": {"kind": "update", "prompts": 2, "group": 16, "prompt_length": 256, "length": 64},
    "update_s512_g1": {"kind": "update", "group": 1} | _LONG,
    "update_s512_g4": {"kind": "update", "group": 4} | _LONG,
    "update_s512_g8": {"kind": "update", "group": 8} | _LONG,
    "update_s512_g16": {"kind": "update", "group": 16} | _LONG,
    "update_s512_g64": {"kind": "update", "group": 64} | _LONG,
    "update_s512_g128": {"kind": "update", "group": 128} | _LONG,
    "step": {"kind": "step", "spread": True, "beta": 0.04},
    "step_full": {"kind": "step", "counting": True},
    "rollout_large": {"kind": "rollout"} | _LARGE,
    "update_large": {"kind": "update"} | _LARGE,
    "step_large": {"kind": "step"} | _LARGE,
}
"""Name to the fields of its `Case`, without the model. Those called `large` are for accelerators."""

ON_REQUEST = ("rollout_large", "update_large", "step_large")
"""Cases that only run when they are named."""


def make_case(name: str, size: str) -> Case:
    return Case(model=MODELS[size], **CASES[name])


def _hazard(longest: int) -> float:
    """Returns the probability of an end at each token for which geometric lengths, cut at `longest`, have the wanted
    mean."""
    low, high = 1e-9, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        mean = (1 - (1 - middle) ** longest) / middle
        low, high = (middle, high) if mean > MEAN_SHARE * longest else (low, middle)
    return high


def floating_operations(case: Case, lengths: np.ndarray) -> float:
    """Returns the multiplications and additions that the case requires, with each prompt computed once: matrix products
    and attention over the visible tokens, and logits where a token is predicted. The backward pass counts twice the
    forward pass; a reference is one forward pass."""
    model = case.model
    per_pair = 4 * model.layers * model.heads * model.head  # scores and their weighted sum over values
    s, n = case.prompt_length, lengths.astype(np.float64)
    prompt = case.prompts * (2.0 * model.layer_matrices * s + per_pair * s * (s + 1) / 2)
    # Token j of a completion (j < n - 1: the last one is never an input) attends to the prompt and j + 1 tokens.
    pairs = (n - 1) * s + (n - 1) * n / 2
    completions = 2.0 * model.layer_matrices * (n - 1) + per_pair * pairs + 2.0 * model.width * model.vocab * n
    forward = prompt + completions.sum()
    return forward * {"rollout": 1, "update": 3, "step": 4 + (case.beta > 0)}[case.kind]


def write_model(case: Case, folder: Path) -> None:
    """Writes a Hugging Face folder with the case's weights, which both sides load."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(case.model.hf_config()))
    weights = dict(_random_weights(case.model))
    if case.counting:
        weights |= _counting_weights(case.model)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _random_weights(model: Model) -> Iterator[tuple[str, np.ndarray]]:
    rng = np.random.default_rng(0)

    def matrix(outputs: int, inputs: int) -> np.ndarray:
        return rng.standard_normal((outputs, inputs), np.float32) * np.float32(inputs**-0.5)

    width, inner, q, kv = model.width, model.inner, model.heads * model.head, model.kv_heads * model.head
    shapes = {"q_proj": (q, width), "k_proj": (kv, width), "v_proj": (kv, width), "o_proj": (width, q)}
    yield "model.embed_tokens.weight", matrix(model.vocab, width)
    yield "model.norm.weight", np.ones(width, np.float32)
    for layer in (f"model.layers.{i}" for i in range(model.layers)):
        for name, shape in shapes.items():
            yield f"{layer}.self_attn.{name}.weight", matrix(*shape)
        for name in ("q_norm", "k_norm"):
            yield f"{layer}.self_attn.{name}.weight", np.ones(model.head, np.float32)
        for name, shape in {"gate": (inner, width), "up": (inner, width), "down": (width, inner)}.items():
            yield f"{layer}.mlp.{name}_proj.weight", matrix(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{layer}.{name}.weight", np.ones(width, np.float32)


def _counting_weights(model: Model) -> dict[str, np.ndarray]:
    """Returns weights with which token `t` is followed by `t + 1` almost surely, at the cost of any other weights.

    The embedding of `t` is `cos(a t), sin(a t)` for many angles `a`, and a constant. Only the first layer's MLP writes
    to the residual stream: its gate reads the constant, so that it is linear, and it rotates the embedding by one step.
    The scale of the embedding makes the score of `t + 1` larger than any other by far more than the noise of sampling.
    """
    width, inner = model.width, model.inner
    count = min(width // 2 - 1, inner // 2)
    angles = np.random.default_rng(3).uniform(0, 2 * math.pi, count)
    turns = np.arange(model.vocab)[:, None] * angles
    embedding = np.zeros((model.vocab, width))
    embedding[:, :count], embedding[:, count : 2 * count], embedding[:, -1] = np.cos(turns), np.sin(turns), 1.0
    normed = math.sqrt(width / (count + 1))  # the constant's value after the norm, and the scale of all others
    gate, up, down = np.zeros((inner, width)), np.zeros((inner, width)), np.zeros((width, inner))
    gate[:, -1] = 1.0
    up[: 2 * count, : 2 * count] = np.eye(2 * count)
    one, cosine, sine = np.eye(count), np.diag(np.cos(angles)), np.diag(np.sin(angles))
    down[: 2 * count, : 2 * count] = np.block([[cosine - one, -sine], [sine, cosine - one]])
    down /= normed * normed / (1 + math.exp(-normed))
    weights = {"model.embed_tokens.weight": embedding}
    for layer in range(model.layers):
        name = f"model.layers.{layer}"
        weights[f"{name}.self_attn.o_proj.weight"] = np.zeros((width, model.heads * model.head))
        weights[f"{name}.mlp.down_proj.weight"] = down if layer == 0 else np.zeros_like(down)
    weights |= {"model.layers.0.mlp.gate_proj.weight": gate, "model.layers.0.mlp.up_proj.weight": up}
    return {name: value.astype(np.float32) for name, value in weights.items()}
