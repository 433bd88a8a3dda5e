"""Tests that nothing of a configuration that can be secret is in a model card, a report or what loggers get."""

from __future__ import annotations

import json
import re

import pytest

from tests.report.runs import write_run
from tunix_like.config.load import load, save
from tunix_like.config.shown import HIDDEN, shown
from tunix_like.report.card import CARD, card_files
from tunix_like.report.page import build
from tunix_like.report.reading import read_runs
from tunix_like.storage.loggers import _shown

PLANTED = [
    "model.path=s3://key:SECRET01@bucket/model",
    "model.tokenizer=/home/SECRET02/tokenizer",
    "model.config={model_type: qwen2, note: SECRET03}",
    "data.path=gs://SECRET04/rows",
    "data.arguments={taskset: {api_key: SECRET05}}",
    "data.eval_arguments={SECRET06: 1}",
    "data.prompt_template='<img src=SECRET07>{question}'",
    "data.answer_template='{answer} SECRET08'",
    "data.system_prompt=SECRET09",
    "data.chat_template_args={token: SECRET10}",
    "data.split=SECRET11",
    "data.sources=[{name: jsonl, path: 's3://SECRET12/x', label: SECRET13, system_prompt: SECRET14, "
    "teacher: /SECRET51}]",
    "algorithm.advantage_estimator=/home/SECRET15/estimator.py:weigh",
    "algorithm.policy_loss_fn=../SECRET16/loss.py:loss",
    "algorithm.estimator_params={webhook: 'https://hooks.example/SECRET17', scale: 2.5}",
    "algorithm.loss_params={key: SECRET18}",
    "teacher.path=http://SECRET19.internal:8000",
    "teacher.prompt='{prompt} SECRET20'",
    "critic.path=/home/SECRET21/critic",
    "rollout.engine=/home/SECRET22/engine.py:Engine",
    "rollout.engine_arguments={password: SECRET23}",
    "rollout.urls=['http://SECRET24:8000']",
    "rollout.weights_folder=/mnt/SECRET25",
    "rewards.functions=[{name: judge, weight: 0.5, url: 'http://SECRET26', rubric: SECRET27, headers: {a: SECRET28}}, "
    "{name: '/home/SECRET29/reward.py:score', api_key: SECRET30}]",
    "environment.name=/home/SECRET31/world.py:World",
    "environment.arguments={url: 'http://SECRET32', api_key: SECRET33, SECRET34: {a: [SECRET35]}}",
    "environment.tools=['/home/SECRET36/tools.py:search']",
    "training.callbacks=[{name: '/home/SECRET37/call.py:Call', webhook: 'https://hooks.example/SECRET38'}]",
    "training.output_dir=s3://SECRET39/run",
    "training.best_metric=eval/SECRET40",
    "data.eval_split='</code><script>SECRET41</script>'",
]


@pytest.fixture
def run(tmp_path):
    """A run whose configuration has all of `PLANTED`."""
    folder = write_run(tmp_path / "run")
    config = load(None, PLANTED)
    save(config, folder / "config.yaml")
    assert len(set(re.findall("SECRET..", (folder / "config.yaml").read_text()))) == 42
    return folder, config


def test_cards_reports_and_loggers_show_no_secrets(run, tmp_path):
    folder, config = run
    runs = read_runs([folder, write_run(tmp_path / "other")])
    page = build(runs, [], folder)
    card = card_files(folder / "checkpoints" / "6", config, False, None)[CARD].decode()
    logged = json.dumps(_shown(folder / "config.yaml", {}))
    for text in (page, card, logged):
        assert "SECRET" not in text and "hooks.example" not in text and "/home" not in text
        for name in ("estimator.py:weigh", "reward.py:score", "tools.py:search", "judge", "2.5"):
            assert name in text.replace("&#95;", "_")
    assert '{"key":"rollout.weights_folder","values":["(not shown)","-"]}' in page
    assert "<" not in card


def test_texts_of_a_run_are_no_markup_in_its_card(tmp_path):
    folder = write_run(tmp_path / "<b>[x](y)`|*", learning_rate=1.0)
    label = "<img src=x onerror=alert(1)>|[x](http://y)`"
    row = {"step": 6, "eval/pass@1": 0.5, f"eval/pass@1/{label}": 0.5}
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    card = card_files(folder / "checkpoints" / "6", load(None, []), False, None)[CARD].decode()
    text = card.split("---\n", 2)[2].replace("![pass@1, held out](curve.png)", "")
    assert not set("<>*()`") & set(re.sub(r"`[\w.]+`", "", text)) - set("()") and "](http" not in text


SHOWN = {
    "model.path": ["Qwen/Qwen3-0.6B"],
    "data.path": ["openai/gsm8k:main", "a/b"],
    "teacher.path": ["self"],
    "data.name": ["gsm8k", "mix"],
    "algorithm.statistic": ["top_mean:4"],
    "algorithm.k": [4, {"start": 1, "end": 4, "steps": 10}],
    "algorithm.weights": [[1.0, 0.5]],
    "rollout.mesh": ["auto", [1, 1, 1]],
    "lora.targets": [["q_proj", "v_proj"]],
    "model.attention": ["splash"],
    "optimizer.learning_rate": [1e-5],
    "rewards.functions": [[{"name": "gsm8k", "weight": 0.5}]],
}


@pytest.mark.parametrize("key, values", SHOWN.items(), ids=SHOWN)
def test_settings_without_secrets_are_shown(key, values):
    assert [shown(key, value) for value in values] == values


HOSTILE = [
    "https://user:key@host/x",
    "a b",
    "x\ny",
    "C:\\Users\\me",
    "x" * 100,
    {"a": "b"},
    ["x y"],
    "/",
    "a/b/",
]


@pytest.mark.parametrize("value", HOSTILE, ids=str)
@pytest.mark.parametrize("key", ["data.name", "environment.tools", "algorithm.k", "model.path", "rewards.functions"])
def test_odd_values_are_hidden(key, value):
    assert set(re.findall(r"\w[\w ]*", json.dumps(shown(key, value)))) <= {"not shown", "name", "a"}, HIDDEN
