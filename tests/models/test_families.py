"""Tests the published `config.json` of each model family: the decoder config, the conversion back, and the errors for
unsupported values."""

from __future__ import annotations

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.nnx.traversals import flatten_mapping
from safetensors.numpy import load_file, save_file

from tests.models.published_configs import (
    GEMMA2,
    GEMMA3,
    GEMMA3_WITH_IMAGES,
    GEMMA4_26B,
    GEMMA4_31B,
    GEMMA4_E2B,
    GEMMA4_E2B_WITH_IMAGES,
    GPT_OSS,
    MINISTRAL3,
    MINISTRAL3_WITH_IMAGES,
    MISTRAL,
    OLMO3,
    QWEN3_MOE,
    QWEN35,
    QWEN35_MOE,
    SMOLLM3,
)
from tunix_like.errors import UserError
from tunix_like.models.config import DecoderConfig
from tunix_like.models.counts import forward_operations, parameter_count, parameter_shapes
from tunix_like.models.decoder import Decoder
from tunix_like.models.families import FAMILIES
from tunix_like.models.fields import DeltaRule, Experts, LinearScaling, ProportionalScaling, YarnScaling
from tunix_like.models.loading import load_model, save_model
from tunix_like.models.weights import fused_name, hf_name, save_weights

PARTS = ("vision_tower.x.weight", "model.multi_modal_projector.y")
QWEN_PARTS = ("model.visual.x.weight", "mtp.layers.0.x.weight")
GEMMA4_PARTS = ("model.vision_tower.x", "model.audio_tower.y", "model.embed_vision.z", "model.embed_audio.z")
GEMMA4 = (GEMMA4_E2B, GEMMA4_31B, GEMMA4_26B)
PUBLISHED = (GEMMA2, GEMMA3, *GEMMA4, MISTRAL, MINISTRAL3, OLMO3, SMOLLM3, QWEN3_MOE, GPT_OSS, QWEN35, QWEN35_MOE)
TINY = {
    "vocab_size": 13,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "eos_token_id": 1,
}


def read(fields, **changes):
    return DecoderConfig.from_hf(fields | changes)


def tiny(fields, **changes):
    per_layer = {"layer_types": None, "no_rope_layers": None}
    experts = (
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 6} if "num_experts" in fields else {}
    )
    if "top_k_experts" in fields:
        experts = {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 6, "global_head_dim": 8}
        experts |= {"num_global_key_value_heads": 1, "vocab_size_per_layer_input": 15}
        if fields["num_kv_shared_layers"]:
            experts |= {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 6}
            per_layer["layer_types"] = ["sliding_attention", "full_attention"] * 2
    if "shared_expert_intermediate_size" in fields:
        experts |= {"shared_expert_intermediate_size": 10}
    if "num_local_experts" in fields:
        experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "experts_per_token": 2}
    recurrent = (
        {"head_dim": 8, "full_attention_interval": 3, "linear_num_key_heads": 1, "linear_num_value_heads": 2}
        | {"linear_key_head_dim": 5, "linear_value_head_dim": 3}
        if "linear_num_key_heads" in fields
        else {}
    )
    per_layer = {name: value for name, value in per_layer.items() if name in fields}
    return fields | per_layer | TINY | experts | recurrent | changes


def test_gemma2_numbers():
    config = read(GEMMA2)
    assert config.windows == (4096, None) * 13
    assert (config.attention_cap, config.logits_cap, config.query_pre_attn_scalar) == (50.0, 30.0, 256.0)
    assert config.post_norms and config.norm_offset and config.scale_embeddings and config.tie_embeddings
    assert (config.activation, config.qk_norm) == ("gelu_tanh", False)
    assert read(GEMMA2, attn_logit_softcapping=None).attention_cap is None


def test_gemma3_numbers():
    config = read(GEMMA3)
    assert config.windows == (512, 512, 512, 512, 512, None) * 4 + (512, 512)
    assert (config.rope(0), config.rope(5)) == ((1e4, None), (1e6, None))
    assert config.qk_norm and config.tie_embeddings and config.logits_cap is None
    assert read(GEMMA3, sliding_window_pattern=2).windows == (512, None) * 13
    kinds = ["full_attention"] * 25 + ["sliding_attention"]
    assert read(GEMMA3, layer_types=kinds).windows == (None,) * 25 + (512,)


def test_gemma3_ropes_in_either_spelling():
    old = read(GEMMA3, rope_scaling={"rope_type": "linear", "factor": 8.0}, rope_theta=5e5, rope_local_base_freq=1e3)
    both = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
    }
    new = read(GEMMA3, rope_parameters=both, rope_theta=None, rope_local_base_freq=None)
    assert old == new and (old.rope(0), old.rope(5)) == ((1e3, None), (5e5, LinearScaling(8.0)))
    assert read(GEMMA3, rope_theta=None, rope_local_base_freq=None) == read(GEMMA3)


def test_decoder_config_of_an_image_model():
    config = read(GEMMA3_WITH_IMAGES)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (34, 8, 4, 256)
    assert (config.vocab_size, config.max_positions, config.windows[:6]) == (262208, 131072, (1024,) * 5 + (None,))
    assert (config.rope(0), config.rope(5)) == ((1e4, None), (1e6, LinearScaling(8.0)))
    back = config.to_hf()
    assert (back["model_type"], back["eos_token_id"]) == ("gemma3_text", [1, 106])
    assert read(back) == config


def test_gemma4_numbers():
    config = read(GEMMA4_E2B_WITH_IMAGES)
    assert config == read(GEMMA4_E2B) and config.windows == (512, 512, 512, 512, None) * 7
    assert (config.rope(0), config.rope(4)) == ((1e4, None), (1e6, ProportionalScaling(0.25)))
    assert [config.kv_source(layer) for layer in (12, 14, 15, 19, 34)] == [12, 14, 13, 14, 14]
    assert (config.head_width(3), config.head_width(4), config.logits_cap) == (256, 512, 30.0)
    assert (config.mlp_width(14), config.mlp_width(15), config.layer_input_width) == (6144, 12288, 256)
    assert config.key_widths == (256, 256, 256, 256, 512) * 3
    large, mixed = read(GEMMA4_31B), read(GEMMA4_26B)
    assert (large.kv_heads(0), large.kv_heads(5), large.keys_as_values) == (16, 4, True)
    assert large.experts is None and large.layer_input_width is None
    assert mixed.experts == Experts(128, 8, 704, normalised=True, shared="beside")
    assert mixed.active_width(0) == 2112 + 8 * 704
    assert read(GEMMA4_31B, layer_types=None) == large
    full = {str(layer): {"head_dim": 512, "num_key_value_heads": 4} for layer in range(5, 60, 6)}
    newer = without(without(GEMMA4_31B, "global_head_dim"), "num_global_key_value_heads")
    assert read(newer, per_layer_config=full) == large
    assert read(without(GEMMA4_31B, "rope_parameters")) == large
    plain = GEMMA4_31B["rope_parameters"] | {"full_attention": {"rope_type": "default", "rope_theta": 1e6}}
    assert read(GEMMA4_31B, rope_parameters=plain).rope(5) == (1e6, None)


@pytest.mark.slow
@pytest.mark.parametrize("fields", GEMMA4, ids=["E2B", "31B", "26B-A4B"])
def test_published_sizes_of_gemma4_equal_those_of_transformers(fields, tmp_path):
    """Compares all names and shapes of weights, for the config and for its export."""
    import torch
    import transformers

    config = read(fields)
    params = parameter_shapes(config, jnp.float32, None, None)
    for each in (fields, config.to_hf()):
        (tmp_path / "config.json").write_text(json.dumps(each))
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(tmp_path))
        theirs = {name: tuple(x.shape) for name, x in model.state_dict().items() if name != "lm_head.weight"}
        sizes: dict[str, int] = {}
        for path, leaf in flatten_mapping(params).items():
            name = fused_name(path) if "experts" in path else hf_name(path)
            sizes[name] = sizes.get(name, 0) + leaf.size
        assert sizes == {name: math.prod(shape) for name, shape in theirs.items()}


def test_mistral_numbers():
    assert read(MISTRAL).windows == (4096,) * 32 and read(MISTRAL).head_dim == 128
    assert read(MISTRAL, sliding_window=None).windows == ()


def test_ministral3_numbers():
    """The published size is 8.4e9 weights, without those of the images."""
    config = read(MINISTRAL3_WITH_IMAGES)
    yarn = YarnScaling(16.0, 16384, mscale=1.0, mscale_all_dim=1.0)
    assert config.rope(33) == (1e6, yarn) and (config.query_scaling, config.windows) == (0.1, ())
    assert parameter_count(config) == 8_489_553_920 and config == read(MINISTRAL3)
    assert config.to_hf()["architectures"] == ["Ministral3ForCausalLM"]
    plain = read(MINISTRAL3, rope_parameters=MINISTRAL3["rope_parameters"] | {"llama_4_scaling_beta": 0})
    assert plain.query_scaling is None and plain.to_hf()["rope_scaling"]["llama_4_scaling_beta"] == 0
    unscaled = dataclasses.replace(plain, rope_scaling=None)
    assert unscaled.to_hf()["model_type"] == "llama", "transformers would fill in a scaling in Ministral 3"
    mistral = MISTRAL | {"model_type": "mistral", "head_dim": 128}
    assert read({"model_type": "mistral3", "text_config": mistral}) == read(MISTRAL)


def test_olmo3_numbers():
    config = read(OLMO3)
    yarn = YarnScaling(8.0, 8192, attention_factor=1.2079441541679836)
    assert config.windows == (4096, 4096, 4096, None) * 8
    assert (config.rope(0), config.rope(3)) == ((5e5, None), (5e5, yarn))
    assert config.joint_qk_norm and config.post_norms and not config.input_norms
    assert parameter_count(config) == 7_298_011_136  # published
    assert read(OLMO3, layer_types=None) == config and read(OLMO3, rope_theta=None) == config
    both = {
        "full_attention": OLMO3["rope_scaling"] | {"rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    other = read(OLMO3, rope_parameters=both, rope_theta=None, rope_scaling=None)
    assert (other.rope(0), other.rope(3)) == ((1e4, None), (1e6, yarn))
    assert other.to_hf()["rope_parameters"]["full_attention"]["rope_theta"] == 1e6 and read(other.to_hf()) == other


def test_smollm3_numbers():
    config = read(SMOLLM3)
    assert config.rotary == (True, True, True, False) * 9 and config.tie_embeddings
    assert (config.rope(0), config.rope(3)) == ((5e6, None), None)
    assert read(SMOLLM3, no_rope_layers=None) == config
    assert read(SMOLLM3, no_rope_layers=None, no_rope_layer_interval=36).rotary == (True,) * 35 + (False,)
    assert read(SMOLLM3, no_rope_layers=[1] * 36).rotary == ()


def test_qwen3_moe_numbers():
    config = read(QWEN3_MOE)
    assert config.experts == Experts(number=128, per_token=8, intermediate_size=768, normalised=True)
    assert config.expert_layers == () and config.active_width(0) == 8 * 768
    sparse = read(QWEN3_MOE, decoder_sparse_step=2, mlp_only_layers=[1])
    assert [sparse.has_experts(layer) for layer in range(5)] == [False, False, False, True, False]
    assert sparse.active_width(0) == 6144
    new = {name: value for name, value in QWEN3_MOE.items() if name != "num_experts"}
    assert read(new, num_local_experts=128) == config
    # published size: 30.5e9 weights, 3.3e9 of them active per token
    assert parameter_count(config) == 30_532_122_624


def test_gpt_oss_numbers():
    config = read(GPT_OSS)
    yarn = YarnScaling(32.0, 4096, beta_fast=32.0, beta_slow=1.0, truncate=False)
    assert config.windows == (128, None) * 12 and config.rope(0) == config.rope(1) == (1.5e5, yarn)
    assert config.experts == Experts(32, 4, 2880, normalised=True, biases=True) and config.expert_layers == ()
    assert config.qkv_bias and config.o_bias and config.sinks and config.activation == "clamped_swiglu"
    assert parameter_count(config) == 20_914_757_184  # published: 20.9e9
    assert parameter_count(read(GPT_OSS, num_hidden_layers=36, num_local_experts=128)) == 116_829_156_672  # 116.8e9
    assert "quantization_config" not in config.to_hf(), "exports are not packed"
    kinds = ["full_attention"] * 23 + ["sliding_attention"]
    assert read(GPT_OSS, layer_types=kinds).windows == (None,) * 23 + (128,)
    for changes in ({"experts": None}, {"experts": dataclasses.replace(config.experts, biases=False)}):
        with pytest.raises(UserError, match="cannot be exported"):
            dataclasses.replace(config, **changes).to_hf()


def test_qwen35_numbers():
    config = read(QWEN35)
    assert config.delta_rule == DeltaRule(key_heads=16, value_heads=48, key_width=128, value_width=128, taps=4)
    assert config.recurrent_layers == (True, True, True, False) * 16
    assert (config.rotary_width, config.rope_theta, config.head_dim) == (64, 1e7, 256)
    assert config.output_gate and config.norm_offset and config.qk_norm
    assert read(QWEN35, layer_types=None) == config
    old = {"rope_parameters": None, "rope_theta": 1e7, "partial_rotary_factor": 0.25}
    assert read(QWEN35, **old) == config
    older = {name: value for name, value in QWEN35.items() if name != "rope_parameters"}
    assert DecoderConfig.from_hf(older | {"rope_theta": 1e7, "rope_scaling": QWEN35["rope_parameters"]}) == config
    for head, width in ((44, 30), (98, 2), (64, 16)):  # quotients of some are rounded down
        other = dataclasses.replace(config, head_dim=head, rotary_width=width)
        assert DecoderConfig.from_hf(other.to_hf()).rotary_width == width
    assert parameter_count(config) == pytest.approx(27e9, rel=0.01)  # without images and layers for several tokens
    outside = {"model_type": "qwen3_5", "text_config": QWEN35, "vision_config": {}, "tie_word_embeddings": False}
    assert DecoderConfig.from_hf(outside) == config


def test_qwen35_moe_numbers():
    config = read(QWEN35_MOE)
    assert config.experts == Experts(256, 8, 512, normalised=True, shared="gated") and config.intermediate_size == 512
    assert config.active_width(0) == 9 * 512 and config.recurrent_layers == (True, True, True, False) * 10
    assert parameter_count(config) == pytest.approx(35e9, rel=0.02)  # without images and layers for several tokens
    outside = {"model_type": "qwen3_5_moe", "text_config": QWEN35_MOE, "tie_word_embeddings": False}
    assert read(outside) == config
    with pytest.raises(UserError, match="cannot be exported"):
        dataclasses.replace(config, experts=dataclasses.replace(config.experts, normalised=False)).to_hf()


@pytest.mark.parametrize("fields", PUBLISHED, ids=lambda fields: fields["model_type"])
def test_round_trip(fields):
    config = read(fields)
    back = config.to_hf()
    assert read(back) == config
    rewritten = {"torch_dtype", "hidden_act", "rope_scaling", "sliding_window_pattern", "no_rope_layer_interval"}
    rewritten |= {"layer_types", "router_aux_loss_coef", "output_router_logits", "attn_logit_softcapping"}
    rewritten |= {"rope_parameters", "dtype", "quantization_config", "experts_per_token", "initial_context_length"}
    rewritten |= {"rope_parameters", "full_attention_interval", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"}
    rewritten |= {"mlp_only_layers"}
    if fields["model_type"] == "gemma4_text" and not fields["enable_moe_block"]:
        rewritten |= {"num_experts", "top_k_experts", "moe_intermediate_size"}
    for name in fields.keys() - rewritten:
        assert back[name] == fields[name], name
    alone = dataclasses.replace(config, source=None).to_hf(eos_ids=[5])
    assert read(alone) == config


def test_config_that_matches_no_family_is_not_exported():
    config = dataclasses.replace(read(tiny(MISTRAL)), source=None)
    for changes, said in (
        ({"windows": (3, None, 3)}, "windows"),
        ({"windows": (3, 3, 3), "rotary": (True, False, True)}, "rotary and windows together"),
        ({"post_norms": True}, "post_norms"),
    ):
        with pytest.raises(UserError, match=said):
            dataclasses.replace(config, **changes).to_hf()


def test_per_layer_tuples():
    config = read(tiny(MISTRAL))
    assert dataclasses.replace(config, num_layers=2).windows == (4096,) * 2
    assert dataclasses.replace(config, windows=(None,) * 3) == dataclasses.replace(config, windows=())
    with pytest.raises(UserError, match="windows has 2 entries for 3 layers"):
        dataclasses.replace(config, windows=(4, 4))
    with pytest.raises(UserError, match="sliding_window must be a positive integer"):
        dataclasses.replace(config, windows=(4, 0, 4))


@pytest.mark.parametrize("fields", PUBLISHED, ids=lambda fields: fields["model_type"])
def test_parameter_count_equals_the_number_of_weights(fields):
    config = read(tiny(fields))
    params = jax.eval_shape(lambda: nnx.split(Decoder(config, rngs=nnx.Rngs(0)))[1])
    assert parameter_count(config) == sum(x.size for x in jax.tree.leaves(params))


def test_operations_with_windows_and_experts():
    """Counts the pairs one by one, for 5 prompt tokens and 3 of 4 completion tokens, in layers with and without a
    window of 3."""
    config = read(tiny(GEMMA3, layer_types=["sliding_attention", "full_attention", "full_attention"]), sliding_window=3)
    pairs = [sum(min(p + 1, window) for p in range(8)) for window in (3, 99, 99)]
    found = forward_operations(config, np.array([5]), np.array([[4]]))
    matrices = 3 * (8 * 4 * (2 * 2 + 2 * 1) + 3 * 8 * 12)
    assert found == 2 * matrices * 8 + 4 * 2 * 4 * sum(pairs) + 2 * 8 * 13 * 4
    config = read(tiny(QWEN3_MOE, mlp_only_layers=[2]))
    found = forward_operations(config, np.array([5]), np.array([[4]]))
    matrices = 3 * 8 * 4 * (2 * 2 + 2 * 1) + 3 * 8 * (2 * 2 * 6 + 12) + 2 * 8 * 4
    assert found == 2 * matrices * 8 + 3 * 4 * 2 * 4 * sum(range(1, 9)) + 2 * 8 * 13 * 4


def test_operations_with_recurrent_layers():
    """Counts the projections, the convolution and three products of a state and a vector for each of 8 tokens."""
    found = forward_operations(read(tiny(QWEN35)), np.array([5]), np.array([[4]]))
    channels, values = 2 * 5 + 2 * 3, 2 * 3
    recurrent = 8 * (channels + values + 2 + 2) + values * 8
    matrices = 2 * recurrent + 8 * 8 * (2 * 2 + 1 + 1 + 2) + 3 * 3 * 8 * 12
    rule = 2 * 8 * (3 * 2 * 2 * 5 * 3 + 2 * 4 * channels)
    assert found == 2 * matrices * 8 + rule + 4 * 2 * 8 * sum(range(1, 9)) + 2 * 8 * 13 * 4


def bad(fields, *said, id):
    return pytest.param(fields, said, id=id)


def without(fields, name):
    return {key: value for key, value in fields.items() if key != name}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        bad(GEMMA2 | {"model_type": "gemma"}, "Did you mean", *FAMILIES, id="family"),
        bad(GEMMA2 | {"hidden_activation": "gelu"}, "hidden_activation", "gelu_pytorch_tanh", id="activation"),
        bad(GEMMA3 | {"use_bidirectional_attention": True}, "use_bidirectional_attention", id="bidirectional"),
        bad(GEMMA3 | {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping", "no such", id="cap-nobody-applies"),
        bad(GEMMA2 | {"final_logit_softcapping": -1}, "final_logit_softcapping (logits_cap)", id="negative-cap"),
        bad(without(GEMMA2, "attn_logit_softcapping"), "missing: attn_logit_softcapping", id="cap-not-named"),
        bad(GEMMA3 | {"sliding_window": None}, "missing: sliding_window", id="no-window"),
        bad(GEMMA3 | {"sliding_window": 0}, "sliding_window must be a positive integer", id="empty-window"),
        bad(GEMMA3 | {"layer_types": ["full_attention"]}, "layer_types", "26 layers", id="too-few-layers"),
        bad(GEMMA3 | {"layer_types": ["chunked_attention"] * 26}, "chunked_attention", id="layer-type"),
        bad(GEMMA3 | {"attention_bias": True}, "attention_bias", id="bias"),
        bad(GEMMA4_E2B | {"use_bidirectional_attention": "all"}, "use_bidirectional_attention", id="gemma4-all"),
        bad(GEMMA4_E2B | {"num_kv_shared_layers": 31}, "num_kv_shared_layers", "must also occur", id="no-source"),
        bad(GEMMA4_E2B | {"num_kv_shared_layers": 35}, "num_kv_shared_layers", id="only-shared"),
        bad(without(GEMMA4_E2B, "hidden_size_per_layer_input"), "missing: hidden_size_per_layer", id="inputs-not-said"),
        bad(without(GEMMA4_E2B, "vocab_size_per_layer_input"), "missing: vocab_size_per_layer", id="no-second-rows"),
        bad(GEMMA4_E2B | {"vocab_size_per_layer_input": 100}, "vocab_size_per_layer_input", id="few-second-rows"),
        bad(without(GEMMA4_E2B, "global_head_dim"), "missing: global_head_dim", id="no-global-width"),
        bad(GEMMA4_E2B | {"global_head_dim": 511}, "global_head_dim (full_head_dim)", "even", id="odd-global-width"),
        bad(
            GEMMA4_31B | {"num_global_key_value_heads": 5}, "num_global_key_value_heads", "multiple", id="global-heads"
        ),
        bad(GEMMA4_E2B | {"rope_theta": 1e4}, "rope_theta", "no such field", id="gemma4-older-rope"),
        bad(
            GEMMA4_E2B | {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
            "sliding_attention",
            id="one-of-two",
        ),
        bad(
            GEMMA4_E2B | {"rope_parameters": GEMMA4_E2B["rope_parameters"] | {"full_attention": OLMO3["rope_scaling"]}},
            "'proportional'",
            id="gemma4-yarn",
        ),
        bad(QWEN3_MOE | {"rope_scaling": {"rope_type": "proportional"}}, "gemma4_text only", id="proportional"),
        bad(
            GEMMA4_E2B | {"layer_types": ["full_attention"] * 34 + ["sliding_attention"]},
            "last layer",
            id="last-window",
        ),
        bad(GEMMA4_E2B | {"per_layer_config": {}}, "per_layer_config", "keep one", id="widths-twice"),
        bad(
            without(GEMMA4_E2B, "global_head_dim") | {"per_layer_config": {"0": {"head_dim": 512}}},
            "per_layer_config",
            "full_attention",
            id="widths-of-other-layers",
        ),
        bad(
            without(GEMMA4_E2B, "global_head_dim")
            | {"per_layer_config": {str(i): {"num_key_value_heads": 2} for i in range(4, 35, 5)}},
            "num_global_key_value_heads",
            "attention_k_eq_v",
            id="global-heads-with-values",
        ),
        bad(without(GEMMA4_26B, "num_experts"), "missing: num_experts", id="gemma4-no-experts"),
        bad(without(GEMMA4_26B, "top_k_experts"), "num_experts_per_tok (per_token)", id="gemma4-no-top-k"),
        bad(QWEN35 | {"attn_output_gate": False}, "attn_output_gate", id="no-gate"),
        bad(without(QWEN35, "linear_key_head_dim"), "missing: linear_key_head_dim", id="no-key-width"),
        bad(without(QWEN35_MOE, "shared_expert_intermediate_size"), "missing: shared_expert_", id="no-shared-expert"),
        bad(QWEN35_MOE | {"mlp_only_layers": [1]}, "mlp_only_layers", id="dense-layer"),
        bad(QWEN35 | {"linear_num_value_heads": 24}, "24", "multiple of linear_num_key_heads", id="value-heads"),
        bad(QWEN35 | {"layer_types": ["linear_attention"] * 64}, "at least one", id="only-recurrent"),
        bad(QWEN35 | {"head_dim": 4, "rope_parameters": None}, "partial_rotary_factor", id="odd-rotation"),
        bad(GEMMA3 | {"rope_parameters": {"rope_type": "default"}}, "sliding_attention", id="one-rope"),
        bad(
            GEMMA3 | {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
            "scaling of sliding_attention",
            id="local-scaling",
        ),
        bad(GEMMA3_WITH_IMAGES | {"text_config": None}, "text_config", id="no-text"),
        bad(GEMMA3_WITH_IMAGES | {"quantization_config": {"bits": 4}}, "quantization_config", id="quantised-outside"),
        bad(GEMMA3_WITH_IMAGES | {"text_config": {"model_type": "llama"}}, "llama", "gemma3_text", id="other-text"),
        bad(without(MISTRAL, "sliding_window"), "missing: sliding_window", id="mistral-window-not-named"),
        bad(MISTRAL | {"layer_types": ["full_attention"] * 32}, "layer_types", id="mistral-layer-types"),
        bad(MINISTRAL3 | {"layer_types": ["full_attention"] * 34}, "layer_types", id="ministral3-layer-types"),
        bad(without(MINISTRAL3, "rope_parameters"), "missing", "llama_4_scaling_beta", id="no-query-scaling"),
        bad(
            MINISTRAL3 | {"rope_parameters": {"rope_type": "default", "llama_4_scaling_beta": 0}},
            "missing: rope_scaling",
            id="no-scaling",
        ),
        bad(
            MINISTRAL3 | {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "llama_4_scaling_beta": 0.1}},
            "llama_4_scaling_beta (query_scaling)",
            "original_max_position_embeddings",
            id="query-scaling-without-a-length",
        ),
        bad(
            MINISTRAL3 | {"rope_parameters": MINISTRAL3["rope_parameters"] | {"llama_4_scaling_beta": -1}},
            "llama_4_scaling_beta (query_scaling)",
            id="negative-query-scaling",
        ),
        bad(MINISTRAL3_WITH_IMAGES | {"text_config": GEMMA3}, "'mistral' or 'ministral3'", id="text-of-gemma"),
        bad(OLMO3 | {"rope_theta": 1e6}, "rope_theta = 1000000.0 is ambiguous", "rope_parameters", id="olmo3-theta"),
        bad(OLMO3 | {"rope_scaling": OLMO3["rope_scaling"] | {"truncate": False}}, "truncate", id="olmo3-truncate"),
        bad(without(OLMO3, "sliding_window"), "missing: sliding_window", id="olmo3-window-not-named"),
        bad(OLMO3 | {"sliding_window_pattern": 4}, "sliding_window_pattern", "is unknown", id="olmo3-pattern"),
        bad(SMOLLM3 | {"use_sliding_window": True}, "use_sliding_window", id="smollm3-windows"),
        bad(SMOLLM3 | {"no_rope_layers": [1, 0]}, "no_rope_layers", "36", id="too-few-ropes"),
        bad(SMOLLM3 | {"no_rope_layers": [2] * 36}, "no_rope_layers", "0 and 1", id="rope-kinds"),
        bad(QWEN3_MOE | {"num_experts_per_tok": 200}, "num_experts_per_tok (per_token)", "128", id="too-many-experts"),
        bad(QWEN3_MOE | {"norm_topk_prob": None}, "norm_topk_prob", id="norm-not-said"),
        bad(QWEN3_MOE | {"mlp_only_layers": [48]}, "mlp_only_layers", "47", id="no-such-layer"),
        bad(QWEN3_MOE | {"num_local_experts": 64}, "num_local_experts", id="experts-twice"),
        bad(QWEN3_MOE | {"n_shared_experts": 1}, "n_shared_experts", "is unknown", id="shared-expert"),
        bad(QWEN3_MOE | {"output_router_logits": True}, "output_router_logits", id="router-logits"),
        bad(
            GPT_OSS | {"experts_per_token": 2}, "num_experts_per_tok and experts_per_token", "differ", id="chosen-twice"
        ),
        bad(GPT_OSS | {"swiglu_limit": 5.0}, "swiglu_limit", "only 7.0", id="another-clamp"),
        bad(GPT_OSS | {"attention_bias": False}, "attention_bias", "only true", id="gpt-oss-without-biases"),
        bad(GPT_OSS | {"quantization_config": {"quant_method": "fp8"}}, "quantization_config", id="fp8"),
        bad(QWEN3_MOE | {"quantization_config": {"quant_method": "mxfp4"}}, "quantization_config", id="mxfp4"),
        bad(without(GPT_OSS, "rope_scaling"), "missing: rope_scaling", id="no-yarn"),
        bad(without(GPT_OSS, "num_local_experts"), "missing: num_experts", id="no-experts"),
        bad(SMOLLM3 | {"num_experts": 4}, "num_experts", "is unknown", id="another-family's"),
    ],
)
def test_unsupported_configs_raise_an_error(fields, said):
    with pytest.raises(UserError) as error:
        DecoderConfig.from_hf(fields)
    for piece in said:
        assert piece in str(error.value)


@pytest.mark.parametrize(
    ("family", "fields", "decoder", "head", "parts"),
    [
        ("gemma3", GEMMA3, "language_model.model.", "language_model.lm_head.", PARTS),
        ("gemma3", GEMMA3, "model.language_model.", "lm_head.", PARTS),
        pytest.param(
            *("gemma4", GEMMA4_E2B, "model.language_model.", "lm_head.", GEMMA4_PARTS), marks=pytest.mark.slow
        ),
        ("mistral3", MINISTRAL3, "language_model.model.", "language_model.lm_head.", PARTS),
        ("mistral3", MINISTRAL3, "model.language_model.", "lm_head.", PARTS),
        ("qwen3_5", QWEN35, "model.language_model.", "lm_head.", QWEN_PARTS),
        ("qwen3_5_moe", QWEN35_MOE, "model.language_model.", "lm_head.", QWEN_PARTS),
    ],
)
def test_decoder_weights_of_an_image_model(family, fields, decoder, head, parts, tmp_path):
    """Covers the formats before and since transformers 5. Other parts of the model are not read, and an unknown tensor
    is named."""
    model, _ = load_model(tiny(fields), init="random")
    params = nnx.to_pure_dict(nnx.split(model)[1])
    save_model(params, model.config, None, tmp_path)
    text = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family, "text_config": text}))
    tensors = load_file(tmp_path / "model.safetensors")
    renamed = lambda name: name.replace("model.", decoder, 1).replace("lm_head.", head, 1)  # noqa: E731
    tensors = {renamed(name): tensor for name, tensor in tensors.items()}
    other = {name: np.zeros(3, np.float32) for name in parts}
    save_file(tensors | other, tmp_path / "model.safetensors")
    again, _ = load_model(tmp_path)
    jax.tree.map(np.testing.assert_array_equal, nnx.to_pure_dict(nnx.split(again)[1]), params)
    save_file(tensors | {"smell_tower.x": np.zeros(3, np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="unexpected tensor.*smell_tower.x"):
        load_model(tmp_path)


def test_experts_beside_a_shared_one_in_either_form(tmp_path):
    """They are written as one tensor. Separate tensors load too, and one of too few rows is named."""
    model, _ = load_model(tiny(QWEN35_MOE), init="random")
    params = nnx.to_pure_dict(nnx.split(model)[1])
    save_model(params, model.config, None, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.2.mlp.experts.gate_up_proj"
    assert tensors[name].shape == (4, 2 * 6, 8) and tensors["model.layers.2.mlp.shared_expert_gate.weight"].shape == (
        1,
        8,
    )
    separate = {key: value for key, value in tensors.items() if ".experts." not in key}
    for key in tensors.keys() - separate.keys():
        for part, stack in zip(("gate", "up"), np.split(tensors[key], 2, axis=1), strict=True):
            stem, names = key.rsplit(".", 1)
            which = names.replace("gate_up", part)
            stack = tensors[key] if names == "down_proj" else stack
            separate |= {f"{stem}.{i}.{which}.weight": np.ascontiguousarray(one) for i, one in enumerate(stack)}
    save_file(separate, tmp_path / "model.safetensors")
    again, _ = load_model(tmp_path)
    jax.tree.map(np.testing.assert_array_equal, nnx.to_pure_dict(nnx.split(again)[1]), params)
    save_file(tensors | {name: tensors[name][:, :10].copy()}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=rf"{name} has shape \(5, 8\), but config.json needs \(6, 8\)"):
        load_model(tmp_path)


def test_unused_keys_of_a_checkpoint_are_ignored(tmp_path):
    """Published files of Gemma 4 have keys and values of layers that read those of an earlier one; other layers have
    none too many."""
    model, _ = load_model(tiny(GEMMA4_E2B), init="random")
    params = nnx.to_pure_dict(nnx.split(model)[1])
    save_model(params, model.config, None, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    unused = {f"model.layers.2.self_attn.{name}.weight" for name in ("k_proj", "v_proj", "k_norm", "v_norm")}
    assert not unused & tensors.keys()
    save_file(tensors | {name: np.ones(3, np.float32) for name in unused}, tmp_path / "model.safetensors")
    again, _ = load_model(tmp_path)
    jax.tree.map(np.testing.assert_array_equal, nnx.to_pure_dict(nnx.split(again)[1]), params)
    name = "model.layers.1.self_attn.v_norm.weight"
    save_file(tensors | {name: np.ones(3, np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=f"unexpected tensor.*{name}"):
        load_model(tmp_path)


def test_experts_in_shards(tmp_path):
    """Every expert is a separate tensor in the files. A missing one is named."""
    model, _ = load_model(tiny(QWEN3_MOE), init="random")
    params = nnx.to_pure_dict(nnx.split(model)[1])
    save_model(params, model.config, None, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.2.mlp.experts.3.up_proj.weight"
    np.testing.assert_array_equal(tensors[name], params["layers"][2]["mlp"]["experts"]["up_proj"]["kernel"][3].T)
    assert tensors["model.layers.2.mlp.gate.weight"].shape == (4, 8)
    save_weights(params, tmp_path, model.config, max_file_bytes=1000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == tensors.keys() and len(set(index["weight_map"].values())) > 5
    again, _ = load_model(tmp_path)
    jax.tree.map(np.testing.assert_array_equal, nnx.to_pure_dict(nnx.split(again)[1]), params)
    (tmp_path / "model.safetensors.index.json").unlink()
    save_file({key: value for key, value in tensors.items() if key != name}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=f"lack tensor.*{name}"):
        load_model(tmp_path)
