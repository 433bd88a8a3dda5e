"""Tests that loggers get each row of `metrics.jsonl` once, with the steps of the run, and that no logger failure ends a
run."""

from __future__ import annotations

import importlib.metadata
import json
import sys
import threading
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import tunix_like
from tests.tiny_model import HF
from tests.training.test_loop import Counting, fail, run
from tunix_like import EvalConfig, MaxRLConfig, MaxRLLearner, OptimizerConfig, RLTrainingConfig, RolloutConfig
from tunix_like.config.load import load
from tunix_like.config.schema import SFTConfig
from tunix_like.data import reverse_text
from tunix_like.errors import UserError
from tunix_like.runs.checks import check_config
from tunix_like.storage import loggers
from tunix_like.storage.checkpoints import Checkpoints
from tunix_like.storage.loggers import check_loggers, open_metrics
from tunix_like.storage.metrics import MetricsLog, rows
from tunix_like.training.sft import SFTTrainer

SETTINGS = {"algorithm": {"k": 2}, "training": {"seed": 7}}


def go(phase, folder, names, every=2):
    with Checkpoints(folder / "checkpoints", 10) as checkpoints:
        log = open_metrics(folder, names, SETTINGS)
        return run(phase, checkpoints=checkpoints, log=log, checkpoint_every=every)


def killed(phase, folder, names):
    with pytest.raises(RuntimeError, match="the machine is gone"):
        go(phase, folder, names)


def shown(folder):
    """Returns the data that TensorBoard shows of a folder: `{tag: [(step, value)]}`, and its texts."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0}).Reload()
    tags = events.Tags()
    curves = {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in tags["scalars"]}
    texts = {tag: events.Tensors(tag)[-1].tensor_proto.string_val[0].decode() for tag in tags["tensors"]}
    return curves, texts


def curves_of(found, key):
    """Returns the same for rows of `metrics.jsonl`, for metrics that are numbers."""
    out = {}
    for row in (row for row in found if key in row):
        for name, value in row.items():
            if name != key and isinstance(value, int | float):
                out.setdefault(name, []).append((row[key], pytest.approx(value, rel=1e-6)))
    return out


@pytest.mark.parametrize("torn", [0, 5])
def test_resumed_run_continues_the_same_curve(tmp_path, torn):
    """Step 3 is logged before the kill and is repeated. The kill may truncate its event."""
    killed(Counting(evaluate_every=4, at={4: fail}), tmp_path, ["tensorboard"])
    (file,) = (tmp_path / "tensorboard" / "count").iterdir()
    assert [step for step, _ in shown(file.parent)[0]["count/sum"]] == [1, 2, 3], "on disk when the row is"
    file.write_bytes(file.read_bytes()[: -torn or None])
    go(Counting(evaluate_every=4), tmp_path, ["tensorboard"])
    curves, texts = shown(file.parent)
    assert curves == curves_of(rows(tmp_path), "count/step")
    assert [step for step, _ in curves["count/sum"]] == [1, 2, 3, 4, 5]
    assert curves["eval/sum"] == [(0, 0.0), (4, 10.0), (5, 15.0)]
    assert texts == {"config/text_summary": "    algorithm:\n      k: 2\n    training:\n      seed: 7"}
    before = sorted(file.parent.iterdir())
    go(Counting(evaluate_every=4), tmp_path, ["tensorboard"])
    assert sorted(file.parent.iterdir()) == before, "a finished run shows nothing new"


def test_run_without_a_checkpoint_restarts_its_curve(tmp_path):
    killed(Counting(evaluate_every=9, at={2: fail}), tmp_path, ["tensorboard"])
    go(Counting(evaluate_every=9), tmp_path, ["tensorboard"])
    curves, _ = shown(tmp_path / "tensorboard" / "count")
    assert curves == curves_of(rows(tmp_path), "count/step") and len(curves["eval/sum"]) == 2


class Recorder:
    """A tool that stores the rows that it gets."""

    told, ends, at_once = [], [], False

    def __init__(self, place):
        self.place, self.first = place, place.mark + 1

    def log(self, number, key, row):
        assert threading.current_thread() is not threading.main_thread()
        Recorder.told.append((self.place.id, number, row[key], row.get("count/sum")))

    def finish(self, failed):
        Recorder.ends.append(failed)


@pytest.fixture
def recorder(monkeypatch):
    monkeypatch.setitem(loggers.TOOLS, "wandb", Recorder)
    monkeypatch.setattr(Recorder, "told", [])
    monkeypatch.setattr(Recorder, "ends", [])
    return Recorder


@pytest.mark.parametrize("at_once", [True, False])
def test_each_step_is_logged_once(tmp_path, recorder, monkeypatch, at_once):
    """All rows have the same run id, although two failures go back to earlier steps. Rows that were logged before are
    not logged again."""
    monkeypatch.setattr(Recorder, "at_once", at_once)
    killed(Counting(at={4: fail}), tmp_path, ["wandb"])
    killed(Counting(at={3: fail}), tmp_path, ["wandb"])
    assert [told[1:3] for told in recorder.told] == [(1, 1), (2, 2), (3, 3)]
    go(Counting(), tmp_path, ["wandb"])
    run_id = json.loads((tmp_path / "tracking.json").read_text())["run"]
    assert recorder.told == [(run_id, i, i, total) for i, total in enumerate([1, 3, 6, 10, 15], 1)]
    assert recorder.ends == [True, False], "the second was killed before it had anything to tell"


def broken(*_):
    raise ConnectionError("no route")


@pytest.mark.parametrize(("at_once", "told"), [(True, [4, 5]), (False, [1, 2, 3, 4, 5])])
def test_missing_rows_are_logged_after_a_kill(tmp_path, recorder, monkeypatch, at_once, told):
    """A tool that stores rows at once gets only the missing ones. A tool that stores nothing before its end gets all
    rows again, from `metrics.jsonl`."""
    monkeypatch.setattr(Recorder, "at_once", at_once)
    with monkeypatch.context() as killed_before_its_end:
        killed_before_its_end.setattr(Recorder, "finish", broken)
        killed(Counting(at={4: fail}), tmp_path, ["wandb"])
    del recorder.told[:]
    go(Counting(), tmp_path, ["wandb"])
    assert [row[1:] for row in recorder.told] == [(i, i, i * (i + 1) / 2) for i in told]


@pytest.mark.parametrize("method", ["__init__", "log"])
def test_rows_that_a_tool_failed_to_log_are_logged_at_the_next_start(tmp_path, recorder, monkeypatch, method):
    monkeypatch.setattr(Recorder, "at_once", True)
    with monkeypatch.context() as down:
        down.setattr(Recorder, method, broken)
        killed(Counting(at={4: fail}), tmp_path, ["wandb"])
    go(Counting(), tmp_path, ["wandb"])
    assert [told[1] for told in recorder.told] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("others", [[], ["trackio"]])
def test_rows_of_a_start_without_the_tool_are_logged_later(tmp_path, recorder, monkeypatch, others):
    monkeypatch.setattr(Recorder, "at_once", True)
    monkeypatch.setitem(loggers.TOOLS, "trackio", type("Other", (Recorder,), {"log": lambda *_: None}))
    killed(Counting(at={3: fail}), tmp_path, ["wandb"])
    killed(Counting(at={5: fail}), tmp_path, others)
    go(Counting(), tmp_path, ["wandb"])
    assert [told[1] for told in recorder.told] == [1, 2, 3, 4, 5]


def test_tool_that_is_added_later_gets_all_rows(tmp_path, recorder):
    killed(Counting(at={4: fail}), tmp_path, [])
    go(Counting(), tmp_path, ["wandb"])
    assert [told[1] for told in recorder.told] == [1, 2, 3, 4, 5]


def test_a_run_without_a_checkpoint_gets_another_id(tmp_path, recorder):
    killed(Counting(at={2: fail}), tmp_path, ["wandb"])
    go(Counting(), tmp_path, ["wandb"])
    first, *others = recorder.told
    assert first[1:3] == (1, 1) and [told[2] for told in others] == [1, 2, 3, 4, 5]
    assert len({told[0] for told in others}) == 1 and others[0][0] != first[0]


def warnings(caplog):
    return [record.message for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.parametrize("where", ["__init__", "log", "finish"])
def test_failing_tool_gives_a_warning_and_the_run_continues(tmp_path, recorder, monkeypatch, caplog, where):
    monkeypatch.setattr(Recorder, where, broken)
    assert go(Counting(), tmp_path, ["wandb", "tensorboard"]) == 5
    assert warnings(caplog) == ["wandb: no route; this logger is off until the next start"]
    assert len(rows(tmp_path)) == 5 and len(shown(tmp_path / "tensorboard" / "count")[0]["count/sum"]) == 5


@pytest.fixture
def hung(recorder, monkeypatch):
    """Two tools whose start hangs until the end of the test. Returns the list of their threads."""
    gate, begun = threading.Event(), []

    def hang(self, place):
        begun.append(threading.current_thread())
        gate.wait()
        self.first = 1

    monkeypatch.setattr(Recorder, "__init__", hang)
    monkeypatch.setitem(loggers.TOOLS, "trackio", Recorder)
    yield begun
    gate.set()
    for thread in begun:
        thread.join()


def test_hanging_tools_are_not_waited_for_or_started_again(tmp_path, hung, monkeypatch, caplog):
    """The run waits once for both tools. The next phase does not start them a second time."""
    ended, until = loggers.Tool.ended, []
    monkeypatch.setattr(loggers.Tool, "ended", lambda tool, time: until.append(time) or ended(tool, time))
    monkeypatch.setattr(loggers, "FINISH_SECONDS", 0.2)
    assert go(Counting(), tmp_path, ["wandb", "trackio", "tensorboard"]) == 5
    assert len(until) == 2 and len(set(until)) == 1
    assert warnings(caplog) == [
        f"{tool}: not done after 0.2 s; the run does not wait any longer" for tool in ("wandb", "trackio")
    ]
    assert len(rows(tmp_path)) == 5 and len(shown(tmp_path / "tensorboard" / "count")[0]["count/sum"]) == 5
    caplog.clear()
    assert go(Counting(7), tmp_path, ["wandb"]) == 7 and len(hung) == 2
    said = ["wandb: still busy with an earlier phase; this logger is off until the next start"]
    assert [text for text in warnings(caplog) if "schedule" not in text] == said


def test_number_of_rows_that_wait_for_a_tool_is_limited(tmp_path, hung, monkeypatch, caplog):
    monkeypatch.setattr(loggers, "WAITING_ROWS", 3)
    assert go(Counting(), tmp_path, ["wandb"]) == 5
    assert warnings(caplog) == ["wandb: 3 rows wait for it; this logger is off until the next start"]


def test_interrupt_does_not_wait_for_tools(tmp_path, hung, caplog):
    def interrupt():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        go(Counting(at={2: interrupt}), tmp_path, ["wandb"])
    assert warnings(caplog) == ["wandb: not done after 0 s; the run does not wait any longer"]


def test_removed_event_files(tmp_path):
    folder = tmp_path / "tensorboard" / "count"
    for last in (1, 2, 3):
        go(Counting(last), tmp_path, ["tensorboard"])
    for file in sorted(folder.iterdir())[:2]:
        file.unlink()
    folder.joinpath("events.out.tfevents.else").touch()
    go(Counting(4), tmp_path, ["tensorboard"])
    names = sorted(file.name.split(".")[3] for file in folder.iterdir())
    assert names == ["0000000002", "0000000003", "else"]


@pytest.mark.parametrize("text", ["a: [", "", "{!!timestamp 2026-01-01: 1}", "- a"])
def test_unreadable_config_file_does_not_end_a_run(tmp_path, caplog, text):
    tmp_path.joinpath("config.yaml").write_text(text)
    assert go(Counting(), tmp_path, ["tensorboard"]) == 5
    assert [said.startswith("loggers show the settings of this run instead of ") for said in warnings(caplog)] == [True]
    assert "seed: 7" in shown(tmp_path / "tensorboard" / "count")[1]["config/text_summary"]


def test_run_in_the_working_directory_has_the_name_of_the_folder(tmp_path, recorder, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = []
    monkeypatch.setattr(Recorder, "finish", lambda self, failed: names.append(self.place.folder.name))
    go(Counting(1), Path(), ["wandb"])
    assert names == [tmp_path.name]


def test_unwritable_event_files_give_a_warning(tmp_path, caplog):
    tmp_path.joinpath("tensorboard").write_text("in the way")
    assert go(Counting(), tmp_path, ["tensorboard"]) == 5
    warned = warnings(caplog)
    assert len(warned) == 1 and warned[0].startswith("tensorboard (") and len(rows(tmp_path)) == 5


def test_only_the_first_process_with_a_folder_logs(tmp_path, monkeypatch):
    """Nothing is logged without a folder. Of several processes only the first one logs."""
    assert type(open_metrics(None, ["tensorboard"], {})) is MetricsLog
    monkeypatch.setattr(loggers, "is_first", lambda: False)
    log = open_metrics(tmp_path, ["tensorboard"], {})
    log.cut("step", -1)
    log.write({"step": 1})
    assert list(tmp_path.iterdir()) == []


def test_bad_names_and_missing_packages(monkeypatch):
    real = importlib.metadata.version

    def version(name):
        if name in loggers.TOOLS:
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(UserError, match="training.loggers: unknown logger 'tensorbord'.*'tensorboard'.*trackio, wandb"):
        check_loggers(RLTrainingConfig(loggers=["tensorbord"]).loggers)
    with pytest.raises(UserError, match="each logger once"):
        RLTrainingConfig(loggers=["wandb", "wandb"])
    model = ["model.init=random", "model.config={model_type: qwen2}", "algorithm.advantage_estimator=maxrl"]
    check_config(load(None, model))
    with pytest.raises(UserError, match=r"training.loggers: wandb is not .*; pip install 'tunix_like\[wandb\]'"):
        check_config(load(None, [*model, "training.loggers=[tensorboard, wandb]"]))
    monkeypatch.undo()
    with pytest.raises(UserError, match="training.loggers: wandb needs training.output_dir"):
        open_metrics(None, ["wandb"], {})


class Watch:
    """Records which modules are looked up."""

    def __init__(self):
        self.asked = []

    def find_spec(self, name, path=None, target=None):
        self.asked.append(name)


@pytest.mark.slow
def test_sft_then_rl_and_pandas(tmp_path, monkeypatch):
    """Both phases of a real run are logged with their own steps. Its files are read as documented, and no optional
    package is imported."""
    import pandas

    for name in ("wandb", "trackio"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    watch = Watch()
    monkeypatch.setattr(sys, "meta_path", [watch, *sys.meta_path])
    data = [reverse_text.record(a + b) for a in "abcd" for b in "ef"]
    common = {"model": tunix_like.load_model(HF, init="random")[0], "tokenizer": reverse_text.tokenizer()}
    common["rollout_config"] = RolloutConfig(max_prompt_length=8, max_tokens_to_generate=4)
    common["training_config"] = RLTrainingConfig(
        max_steps=2, output_dir=str(tmp_path), log_rollouts_every_n_steps=1, actor_optimizer=OptimizerConfig()
    )
    SFTTrainer(sft_config=SFTConfig(max_steps=2, batch_size=4), **common).train(data)
    learner = MaxRLLearner(
        reward_fns=lambda prompts, completions, **columns: [float(len(text) % 2) for text in completions],
        algo_config=MaxRLConfig(num_generations=2),
        eval_config=EvalConfig(samples=2, k=[1]),
        **common,
    )
    learner.train(data, data[:2], batch_size=4)
    assert {"wandb", "trackio"} & {name.partition(".")[0] for name in watch.asked} == set()
    for phase, key in (("sft", "sft/step"), ("train", "step")):
        curves, texts = shown(tmp_path / "tensorboard" / phase)
        assert curves == curves_of(rows(tmp_path), key)
        assert [step for step, _ in curves[f"{phase}/loss"]] == [1, 2]
        assert "max_tokens_to_generate: 4" in texts["config/text_summary"]
    assert [step for step, _ in curves["eval/pass@1"]] == [0, 2]
    assert "advantage_estimator: maxrl" in texts["config/text_summary"]
    frame = pandas.read_json(tmp_path / "rollouts" / "step_000002.jsonl", lines=True)
    assert len(frame) == 8 and {"prompt", "completion", "reward", "advantage"} <= set(frame.columns)
    metrics = pandas.read_json(tmp_path / "metrics.jsonl", lines=True)
    assert metrics["train/loss"].notna().sum() == metrics["sft/loss"].notna().sum() == 2
