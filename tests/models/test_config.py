"""Tests `DecoderConfig`: published configs are read correctly, unsupported values raise an error, and the conversion
back to the Hugging Face format."""

import dataclasses
import inspect
import json
import re

import pytest

from tests.models.published_configs import CHECKPOINTS, LLAMA31_8B, LLAMA32, QWEN3, QWEN3_8B, QWEN25, SMOLLM2
from tunix_like.errors import UserError
from tunix_like.models import families
from tunix_like.models.config import DecoderConfig
from tunix_like.models.counts import parameter_count
from tunix_like.models.families import FAMILIES
from tunix_like.models.fields import RopeScaling, YarnScaling

LLAMA3_ROPE = LLAMA32["rope_scaling"]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


def without(fields, *names):
    return {name: value for name, value in fields.items() if name not in names}


def test_qwen25_numbers():
    assert DecoderConfig.from_hf(QWEN25) == DecoderConfig(
        vocab_size=151936,
        hidden_size=896,
        intermediate_size=4864,
        num_layers=24,
        num_heads=14,
        num_kv_heads=2,
        head_dim=64,
        rope_theta=1e6,
        tie_embeddings=True,
        qkv_bias=True,
    )


def test_qwen3_numbers():
    config = DecoderConfig.from_hf(QWEN3)
    assert (config.head_dim, config.qk_norm, config.qkv_bias, config.max_positions) == (128, True, False, 40960)


def test_llama32_numbers():
    config = DecoderConfig.from_hf(LLAMA32)
    assert config.rope_scaling == RopeScaling(32.0, 1.0, 4.0, 8192)
    assert (config.rope_theta, config.norm_eps, config.qk_norm, config.qkv_bias) == (5e5, 1e-5, False, False)


def test_smollm2_numbers():
    config = DecoderConfig.from_hf(SMOLLM2)
    assert (config.head_dim, config.num_kv_heads, config.rope_theta, config.rope_scaling) == (64, 3, 1e5, None)


UNREAD = {
    "_model_name_or_path": "a/b",
    "unk_token_id": 0,
    "transformers.js_config": {"dtype": "q4"},
    "auto_map": {"AutoModelForCausalLM": "modeling.Own"},
    "attn_logit_softcapping": 50.0,  # of another family
    "quantization": "none",
}


def test_fields_of_a_file_that_transformers_does_not_read_are_ignored(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA32 | UNREAD))
    found = DecoderConfig.from_hf(tmp_path)
    assert found == DecoderConfig.from_hf(LLAMA32)
    assert "auto_map" not in found.to_hf()


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_published_checkpoints_are_accepted_or_refused_for_the_right_reason(name, tmp_path):
    fields, refused = CHECKPOINTS[name]
    (tmp_path / "config.json").write_text(json.dumps(fields))
    if refused is None:
        assert DecoderConfig.from_hf(tmp_path).num_layers
        return
    with pytest.raises(UserError) as error:
        DecoderConfig.from_hf(tmp_path)
    assert refused in str(error.value)


def test_fields_that_the_common_code_of_transformers_reads_are_known():
    """A field that no class declares, but that masks or the base class of all configs read, is not ignored either."""
    transformers = pytest.importorskip("transformers")
    common = set(re.findall(r'getattr\(config, "(\w+)"', inspect.getsource(transformers.masking_utils)))
    common |= {name for name in transformers.PreTrainedConfig.__annotations__ if not name.startswith("_")}
    common -= {name for name, kind in transformers.PreTrainedConfig.__annotations__.items() if "ClassVar" in str(kind)}
    common.discard("attention_chunk_size")  # only read for a kind of layer that is refused
    common.add("per_layer_config")  # handled by code, without an annotation
    assert common <= families._KNOWN and {"is_causal", "sliding_window"} <= common


@pytest.mark.parametrize("name", FAMILIES)
def test_tables_have_all_fields_that_transformers_reads(name):
    """A field that is in no table is ignored in a file, so no field of a family's class may be missing."""
    configuration = pytest.importorskip("transformers").CONFIG_MAPPING[name]
    parts = [part for part in configuration.__mro__ if part.__name__ not in ("PreTrainedConfig", "object")]
    declared = {field for part in parts for field in getattr(part, "__annotations__", {}) if not field.startswith("_")}
    about_code = {field for field in declared if field.endswith("_plan")}
    about_code |= {"attribute_map", "base_config_key", "sub_configs_defaults", "extra_config_files", "extra_files"}
    family = FAMILIES[name]
    assert declared - about_code <= families._KNOWN | family.hf | family.fixed.keys()
    assert {"vocab_size", "rms_norm_eps"} <= declared


def test_new_and_old_rope_spelling_agree():
    new = without(LLAMA32, "rope_theta", "rope_scaling") | {"rope_parameters": {**LLAMA3_ROPE, "rope_theta": 5e5}}
    assert DecoderConfig.from_hf(new) == DecoderConfig.from_hf(LLAMA32)
    plain = without(QWEN25, "rope_theta") | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    assert DecoderConfig.from_hf(plain) == DecoderConfig.from_hf(QWEN25)
    oldest = LLAMA32 | {"rope_scaling": without(LLAMA3_ROPE, "rope_type") | {"type": "llama3"}}
    assert DecoderConfig.from_hf(oldest) == DecoderConfig.from_hf(LLAMA32)


def test_yarn():
    """Defaults, all fields, either spelling, and the round trip. In transformers, an mscale of 0 is an absent one."""
    config = DecoderConfig.from_hf(QWEN3 | {"rope_scaling": YARN})
    assert config.rope_scaling == YarnScaling(4.0, 32768, 32.0, 1.0, True, None, None, None)
    more = YARN | {"beta_fast": 4, "beta_slow": 2, "truncate": False, "mscale": 1.0, "mscale_all_dim": 0.5}
    full = DecoderConfig.from_hf(QWEN3 | {"rope_scaling": more | {"attention_factor": 1.5}})
    assert full.rope_scaling == YarnScaling(4.0, 32768, 4.0, 2.0, False, 1.5, 1.0, 0.5)
    new = without(QWEN3, "rope_theta", "rope_scaling") | {"rope_parameters": YARN | {"rope_theta": 1e6}}
    assert DecoderConfig.from_hf(new) == config
    assert DecoderConfig.from_hf(QWEN3 | {"rope_scaling": YARN | {"mscale": 0, "mscale_all_dim": 0.0}}) == config
    for one in (config, full):
        assert DecoderConfig.from_hf(one.to_hf()) == one
        assert None not in one.to_hf()["rope_scaling"].values()


def test_absent_values_are_derived():
    config = DecoderConfig.from_hf(without(LLAMA32, "head_dim", "num_key_value_heads"))
    assert (config.head_dim, config.num_kv_heads) == (64, 32)
    # transformers 5 writes null for values that it derives
    assert DecoderConfig.from_hf(LLAMA32 | {"head_dim": None}).head_dim == 64


@pytest.mark.parametrize(("fields", "millions"), [(QWEN3_8B, 8190.74), (LLAMA31_8B, 8030.26)], ids=["qwen3", "llama"])
def test_parameter_counts_of_published_models(fields, millions):
    """Compares with the parameter counts of the two published models."""
    assert parameter_count(DecoderConfig.from_hf(fields)) / 1e6 == pytest.approx(millions, abs=0.005)


def test_source_does_not_affect_equality():
    one, two = DecoderConfig.from_hf(QWEN25), DecoderConfig.from_hf(QWEN25 | {"initializer_range": 0.5})
    assert one == two and hash(one) == hash(two)
    assert one != dataclasses.replace(one, num_layers=3)


@pytest.mark.parametrize("fields", [QWEN25, QWEN3, LLAMA32, SMOLLM2], ids=lambda f: f["model_type"])
def test_to_hf_round_trip(fields):
    config = DecoderConfig.from_hf(fields)
    back = config.to_hf()
    assert DecoderConfig.from_hf(back) == config
    for name in without(fields, "torch_dtype", "rope_scaling", "head_dim"):
        assert back[name] == fields[name], name


def test_to_hf_uses_the_values_of_the_config_before_those_of_the_source():
    config = dataclasses.replace(DecoderConfig.from_hf(LLAMA32), num_layers=2, rope_scaling=None, vocab_size=7)
    back = config.to_hf(eos_ids=[3, 4], bos_id=1, pad_id=0)
    assert DecoderConfig.from_hf(back) == config
    assert (back["num_hidden_layers"], back["vocab_size"], "rope_scaling" in back) == (2, 7, False)
    assert (back["eos_token_id"], back["bos_token_id"], back["pad_token_id"]) == ([3, 4], 1, 0)


def test_to_hf_without_a_source():
    config = dataclasses.replace(DecoderConfig.from_hf(QWEN25), source=None)
    back = config.to_hf(eos_ids=[5])
    assert (back["model_type"], back["architectures"], back["eos_token_id"]) == ("qwen2", ["Qwen2ForCausalLM"], 5)
    assert back["bos_token_id"] is None, "an absent id would be filled with a default of the family's"
    assert DecoderConfig.from_hf(back) == config
    with pytest.raises(UserError, match="qkv_bias and qk_norm"):
        dataclasses.replace(config, qk_norm=True).to_hf()


def bad(fields, *said, id):
    return pytest.param(fields, said, id=id)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        bad(QWEN25 | {"model_type": "gpt2"}, "gpt2", *FAMILIES, id="family"),
        bad(QWEN25 | {"model_type": "qwen_2"}, "Did you mean 'qwen2'", id="family-misspelt"),
        bad(
            without(QWEN25, "model_type"),
            "model_type",
            *FAMILIES,
            id="family-absent",
        ),
        bad(QWEN25 | {"logit_softcap": 30.0}, "logit_softcap", "is unknown", id="unknown-field"),
        bad(without(QWEN25, "hidden_size"), "missing: hidden_size", id="missing"),
        bad(QWEN25 | {"vocab_size": None}, "missing: vocab_size", id="null-is-missing"),
        bad(without(QWEN25, "num_key_value_heads"), "missing: num_key_value_heads", id="missing-kv-heads"),
        bad(without(QWEN3, "head_dim"), "missing: head_dim", id="missing-head-dim"),
        bad(QWEN25 | {"hidden_act": "gelu"}, "hidden_act", "silu", id="activation"),
        bad(QWEN25 | {"use_sliding_window": True}, "use_sliding_window", id="sliding"),
        bad(QWEN25 | {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types", id="layer-types"),
        bad(LLAMA32 | {"attention_bias": True}, "attention_bias", id="attention-bias"),
        bad(LLAMA32 | {"mlp_bias": True}, "mlp_bias", id="mlp-bias"),
        bad(QWEN3 | {"attention_dropout": 0.1}, "attention_dropout", id="dropout"),
        bad(QWEN3 | {"quantization_config": {"bits": 4}}, "quantization_config", id="quantised"),
        bad(QWEN25 | {"num_key_value_heads": 4}, "num_attention_heads", "14", "4", id="kv-does-not-divide"),
        bad(QWEN25 | {"num_hidden_layers": 0}, "num_hidden_layers (num_layers)", "positive integer", id="no-layers"),
        bad(QWEN25 | {"hidden_size": "896"}, "hidden_size", "'896'", id="text-for-number"),
        bad(QWEN25 | {"vocab_size": True}, "vocab_size", "True", id="bool-for-number"),
        bad(QWEN25 | {"hidden_size": 900}, "900", "multiple", "14", id="indivisible-width"),
        bad(QWEN3 | {"head_dim": 7}, "head_dim", "even", id="odd-head"),
        bad(QWEN3 | {"rms_norm_eps": 0.0}, "rms_norm_eps (norm_eps)", id="zero-epsilon"),
        bad(QWEN3 | {"tie_word_embeddings": "yes"}, "tie_word_embeddings", "'yes'", id="text-for-bool"),
        bad(QWEN3 | {"rope_theta": -1.0}, "rope_theta", "-1", id="negative-theta"),
        bad(QWEN3 | {"rope_scaling": {"rope_type": "longrope"}}, "longrope", "'llama3', 'yarn'", id="rope-type"),
        bad(
            QWEN3 | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            "missing",
            "original_max_position_embeddings",
            id="yarn-missing",
        ),
        bad(QWEN3 | {"rope_scaling": YARN | {"beta_slow": 33}}, "beta_fast", "smaller", id="yarn-order"),
        bad(QWEN3 | {"rope_scaling": YARN | {"truncate": 0}}, "truncate must be true", id="yarn-truncate"),
        bad(QWEN3 | {"rope_scaling": YARN, "rope_theta": 1.0}, "rope_theta is 1.0", "YaRN", id="yarn-theta"),
        bad(QWEN3 | {"rope_scaling": YARN | {"llama_4_scaling_beta": 0.1}}, "llama_4_scaling_beta", id="yarn-beta"),
        bad(QWEN3 | {"rope_scaling": {"type": "linear"}}, "missing", "linear", "factor", id="linear"),
        bad(QWEN3 | {"rope_scaling": {"rope_type": "default", "factor": 4.0}}, "factor", id="rope-unknown-field"),
        bad(QWEN3 | {"rope_scaling": "llama3"}, "rope_scaling", id="rope-no-mapping"),
        bad(
            LLAMA32 | {"rope_scaling": without(LLAMA3_ROPE, "low_freq_factor")},
            "missing",
            "low_freq_factor",
            id="rope-missing",
        ),
        bad(
            LLAMA32 | {"rope_scaling": LLAMA3_ROPE | {"high_freq_factor": 1.0}},
            "high_freq_factor",
            "larger",
            id="rope-order",
        ),
        bad(
            QWEN3 | {"rope_parameters": {"rope_type": "default", "rope_theta": 2.0}},
            "rope_theta",
            "twice",
            id="two-thetas",
        ),
        bad(
            LLAMA32 | {"rope_parameters": {"rope_type": "default"}},
            "rope_scaling and rope_parameters",
            id="two-spellings",
        ),
    ],
)
def test_bad_config(fields, said):
    with pytest.raises(UserError) as error:
        DecoderConfig.from_hf(fields)
    for piece in said:
        assert piece in str(error.value)


def test_folder_and_its_errors(tmp_path):
    file = tmp_path / "config.json"
    with pytest.raises(UserError, match="config.json: no such file"):
        DecoderConfig.from_hf(tmp_path)
    file.write_text('{"model_type": ')
    with pytest.raises(UserError, match="config.json: not valid JSON"):
        DecoderConfig.from_hf(tmp_path)
    file.write_text("[1]")
    with pytest.raises(UserError, match="JSON object"):
        DecoderConfig.from_hf(tmp_path)
    file.write_text(json.dumps(without(QWEN25, "hidden_size")))
    with pytest.raises(UserError, match=r"config.json: required field\(s\) missing: hidden_size"):
        DecoderConfig.from_hf(str(tmp_path))
    file.write_text(json.dumps(QWEN25))
    assert DecoderConfig.from_hf(tmp_path) == DecoderConfig.from_hf(file) == DecoderConfig.from_hf(QWEN25)
