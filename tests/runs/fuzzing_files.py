"""Damaged model folders, each of which must load, or be rejected with a one-line message that names the file."""

from __future__ import annotations

import json
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tokenizers
from flax import nnx
from hypothesis import strategies as st

import tunix_like
from tests.runs.fuzzing import Violation, limits
from tests.tiny_model import HF
from tunix_like.errors import UserError
from tunix_like.models.loading import load_abstract, save_description
from tunix_like.models.weights import save_weights
from tunix_like.text.tokenizer import Tokenizer

FOLDERS = ("whole", "shards")
"""One folder has all weights in one file, a word-level tokenizer and every optional file. The other has shards with an
index, and byte-level BPE."""

_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
_HUGE = [2**31, 2**32 - 1, 2**63, 2**64, 10**30, 10**400]
_values = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 20), st.sampled_from(_HUGE), st.floats(), st.text(max_size=6),
    st.sampled_from(["", "\x00", "\ud800", "F32", "<eos>", "..", "/dev/null", [], {}, [[]], [None], [-1]]),
    st.just({"content": 1}),
    st.lists(st.integers(-2, 2**65), max_size=3), st.dictionaries(st.text(max_size=3), st.integers(-1, 3), max_size=2),
)  # fmt: skip

Change = Callable[[bytes], bytes]


class Damage(NamedTuple):
    """The damage of one file of a folder, as a description and as a function of its bytes, and whether the weights are
    read or only their headers."""

    folder: str
    file: str
    what: str
    change: Change
    abstract: bool


def make_folders(place: Path) -> None:
    """Writes the folders to damage into `place`."""
    model, _ = tunix_like.load_model(HF | {"vocab_size": 300, "eos_token_id": 2, "bos_token_id": 1}, init="random")
    params = nnx.to_pure_dict(nnx.split(model)[1])
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(13)}, unk_token="w0"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    letters = tokenizers.Tokenizer(tokenizers.models.BPE())
    letters.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    letters.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        special_tokens=["<bos>", "<eos>"], initial_alphabet=alphabet, show_progress=False
    )
    letters.train_from_iterator(["ab ab abab"], trainer)
    most = {"whole": 4 * 1024**3, "shards": 4000}
    for name, backend, eos in (("whole", words, "w2"), ("shards", letters, "<eos>")):
        tokenizer = Tokenizer(backend, eos_token=eos, chat_template=_TEMPLATE)
        save_weights(params, place / name, model.config, max_file_bytes=most[name])
        save_description(model.config, tokenizer, place / name, "float32")
    folder = place / "whole"
    (folder / "chat_template.jinja").unlink()
    more = {
        "chat_template": [{"name": "default", "template": _TEMPLATE}],
        "added_tokens_decoder": {"13": {"content": "<a>", "special": True, "lstrip": False}, "14": {"content": "<b>"}},
        "extra_special_tokens": {"image_token": "<c>"},
        "unk_token": {"content": "w0", "normalized": True},
    }
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | more))
    (folder / "special_tokens_map.json").write_text(json.dumps({"pad_token": {"content": "w3"}, "sep_token": "w4"}))


@st.composite
def damages(draw: Any, place: Path) -> Damage:
    """Draws damage to one file. Half of the cases damage weights or their index."""
    name = draw(st.sampled_from(FOLDERS))
    files = sorted(file.name for file in (place / name).iterdir())
    weights = [file for file in files if "safetensors" in file]
    file = draw(st.sampled_from(weights) if draw(st.booleans()) else st.sampled_from(files))
    kinds: dict[str, Callable[..., st.SearchStrategy[tuple[str, Change]]]] = {"bytes": _bytes, "text": _text}
    if file.endswith(".json"):
        kinds |= {"value": _json, "other value": _json, "third value": _json}
    if file.endswith(".safetensors"):
        kinds |= {"length": _length, "header": _header, "entry": _entry, "other entry": _entry, "third entry": _entry}
    what, change = draw(kinds[draw(st.sampled_from(sorted(kinds)))]((place / name / file).read_bytes()))
    return Damage(name, file, what, change, draw(st.booleans()))


@st.composite
def _bytes(draw: Any, old: bytes) -> tuple[str, Change]:
    """Truncates, extends, flips or replaces bytes."""
    at = draw(st.integers(0, max(0, min(len(old), 4000) - 1)))
    junk = draw(st.binary(min_size=1, max_size=9))
    changes: dict[str, bytes] = {
        f"cut at {at}": old[:at],
        f"{junk!r} at the end": old + junk,
        f"{junk!r} at {at}": old[:at] + junk + old[at:],
        f"byte {at} flipped": old[:at] + bytes([old[at] ^ junk[0]]) + old[at + 1 :] if old else b"",
        f"replaced by {junk!r}": junk,
        "empty": b"",
        "zeros": bytes(len(old)),
    }
    what = draw(st.sampled_from(sorted(changes)))
    return what, lambda _: changes[what]


@st.composite
def _text(draw: Any, old: bytes) -> tuple[str, Change]:
    """Returns text that is not JSON, or bytes that are not text."""
    texts: dict[str, bytes] = {
        "git lfs": b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n",
        "html": b"<!DOCTYPE html><html>404</html>",
        "latin-1": b"\xff\xfe\xe9",
        "utf-16": '{"a": 1}'.encode("utf-16"),
        "byte order mark": b"\xef\xbb\xbf" + old,
        "deep list": b"[" * 100_000,
        "deep mapping": b'{"a":' * 100_000,
        "digits": b'{"eos_token_id": ' + b"9" * 5000 + b"}",
        "null": b"null",
        "list": b"[]",
        "mapping": b"{}",
        "number": b"1e999",
        "template": b"{% if %}",
        "template that fails": b"{{ messages[9].content.x.y }}",
        "template that raises": b"{{ raise_exception('no') }}",
    }
    what = draw(st.sampled_from(sorted(texts)))
    return what, lambda _: texts[what]


def _places(tree: Any, above: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree[:3]) if isinstance(tree, list) else ()
    return [place for name, value in pairs for place in ((*above, name), *_places(value, (*above, name)))]


def _changed(draw: Any, tree: Any, places: list[tuple[Any, ...]]) -> tuple[str, bytes]:
    """Returns a JSON tree with one value removed, replaced or added."""
    tree = json.loads(json.dumps(tree))
    place = draw(st.sampled_from(places))
    holder = tree
    for part in place[:-1]:
        holder = holder[part]
    way = draw(st.sampled_from(["remove", "replace", "replace", "replace", "add"]))
    if way == "remove":
        del holder[place[-1]]
        what = f"without {place}"
    else:
        value = draw(_values)
        if way == "add" and isinstance(holder, dict):
            name = draw(
                st.text(max_size=4) | st.sampled_from(["auto_map", "quantization_config", "rope_scaling", "x.w"])
            )
            holder[name], what = value, f"{(*place[:-1], name)} added as {value!r}"
        else:
            holder[place[-1]], what = value, f"{place} = {value!r}"
    return what, json.dumps(tree).encode()


@st.composite
def _json(draw: Any, old: bytes) -> tuple[str, Change]:
    tree = json.loads(old)
    places = _places(tree)
    shallow = [place for place in places if len(place) < 3]
    what, new = _changed(draw, tree, draw(st.sampled_from([places, shallow])))
    return what, lambda _: new


def _split(old: bytes) -> tuple[Any, bytes]:
    (length,) = struct.unpack("<Q", old[:8])
    return json.loads(old[8 : 8 + length]), old[8 + length :]


@st.composite
def _length(draw: Any, old: bytes) -> tuple[str, Change]:
    (length,) = struct.unpack("<Q", old[:8])
    near = [length - 1, length + 1, length + 8, length // 2, len(old), len(old) - 8]
    new = draw(st.sampled_from([0, 1, 2, *near, 10**8, 10**8 + 1, 2**31, 2**63, 2**64 - 1]))
    return f"header of {new} bytes", lambda _: struct.pack("<Q", new) + old[8:]


@st.composite
def _header(draw: Any, old: bytes) -> tuple[str, Change]:
    """Damages the text of the header and updates its length."""
    (length,) = struct.unpack("<Q", old[:8])
    what, change = draw(st.one_of(_bytes(old[8 : 8 + length]), _text(old[8 : 8 + length])))
    new = change(b"")
    return f"header {what}", lambda _: struct.pack("<Q", len(new)) + new + old[8 + length :]


@st.composite
def _entry(draw: Any, old: bytes) -> tuple[str, Change]:
    """Damages the entry of one tensor (type, shape, offsets or name), or adds or removes a tensor."""
    header, data = _split(old)
    names = [name for name in header if name != "__metadata__"]
    name, other = draw(st.sampled_from(names)), draw(st.sampled_from(names))
    shape, (start, stop) = header[name]["shape"], header[name]["data_offsets"]
    fields = {
        "dtype": ["F64", "F16", "BF16", "F8_E4M3", "I32", "I64", "U8", "BOOL", "C64", "F4", "F33", "f32", "", 7, None],
        "shape": [
            [], [0], [-1], [*shape, 1], shape[::-1], [n + 1 for n in shape], [2**32, 2**32], [2**63, 2], [2**64], [1.5],
            None, "x", ["8"], [True],
        ],
        "data_offsets": [
            [start, stop + 4], [start + 4, stop + 4], [stop, start], [-4, stop], [0, 2**64], [2**63, 2**63], [start],
            [start, stop, stop], [], None, "x", [start, start], [len(data), len(data) + stop - start],
            header[other]["data_offsets"],
        ],
    }  # fmt: skip
    way = draw(st.sampled_from([*fields, "remove", "rename", "add", "value"]))
    if way in fields:
        header[name][way] = draw(st.sampled_from(fields[way]))
        what = f"{name}: {header[name]}"
    elif way == "remove":
        del header[name]
        what = f"{name} removed"
    elif way == "rename":
        new = draw(
            st.sampled_from(["", "x", other, name + "\x00", "lm_head.weight", "language_model." + name, "__metadata__"])
        )
        header[new], what = header.pop(name), f"{name} called {new!r}"
    elif way == "add":
        new = draw(st.sampled_from(["x", "lm_head.weight", "language_model.model.x.weight", "a.rotary_emb.inv_freq"]))
        header[new] = {"dtype": "F32", "shape": [4], "data_offsets": [len(data), len(data) + 16]}
        data, what = data + np.ones(4, np.float32).tobytes(), f"{new} added"
    else:
        what, raw = _changed(draw, header, _places(header))
        return what, lambda _: struct.pack("<Q", len(raw)) + raw + data
    raw_header = json.dumps(header).encode()
    return what, lambda _: struct.pack("<Q", len(raw_header)) + raw_header + data


_ALSO = {
    "config.json": ("its tokenizer has", "config.json"),
    "tokenizer.json": ("its tokenizer has", "not in the tokenizer's vocabulary", "generation_config.json", "has only"),
    "tokenizer_config.json": ("its tokenizer has", "chat template"),
    "special_tokens_map.json": ("its tokenizer has",),
    "chat_template.jinja": ("chat template",),
    _INDEX: ("its weights",),
    _WEIGHTS: ("its weights",),
}
"""The parts of a message that are accepted in place of the file name, next to the folder name, if two files contradict
each other."""


def run(damage: Damage, place: Path, scratch: Path) -> str | None:
    """Loads the damaged folder, weights included unless `abstract`, and renders a message if there is a tokenizer.

    Returns:
      the error message, or None if the folder is loaded.

    Raises:
      Violation: another exception, or a message that names no file.
    """
    shutil.rmtree(scratch, ignore_errors=True)
    shutil.copytree(place / damage.folder, scratch)
    file = scratch / damage.file
    file.write_bytes(damage.change(file.read_bytes()))
    shown = f"{damage.folder}/{damage.file}: {damage.what} ({'headers' if damage.abstract else 'all'})"
    try:
        with limits():
            tokenizer = (load_abstract if damage.abstract else tunix_like.load_model)(scratch)[1]
            if tokenizer is not None and tokenizer.chat_template is not None:
                tokenizer.encode_prompt("ab", apply_chat_template=True)
    except UserError as error:
        said = str(error)
    except BaseException as caught:
        if isinstance(caught, KeyboardInterrupt):
            raise
        raise Violation(f"{shown}: {type(caught).__name__}: {str(caught)[:300]}") from caught
    else:
        return None
    also = _ALSO.get("model.safetensors" if re.search(r"\d\.safetensors$", damage.file) else damage.file, ())
    if damage.file not in said and not any(words in said for words in also):
        raise Violation(f"{shown}: the message names no file: {said[:400]}")
    return said
