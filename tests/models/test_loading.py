"""Tests `load_model` and `save_model`: the results for a folder, a hub id and a mapping, and the error messages."""

import dataclasses
import json
import mmap
import subprocess
import sys
import tracemalloc
import types

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tokenizers
from flax import nnx
from jax.sharding import AxisType

import tunix_like
from tunix_like.config.schema import RolloutConfig, SFTConfig
from tunix_like.errors import UserError
from tunix_like.models import stored_tensors
from tunix_like.models.config import DecoderConfig
from tunix_like.models.decoder import Decoder
from tunix_like.models.loading import export_model, load_abstract, load_model, save_model
from tunix_like.models.sharding import parameter_shardings
from tunix_like.runs.trained import open_trained
from tunix_like.text.tokenizer import Tokenizer
from tunix_like.training.engine import make_engine
from tunix_like.training.sft import SFTTrainer

HF = {
    "model_type": "qwen2",
    "vocab_size": 12,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "initializer_range": 0.25,
    "eos_token_id": 3,
}

LARGE = HF | {"vocab_size": 32768, "hidden_size": 512, "num_attention_heads": 4, "num_key_value_heads": 4}


def make_tokenizer(size=10, **kwargs):
    vocab = {"<pad>": 0, "<bos>": 1, "<eos>": 2, "<unk>": 3} | {f"w{i}": i for i in range(4, size)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return Tokenizer(backend, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", **kwargs)


def params_of(model):
    return nnx.to_pure_dict(nnx.split(model)[1])


def assert_same(one, two):
    jax.tree.map(np.testing.assert_array_equal, params_of(one), params_of(two))


@pytest.fixture
def folder(tmp_path):
    """A complete model folder: weights, config, and a tokenizer with end-of-sequence ids 2 and 5."""
    model, _ = load_model(HF, init="random", seed=1)
    save_model(params_of(model), model.config, make_tokenizer(eos_ids=[2, 5]), tmp_path / "model")
    return tmp_path / "model"


def rewrite(file, **changes):
    fields = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({name: value for name, value in fields.items() if value is not ...}))


def test_random_from_a_mapping():
    model, tokenizer = load_model(HF, init="random", seed=1)
    again, other = load_model(HF, init="random", seed=1)[0], load_model(HF, init="random", seed=2)[0]
    assert tokenizer is None and model.config.qkv_bias
    assert_same(model, again)
    kernel = lambda m: np.asarray(m.layers[0].mlp.up_proj.kernel[...])  # noqa: E731
    assert np.abs(kernel(model) - kernel(other)).max() > 0.01
    assert np.abs(kernel(model) - np.asarray(model.layers[1].mlp.up_proj.kernel[...])).max() > 0.01
    assert model(jnp.zeros((1, 3), int)).shape == (1, 3, 12)


def test_random_from_a_folder_needs_no_weights(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(HF))
    model, tokenizer = load_model(tmp_path, init="random", seed=1)
    assert tokenizer is None
    assert_same(model, load_model(HF, init="random", seed=1)[0])
    with pytest.raises(UserError, match="no model.safetensors.*init to 'random'"):
        load_model(tmp_path)


def test_export_and_load(folder):
    model, tokenizer = load_model(folder)
    assert_same(model, load_model(HF, init="random", seed=1)[0])
    assert tokenizer.eos_ids == (2, 5) and tokenizer.encode("w4 w9") == [4, 9]
    config = json.loads((folder / "config.json").read_text())
    assert (config["eos_token_id"], config["bos_token_id"], config["pad_token_id"]) == ([2, 5], 1, 0)
    assert (config["initializer_range"], config["torch_dtype"]) == (0.25, "float32")
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation == {"eos_token_id": [2, 5], "bos_token_id": 1, "pad_token_id": 0}
    assert not list(folder.glob(".*")), "temporary files are left over"


def test_abstract_model_has_the_structure_of_the_loaded_model(folder):
    model, tokenizer = load_model(folder)
    shapes, again, weights = load_abstract(folder)
    assert shapes.config == model.config and shapes.dtype == model.dtype and again.eos_ids == tokenizer.eos_ids
    assert "tensors match" in weights
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(params_of(shapes)))
    assert jax.eval_shape(lambda: params_of(model)) == params_of(shapes)
    rewrite(folder / "config.json", intermediate_size=24)
    with pytest.raises(UserError, match="are of different models"):
        load_abstract(folder)
    assert load_abstract(folder, init="random")[2] == "initialised at random"
    assert load_abstract(HF, init="random")[1:] == (None, "initialised at random")
    with pytest.raises(UserError, match="a config mapping has no weights"):
        load_abstract(HF)


def test_export_without_a_tokenizer_keeps_the_ids_of_the_source(tmp_path):
    model, _ = load_model(HF, init="random", param_dtype=jnp.bfloat16)
    save_model(params_of(model), model.config, None, tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    assert (fields["eos_token_id"], fields["torch_dtype"]) == (3, "bfloat16")
    assert load_model(tmp_path)[1] is None


def test_export_loads_in_transformers(folder):
    import torch
    import transformers

    model, tokenizer = load_model(folder)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokens = transformers.AutoTokenizer.from_pretrained(folder)("w4 w9 w5")["input_ids"]
    assert tokens == tokenizer.encode("w4 w9 w5")
    assert theirs.generation_config.eos_token_id == [2, 5]
    with torch.no_grad():
        expected = theirs(torch.tensor([tokens])).logits.numpy()
    np.testing.assert_allclose(model(jnp.array([tokens])), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ([4, 2], 3, (4, 2)),
        (4, 3, (4, 2)),
        (..., 3, (3, 2)),
        (None, [6, 7], (6, 7, 2)),
        (..., ..., (2,)),
        ([], None, (2,)),
    ],
)
def test_order_of_the_eos_sources(folder, generation, config, expected):
    """The ids come from generation_config.json, else from config.json, and always include the token of the
    tokenizer."""
    rewrite(folder / "generation_config.json", eos_token_id=generation)
    rewrite(folder / "config.json", eos_token_id=config)
    assert load_model(folder)[1].eos_ids == expected


def test_chatml_end_token_with_the_generation_config_of_a_base_model(folder, tmp_path):
    """The end token of SFT, the stop ids of the sampler and those of an export are the same set."""
    rewrite(folder / "generation_config.json", eos_token_id=5)
    model, tokenizer = load_model(folder)
    rollout = RolloutConfig(max_prompt_length=8, max_tokens_to_generate=8)
    trainer = SFTTrainer(model=model, tokenizer=tokenizer, sft_config=SFTConfig(max_steps=1), rollout_config=rollout)
    assert trainer._answers.eos_id == tokenizer.eos_id == 2
    assert trainer._answers.eos_id in make_engine(nnx.split(model)[0], tokenizer, rollout).eos_ids
    export_model(model, tokenizer, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["eos_token_id"] == [5, 2]


def test_no_generation_config(folder):
    (folder / "generation_config.json").unlink()
    rewrite(folder / "config.json", eos_token_id=7)
    assert load_model(folder, init="random")[1].eos_ids == (7, 2)


def test_dtypes(folder):
    model, _ = load_model(folder)
    assert (model.dtype, model.norm.scale[...].dtype) == (jnp.float32, jnp.float32)
    narrow, _ = load_model(folder, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
    assert narrow.dtype == jnp.bfloat16 and narrow.norm.scale[...].dtype == jnp.bfloat16
    tokens = jnp.array([[4, 5, 6]])
    assert narrow(tokens).dtype == jnp.float32
    np.testing.assert_allclose(narrow(tokens), model(tokens), atol=0.02)


def test_accelerators_compute_in_bfloat16(folder, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    model, _ = load_model(folder)
    assert (model.dtype, model.norm.scale[...].dtype) == (jnp.bfloat16, jnp.float32)


def test_pretrained_draws_no_random_weights(folder, monkeypatch):
    """The model is created from shapes only, so there are never random weights in memory besides the loaded ones."""
    drawn = []
    normal = jax.random.normal

    def spy(key, *args, **kwargs):
        drawn.append(isinstance(key, jax.core.Tracer))
        return normal(key, *args, **kwargs)

    monkeypatch.setattr(jax.random, "normal", spy)
    load_model(folder)
    assert drawn and all(drawn)


@pytest.mark.parametrize(("dtype", "value"), [("float32", np.nan), ("float16", np.inf), ("bfloat16", -np.inf)])
@pytest.mark.parametrize("options", [{}, {"quantize": "int8"}, {"mesh": (2, 2)}])
def test_tensor_with_a_value_that_is_not_finite(tmp_path, monkeypatch, dtype, value, options):
    """The largest finite numbers of the dtype are accepted."""
    monkeypatch.setattr(stored_tensors, "READ_BYTES", 256)  # several blocks per tensor
    if options.get("mesh"):
        options = {"mesh": jax.make_mesh(options["mesh"], ("fsdp", "tp"), axis_types=(AxisType.Auto,) * 2)}
    model, _ = load_model(HF | {"num_key_value_heads": 2}, init="random")
    params = jax.tree.map(lambda x: np.array(x, dtype), params_of(model))
    kernel = params["layers"][1]["mlp"]["down_proj"]["kernel"]
    limits = ml_dtypes.finfo(dtype)
    kernel[:3, 0] = limits.max, limits.min, limits.smallest_subnormal
    save_model(params, model.config, None, tmp_path)
    load_model(tmp_path, **options)
    kernel[11, 5] = value
    save_model(params, model.config, None, tmp_path)
    with pytest.raises(UserError, match=r"model\.safetensors: tensor model\.layers\.1\.mlp\.down_proj\.weight "):
        load_model(tmp_path, **options)


def test_tokenizer_larger_than_the_model(folder):
    make_tokenizer(size=13).save(folder)
    for init in ("pretrained", "random"):
        with pytest.raises(UserError, match="13 tokens.*vocab_size = 12"):
            load_model(folder, init=init)
    make_tokenizer(size=12).save(folder)
    assert load_model(folder)[1].vocab_size == 12


def test_bad_arguments(folder):
    with pytest.raises(UserError, match="init 'pretraind' is unknown. Did you mean 'pretrained'"):
        load_model(folder, init="pretraind")
    with pytest.raises(UserError, match="mapping has no weights"):
        load_model(HF)
    with pytest.raises(UserError, match="no such folder"):
        load_model(folder / "nothing")
    with pytest.raises(UserError, match="is a file; give the folder"):
        load_model(folder / "config.json")
    with pytest.raises(UserError, match="missing: vocab_size"):
        load_model({name: value for name, value in HF.items() if name != "vocab_size"}, init="random")


@pytest.mark.parametrize("value", [12, -1, "<eos>", [2, 99], True])
def test_bad_eos_ids(folder, value):
    rewrite(folder / "generation_config.json", eos_token_id=value)
    with pytest.raises(UserError, match="generation_config.json: eos_token_id"):
        load_model(folder)


def test_broken_generation_config(folder):
    for text in ("{", "[]"):
        (folder / "generation_config.json").write_text(text)
        with pytest.raises(UserError, match="generation_config.json"):
            load_model(folder)


def test_hub_id_without_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UserError) as error:
        load_model("Qwen/Qwen2.5-0.5B")
    for piece in ("tunix-like[hub]", "https://huggingface.co/Qwen/Qwen2.5-0.5B", "*.safetensors", "give its path"):
        assert piece in str(error.value)


def fake_hub(monkeypatch, download):
    monkeypatch.setitem(sys.modules, "huggingface_hub", types.SimpleNamespace(snapshot_download=download))


def test_hub_id_is_downloaded(folder, monkeypatch):
    asked = []

    def download(name, allow_patterns):
        asked.append((name, sorted(allow_patterns)))
        return str(folder)

    fake_hub(monkeypatch, download)
    assert_same(load_model("owner/name")[0], load_model(folder)[0])
    load_model("owner/name", init="random")
    load_abstract("owner/name")
    without_weights = ("owner/name", ["*.jinja", "*.json", "*.txt"])
    with_weights = ("owner/name", ["*.jinja", "*.json", "*.safetensors", "*.txt"])
    assert asked == [with_weights, without_weights, without_weights]
    assert_same(tunix_like.load_model("hf://owner/name")[0], load_model(folder)[0])
    open_trained("hf://owner/name", [])
    assert asked[3:] == [with_weights] * 2
    for name in ("hf://owner", "hf://datasets/owner/name", "hf://owner/name@main"):
        with pytest.raises(UserError, match="load_model: .*OWNER/NAME"):
            tunix_like.load_model(name)


def test_hub_without_network(monkeypatch):
    def download(name, allow_patterns):
        raise ConnectionError(f"offline {'x' * 400}\nand more")

    fake_hub(monkeypatch, download)
    with pytest.raises(UserError) as raised:
        load_model("owner/name")
    advice, _, theirs = str(raised.value).partition("The error of the hub client: ")
    assert advice.startswith("owner/name could not be downloaded")
    for word in ("give its path", "hf download owner/name --local-dir", "HF_HUB_OFFLINE=1"):
        assert word in advice
    assert theirs.startswith("ConnectionError: offline xxx") and len(theirs) < 210 and "\n" not in theirs


def test_local_folder_takes_precedence_over_the_hub(folder, monkeypatch):
    monkeypatch.chdir(folder.parent.parent)
    fake_hub(monkeypatch, lambda *args, **kwargs: pytest.fail("the hub was asked"))
    name = f"{folder.parent.name}/{folder.name}"
    assert load_model(name)[0].config.vocab_size == 12


def test_export_of_another_config(folder, tmp_path):
    model, _ = load_model(folder)
    with pytest.raises(UserError, match="lm_head"):
        save_model(params_of(model), dataclasses.replace(model.config, tie_embeddings=True), None, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write the weights"):
        save_model(params_of(model), model.config, None, tmp_path / "file")


@pytest.mark.slow
def test_loading_imports_neither_torch_nor_transformers():
    code = (
        "import sys; from tunix_like.models.loading import load_model; "
        f"load_model({HF!r}, init='random'); "
        "print([m for m in ('torch', 'transformers', 'huggingface_hub') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
@pytest.mark.parametrize("shape", [None, (2, 4)])
def test_loading_keeps_one_part_of_one_tensor_in_host_memory(tmp_path, monkeypatch, shape):
    """For a file in bfloat16 that is loaded as float32, the peak is at most the largest part of a device plus a
    tenth."""
    monkeypatch.setattr(stored_tensors, "READ_BYTES", 2**17)
    put = jax.device_put

    def to_device_memory(x, place):  # the CPU has no separate device memory; mapped memory is not traced
        held = np.frombuffer(mmap.mmap(-1, x.nbytes), x.dtype).reshape(x.shape)
        held[...] = x
        return put(held, place)

    monkeypatch.setattr(jax, "device_put", to_device_memory)
    config = DecoderConfig.from_hf(LARGE)
    state = nnx.state(Decoder(config, rngs=nnx.Rngs(0), param_dtype=jnp.bfloat16))
    save_model(nnx.to_pure_dict(state), config, None, tmp_path)
    mesh = None if shape is None else jax.make_mesh(shape, ("fsdp", "tp"), axis_types=(AxisType.Auto,) * 2)
    load_model(tmp_path, mesh=mesh)  # imports and caches are not part of the weights
    tracemalloc.start()
    try:
        model, _ = load_model(tmp_path, mesh=mesh)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    loaded = nnx.to_pure_dict(nnx.split(model)[1])
    for got, expected in zip(jax.tree.leaves(loaded), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(got, np.asarray(expected, np.float32))
    assert mesh is None or jax.tree.map(lambda x: x.sharding, loaded) == parameter_shardings(loaded, mesh)
    largest = max(4 * leaf.size for leaf in jax.tree.leaves(loaded)) / (1 if mesh is None else 8)
    assert largest < peak < 1.1 * largest
