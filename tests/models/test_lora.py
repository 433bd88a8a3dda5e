"""Tests adapters against PEFT and transformers, on tiny models of several families: initialization, training, merge,
save and load, and errors."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from tests.parameters import others_slow
from tunix_like import LoraConfig, UserError, add_lora, load_adapter, load_model, merge_lora, save_adapter
from tunix_like.models.decoder import Decoder
from tunix_like.models.loading import load_abstract, save_model
from tunix_like.models.lora import join_params, split_params, without_adapters

from .test_parity import FAMILIES, MASKS, SMALL, TOKENS

REAL = MASKS["right"]


@pytest.fixture(
    scope="module",
    params=others_slow(
        (
            *("qwen2", "qwen3", "llama-rope", "gemma3", "olmo3", "ministral3", "gpt-oss", "qwen3.5", "qwen3.5-moe"),
            *("gemma4", "gemma4-moe"),
        ),
        "qwen3",
    ),
)
def place(request, tmp_path_factory):
    """Returns (transformers model, its folder) of one family. The families cover biases, another head width, norms
    after the MLP with and without others, queries scaled by position, experts without and with a shared one or
    beside an MLP, recurrent layers, and layers without k and v."""
    import torch
    import transformers

    name, extra = FAMILIES[request.param]
    torch.manual_seed(0)
    made = getattr(transformers, f"{name}ForCausalLM")
    model = made(made.config_class(**SMALL | extra)).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    folder = tmp_path_factory.mktemp("lora") / "base"
    model.save_pretrained(folder)
    return model, folder


def trained(model, scale=0.2):
    """Returns the model with adapters that change its outputs."""
    graphdef, state = nnx.split(model)
    adapters, frozen = split_params(nnx.to_pure_dict(state))
    leaves, structure = jax.tree.flatten(adapters)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    moved = [x + scale * jax.random.normal(key, x.shape) for key, x in zip(keys, leaves, strict=True)]
    return nnx.merge(graphdef, join_params(jax.tree.unflatten(structure, moved), frozen))


def logits(model):
    return np.asarray(model(jnp.asarray(TOKENS), jnp.asarray(REAL)))[REAL]


def torch_logits(model):
    import torch

    with torch.no_grad():
        out = model(input_ids=torch.tensor(TOKENS), attention_mask=torch.tensor(REAL).long())
    return out.logits.float().numpy()[REAL]


@pytest.mark.slow
def test_logits_are_equal_in_peft_transformers_and_after_loading(place, tmp_path):
    """The logits of this package equal those of PEFT with the adapters on the base model, of transformers with the
    merged folder, and of this package after loading either. They differ from those of the base model."""
    import peft
    import transformers

    reference, folder = place
    base, _ = load_model(folder)
    fresh = add_lora(base, LoraConfig(rank=4, alpha=6))
    before = logits(base)
    np.testing.assert_array_equal(logits(fresh), before)
    model = trained(fresh)
    expected = logits(model)
    assert np.abs(expected - before).max() > 0.1

    save_adapter(model, tmp_path / "adapter")
    fields = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert fields["base_model_name_or_path"] == str(folder)
    beside = peft.PeftModel.from_pretrained(reference, tmp_path / "adapter")
    np.testing.assert_allclose(torch_logits(beside), expected, atol=1e-4)
    reference = beside.unload()
    np.testing.assert_allclose(torch_logits(reference), before, atol=1e-4)
    np.testing.assert_array_equal(logits(load_adapter(base, tmp_path / "adapter")), expected)

    merged = merge_lora(model)
    np.testing.assert_allclose(logits(merged), expected, atol=1e-4)
    save_model(nnx.to_pure_dict(nnx.split(merged)[1]), merged.config, None, tmp_path / "merged")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").float().eval()
    np.testing.assert_allclose(torch_logits(again), expected, atol=1e-4)
    assert nnx.split(load_model(tmp_path / "merged")[0])[0] == nnx.split(base)[0]


def test_an_adapter_from_peft(place, tmp_path):
    """PEFT made and wrote the adapter. It has only some projections, named by a pattern."""
    import peft
    import torch

    reference, folder = place
    pattern = r".*\.(q_proj|down_proj|in_proj_qkv|out_proj)"
    config = peft.LoraConfig(r=3, lora_alpha=5, target_modules=pattern, init_lora_weights=False)
    torch.manual_seed(1)
    made = peft.get_peft_model(reference, config)
    made.save_pretrained(tmp_path / "adapter")
    expected = torch_logits(made)
    made.unload()
    model = load_adapter(load_model(folder)[0], tmp_path / "adapter")
    adapted = model.config.experts is None or model.config.experts.shared
    targets = ("q_proj", "down_proj") if adapted else ("q_proj",)
    targets += ("in_proj_qkv", "out_proj") if model.config.recurrent_layers else ()
    assert (model.adapters.rank, model.adapters.alpha, model.adapters.targets) == (3, 5, targets)
    np.testing.assert_allclose(logits(model), expected, atol=1e-4)
    assert np.abs(torch_logits(reference) - expected).max() > 0.01


HF = SMALL | {"model_type": "qwen3", "head_dim": 8}
del HF["attn_implementation"]
WIDTHS = {
    "q_proj": (32, 32), "k_proj": (32, 16), "v_proj": (32, 16), "o_proj": (32, 32), "gate_proj": (32, 48),
    "up_proj": (32, 48), "down_proj": (48, 32),
}  # fmt: skip


@pytest.fixture(scope="module")
def model():
    return load_model(HF, init="random")[0]


def test_initialization_of_adapters_is_that_of_peft(model):
    """A is uniform within `in ** -0.5`, with that standard deviation, and differs between projections and seeds. B is
    zero. alpha equals the rank, so that the scale is 1."""
    adapted = add_lora(model, LoraConfig(rank=16), seed=3)
    found = adapted.projections()
    assert len(found) == 14 and adapted.adapters.scale == 1
    for name, linear in found.items():
        inputs, outputs = WIDTHS[name.rpartition(".")[2]]
        a, b = np.asarray(linear.lora_a[...]), np.asarray(linear.lora_b[...])
        assert a.shape == (inputs, 16) and b.shape == (16, outputs) and a.dtype == b.dtype == np.float32
        assert 0.9 * inputs**-0.5 < np.abs(a).max() <= inputs**-0.5 and not b.any()
        assert a.std() == pytest.approx((3 * inputs) ** -0.5, rel=0.1)
    assert len({linear.lora_a[...].tobytes() for linear in found.values()}) == 14
    other = add_lora(model, LoraConfig(rank=16), seed=4).projections()
    name = next(iter(found))
    assert not np.array_equal(found[name].lora_a[...], other[name].lora_a[...])
    assert model.adapters is None and model.projections()[name].lora_a is None, "the model itself stays"


def test_adapters_are_split_from_and_merged_into_the_parameter_tree(model):
    graphdef, state = nnx.split(add_lora(model, LoraConfig(rank=2, targets=["o_proj"])))
    params = nnx.to_pure_dict(state)
    adapters, frozen = split_params(params)
    assert sum(x.size for x in jax.tree.leaves(adapters)) == 2 * 2 * (32 + 32)
    assert jax.tree.structure(join_params(adapters, frozen)) == jax.tree.structure(params)
    base, state = nnx.split(model)
    assert without_adapters(graphdef) == base
    jax.tree.map(np.testing.assert_array_equal, frozen, nnx.to_pure_dict(state))
    assert split_params(nnx.to_pure_dict(state))[1] == {}


def test_adapters_of_an_abstract_model(model):
    """Covers traced arrays and shapes in place of arrays."""
    lora = LoraConfig(rank=2)
    expected, params = nnx.split(add_lora(model, lora))
    shapes, _, _ = load_abstract(HF, init="random")
    traced = nnx.eval_shape(lambda: add_lora(Decoder(model.config, rngs=nnx.Rngs(0)), lora))
    for made in (add_lora(shapes, lora), traced):
        graphdef, found = nnx.split(made)
        assert graphdef == expected
        same = jax.tree.map(lambda a, b: (a.shape, a.dtype) == (b.shape, b.dtype), found, params)
        assert all(jax.tree.leaves(same))


@pytest.mark.slow
def test_merge_into_bfloat16_rounds_once(model):
    """For a bfloat16 base the sum is computed in float32, and equals the rounded float64 sum."""
    base, _ = load_model(HF, init="random", param_dtype=jnp.bfloat16)
    made = trained(add_lora(base, LoraConfig(rank=3, alpha=2)), 0.3)
    for name, linear in made.projections().items():
        wide = np.asarray(linear.kernel[...]).astype(np.float64)
        wide += 2 / 3 * np.asarray(linear.lora_a[...], np.float64) @ np.asarray(linear.lora_b[...], np.float64)
        kernel = merge_lora(made).projections()[name].kernel[...]
        assert kernel.dtype == jnp.bfloat16
        exact = np.asarray(kernel) == wide.astype(np.float32).astype(jnp.bfloat16)
        assert exact.mean() > 0.999, "but where float32's own rounding decides a tie"


def test_projections_without_adapter_support_raise_an_error(model, tmp_path):
    adapted = add_lora(model, LoraConfig(rank=2))
    with pytest.raises(UserError, match="already has adapters"):
        add_lora(adapted, LoraConfig(rank=2))
    with pytest.raises(UserError, match=r"lora\.rank: set"):
        add_lora(model, LoraConfig())
    with pytest.raises(UserError, match=r"lora\.targets: unknown projection 'q_prj'\. Did you mean 'q_proj'"):
        LoraConfig(rank=2, targets=["q_prj"])
    for bad in ([], ["q_proj", "q_proj"]):
        with pytest.raises(UserError, match=r"lora\.targets: list at least one projection, each once"):
            LoraConfig(rank=2, targets=bad)
    with pytest.raises(UserError, match=r"lora\.targets: out_proj: no layer of this model is recurrent"):
        add_lora(model, LoraConfig(rank=2, targets=["q_proj", "out_proj"]))
    with pytest.raises(UserError, match="has no adapters"):
        save_adapter(model, tmp_path)
    with pytest.raises(UserError, match="merge adapters first"):
        save_model(nnx.to_pure_dict(nnx.split(adapted)[1]), adapted.config, None, tmp_path / "out")


def test_experts_do_not_support_adapters():
    fields = FAMILIES["qwen3-moe"][1] | HF | {"model_type": "qwen3_moe", "num_hidden_layers": 3}
    model, _ = load_model(fields, init="random")
    assert add_lora(model, LoraConfig(rank=2)).adapters.targets == ("q_proj", "k_proj", "v_proj", "o_proj")
    with pytest.raises(
        UserError, match=r"lora\.targets: up_proj: .* experts, which do not support adapters; .* q_proj"
    ):
        add_lora(model, LoraConfig(rank=2, targets=["q_proj", "up_proj"]))


def multimodal(name, text):
    """Returns a tiny model for images and texts of transformers, with random weights."""
    import torch
    import transformers

    vision = {
        "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
        "patch_size": 14, "head_dim": 4, "depth": 1, "num_heads": 2, "out_hidden_size": 32,
    }  # fmt: skip
    if name == "Mistral3":
        vision["model_type"] = "pixtral"
    config = getattr(transformers, f"{name}Config")(text_config=text, vision_config=vision, tie_word_embeddings=False)
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    return model


@pytest.mark.parametrize(
    ("name", "family", "kind"),
    [
        ("Gemma3", "gemma3", "gemma3_text"),
        pytest.param("Mistral3", "ministral3", "ministral3", marks=pytest.mark.slow),
        pytest.param("Qwen3_5", "qwen3.5", "qwen3_5_text", marks=pytest.mark.slow),
    ],
)
def test_adapters_of_a_multimodal_model_in_both_directions(name, family, kind, tmp_path):
    """PEFT loads an adapter of this package onto the multimodal class, and this package one that PEFT wrote for it, or
    one with the names of earlier versions of transformers."""
    import peft
    import torch

    text = SMALL | FAMILIES[family][1] | {"model_type": kind, "final_logit_softcapping": None}
    reference = multimodal(name, text)
    reference.save_pretrained(tmp_path / "base")
    base, _ = load_model(tmp_path / "base")
    before = logits(base)
    np.testing.assert_allclose(torch_logits(reference), before, atol=1e-4)
    model = trained(add_lora(base, LoraConfig(rank=2, alpha=4, targets=["q_proj", "down_proj"])))
    save_adapter(model, tmp_path / "adapter")
    beside = peft.PeftModel.from_pretrained(reference, tmp_path / "adapter")
    expected = torch_logits(beside)
    assert np.abs(expected - before).max() > 0.05
    np.testing.assert_allclose(logits(model), expected, atol=1e-4)
    np.testing.assert_array_equal(logits(load_adapter(base, tmp_path / "adapter")), logits(model))
    torch.manual_seed(1)
    pattern = r".*language_model.*\.(q_proj|down_proj)"
    config = peft.LoraConfig(r=2, lora_alpha=3, target_modules=pattern, init_lora_weights=False)
    theirs = peft.get_peft_model(beside.unload(), config)
    theirs.save_pretrained(tmp_path / "theirs")
    file = tmp_path / "theirs" / "adapter_model.safetensors"
    tensors = load_file(file)
    assert all(".language_model." in tensor for tensor in tensors)
    for prefix in ("model.language_model.", "language_model.model."):
        renamed = {key.replace("model.language_model.", prefix): tensor for key, tensor in tensors.items()}
        save_file(renamed, file)
        np.testing.assert_allclose(logits(load_adapter(base, tmp_path / "theirs")), torch_logits(theirs), atol=1e-4)


@pytest.mark.parametrize(
    "variant", ["pissa", "pissa_niter_2", "olora", "dora", "rslora", "alora", "bias", "embeddings"]
)
def test_variants_of_peft_are_refused(variant, place, tmp_path):
    """An adapter that PEFT has made, trained and saved as a variant gives other outputs as plain LoRA."""
    import peft
    import torch

    reference, folder = place
    given = {
        "dora": {"use_dora": True}, "rslora": {"use_rslora": True}, "alora": {"alora_invocation_tokens": [3, 4]},
        "bias": {"bias": "lora_only"}, "embeddings": {"trainable_token_indices": [1, 2]},
    }.get(variant, {"init_lora_weights": variant})  # fmt: skip
    config = peft.LoraConfig(r=3, lora_alpha=5, target_modules=["q_proj", "down_proj"], **given)
    torch.manual_seed(0)
    adapted = peft.get_peft_model(copy.deepcopy(reference), config)
    adapted.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"adapter_config.json: \w+ = .* is not supported"):
        load_adapter(load_model(folder)[0], tmp_path)


@pytest.mark.parametrize("start", [False, "gaussian", "orthogonal"])
def test_other_starts_that_leave_the_base_unchanged_are_read(start, place, tmp_path):
    import peft
    import torch

    reference, folder = place
    config = peft.LoraConfig(r=4, lora_alpha=5, target_modules=["q_proj", "down_proj"], init_lora_weights=start)
    torch.manual_seed(0)
    adapted = peft.get_peft_model(copy.deepcopy(reference), config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            parameter += 0.1 * torch.randn_like(parameter) * ("lora_" in name)
    adapted.save_pretrained(tmp_path)
    found = load_adapter(load_model(folder)[0], tmp_path)
    np.testing.assert_allclose(logits(found), torch_logits(adapted), atol=1e-4)


CHANGES = {
    "use_dora": (True, "use_dora = True is not supported"),
    "rank_pattern": ({"q_proj": 3}, "rank_pattern"),
    "bias": ("all", "bias = 'all' is not supported"),
    "init_lora_weights": ("corda", "init_lora_weights = 'corda' is not supported"),
    "layer_replication": ([[0, 1]], "layer_replication"),
    "target_parameters": (["mlp.experts.down_proj"], "target_parameters"),
    "use_qalora": (True, "use_qalora"),
    "a_field_of_next_year": (0.5, "a_field_of_next_year"),
    "peft_type": ("LOHA", "not the config of a LoRA adapter"),
    "r": (0, "r = 0 must be a positive number"),
    "lora_alpha": ("2", "lora_alpha = '2' must be"),
}


@pytest.mark.parametrize("field", CHANGES)
def test_unsupported_adapter_config_raises_an_error(field, model, tmp_path):
    save_adapter(add_lora(model, LoraConfig(rank=2)), tmp_path)
    file, (value, said) = tmp_path / "adapter_config.json", CHANGES[field]
    file.write_text(json.dumps(json.loads(file.read_text()) | {field: value}))
    with pytest.raises(UserError, match=f"adapter_config.json: {said}"):
        load_adapter(model, tmp_path)


def test_adapters_of_another_model(model, tmp_path):
    save_adapter(add_lora(model, LoraConfig(rank=2, targets=["q_proj"])), tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    tensors, first = load_file(file), "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"

    def said_of(changed: dict[str, np.ndarray], where: Path = tmp_path) -> str:
        save_file(changed, file)
        with pytest.raises(UserError) as caught:
            load_adapter(model, where)
        return str(caught.value)

    assert "lacks tensor(s) base_model" in said_of({k: v for k, v in tensors.items() if k != first})
    assert "unexpected tensor(s) further" in said_of(tensors | {"further": np.zeros(1)})
    assert f"{first} has shape (2, 31), but this model with r = 2 needs (2, 32)" in said_of(
        tensors | {first: tensors[first][:, 1:].copy()}
    )
    wrong = np.full_like(tensors[first], np.inf)
    assert f"{file}: tensor {first} has NaN or infinite values" in said_of(tensors | {first: wrong})
    assert "has no adapter of" in said_of({"embed": np.zeros(1)})
    assert "adapter_config.json: cannot be read" in said_of(tensors, tmp_path / "nowhere")
    file.write_bytes(b"x")
    with pytest.raises(UserError, match="cannot be read as safetensors"):
        load_adapter(model, tmp_path)
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(UserError, match="is not a regular file"):
        load_adapter(model, tmp_path)
