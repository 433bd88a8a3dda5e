"""Tests that logits agree with transformers on tiny random models of every family, in both directions, and that the
decoder is causal and ignores padding."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.parameters import others_slow
from tests.rollout.arrays import sample_groups
from tunix_like.models.config import DecoderConfig
from tunix_like.models.decoder import Decoder
from tunix_like.models.loading import load_model, save_model
from tunix_like.models.log_probabilities import token_logprobs
from tunix_like.models.weights import hf_name
from tunix_like.rollout.sampler import Sampler
from tunix_like.rollout.shapes import pad_tokens
from tunix_like.training.forward import ForwardOptions, batch_logprobs
from tunix_like.training.packing import choose_layout, pack
from tunix_like.types import GroupBatch, SamplingParams

SMALL = {
    "vocab_size": 53,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "attn_implementation": "eager",
}
# With head_dim 8 and theta 1e4 the wavelengths are 6.3, 63, 628 and 6283: one below 64 / 4, one between, two above 64 /
# 1.
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES = {
    "qwen2": ("Qwen2", {}),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 24, "tie_word_embeddings": True}),  # 4 heads x 24 is not 32
    "qwen3-untied": ("Qwen3", {"head_dim": 16}),
    "llama": ("Llama", {"num_key_value_heads": 4}),
    "llama-rope": ("Llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    # Windows of 8 begin within prompts, within completions and across both. The caps are low enough to change most
    # scores.
    "gemma3": (
        "Gemma3",
        {
            "head_dim": 8,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "num_hidden_layers": 3,
            "query_pre_attn_scalar": 12,
            "final_logit_softcapping": 3.0,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 2e3},
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            },
        },
    ),
    "gemma2": (
        "Gemma2",
        {
            "head_dim": 24,
            "sliding_window": 8,
            "query_pre_attn_scalar": 12,
            "attn_logit_softcapping": 1.5,
            "final_logit_softcapping": 3.0,
            "tie_word_embeddings": False,  # with a tied embedding of this size, a token would predict itself
        },
    ),
    # The convolution and prompts shorter than it, value heads that share key heads, rotation of half of a head.
    "qwen3.5": (
        "Qwen3_5",
        {
            "head_dim": 8,
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        },
    ),
    "mistral": ("Mistral", {"sliding_window": 11, "head_dim": 16}),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0]}),
    "qwen3-moe": (
        "Qwen3Moe",
        {
            "head_dim": 8,
            "num_hidden_layers": 3,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 12,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3-moe-shares": (
        "Qwen3Moe",
        {
            "head_dim": 8,
            "num_experts": 4,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 12,
            "norm_topk_prob": False,
            "decoder_sparse_step": 2,
        },
    ),
}
LENGTHS = (40, 11, 1)
TOKENS = np.random.default_rng(0).integers(0, SMALL["vocab_size"], (len(LENGTHS), max(LENGTHS)))
RIGHT = np.arange(max(LENGTHS))[None] < np.array(LENGTHS)[:, None]
MASKS = {"right": RIGHT, "left": RIGHT[:, ::-1].copy()}


VARIANTS = ("qwen2-tied", "qwen3-untied", "llama-rope", "gemma2", "mistral", "smollm3", "qwen3-moe-shares")
"""Families whose parts another family also has. A plain run tests only the other one."""


def slow_variants(names):
    return [pytest.param(name, marks=pytest.mark.slow) if name in VARIANTS else name for name in names]


@pytest.fixture(scope="session", params=slow_variants(FAMILIES))
def reference(request, tmp_path_factory):
    """Returns (transformers model, folder of the saved model) of one family."""
    import torch
    import transformers

    name, extra = FAMILIES[request.param]
    torch.manual_seed(0)
    made = getattr(transformers, f"{name}ForCausalLM")
    model = made(made.config_class(**SMALL | extra)).float().eval()
    with torch.no_grad():  # transformers initializes biases with 0 and norms with 1, which would hide swapped names
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    return model, folder


def hf_logits(model, mask):
    import torch

    with torch.no_grad():
        out = model(input_ids=torch.tensor(TOKENS), attention_mask=torch.tensor(mask).long())
    return out.logits.numpy()


def our_logits(model, mask):
    return np.asarray(model(jnp.asarray(TOKENS), jnp.asarray(mask)))


def params_of(model):
    return nnx.to_pure_dict(nnx.split(model)[1])


@pytest.mark.parametrize("side", MASKS)
def test_logits_agree_with_transformers(reference, side):
    hf, folder = reference
    ours, tokenizer = load_model(folder)
    theirs, mask = hf_logits(hf, MASKS[side]), MASKS[side]
    assert tokenizer is None
    assert theirs[mask].std() > 0.3, "logits near zero would agree with anything"
    np.testing.assert_allclose(our_logits(ours, mask)[mask], theirs[mask], rtol=0, atol=1e-4)


@pytest.mark.parametrize("reference", others_slow(FAMILIES, "gemma3"), indirect=True)
def test_sampled_tokens_and_their_log_probabilities(reference):
    """64 greedy tokens are the argmax of the full forward pass of transformers. Tokens drawn at a temperature have the
    log-probabilities that transformers and the trainer compute."""
    import torch

    hf, folder = reference
    graphdef, state = nnx.split(load_model(folder)[0])
    params, prompts, steps = nnx.to_pure_dict(state), [TOKENS[0, :17].tolist(), TOKENS[1, :3].tolist()], 64
    sampler = Sampler(graphdef, (), max_prompt_length=24, max_tokens=steps)
    for temperature in (0.0, 0.7):
        found = sample_groups(sampler, params, prompts, [0, 1], 2, jax.random.key(0), SamplingParams(temperature))
        logits = np.empty((2, 2, steps, SMALL["vocab_size"]))
        for p, i in np.ndindex(2, 2):
            with torch.no_grad():
                out = hf(input_ids=torch.tensor([[*prompts[p], *found.tokens[p, i].tolist()]])).logits[0]
            logits[p, i] = out[len(prompts[p]) - 1 : -1].double().numpy()
        if temperature == 0:
            np.testing.assert_array_equal(found.tokens, logits.argmax(axis=-1))
            assert len(np.unique(found.tokens)) > 4, "one token over and over would not tell positions apart"
            continue
        scaled = logits / temperature
        table = scaled - np.log(np.exp(scaled).sum(axis=-1, keepdims=True))
        expected = np.take_along_axis(table, found.tokens[..., None], axis=-1)[..., 0]
        np.testing.assert_allclose(found.logprobs, expected, rtol=0, atol=1e-4)
        batch = GroupBatch(
            pad_tokens(prompts, 24), np.array([17, 3], np.int32), found.tokens, found.lengths, None,
            rewards=np.zeros((2, 2), np.float32), scored=np.ones((2, 2), bool),
        )  # fmt: skip
        packed = pack(found.lengths, batch.scored, steps, choose_layout(2, 2, (24, steps), 3))
        options = ForwardOptions(temperature, chunk=50, remat=False)
        trained = jax.jit(batch_logprobs, static_argnums=(0, 4))(graphdef, params, batch, packed, options)
        np.testing.assert_allclose(trained, found.logprobs, rtol=0, atol=1e-4)


NEW = ("gemma3", "qwen3.5", "gemma2", "mistral", "smollm3", "qwen3-moe", "qwen3-moe-shares")
BINS = ((9, 7), (3, 12))  # lengths of completions that share a bin of 20, for prompts of 17 and 3 tokens


@pytest.mark.parametrize("reference", others_slow(NEW, "qwen3-moe"), indirect=True)
def test_gradients_agree_with_autograd(reference):
    """Compares the gradient of every weight. Prompts are computed once, and completions share bins."""
    import torch

    hf, folder = reference
    model, _ = load_model(folder)
    rng = np.random.default_rng(2)
    lengths, tokens = np.array([17, 3], np.int32), rng.integers(0, SMALL["vocab_size"], (2, 1, 20))
    segments = np.array([[[0] * a + [1] * b + [-1] * (20 - a - b)] for a, b in BINS])
    offsets = np.array([[[*range(a), *range(b), *range(20 - a - b)]] for a, b in BINS])
    weights = np.where(segments >= 0, rng.normal(size=tokens.shape), 0).astype(np.float32)
    graphdef, state = nnx.split(model)

    def loss(params):
        model = nnx.merge(graphdef, params)
        first, cache = model.prefill(jnp.asarray(TOKENS[:2, :24]), jnp.asarray(lengths))
        hidden = model.completion_hidden(first, cache, *map(jnp.asarray, (lengths, tokens, offsets, segments)))
        lanes, cap = hidden.reshape(len(hidden), -1, hidden.shape[-1]), model.config.logits_cap
        found, _ = token_logprobs(lanes, model.head(), jnp.asarray(tokens).reshape(len(tokens), -1), 1.0, 100, cap=cap)
        return (found * weights.reshape(found.shape)).sum()

    ours = jax.jit(jax.grad(loss))(nnx.to_pure_dict(state))
    hf.zero_grad()
    for p, i in np.ndindex(2, 2):
        mine = segments[p, 0] == i
        sequence = torch.tensor(np.concatenate([TOKENS[p, : lengths[p]], tokens[p, 0, mine]]))[None]
        table = hf(input_ids=sequence).logits[0, lengths[p] - 1 : -1].log_softmax(-1)
        found = table.gather(1, sequence[0, lengths[p] :, None])[:, 0]
        (found * torch.tensor(weights[p, 0, mine])).sum().backward()
    theirs = {name: parameter.grad.numpy() for name, parameter in hf.named_parameters()}
    hf.zero_grad()
    compared = dict(named_gradients(ours))
    for name in [name for name in theirs if name.endswith("gate_up_proj")]:  # fused in memory, separate in files
        stem, fused = name.removesuffix("gate_up_proj"), theirs.pop(name)
        theirs |= dict(zip((f"{stem}gate_proj", f"{stem}up_proj"), np.split(fused, 2, axis=1), strict=True))
    assert compared.keys() == theirs.keys()
    for name, value in theirs.items():
        assert np.abs(value).max() > 1e-4, name
        np.testing.assert_allclose(compared[name], value, rtol=0, atol=1e-4 * np.abs(value).max(), err_msg=name)


def named_gradients(tree):
    """Returns the gradients with the names and the layout that transformers has in memory."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        keys = tuple(key.key for key in path)
        name = hf_name(keys) if "experts" not in keys else f"model.{'.'.join(map(str, keys[:-1]))}"
        yield name, np.asarray(leaf.swapaxes(-1, -2) if keys[-1] == "kernel" else leaf)


def test_exported_model_loads_in_transformers(reference, tmp_path):
    import torch
    import transformers

    hf, folder = reference
    ours, _ = load_model(folder)
    save_model(params_of(ours), ours.config, None, tmp_path)
    # an explicit check of every name: transformers only warns about missing and unexpected tensors
    again, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation="eager", output_loading_info=True
    )
    assert not any(info.values()), info
    assert type(again) is type(hf) and again.dtype == torch.float32
    for name, value in hf.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name
    mask = MASKS["right"]
    np.testing.assert_array_equal(hf_logits(again.eval(), mask)[mask], hf_logits(hf, mask)[mask])


def test_export_without_a_source_config(reference, tmp_path):
    """transformers also loads a decoder that was created from numbers only."""
    import dataclasses

    import transformers

    hf, folder = reference
    ours, _ = load_model(folder)
    save_model(params_of(ours), dataclasses.replace(ours.config, source=None), None, tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    mask = MASKS["right"]
    np.testing.assert_array_equal(hf_logits(again, mask)[mask], hf_logits(hf, mask)[mask])


def test_sharded_weights_of_transformers_load(reference, tmp_path):
    hf, folder = reference
    hf.save_pretrained(tmp_path, max_shard_size="20KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    jax.tree.map(np.testing.assert_array_equal, params_of(load_model(tmp_path)[0]), params_of(load_model(folder)[0]))


def make_decoder():
    config = DecoderConfig(
        vocab_size=23,
        hidden_size=16,
        intermediate_size=24,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=4,
        qkv_bias=True,
        qk_norm=True,
    )
    return Decoder(config, rngs=nnx.Rngs(0))


def test_logits_have_no_gradient_from_later_tokens():
    """All tokens differ, so the embedding row of a token gets a gradient from the logits at position t exactly if the
    token is at or before t."""
    graphdef, state = nnx.split(make_decoder())
    params, tokens = nnx.to_pure_dict(state), np.random.default_rng(1).permutation(23)[:9]

    def scores(table):
        model = nnx.merge(graphdef, params | {"embed_tokens": {"embedding": table}})
        # unequal coefficients, because a plain sum over the vocabulary could cancel
        return model(jnp.asarray(tokens)[None])[0] @ jnp.arange(1.0, 24.0)

    jacobian = jax.jit(jax.jacrev(scores))(params["embed_tokens"]["embedding"])  # [position, vocabulary, width]
    reached = np.abs(jacobian).max(axis=-1)[:, tokens] > 0
    np.testing.assert_array_equal(reached, np.tril(np.ones((9, 9), bool)))


@pytest.mark.parametrize("side", others_slow(MASKS, "left"))
def test_padding_does_not_change_the_logits(side):
    decoder, mask = make_decoder(), MASKS[side]
    model = nnx.jit(lambda *inputs: decoder(*inputs))
    tokens = jnp.asarray(TOKENS % 23)
    padded = np.asarray(model(tokens, jnp.asarray(mask)))
    other = np.asarray(model(jnp.where(mask, tokens, (tokens + 7) % 23), jnp.asarray(mask)))
    np.testing.assert_array_equal(padded[mask], other[mask], "the token under the padding matters")
    for row, real in enumerate(mask):
        alone = np.asarray(model(tokens[row, real][None]))[0]
        np.testing.assert_allclose(padded[row, real], alone, rtol=0, atol=1e-5)
