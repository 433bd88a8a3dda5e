"""Tests random configurations and damaged model folders, drawn by hypothesis: each is accepted, or rejected with a
one-line message that names the key or the file, within limits of time and memory. `tests/stress/fuzz.py` draws
thousands."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.runs import fuzzing, fuzzing_files
from tests.runs.fuzzing import Case
from tests.runs.fuzzing_files import Damage
from tunix_like.models import loading

pytestmark = pytest.mark.slow

FIXED = {"derandomize": True, "deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = tmp_path_factory.mktemp("configs")
    fuzzing.make_place(place)
    return place


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    place = tmp_path_factory.mktemp("folders")
    fuzzing_files.make_folders(place)
    return place


@pytest.fixture(autouse=True, scope="module")
def described_once():
    """Traces models of equal configs once, which is most of the time of a valid configuration."""
    seen, abstract = {}, loading._abstract

    def remembered(config, kinds, quantize=None):
        key = config, tuple(kinds.items()), quantize
        if key not in seen:
            seen[key] = abstract(config, kinds, quantize)
        return seen[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "_abstract", remembered)
        yield


@pytest.mark.parametrize("base", fuzzing.BASES)
def test_bases_are_accepted(base, place, monkeypatch):
    monkeypatch.chdir(place)
    assert fuzzing.run(Case(base, {}, (), False), place) is None


def test_any_value_of_any_key_is_accepted_or_rejected_with_a_message(place, monkeypatch):
    monkeypatch.chdir(place)
    outcomes = Counter()

    @settings(max_examples=200, **FIXED)
    @given(fuzzing.cases())
    def check(case):
        outcomes[fuzzing.run(case, place) is None] += 1

    check()
    assert outcomes[False] > 100 and outcomes[True] > 10, outcomes


# configurations that once caused a hang, exhausted the memory, or ended in a traceback
HUGE = {
    "rows that are made": ("maxrl", ("data", "train_size"), 10**9),
    "mazes": ("maze", ("data", "maze_size"), 10**9 + 1),
    "longest string": ("maxrl", ("data", "text_length"), 10**9),
    "more than an integer of 32 bits": ("maxrl", ("algorithm", "num_generations"), 10**12),
    "more than a float": ("jsonl", ("training", "logprob_chunk_size"), 10**400),
    "an integer that is no float": ("maxrl", ("model", "config", "rms_norm_eps"), 10**400),
    "infinite in float32": ("maxrl", ("optimizer", "learning_rate"), 1e300),
    "zero in float32": ("maxrl", ("rollout", "temperature"), 5e-324),
    "in a list": ("maxrl", ("rollout", "eos_tokens"), [10**30]),
    "layers": ("maxrl", ("model", "config", "num_hidden_layers"), 2**31 - 1),
    "width": ("maxrl", ("model", "config", "hidden_size"), 2**31 - 2),
    "weight of a reward": ("jsonl", ("rewards", "functions", 0, "weight"), 10**400),
    "rows of one of several sources": ("mix", ("data", "sources", 1, "train_size"), 10**9),
    "empty path": ("jsonl", ("model", "path"), ""),
    "empty folder": ("maxrl", ("training", "output_dir"), " "),
    "fields that are no text": ("maxrl", ("model", "config", "rope_scaling"), {"": 3e16, 1: False, "x": False}),
    "a kind that is a list": ("maxrl", ("model", "config", "rope_scaling"), {"rope_type": ["llama3"]}),
}


@pytest.mark.parametrize("name", HUGE)
def test_configurations_that_once_failed_are_rejected(name, place, monkeypatch):
    monkeypatch.chdir(place)
    base, key, value = HUGE[name]
    assert fuzzing.run(Case(base, {key: value}, (), False), place) is not None


@pytest.mark.parametrize("name", fuzzing_files.FOLDERS)
@pytest.mark.parametrize("abstract", [False, True])
def test_undamaged_folders_load(name, abstract, folders, tmp_path):
    whole = Damage(name, "config.json", "nothing", lambda old: old, abstract)
    assert fuzzing_files.run(whole, folders, tmp_path / "x") is None


def test_any_damaged_file_loads_or_is_named_in_the_message(folders, tmp_path):
    outcomes = Counter()

    @settings(max_examples=60, **FIXED)
    @given(st.data())
    def check(data):
        damage = data.draw(fuzzing_files.damages(folders))
        outcomes[fuzzing_files.run(damage, folders, tmp_path / "x") is None] += 1

    check()
    assert outcomes[False] > 30 and outcomes[True] > 5, outcomes


DEEP = b"[" * 100_000
DAMAGES = {
    "template in another encoding": ("shards", "chat_template.jinja", b"\xff\xfe\xe9"),
    "token that is no text": ("shards", "tokenizer_config.json", b'{"eos_token": true}'),
    "token without content": ("whole", "special_tokens_map.json", b'{"pad_token": {}}'),
    "half a pair of surrogates": ("whole", "tokenizer_config.json", b'{"eos_token": "\\ud800"}'),
    "declared token that is no mapping": ("whole", "tokenizer_config.json", b'{"added_tokens_decoder": {"1": 7}}'),
    "declared token without an id": (
        "whole", "tokenizer_config.json", b'{"added_tokens_decoder": {"x": {"content": "y"}}}'
    ),
    "template that is none": ("whole", "tokenizer_config.json", b'{"chat_template": [1]}'),
    "vocabulary without its unknown token": (
        "whole", "tokenizer.json", b'{"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "b"}}'
    ),
    **{f"deep {file}": ("shards", file, DEEP) for file in (
        "config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json",
        "model.safetensors.index.json",
    )},
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_that_once_failed_is_rejected_with_the_file_name(name, folders, tmp_path):
    folder, file, new = DAMAGES[name]
    said = fuzzing_files.run(Damage(folder, file, name, lambda _: new, True), folders, tmp_path / "x")
    assert said is not None and (file in said or file == "chat_template.jinja"), said
