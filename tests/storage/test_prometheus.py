"""Tests that Prometheus reads the values of `metrics.jsonl` while a run runs, in both of its text formats, and that the
Grafana board asks for nothing else."""

from __future__ import annotations

import importlib.metadata
import json
import logging
import re
import socket
import types
from pathlib import Path

import httpx
import pytest
from prometheus_client import openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from tests.callbacks import OnRow
from tests.storage.test_loggers import go, killed
from tests.training.small_learner import ROWS, TOKENIZER, make, make_model
from tests.training.test_loop import Counting, fail
from tunix_like import EvalConfig, MaxRLConfig, RLTrainingConfig, RolloutConfig, SFTConfig, SFTTrainer
from tunix_like.errors import UserError
from tunix_like.storage import prometheus
from tunix_like.storage.loggers import check_loggers, open_metrics
from tunix_like.storage.metrics import is_number, rows
from tunix_like.storage.prometheus import series

BOARD = Path(__file__).resolve().parents[2] / "examples" / "grafana" / "run.json"
OPENMETRICS = {"Accept": f"{openmetrics.exposition.CONTENT_TYPE_LATEST}"}


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.fixture
def port(monkeypatch):
    number = free_port()
    monkeypatch.setenv("PROMETHEUS_PORT", str(number))
    return number


def _of_run(text):
    return [line for line in text.splitlines() if not line.startswith(("tunix_like_process_", "#"))]


def scrape(port):
    """Returns `{(name, labels): value}`, without the label `run`, of what Prometheus reads, and the runs. Both formats
    must say the same."""
    url = f"http://127.0.0.1:{port}/metrics"
    for _ in range(20):
        plain = httpx.get(url).text
        strict = httpx.get(url, headers=OPENMETRICS).text
        if _of_run(httpx.get(url).text) == _of_run(plain):  # no checkpoint was completed meanwhile
            break
    assert strict.endswith("# EOF\n")
    found = [
        {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in parsed
            for sample in family.samples
            if not sample.name.startswith("tunix_like_process_")
        }
        for parsed in (parse_text(plain), parse_openmetrics(strict))
    ]
    assert found[0] == found[1] and len(found[0]) == plain.count("\ntunix_like_") - plain.count("\ntunix_like_process_")
    runs = {dict(labels)["run"] for _, labels in found[0]}
    return {(name, labels - {("run", dict(labels)["run"])}): value for (name, labels), value in found[0].items()}, runs


def value(found, name, **labels):
    return found.get((f"tunix_like_{name}", frozenset(labels.items())))


class RealRun:
    """A run of SFT and RL, scraped at each row."""

    def __init__(self, folder, port):
        self.folder = folder / "my run"
        self.port = port
        self.scrapes = []
        training = {"output_dir": str(self.folder), "loggers": ["prometheus"], "checkpoint_every_n_steps": 1}
        sft = SFTTrainer(
            model=make_model(),
            tokenizer=TOKENIZER,
            sft_config=SFTConfig(max_steps=1, batch_size=4),
            rollout_config=RolloutConfig(max_prompt_length=8, max_tokens_to_generate=4),
            training_config=RLTrainingConfig(**training),
        )
        sft.train(ROWS, callbacks=[OnRow(self.scrape)])
        evaluation = EvalConfig(samples=2, k=[1, 2])
        algo = MaxRLConfig(num_generations=4, beta=0.1)
        learner = make(algo, eval_config=evaluation, on_row=lambda row, total: self.scrape(row), **training)
        learner.train(ROWS, ROWS[:2], batch_size=4)

    def scrape(self, row):
        self.scrapes.append(scrape(self.port))


@pytest.fixture(scope="module")
def real_run(tmp_path_factory):
    """The devices report memory, as accelerators do."""
    memory = {"bytes_in_use": 3, "bytes_limit": 9, "num_allocs": 1}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prometheus, "local_devices", lambda: [types.SimpleNamespace(memory_stats=lambda: memory)])
        number = free_port()
        patch.setenv("PROMETHEUS_PORT", str(number))
        return RealRun(tmp_path_factory.mktemp("runs"), number)


def test_each_scrape_has_the_values_of_the_newest_rows(real_run):
    written = rows(real_run.folder)
    assert [row.get("step", row.get("sft/step")) for row in written] == [1, 0, 1, 2]
    for index, (found, runs) in enumerate(real_run.scrapes):
        assert runs == {"my run"}
        phase = [row for row in written[: index + 1] if ("sft/step" in row) == (index == 0)]
        newest = {name: value for row in phase for name, value in row.items() if is_number(value)}
        assert len(newest) > 5
        expected = {series(name): value for name, value in newest.items()}
        assert len(expected) == len(newest)
        gauges = {
            key: value
            for key, value in found.items()
            if not re.search("_total$|total_steps|checkpoint_step|device", key[0])
        }
        assert gauges == {(name, frozenset(labels)): value for (name, labels), value in expected.items()}
        assert all(re.fullmatch("[a-zA-Z_][a-zA-Z0-9_]*", name) for name, _ in found)


def test_a_scrape_has_the_state_of_the_run(real_run):
    first, last = real_run.scrapes[0][0], real_run.scrapes[-1][0]
    assert value(first, "total_steps") == 1 and value(last, "total_steps") == 2
    assert value(last, "checkpoint_step") == 1, "that of step 2 is written after the row"
    assert value(last, "device_bytes_in_use", device="0") == 3 and value(last, "device_bytes_limit", device="0") == 9
    assert value(last, "train_update_skipped_steps_total") == 0
    with pytest.raises(httpx.ConnectError):
        scrape(real_run.port)


def test_board_asks_for_metrics_that_a_run_has(real_run):
    board = json.loads(BOARD.read_text(encoding="utf-8"))
    assert {"title", "uid", "schemaVersion", "version", "time", "refresh", "templating", "panels"} <= set(board)
    source, run = board["templating"]["list"]
    assert (source["type"], source["query"], run["type"]) == ("datasource", "prometheus", "query")
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len({panel["title"] for panel in panels}) == len(panels)
    places = [panel["gridPos"] for panel in panels]
    squares = [
        (place["x"] + i, place["y"] + j) for place in places for i in range(place["w"]) for j in range(place["h"])
    ]
    assert len(set(squares)) == len(squares) and max(x for x, _ in squares) == 23
    names = {name for found, _ in real_run.scrapes for name, _ in found} | {"tunix_like_process_resident_memory_bytes"}
    labels = {key for found, _ in real_run.scrapes for _, labels in found for key, _ in labels} | {"run", "instance"}
    for panel in panels:
        assert {"type", "fieldConfig", "datasource", "targets"} <= set(panel)
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
        for target in panel["targets"]:
            assert target["datasource"] == panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
            assert (asked := set(re.findall(r"tunix_like_\w+", target["expr"]))) and asked <= names
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= labels | {"source"}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("step", "step {}"),
        ("sft/eval/loss", "sft_eval_loss {}"),
        ("train/pass@1", "train_pass_at {'k': '1'}"),
        ("eval/low/maj@16/my data", "eval_low_maj_at {'k': '16', 'source': 'my data'}"),
        ("train/rewards/mean/a/b", "train_rewards_mean {'source': 'a/b'}"),
        ("train/rewards/exact-match", "train_rewards_exact_match {}"),
        ("train/schedule/k", "train_schedule_k {}"),
        ("train/schedule/a/k", "train_schedule_k {'source': 'a'}"),
        ("train/time/trainer_idle", "train_time {'part': 'trainer_idle'}"),
        ("train/sampler_time/reward", "train_sampler_time {'part': 'reward'}"),
        ("train/step_time_sec", "train_step_time_sec {}"),
        ("train/turns/reward/12", "train_turns_reward {'turn': '12'}"),
        ("train/reward/unscored_frac", "train_reward_unscored_frac {}"),
        ("train/reward/judge/prompt_tokens", "train_reward_prompt_tokens {'function': 'judge'}"),
        ("train/environment/Größe in %", "train_environment_Gr_e_in {}"),
    ],
)
def test_names(name, expected):
    found = series(name)
    assert f"{found.name} {dict(found.labels)}" == f"tunix_like_{expected}"


def test_counters_add_up_what_scrapes_miss(tmp_path, port):
    """A step with a skipped update is counted, although the next row replaces its share. Counts of a step are added."""
    log = open_metrics(tmp_path, ["prometheus"], {})
    log.cut("step", -1)
    for step, (skipped, unscored, calls) in enumerate([(1.0, None, 3), (0.0, 0.25, 4), (0.5, 0.5, 0)], 1):
        shares = {"train/update/skipped": skipped, "train/reward/unscored_frac": unscored}
        log.write({"step": step, **shares, "train/reward/judge/calls": calls, "train/pass_rate/drawn": [1, 2]})
    found, _ = scrape(port)
    log.close()
    assert found == {
        ("tunix_like_step", frozenset()): 3,
        ("tunix_like_train_update_skipped", frozenset()): 0.5,
        ("tunix_like_train_update_skipped_steps_total", frozenset()): 2,
        ("tunix_like_train_reward_unscored_frac", frozenset()): 0.5,
        ("tunix_like_train_reward_unscored_frac_steps_total", frozenset()): 2,
        ("tunix_like_train_reward_calls_total", frozenset({("function", "judge")})): 7,
    }


def test_metric_without_a_value_is_not_shown(tmp_path, port):
    """`train/pass@1` of a row without it keeps its newest value; `train/kl` that is null has none. Of names that become
    equal one is shown, as Prometheus rejects a scrape with both."""
    log = open_metrics(tmp_path, ["prometheus"], {})
    log.cut("step", -1)
    log.write({"step": 1, "train/kl": 0.5, "eval/pass@1": 0.25, "train/environment/a-b": 1, "train/environment/a b": 2})
    log.write({"step": 2, "train/kl": float("nan")})
    found, _ = scrape(port)
    log.close()
    assert value(found, "train_kl") is None and value(found, "eval_pass_at", k="1") == 0.25
    assert value(found, "train_environment_a_b") == 1


def test_resumed_run_shows_its_last_evaluation(tmp_path, port):
    killed(Counting(evaluate_every=2, at={4: fail}), tmp_path, ["prometheus"])
    seen = []
    at = {3: lambda: seen.append(scrape(port)[0])}
    go(Counting(evaluate_every=2, at=at), tmp_path, ["prometheus"])
    (found,) = seen
    assert (value(found, "count_step"), value(found, "eval_sum"), value(found, "checkpoint_step")) == (2, 3.0, 2)


def test_runs_of_one_process_do_not_mix(tmp_path, monkeypatch):
    logs = {}
    for name in ("one", "two"):
        monkeypatch.setenv("PROMETHEUS_PORT", str(number := free_port()))
        logs[number] = open_metrics(tmp_path / name, ["prometheus"], {})
    for step, log in enumerate(logs.values()):
        log.cut("step", -1)
        log.write({"step": step})
    assert [scrape(number) for number in logs] == [
        ({("tunix_like_step", frozenset()): step}, {name}) for step, name in enumerate(("one", "two"))
    ]
    for log in logs.values():
        log.close()


def test_port_in_use(tmp_path, port, caplog):
    """A new run ends before its first step. A run with rows goes on, as a scheduler may have started it again."""
    phase = Counting()
    with socket.create_server(("127.0.0.1", port)):
        with pytest.raises(
            UserError, match=rf"cannot listen on port {port} of 127.0.0.1 \(.*in use\).*PROMETHEUS_PORT"
        ):
            go(phase, tmp_path, ["prometheus"])
        assert phase.seen == []
        killed(Counting(at={4: fail}), tmp_path, [])
        assert go(Counting(), tmp_path, ["prometheus"]) == 5
        assert [record.levelname for record in caplog.records if "cannot listen" in record.message] == ["WARNING"]


def test_any_free_port_without_a_folder(monkeypatch, caplog):
    monkeypatch.setenv("PROMETHEUS_PORT", "0")
    monkeypatch.setenv("PROMETHEUS_HOST", "localhost")
    with caplog.at_level(logging.INFO, "tunix_like"):
        log = open_metrics(None, ["tensorboard", "prometheus"], {})
    (address,) = re.findall(r"http://localhost:(\d+)/metrics", caplog.text)
    log.cut("step", -1)
    log.write({"step": 7})
    assert scrape(address) == ({("tunix_like_step", frozenset()): 7}, {""})
    log.close()


@pytest.mark.parametrize("text", ["70000", "http", "-1", ""])
def test_invalid_port(tmp_path, monkeypatch, text):
    monkeypatch.setenv("PROMETHEUS_PORT", text)
    with pytest.raises(UserError, match=f"PROMETHEUS_PORT is '{text}'; set it to"):
        open_metrics(tmp_path, ["prometheus"], {})


def test_missing_package(monkeypatch):
    def version(name):
        assert name == "prometheus-client"
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(UserError, match=r"prometheus is not installed; pip install 'tunix_like\[prometheus\]'"):
        check_loggers(["prometheus"])
