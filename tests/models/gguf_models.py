"""Writes tiny random models of transformers as GGUF files, as llama.cpp's converter does."""

import numpy as np
import pytest

from tests.models.published_configs import LLAMA31_8B

gguf = pytest.importorskip("gguf")

WORDS = ["<unk>", "<|end|>", "<|user|>", *(chr(33 + i) for i in range(94)), "Ġ", "Ċ", "he", "ll", "hell", "hello", "Ġh"]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ h"]
SIZES = {
    "vocab_size": len(WORDS),
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "attn_implementation": "eager",
}
GEMMA = {"query_pre_attn_scalar": 32, "sliding_window": 8}
FAMILIES = {
    "llama": ({"rope_theta": 5e5, "tie_word_embeddings": True}, "llama"),
    "llama3": ({"rope_scaling": LLAMA31_8B["rope_scaling"], "rope_theta": 5e5}, "llama"),
    "qwen2": ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "qwen2"),
    "qwen3": ({"tie_word_embeddings": True}, "qwen3"),
    "qwen3_moe": (
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True},
        "qwen3moe",
    ),
    "gemma2": (GEMMA, "gemma2"),
    "gemma3_text": (GEMMA | {"num_hidden_layers": 7}, "gemma3"),
}


def written(file, name, quantisation="Q8_0", change=None, options=None):
    """Writes a random model of transformers as a GGUF file, and returns the model with the rounded weights."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    of_family, architecture = FAMILIES[name]
    family = "llama" if name == "llama3" else name
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[family](**SIZES | of_family | (options or {}))
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    kind = gguf.GGMLQuantizationType[quantisation]
    kinds = {value: key for key, value in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[architecture], config.num_hidden_layers)
    writer = gguf.GGUFWriter(file, architecture)
    write_fields(writer, config, architecture)
    for key, value in (change or {}).items():
        writer.add_string(key, value)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter += 0.1 * torch.randn_like(parameter)  # norms begin with equal values
            values, of_kind = parameter.numpy(), gguf.GGMLQuantizationType.F32
            if parameter.ndim > 1:
                of_kind = kind
                packed = gguf.quants.quantize(values, kind)
                values = gguf.quants.dequantize(packed, kind).reshape(values.shape)
                parameter.copy_(torch.from_numpy(values))
            if parameter_name.endswith("experts.gate_up_proj"):
                halves = np.split(values, 2, axis=1)
                parts = {"gate_proj": halves[0], "up_proj": halves[1]}
                base = parameter_name.removesuffix("gate_up_proj")
                parts = {f"{base}{part}.weight": half for part, half in parts.items()}
            else:
                parts = {parameter_name if "." in parameter_name[-7:] else f"{parameter_name}.weight": values}
            for hf, array in parts.items():
                target = names.get_name(hf, try_suffixes=(".weight", ".bias"))
                stored = converted(array, hf, architecture, config)
                raw = stored if of_kind.name == "F32" else gguf.quants.quantize(stored, of_kind)
                writer.add_tensor(target, raw, raw_dtype=of_kind)
    if name == "llama3":
        rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
        plain = 1 / 5e5 ** (np.arange(0, 32, 2) / 32)
        writer.add_tensor("rope_freqs.weight", (plain / rotary.inv_freq.numpy()).astype(np.float32))
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    return model


def converted(array, name, architecture, config):
    """Changes a tensor as llama.cpp's convert_hf_to_gguf does."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
    if architecture == "llama" and heads is not None:
        rows = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
        return np.ascontiguousarray(rows.swapaxes(1, 2).reshape(array.shape))
    return array + 1 if architecture.startswith("gemma") and name.endswith("norm.weight") else array


def write_fields(writer, config, architecture):
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    full = rope.get("full_attention", rope)
    writer.add_rope_freq_base(full["rope_theta"])
    if full["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(full["factor"])
    if architecture == "qwen3moe":
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if architecture.startswith("gemma"):
        writer.add_sliding_window(config.sliding_window)
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(WORDS)
    writer.add_token_types([2, 3, 4] + [1] * (len(WORDS) - 3))
    writer.add_token_merges(MERGES)
    writer.add_eos_token_id(1)
    writer.add_chat_template("{% for m in messages %}<|user|>{{ m.content }}{% endfor %}")
