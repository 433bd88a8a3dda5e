"""Tests that logits agree with transformers on tiny random models of every family, in both directions, and that the
decoder is causal and ignores padding."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file, save_file

from tests.parameters import others_slow
from tests.rollout.arrays import sample_groups
from tunix_like.errors import UserError
from tunix_like.models.config import DecoderConfig
from tunix_like.models.decoder import Bins, Decoder
from tunix_like.models.layers import rope_frequencies, rope_tables
from tunix_like.models.loading import load_model, save_model
from tunix_like.models.log_probabilities import token_logprobs
from tunix_like.models.weights import check_weights, hf_name, load_weights
from tunix_like.rollout.sampler import Sampler
from tunix_like.rollout.shapes import pad_tokens
from tunix_like.step.forward import ForwardOptions, batch_logprobs
from tunix_like.step.packing import choose_layout, pack
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
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 2.0,
    "beta_slow": 0.25,
}
FAMILIES = {
    "qwen2": ("Qwen2", {}),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 24, "tie_word_embeddings": True}),  # 4 heads x 24 is not 32
    "qwen3-untied": ("Qwen3", {"head_dim": 16}),
    "llama": ("Llama", {"num_key_value_heads": 4}),
    "llama-yarn": ("Llama", {"rope_parameters": YARN, "head_dim": 16}),
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
    # As Gemma 4 E2B: keys of earlier layers with and without a window, wide MLPs in layers that read them, a second
    # embedding with more rows, global heads of another width.
    "gemma4": (
        "Gemma4",
        {
            "head_dim": 4,  # small: the scores are not scaled, so large ones magnify rounding
            "global_head_dim": 8,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", *["sliding_attention", "full_attention"] * 2],
            "num_hidden_layers": 5,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 6,
            "vocab_size_per_layer_input": 60,
            "final_logit_softcapping": 3.0,
            "rope_parameters": {
                "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 2e3},
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            },
        },
    ),
    # As Gemma 4 31B: values equal keys in global layers, which have fewer key heads.
    "gemma4-values": (
        "Gemma4",
        {
            "head_dim": 8,
            "global_head_dim": 16,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 53,
            "final_logit_softcapping": 3.0,
            "tie_word_embeddings": False,
        },
    ),
    # As Gemma 4 26B-A4B: also experts beside an MLP of another width.
    "gemma4-moe": (
        "Gemma4",
        {
            "head_dim": 8,
            "global_head_dim": 16,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 53,
            "enable_moe_block": True,
            "num_experts": 5,
            "top_k_experts": 2,
            "moe_intermediate_size": 12,
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
    # As above, with experts, a shared one of another width, and weights of all experts in one tensor.
    "qwen3.5-moe": (
        "Qwen3_5Moe",
        {
            "head_dim": 8,
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 12,
            "shared_expert_intermediate_size": 20,
        },
    ),
    "mistral": ("Mistral", {"sliding_window": 11, "head_dim": 16}),
    # Queries grow at positions 16, 32, ...
    "ministral3": ("Ministral3", {"head_dim": 16, "rope_parameters": YARN | {"llama_4_scaling_beta": 0.7}}),
    "ministral3-window": (
        "Ministral3",
        {"head_dim": 8, "sliding_window": 11, "rope_parameters": YARN | {"mscale": 1.0, "llama_4_scaling_beta": 0}},
    ),
    "olmo3": (
        "Olmo3",
        {
            "num_hidden_layers": 4,
            "sliding_window": 8,
            "rope_scaling": {name: value for name, value in YARN.items() if name != "rope_theta"},
        },
    ),
    "olmo3-thetas": (
        "Olmo3",
        {
            "sliding_window": 8,
            "layer_types": ["full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 2e3},
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            },
            "tie_word_embeddings": True,
        },
    ),
    # MXFP4 packs 32 inputs; windows begin within prompts and completions.
    "gpt-oss": (
        "GptOss",
        {
            "head_dim": 8,
            "num_hidden_layers": 3,
            "sliding_window": 8,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "intermediate_size": 32,
            "rope_parameters": YARN | {"truncate": False},
        },
    ),
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


VARIANTS = (
    "qwen2-tied",
    "qwen3-untied",
    "llama-rope",
    "llama-yarn",
    "gemma2",
    "gemma4-values",
    "gemma4-moe",
    "mistral",
    "ministral3-window",
    "olmo3-thetas",
    "smollm3",
    "qwen3-moe-shares",
)
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
    numbers = [buffer for name, buffer in model.named_buffers() if name.endswith(".layer_scalar")]
    with torch.no_grad():  # transformers initializes biases with 0 and norms with 1, which would hide swapped names
        for parameter in (*model.parameters(), *numbers):
            parameter.add_(torch.randn_like(parameter) * 0.2)
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    return model, folder


def hf_logits(model, mask):
    import torch

    # as in `generate`; without them, padding would count
    positions = torch.tensor(np.maximum(mask.cumsum(axis=1) - 1, 0))
    with torch.no_grad():
        out = model(torch.tensor(TOKENS), attention_mask=torch.tensor(mask).long(), position_ids=positions)
    return out.logits.numpy()


def our_logits(model, mask):
    return np.asarray(model(jnp.asarray(TOKENS), jnp.asarray(mask)))


def params_of(model):
    return nnx.to_pure_dict(nnx.split(model)[1])


SCALINGS = {
    "linear": {"factor": 3.0},
    "llama3": {name: value for name, value in LLAMA3.items() if name not in ("rope_type", "rope_theta")},
    "yarn": {"factor": 8.0, "original_max_position_embeddings": 8192},
    "yarn fractional": {"factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False},
    "yarn betas": {"factor": 16.0, "original_max_position_embeddings": 300, "beta_fast": 4.0, "beta_slow": 2},
    "yarn mscale": {"factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 1.0, "mscale_all_dim": 0.5},
    "yarn one mscale": {"factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 0.7, "mscale_all_dim": 0},
    "yarn attention": {
        "factor": 4.0, "original_max_position_embeddings": 512, "attention_factor": 1.3, "mscale": 2.0,
        "mscale_all_dim": 1.0,
    },
    "yarn shrinking": {"factor": 0.5, "original_max_position_embeddings": 512},
    "yarn beyond the table": {"factor": 4.0, "original_max_position_embeddings": 8192, "beta_slow": 1e-6},
    "yarn one turn": {"factor": 4.0, "original_max_position_embeddings": 6, "beta_fast": 1.0},
}  # fmt: skip


@pytest.mark.parametrize("theta", [1e4, 1e6])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_rotary_frequencies_agree_with_transformers(scaling, theta):
    from transformers import Qwen3Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    kind = scaling.split()[0]
    fields = SMALL | {"head_dim": 64, "rope_theta": theta, "rope_scaling": {"rope_type": kind, **SCALINGS[scaling]}}
    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](Qwen3Config(**json.loads(json.dumps(fields))))
    del fields["attn_implementation"]
    config = DecoderConfig.from_hf(fields | {"model_type": "qwen3"})
    ours = rope_frequencies(64, *config.rope(0))
    np.testing.assert_allclose(ours, frequencies.numpy(), rtol=2e-6)
    cosine, sine = rope_tables(64, *config.rope(0), jnp.arange(7))
    np.testing.assert_allclose(np.hypot(cosine, sine), factor, rtol=1e-6)


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
        options = ForwardOptions(temperature, logits_chunk=50, remat=False)
        trained = jax.jit(batch_logprobs, static_argnums=(0, 4))(graphdef, params, batch, packed, options)
        np.testing.assert_allclose(trained, found.logprobs, rtol=0, atol=1e-4)


NEW = (
    *(
        "gemma3",
        "gemma4",
        "gemma4-values",
        "gemma4-moe",
        "qwen3.5",
        "qwen3.5-moe",
        "gemma2",
        "mistral",
        "ministral3",
        "olmo3",
        "gpt-oss",
        "smollm3",
        "qwen3-moe",
    ),
    "qwen3-moe-shares",
)
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
        first, cache, _ = model.prefill(jnp.asarray(TOKENS[:2, :24]), jnp.asarray(lengths))
        bins = Bins(*map(jnp.asarray, (tokens, offsets, segments)))
        hidden = model.completion_hidden(first, cache, jnp.asarray(lengths), bins)
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
    interleaved = model.config.experts is not None and model.config.experts.biases
    compared = dict(named_gradients(ours, interleaved))
    for name in [name for name in theirs if "gate_up_proj" in name]:  # fused in transformers
        parts, fused = [name.replace("gate_up", part) for part in ("gate", "up")], theirs.pop(name)
        halves = (fused[..., 0::2], fused[..., 1::2]) if interleaved else np.split(fused, 2, axis=1)
        theirs |= dict(zip(parts, halves, strict=True))
    assert compared.keys() == theirs.keys()
    for name, value in theirs.items():
        assert np.abs(value).max() > 1e-4, name
        np.testing.assert_allclose(compared[name], value, rtol=0, atol=1e-4 * np.abs(value).max(), err_msg=name)


def named_gradients(tree, gpt_oss):
    """Returns the gradients with the names and the layout that transformers has in memory, before gate and up are
    fused."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        keys = tuple(key.key for key in path)
        if keys[-1] == "layer_scalar":  # not trained
            assert not np.asarray(leaf).any()
            continue
        name = hf_name(keys)
        if experts := "experts" in keys:
            name = f"model.{'.'.join(map(str, keys[:-1]))}{'_bias' * (keys[-1] == 'bias')}"
        name = name.replace(".mlp.gate.", ".mlp.router.") if gpt_oss else name
        turned = keys[-1] == "kernel" and not (gpt_oss and experts)
        yield name, np.asarray(leaf.swapaxes(-1, -2) if turned else leaf)


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


@pytest.mark.slow
@pytest.mark.parametrize("reference", ["gpt-oss"], indirect=True)
def test_weights_in_mxfp4(reference, tmp_path):
    """Random bytes have the values that transformers gives them, on one device and on a mesh that splits blocks of 32
    inputs. Exponents from 2 ** -127 to 2 ** 127 are exact. The logits are those of the model that transformers
    dequantises."""
    import torch
    import transformers
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    _, folder = reference
    ours, _ = load_model(folder)
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    fields = config | {"quantization_config": {"quant_method": "mxfp4"}, "initial_context_length": 4096}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    tensors, random, wanted = load_file(folder / "model.safetensors"), np.random.default_rng(0), {}
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        codes = random.integers(0, 256, (experts, outputs, inputs // 32, 16), dtype=np.uint8)
        scales = random.integers(123, 126, codes.shape[:-1], dtype=np.uint8)
        scales[0, 0] = 0 if name.startswith("model.layers.0.") else 124
        scales[1, 1] = 124
        tensors |= {f"{name}_blocks": codes, f"{name}_scales": scales}
        wanted[name] = convert_moe_packed_tensors(
            torch.tensor(codes), torch.tensor(scales), dtype=torch.float32
        ).numpy()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert check_weights(tmp_path, params_of(ours), ours.config).startswith(f"the headers of all {len(tensors)} ")

    mesh = jax.make_mesh((4, 2), ("a", "b"))
    spread = lambda x: NamedSharding(mesh, P(None, "a", "b") if x.ndim == 3 else P())  # noqa: E731
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=spread(x)), params_of(ours))
    for params in (params_of(load_model(tmp_path)[0]), load_weights(tmp_path, shapes, ours.config)):
        for index, layer in params["layers"].items():
            stem, experts = f"model.layers.{index}.mlp.experts", layer["mlp"]["experts"]
            fused = wanted[f"{stem}.gate_up_proj"]
            np.testing.assert_array_equal(experts["gate_proj"]["kernel"], fused[..., 0::2])
            np.testing.assert_array_equal(experts["up_proj"]["kernel"], fused[..., 1::2])
            np.testing.assert_array_equal(experts["down_proj"]["kernel"], wanted[f"{stem}.down_proj"])
    unpacked = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path,
        dtype=torch.float32,
        attn_implementation="eager",
        quantization_config=transformers.Mxfp4Config(dequantize=True),
    )
    mask, ours = MASKS["right"], load_model(tmp_path)[0]
    np.testing.assert_allclose(our_logits(ours, mask)[mask], hf_logits(unpacked.eval(), mask)[mask], rtol=0, atol=1e-4)

    name = "model.layers.1.mlp.experts.down_proj"
    for change, said in (
        ({f"{name}_scales": None}, rf"lack tensor\(s\) {name}_scales"),
        (
            {f"{name}_scales": tensors[f"{name}_scales"][:, :3]},
            rf"{name}_blocks has shape .* and {name}_scales \(5, 3, 1",
        ),
        ({f"{name}_bias": tensors[f"{name}_bias"][:4]}, rf"{name}_bias has shape \(4, 32\), .* needs 5 experts"),
        ({f"{name}_blocks": tensors[f"{name}_blocks"].astype(np.int8)}, rf"{name}_blocks is stored as I8"),
        ({f"{name}_scales": np.full_like(tensors[f"{name}_scales"], 255)}, rf"{name}_blocks has NaN or infinite"),
    ):
        changed = {key: np.ascontiguousarray(value) for key, value in (tensors | change).items() if value is not None}
        save_file(changed, tmp_path / "model.safetensors")
        with pytest.raises(UserError, match=said):
            load_model(tmp_path)


@pytest.mark.slow
def test_text_part_of_mistral3(tmp_path):
    """Loads the text part of a model for images, and exports it as a text model."""
    import torch
    import transformers

    text = SMALL | FAMILIES["ministral3"][1] | {"model_type": "ministral3"}
    images = {
        "model_type": "pixtral", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "head_dim": 4,
        "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
    }  # fmt: skip
    torch.manual_seed(0)
    config = transformers.Mistral3Config(text_config=text, vision_config=images, tie_word_embeddings=False)
    config._attn_implementation = "eager"
    hf = transformers.Mistral3ForConditionalGeneration(config).float().eval()
    with torch.no_grad():
        for parameter in hf.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    hf.save_pretrained(tmp_path / "images")
    ours, _ = load_model(tmp_path / "images")
    mask = MASKS["right"]
    np.testing.assert_allclose(our_logits(ours, mask)[mask], hf_logits(hf, mask)[mask], rtol=0, atol=1e-4)
    save_model(params_of(ours), ours.config, None, tmp_path / "text")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "text", attn_implementation="eager").eval()
    assert type(again) is transformers.Ministral3ForCausalLM
    np.testing.assert_allclose(hf_logits(again, mask)[mask], hf_logits(hf, mask)[mask], rtol=0, atol=1e-5)


def scaled(name, **scaling):
    """Returns the fields of a family with scaled rotary positions."""
    fields = FAMILIES[name][1]
    plain = {"rope_theta": 10000.0, **(fields.get("rope_parameters") or {})}
    return name, {"rope_parameters": plain | scaling}


def without_windows(name, **more):
    """Returns the fields of a family whose layers all have full attention, although it has a size of windows."""
    return name, {"layer_types": ["full_attention"] * (SMALL | FAMILIES[name][1])["num_hidden_layers"], **more}


VARIANTS = {
    "qwen3.5 yarn": scaled("qwen3.5", rope_type="yarn", factor=4.0, original_max_position_embeddings=16),
    "qwen3.5 linear": scaled("qwen3.5", rope_type="linear", factor=3.0),
    "qwen3.5-moe yarn": scaled("qwen3.5-moe", rope_type="yarn", factor=4.0, original_max_position_embeddings=16),
    **{f"{name} full": without_windows(name) for name in ("olmo3", "gemma2", "gemma3", "gemma4", "gpt-oss")},
    "gemma4 equal heads": ("gemma4", {"global_head_dim": FAMILIES["gemma4"][1]["head_dim"]}),
    "gemma4 full equal heads": without_windows("gemma4", global_head_dim=FAMILIES["gemma4"][1]["head_dim"]),
    "gemma4-moe equal heads": ("gemma4-moe", {"global_head_dim": FAMILIES["gemma4-moe"][1]["head_dim"]}),
}


@pytest.mark.parametrize("variant", others_slow(VARIANTS, "qwen3.5 yarn", "gemma2 full", "gemma4 equal heads"))
def test_variants_load_and_are_exported(variant, tmp_path):
    """The logits are those of transformers, before and after an export."""
    import torch
    import transformers

    family, fields = VARIANTS[variant]
    name, extra = FAMILIES[family]
    torch.manual_seed(0)
    made = getattr(transformers, f"{name}ForCausalLM")
    config = made.config_class(**SMALL | extra | fields)
    config._attn_implementation = "eager"
    hf = made(config).float().eval()
    hf.save_pretrained(tmp_path / "theirs")
    ours, _ = load_model(tmp_path / "theirs")
    mask = MASKS["right"]
    np.testing.assert_allclose(our_logits(ours, mask)[mask], hf_logits(hf, mask)[mask], rtol=0, atol=1e-5)
    for source in (ours.config.source, None):
        folder = tmp_path / str(source is None)
        save_model(params_of(ours), dataclasses.replace(ours.config, source=source), None, folder)
        again = made.from_pretrained(folder, attn_implementation="eager").float().eval()
        np.testing.assert_allclose(hf_logits(again, mask)[mask], hf_logits(hf, mask)[mask], rtol=0, atol=1e-6)
        assert load_model(folder)[0].config == ours.config


def test_export_without_a_source_config(reference, tmp_path):
    """transformers also loads a decoder that was created from numbers only."""
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
