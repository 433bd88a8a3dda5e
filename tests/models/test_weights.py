"""Tests reading and writing safetensors: the table of names, casts, shards, and errors that name the invalid file."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from tunix_like.errors import UserError
from tunix_like.models.config import DecoderConfig
from tunix_like.models.decoder import Decoder
from tunix_like.models.weights import INDEX, SINGLE, Stored, check_weights, hf_name, load_weights, save_weights

CONFIG = DecoderConfig(
    vocab_size=11,
    hidden_size=8,
    intermediate_size=12,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    qkv_bias=True,
    qk_norm=True,
)
TIED = dataclasses.replace(CONFIG, tie_embeddings=True)
GATE = "model.layers.1.mlp.gate_proj.weight"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def make_params(config, seed=0):
    """Returns parameters with different random numbers in each leaf, because equal leaves would hide a swap."""
    params = nnx.to_pure_dict(nnx.split(Decoder(config, rngs=nnx.Rngs(0)))[1])
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    return tree.unflatten([jax.random.normal(k, x.shape) for k, x in zip(keys, leaves, strict=True)])


def abstract(config, dtype=jnp.float32):
    model = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0), param_dtype=dtype))
    return nnx.to_pure_dict(nnx.split(model)[1])


def load(folder, config=CONFIG):
    return load_weights(folder, abstract(config), config)


def headers(folder, config=CONFIG):
    return check_weights(folder, abstract(config), config)


def assert_same(one, two):
    jax.tree.map(np.testing.assert_array_equal, one, two)


@pytest.fixture
def folder(tmp_path):
    save_weights(make_params(CONFIG), tmp_path, CONFIG)
    return tmp_path


def edit(folder, **changes):
    """Rewrites the weight file with changed tensors (None removes one)."""
    tensors = load_file(folder / SINGLE) | changes
    save_file({name: value for name, value in tensors.items() if value is not None}, folder / SINGLE)


def test_hugging_face_names_of_parameters():
    assert hf_name(("layers", 3, "self_attn", "q_proj", "bias")) == "model.layers.3.self_attn.q_proj.bias"
    assert hf_name(("layers", 0, "self_attn", "k_norm", "scale")) == "model.layers.0.self_attn.k_norm.weight"
    assert hf_name(("embed_tokens", "embedding")) == EMBEDDING
    assert hf_name(("lm_head", "kernel")) == HEAD
    with pytest.raises(UserError, match="layers.0.mlp.up_proj.lora_a has no"):
        hf_name(("layers", 0, "mlp", "up_proj", "lora_a"))


def test_file_holds_transposed_kernels_and_all_else_as_is(folder):
    params, stored = make_params(CONFIG), load_file(folder / SINGLE)
    assert len(stored) == len(jax.tree.leaves(params))
    np.testing.assert_array_equal(stored[GATE], params["layers"][1]["mlp"]["gate_proj"]["kernel"].T)
    np.testing.assert_array_equal(stored[EMBEDDING], params["embed_tokens"]["embedding"])
    np.testing.assert_array_equal(stored[HEAD], params["lm_head"]["kernel"].T)
    np.testing.assert_array_equal(stored["model.norm.weight"], params["norm"]["scale"])
    with safe_open(folder / SINGLE, framework="numpy") as reader:
        assert reader.metadata() == {"format": "pt"}, "transformers before 5 refuses the file"


def test_round_trip(folder):
    params = load(folder)
    assert jax.tree.structure(params) == jax.tree.structure(abstract(CONFIG))
    assert_same(params, make_params(CONFIG))


def test_bfloat16_round_trip_and_casts(tmp_path):
    wide = make_params(CONFIG)
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), wide)
    save_weights(narrow, tmp_path, CONFIG)
    assert_same(load_weights(tmp_path, abstract(CONFIG, jnp.bfloat16), CONFIG), narrow)
    widened = load(tmp_path)
    assert {x.dtype.name for x in jax.tree.leaves(widened)} == {"float32"}
    assert_same(widened, jax.tree.map(lambda x: x.astype(jnp.float32), narrow))


def test_tied_head_is_not_written_and_is_accepted_if_equal(tmp_path):
    params = make_params(TIED)
    save_weights(params, tmp_path, TIED)
    stored = load_file(tmp_path / SINGLE)
    assert HEAD not in stored
    edit(tmp_path, **{HEAD: stored[EMBEDDING]})
    assert_same(load(tmp_path, TIED), params)
    edit(tmp_path, **{HEAD: stored[EMBEDDING] + 1})
    with pytest.raises(UserError, match="lm_head.weight differs from model.embed_tokens.weight"):
        load(tmp_path, TIED)


def test_parameter_tree_of_another_config():
    with pytest.raises(UserError, match="no lm_head"):
        save_weights(make_params(TIED), "unused", CONFIG)
    with pytest.raises(UserError, match="an lm_head"):
        load_weights("unused", abstract(CONFIG), TIED)


def test_known_buffers_are_ignored(folder):
    edit(folder, **{"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(3, np.float32)})
    assert_same(load(folder), make_params(CONFIG))


def test_sharding_of_a_leaf_is_kept(folder):
    device = jax.devices()[-1]
    where = jax.sharding.SingleDeviceSharding(device)
    tree = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), abstract(CONFIG))
    params = load_weights(folder, tree, CONFIG)
    assert {x.sharding for x in jax.tree.leaves(params)} == {where}


def test_shards(tmp_path):
    params = make_params(CONFIG)
    save_weights(params, tmp_path, CONFIG, max_file_bytes=1500)
    index = json.loads((tmp_path / INDEX).read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05}.safetensors"
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted([*files, INDEX])
    for file in files:
        stored = load_file(tmp_path / file)
        assert sum(x.nbytes for x in stored.values()) <= 1500
        assert sorted(stored) == sorted(name for name, at in index["weight_map"].items() if at == file)
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in jax.tree.leaves(params))
    assert_same(load(tmp_path), params)


@pytest.mark.parametrize(("before", "after"), [(10**9, 1500), (1500, 10**9), (1500, 2500), (1500, 1500)])
def test_save_replaces_older_weights(tmp_path, before, after):
    save_weights(make_params(CONFIG, seed=1), tmp_path, CONFIG, max_file_bytes=before)
    save_weights(make_params(CONFIG, seed=2), tmp_path, CONFIG, max_file_bytes=after)
    assert_same(load(tmp_path), make_params(CONFIG, seed=2))
    (tmp_path / "new").mkdir()
    save_weights(make_params(CONFIG, seed=2), tmp_path / "new", CONFIG, max_file_bytes=after)
    fresh = {file.name for file in (tmp_path / "new").iterdir()}
    assert {file.name for file in tmp_path.iterdir()} == fresh | {"new"}, "files of the older weights are left over"


def test_failed_save_leaves_the_old_weights(folder, monkeypatch):
    def full_disk(arrays, path, metadata):
        path.write_bytes(b"half a file")
        raise OSError("No space left on device")

    monkeypatch.setattr("tunix_like.models.weights.save_file", full_disk)
    with pytest.raises(UserError, match="cannot write the weights: No space left"):
        save_weights(make_params(CONFIG, seed=5), folder, CONFIG)
    assert [file.name for file in folder.iterdir()] == [SINGLE]
    assert_same(load(folder), make_params(CONFIG))


def test_bad_tensors(folder):
    stored = load_file(folder / SINGLE)
    cases = [
        ({GATE: None}, ["lack", GATE]),
        ({"model.layers.2.mlp.gate_proj.weight": stored[GATE]}, ["unexpected", "model.layers.2.mlp.gate_proj.weight"]),
        ({GATE: stored[GATE].T.copy()}, [SINGLE, GATE, "(8, 12)", "(12, 8)"]),
        ({GATE: stored[GATE].astype(np.int8)}, [SINGLE, GATE, "I8", "quantised"]),
    ]
    for change, said in cases:
        save_file(stored, folder / SINGLE)
        edit(folder, **change)
        for look in (load, headers):
            with pytest.raises(UserError) as error:
                look(folder)
            for piece in [str(folder), *said]:
                assert piece in str(error.value)


def test_many_missing_tensors_are_counted(folder):
    edit(folder, **{f"model.layers.1.mlp.{name}_proj.weight": None for name in ("gate", "up", "down")}, **{HEAD: None})
    with pytest.raises(UserError, match="and 1 more"):
        load(folder)


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_truncated_file_is_named(folder, keep):
    whole = (folder / SINGLE).read_bytes()
    (folder / SINGLE).write_bytes(whole[:keep])
    with pytest.raises(UserError, match="model.safetensors: cannot be read as safetensors.*download it again"):
        load(folder)


def test_no_weights_and_pickles(tmp_path):
    with pytest.raises(UserError, match="no model.safetensors and no model.safetensors.index.json"):
        load(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(UserError, match="pytorch_model.bin.*never read here.*safetensors"):
        load(tmp_path)


def test_bad_index(tmp_path):
    save_weights(make_params(CONFIG), tmp_path, CONFIG, max_file_bytes=1500)
    index = json.loads((tmp_path / INDEX).read_text())
    gone = sorted(set(index["weight_map"].values()))[1]
    (tmp_path / gone).unlink()
    with pytest.raises(UserError, match=f"do not exist: {gone}"):
        load(tmp_path)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {HEAD: "../other/model.safetensors"}}))
    with pytest.raises(UserError, match="leads out of its folder"):
        load(tmp_path)
    (tmp_path / "linked").symlink_to(tmp_path.parent)
    names = ["..", ".", "", "/etc/passwd", "a//b", "a/../b", "./a", "a/", "a/..", "linked/x", "../" * 30 + "etc/passwd"]
    for name in names:
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": {HEAD: name}}))
        for reads in (load, lambda folder: check_weights(folder, make_params(CONFIG), CONFIG)):
            with pytest.raises(UserError, match="leads out of its folder"):
                reads(tmp_path)
    for text in ("{", "{}", "[]", '{"weight_map": [1]}', '{"weight_map": {"a": 1}}'):
        (tmp_path / INDEX).write_text(text)
        with pytest.raises(UserError, match="index.json: (not a valid weight index|not valid JSON|expected a JSON)"):
            load(tmp_path)


def test_check_of_headers_gives_the_errors_of_loading(tmp_path, monkeypatch):
    """Reads no tensor: only the headers of complete weights, the index if files are missing, and nothing without
    weights."""
    monkeypatch.setattr(Stored, "blocks", lambda self, index: pytest.fail(f"{self.name} was read"))
    assert headers(tmp_path) == "not present, so not compared"
    save_weights(make_params(TIED), tmp_path, TIED)
    edit(tmp_path, **{HEAD: load_file(tmp_path / SINGLE)[EMBEDDING]})
    count = len(jax.tree.leaves(abstract(TIED)))
    assert headers(tmp_path, TIED) == f"the headers of all {count} tensors match; the values were not read"
    (tmp_path / SINGLE).unlink()

    save_weights(make_params(CONFIG), tmp_path, CONFIG, max_file_bytes=1500)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert headers(tmp_path) == f"the headers of all {count + 1} tensors match; the values were not read"
    files[0].unlink()
    assert headers(tmp_path) == f"1 of {len(files)} files are missing; the names in the index match"
    index = json.loads((tmp_path / INDEX).read_text())
    del index["weight_map"][GATE]
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(UserError, match=f"lack tensor.*{GATE}"):
        headers(tmp_path)


def test_headers_of_pickles_are_not_read(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(UserError, match="pytorch_model.bin.*never read here"):
        headers(tmp_path)
