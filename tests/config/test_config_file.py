"""Tests loading, saving and documentation of configurations, and the error message of every mistake."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from tunix_like.config import load as config_file
from tunix_like.config import reference as config_reference
from tunix_like.config.schema import Config, ModelConfig, OptimizerConfig, RewardsConfig, SFTConfig
from tunix_like.errors import UserError


def from_text(folder: Path, text: str, *overrides: str) -> Config:
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return config_file.load(path, overrides)


def message(folder: Path, text: str, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        from_text(folder, text, *overrides)
    return str(caught.value)


def test_no_file_and_an_empty_file_are_the_defaults(tmp_path):
    assert config_file.load(None) == Config()
    assert from_text(tmp_path, "# nothing\n") == Config()
    assert from_text(tmp_path, "optimizer:\n  # nothing set\n") == Config()


def test_overrides_replace_file_values_and_later_overrides_win(tmp_path):
    config = from_text(
        tmp_path,
        "optimizer: {learning_rate: 1e-3, b1: 0}\nsft:\n  optimizer:\n    schedule: cosine\n"
        "rollout: {eos_tokens: [1, 2]}",
        "optimizer.learning_rate=2e-3",
        "sft.optimizer.learning_rate=5",
        "optimizer.learning_rate=3e-3",
        "optimizer.max_grad_norm=null",
        "algorithm.k=4",
        "training.output_dir=runs/x",
        "rewards.functions=[{name: maze}, {name: my.py:f, weight: 0.5}]",
        "mesh.shape=[2, 2]",
        "data.shuffle=false",
    )
    assert config.optimizer == OptimizerConfig(learning_rate=3e-3, b1=0.0, max_grad_norm=None)
    assert isinstance(config.optimizer.b1, float)
    assert config.sft.optimizer == OptimizerConfig(learning_rate=5.0, schedule="cosine")
    assert config.rollout.eos_tokens == [1, 2]
    assert (config.algorithm.k, config.training.output_dir, config.mesh.shape) == (4, "runs/x", [2, 2])
    assert config.rewards.functions == [{"name": "maze"}, {"name": "my.py:f", "weight": 0.5}]
    assert config.data.shuffle is False
    assert config_file.load(None, ["mesh.shape=auto"]).mesh.shape == "auto"


def test_nested_section_keeps_its_defaults():
    config = config_file.load(None, ["sft.optimizer.b1=0.5"])
    assert config.sft.optimizer == dataclasses.replace(SFTConfig().optimizer, b1=0.5)


def test_free_form_mapping_is_set_by_file_and_by_sub_key(tmp_path):
    text = "model:\n  config: {model_type: qwen2, hidden_size: 32}\n"
    config = from_text(tmp_path, text, "model.config.hidden_size=64", "model.config.rope_scaling.factor=8.0")
    assert config.model.config == {"model_type": "qwen2", "hidden_size": 64, "rope_scaling": {"factor": 8.0}}
    assert config_file.load(None, ["model.config.hidden_size=64"]).model.config == {"hidden_size": 64}
    own = ["algorithm.advantage_estimator=../my own.py:best", "algorithm.estimator_params.power=0.5"]
    algorithm = from_text(tmp_path, "algorithm: {estimator_params: {power: 1, top: true}}", *own).algorithm
    assert algorithm.advantage_estimator == "../my own.py:best"
    assert algorithm.estimator_params == {"power": 0.5, "top": True}
    assert "model.config.hidden_size is 32" in message(tmp_path, text, "model.config.hidden_size.x=1")


def test_text_keys_take_overrides_as_typed():
    config = config_file.load(
        None, ["data.prompt_template=Q: {question}", "training.output_dir='null'", "data.path=2024", "data.split=[a"]
    )
    assert config.data.prompt_template == "Q: {question}"
    assert (config.training.output_dir, config.data.path, config.data.split) == ("null", "2024", "[a")
    assert config_file.load(None, ["data.path=null"]).data.path is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("optimiser: {}", ["run.yaml", "'optimiser'", "Did you mean 'optimizer'?"]),
        ("learning_rate: 1", ["'learning_rate'", "'optimizer.learning_rate' or 'sft.optimizer.learning_rate'?"]),
        ("training: {k: 1}", ["'training.k'", "'algorithm.k' or 'eval.k'?", "Keys of training: best_metric, "]),
        ("optimizer: {learningrate: 1}", ["'optimizer.learningrate'", "Did you mean 'optimizer.learning_rate'?", "b1"]),
        ("sft: {optimizer: {scedule: 1}}", ["'sft.optimizer.scedule'", "Did you mean 'sft.optimizer.schedule'?"]),
        ("training: {actor_optimizer: 1}", ["unknown key 'training.actor_optimizer'"]),
        ("algorithm.k: 4", ["'algorithm.k'", "command line"]),
        ("optimizer: 3", ["optimizer", "got 3", "section"]),
        ("- 1", ["run.yaml", "list", "mapping"]),
        ("algorithm: {k: true}", ["algorithm.k", "True", "integer or mapping or null"]),
        ("algorithm: {k: 1.0}", ["algorithm.k", "1.0 (number)", "integer"]),
        ("algorithm: {num_generations: '8'}", ["algorithm.num_generations", "'8' (string)", "integer"]),
        ("algorithm: {num_generations: null}", ["algorithm.num_generations", "null", "integer"]),
        ("optimizer: {learning_rate: true}", ["optimizer.learning_rate", "True (true/false)", "number"]),
        ("optimizer: {learning_rate: .nan}", ["optimizer.learning_rate", "nan", "number"]),
        ("optimizer: {learning_rate: .inf}", ["optimizer.learning_rate: got inf; expected: a finite number"]),
        ("model: {path: 's3:/x'}", ["model.path: s3:/x: addresses"]),
        ("data: {path: 's3:/x'}", ["data.path: s3:/x: addresses"]),
        ("training: {output_dir: 'gs:/x'}", ["training.output_dir: gs:/x: addresses"]),
        ("optimizer: {learning_rate: fast}", ["optimizer.learning_rate", "'fast' (string)"]),
        ("data: {name: 5}", ["data.name", "5 (integer)", "string"]),
        ("data: {shuffle: 1}", ["data.shuffle", "1 (integer)", "true/false"]),
        ("data: {shuffle: 'false'}", ["data.shuffle", "'false' (string)"]),
        ("rollout: {eos_tokens: [1, a]}", ["rollout.eos_tokens", "[1, 'a']", "list of integers"]),
        ("rollout: {eos_tokens: [1, true]}", ["rollout.eos_tokens", "list of integers"]),
        ("rewards: {functions: [maze]}", ["rewards.functions", "list of mappings"]),
        ("mesh: {shape: 4}", ["mesh.shape", "list of integers or string"]),
        ("model: {config: 4}", ["model.config", "mapping or null"]),
        ("a: [\nb: 1", ["run.yaml, line 2"]),
        ("data:\n  name: a\n  path: b\n  name: c", ["run.yaml, line 4", "'name'", "twice"]),
        ("data: {name: \x00}", ["run.yaml"]),
        ("? [1]\n: 2", ["run.yaml, line 1"]),
        ("optimizer: {learning_rate: 0}", ["optimizer.learning_rate: got 0.0; it must be above 0"]),
        ("sft: {optimizer: {b1: 2}}", ["sft.optimizer.b1: got 2.0; it must be below 1"]),
        ("optimizer: {schedule: cosin}", ["optimizer.schedule", "'cosin'", "Did you mean 'cosine'?"]),
    ],
)
def test_bad_files(tmp_path, text, words):
    said = message(tmp_path, text)
    assert [word for word in words if word not in said] == [], said


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("algorithm.k", ["'algorithm.k'", "section.key=value"]),
        ("=4", ["'=4'", "section.key=value"]),
        ("optimizer={learning_rate: 1}", ["optimizer is a section", "optimizer.learning_rate=value"]),
        ("sft.optimizer=null", ["sft.optimizer is a section"]),
        ("algorithm.num_generation=4", ["'algorithm.num_generation'", "Did you mean 'algorithm.num_generations'?"]),
        ("algoritm.k=4", ["'algoritm.k'", "Did you mean 'algorithm.k'?"]),
        (
            "optimizer.lr=1",
            ["unknown key 'optimizer.lr'", "Did you mean 'optimizer.learning_rate'? Keys of optimizer:"],
        ),
        ("max_steps=20", ["'max_steps'", "Did you mean 'sft.max_steps' or 'training.max_steps'?"]),
        (
            "rewards.functions=maze",
            ["rewards.functions", "'maze' (string)", "list of {name, weight, per}; a name is maze,"],
        ),
        ("trainng.max_steps=20", ["'trainng.max_steps'", "Did you mean 'training.max_steps'?"]),
        ("algorithm.k=four", ["algorithm.k", "'four'", "integer"]),
        ("algorithm.k=", ["algorithm.num_generations", "integer"]),
        ("rewards.functions=[{", ["rewards.functions", "not valid YAML"]),
        ("algorithm.k=0", ["algorithm.k: got 0", "at least 1"]),
    ],
)
def test_bad_overrides(override, words):
    if override == "algorithm.k=":  # unset, which k allows and num_generations does not
        assert config_file.load(None, [override]).algorithm.k is None
        override = "algorithm.num_generations="
    with pytest.raises(UserError) as caught:
        config_file.load(None, [override])
    assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match=r"absent\.yaml"):
        config_file.load(tmp_path / "absent.yaml")
    with pytest.raises(UserError, match="cannot read"):
        config_file.load(tmp_path)


def test_numbers_in_yaml_are_those_of_json(tmp_path):
    for text, value in [("1e-3", 1e-3), ("1E+2", 100.0), ("'1e-3'", 1e-3), (".5", 0.5), ("1.", 1.0), ("7", 7.0)]:
        assert from_text(tmp_path, f"optimizer: {{learning_rate: {text}}}").optimizer.learning_rate == value
    assert from_text(tmp_path, "data: {path: 2020-01-01, name: '010', split: 1:30}").data.path == "2020-01-01"


def test_saved_config_loads_as_an_equal_config(tmp_path):
    config = config_file.load(
        None,
        [
            "optimizer.learning_rate=1e-7",
            "mesh.shape=[4, 1]",
            "model.config.rope_scaling={factor: 8.0}",
            "data.path=1e3",
        ],
    )
    config = dataclasses.replace(config, rewards=RewardsConfig(functions=[{"name": "a.py:f", "weight": 1e-9}]))
    for value in ("1e-3", "null", "2020-01-01", "true", "a: b", "line\nline", "é", "'", "0x10", ""):
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, system_prompt=value))
        config_file.save(config, tmp_path / "config.yaml")
        assert config_file.load(tmp_path / "config.yaml") == config


def test_as_dict_returns_plain_copies():
    config = Config(model=ModelConfig(config={"layers": [1]}))
    plain = config_file.as_dict(config)
    plain["model"]["config"]["layers"].append(2)
    assert config.model.config == {"layers": [1]}
    assert "actor_optimizer" not in plain["training"]
    assert type(plain["sft"]["optimizer"]) is dict


def test_differences_name_the_keys_and_both_values():
    a = config_file.as_dict(config_file.load(None, ["algorithm.k=2", "model.config.x=1"]))
    b = config_file.as_dict(config_file.load(None, ["algorithm.k=3", "model.config.y=1"]))
    assert config_file.differences(a, a) == []
    assert config_file.differences(a, b) == [
        "model.config.x: 1 -> '(absent)'",
        "algorithm.k: 2 -> 3",
        "model.config.y: '(absent)' -> 1",
    ]


def test_base_config_lists_all_keys_and_their_defaults():
    path = Path(config_file.__file__).with_name("base_config.yaml")
    assert path.read_text(encoding="utf-8") == config_reference.yaml_text(), (
        "run `python -m tunix_like.config.reference`"
    )
    assert config_file.load(path) == Config()
    for leaf in ("learning_rate: 1.0e-06", "schedule: constant", "axis_names: [fsdp, tp]", "(float32, bfloat16, null)"):
        assert leaf in path.read_text(encoding="utf-8")


def dotted(values, prefix=""):
    for name, value in values.items():
        if isinstance(value, dict):
            yield from dotted(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def test_documentation_of_the_keys_is_complete():
    path = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"
    text = path.read_text(encoding="utf-8")
    assert text == config_reference.markdown_text(), "run `python -m tunix_like.config.reference`"
    rows = [line.split("`")[1] for line in text.splitlines() if line.startswith("| `")]
    assert rows == list(dotted(config_file.as_dict(Config())))
    assert "| `optimizer.learning_rate` | `1.0e-06` | peak learning rate | number, above 0 |" in text


def test_reading_a_config_imports_no_jax():
    code = "import sys, tunix_like.config.load as c; c.load(None); sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_hub_ids_may_begin_with_hf():
    names = ("model.path", "model.tokenizer", "teacher.path", "critic.path")
    given = [f"{name}=hf://Qwen/Qwen3-0.6B" for name in names]
    assert config_file.load(None, given) == config_file.load(None, [text.replace("hf://", "") for text in given])
    for path in ("hf://datasets/openai/gsm8k:main", "hf://openai/gsm8k:main"):
        assert config_file.load(None, [f"data.path={path}"]).data.path == "openai/gsm8k:main"
    for name in (*names, "data.path"):
        for value in ("hf://", "hf://Qwen", "hf://spaces/Qwen/Qwen3", "hf://Qwen/Qwen3@main"):
            with pytest.raises(UserError, match=f"{name}: .*{value}.*OWNER/NAME"):
                config_file.load(None, [f"{name}={value}"])
