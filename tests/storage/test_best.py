"""Tests the best checkpoint by a metric: how it is selected, that only a better one replaces it, and the commands that
use it."""

from __future__ import annotations

import json
import resource
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.training.test_loop import Counting, run
from tunix_like.cli import main as cli
from tunix_like.errors import NotSaved, UserError
from tunix_like.storage import checkpoint_files
from tunix_like.storage.checkpoints import Checkpoints
from tunix_like.storage.metrics import Best, MetricsLog, rows

pytestmark = pytest.mark.slow

YAML = str(Path(__file__).resolve().parents[2] / "examples" / "debug" / "reverse_text.yaml")
SMALL = (
    "model.config.hidden_size=16",
    "model.config.intermediate_size=16",
    "model.config.num_hidden_layers=1",
    "data.batch_size=8",
    "data.train_size=50",
    "data.eval_size=8",
    "algorithm.num_generations=4",
    "sft.max_steps=0",
    "eval.batch_size=8",
    "eval.samples=4",
    "optimizer.learning_rate=0.03",
    "rewards.functions=[{name: wavering.py:wavering}]",
    "rewards.workers=0",
    "training.max_steps=5",
    "training.checkpoint_every_n_steps=2",
    "training.max_checkpoints_to_keep=1",
)
BEST = ("training.eval_every_n_steps=1", "training.best_metric=eval/rewards/mean")
# The reward is the number of different letters. It decreases, because with this large learning rate a run starts to
# repeat some letters.
WAVERING = """
def wavering(prompts, completions, answer):
    return [len(set(text)) / 10 for text in completions]
"""


class Measured(Counting):
    """A phase whose evaluation returns `values[step]`, at the given steps. A function in place of a value is called
    instead."""

    def __init__(self, values, total=None, **kinds):
        super().__init__(max(values) if total is None else total, **kinds)
        self.values = values

    def evaluate_if_due(self, step, last):
        value = self.values.get(step)
        return {} if value is None else {"eval/x": value() if callable(value) else value}


def go(phase, folder, *, every=100, keep=1, **more) -> int:
    best = Best("eval/x", phase.step_key)
    with Checkpoints(folder / "checkpoints", keep, best) as checkpoints:
        kinds = {"checkpoint_every": every} | more
        return run(phase, checkpoints=checkpoints, log=MetricsLog(folder), **kinds)


def saved(folder) -> list[int]:
    with Checkpoints(folder / "checkpoints") as checkpoints:
        return checkpoints.steps()


def sum_in(folder, step) -> float:
    with Checkpoints(folder / "checkpoints") as checkpoints:
        checkpoints.check(step)
        return float(checkpoints.restore(step, {"sum": jnp.zeros(())})[0]["sum"])


def die():
    raise RuntimeError("killed")


@pytest.mark.parametrize(
    ("values", "kept"),
    [
        ({0: 0.1, 2: 0.4, 4: 0.3, 6: 0.2}, [2, 6]),
        ({0: 0.1, 2: 0.2, 4: 0.2, 6: 0.2}, [2, 6]),  # the earliest of equal ones
        ({0: 0.1, 2: 0.2, 4: 0.3, 6: 0.4}, [6]),
        ({0: 0.9, 2: 0.2, 4: 0.3, 6: 0.4}, [0, 6]),  # without an improvement: the start
        ({0: float("nan"), 2: -0.5, 4: float("nan"), 6: float("inf")}, [2, 6]),
        ({0: float("nan"), 6: float("nan")}, [6]),
    ],
)
def test_best_and_newest_checkpoints_are_kept(tmp_path, values, kept):
    """The state of the best step is kept with it. Steps that are not the best are not saved for the metric."""
    go(Measured(values), tmp_path)
    assert saved(tmp_path) == kept
    assert sum_in(tmp_path, kept[0]) == sum(range(kept[0] + 1))


def test_best_does_not_count_as_one_of_the_newest(tmp_path):
    go(Measured({1: 0.9, 3: 0.1}, 9), tmp_path, every=2, keep=2)
    assert saved(tmp_path) == [1, 8, 9]


def test_final_evaluation_after_the_end_of_the_data(tmp_path):
    """The step is already saved when the final evaluation makes it the best."""

    class Ending(Measured):
        def evaluate_if_due(self, step, last):
            return super().evaluate_if_due(step, last) if last or step != 4 else {}

    def phase(data):
        ending = Ending({1: 0.1, 4: 0.5, 6: 0.2}, data=data)
        ending.total = None
        return ending

    go(phase(4), tmp_path, every=2)
    assert 4 in saved(tmp_path)
    go(phase(6), tmp_path, every=2)
    assert saved(tmp_path) == [4, 6]
    go(phase(4), tmp_path / "unsaved")
    assert saved(tmp_path / "unsaved") == [4], "the one before was better than none"


def test_kill_before_the_old_best_is_removed(tmp_path, monkeypatch):
    """Both checkpoints exist. The next start selects the better one, and removes the other when it saves."""
    monkeypatch.setattr(checkpoint_files, "remove", lambda step: None)
    values = {1: 0.3, 3: 0.5, 5: 0.1}
    with pytest.raises(RuntimeError):
        go(Measured(values, 6, at={4: die}), tmp_path)
    monkeypatch.undo()
    assert saved(tmp_path) == [1, 3]
    go(Measured(values, 6), tmp_path)
    assert saved(tmp_path) == [3, 6] and sum_in(tmp_path, 3) == 6


@pytest.mark.parametrize("when", ["before the row", "between row and checkpoint"])
def test_kill_during_the_evaluation_of_the_best_step(tmp_path, when):
    """The step is repeated and is then the best. Its first row of metrics is discarded."""
    values = {0: 0.1, 1: 0.3, 3: 0.5, 4: 0.2}

    class Killed(Measured):
        def before_save(self):
            if self.seen[-1:] == [3]:
                die()

    phase = Measured(values | {3: die}) if when == "before the row" else Killed(values)
    with pytest.raises(RuntimeError):
        go(phase, tmp_path, before_save=getattr(phase, "before_save", lambda: None))
    assert saved(tmp_path) == [1] and rows(tmp_path)[-1]["count/step"] == (2 if when == "before the row" else 3)
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        best = Best("eval/x", "count/step")
        best.add(rows(tmp_path))
        assert best.among(checkpoints.steps()) == 1, "what is not saved is not the best"
    again = Measured(values)
    go(again, tmp_path)
    assert again.loaded == 1 and again.seen == [2, 3, 4] and saved(tmp_path) == [3, 4]
    assert [row["count/step"] for row in rows(tmp_path)] == [0, 1, 2, 3, 4]


def test_kill_after_the_first_evaluation(tmp_path):
    """The start is saved, and is not evaluated a second time."""
    with pytest.raises(RuntimeError):
        go(Measured({0: 0.1, 3: 0.5}, at={1: die}), tmp_path)
    assert saved(tmp_path) == [0]
    again = Measured({0: die, 3: 0.5})
    go(again, tmp_path)
    assert again.loaded == 0 and again.seen == [1, 2, 3] and saved(tmp_path) == [3]


def flip(folder, step):
    (file,) = (folder / "checkpoints" / str(step) / "state" / "d").iterdir()
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def test_damaged_best_checkpoint_is_detected_at_the_next_start(tmp_path, caplog):
    """The damaged checkpoint is renamed, and the best of the remaining ones and of new ones is kept from then on."""
    with pytest.raises(RuntimeError):
        go(Measured({1: 0.5, 3: 0.3}, 8, at={6: die}), tmp_path, every=5, keep=2)
    assert saved(tmp_path) == [1, 5]
    flip(tmp_path, 1)
    go(Measured({1: 0.5, 3: 0.3, 6: 0.2, 7: 0.1}, 8), tmp_path)
    assert "1: this checkpoint is damaged" in caplog.text and "it was renamed to 1.damaged" in caplog.text
    assert "It was the best checkpoint by eval/x; no other has this metric" in caplog.text
    assert saved(tmp_path) == [6, 8] and (tmp_path / "checkpoints" / "1.damaged").is_dir()


def test_old_best_is_kept_until_the_new_one_is_verified(tmp_path, monkeypatch, caplog):
    """The bytes change between write and verification. The new checkpoint is renamed, and the run continues."""
    damage = checkpoint_files.damage
    monkeypatch.setattr(checkpoint_files, "damage", lambda step: "all wrong" if step.name == "3" else damage(step))
    go(Measured({1: 0.3, 3: 0.5, 4: 0.2}), tmp_path)
    assert (
        saved(tmp_path) == [1, 4]
        and "3: this checkpoint is damaged: all wrong; it was renamed to 3.damaged" in caplog.text
    )
    with pytest.raises(NotSaved, match=r"3: this checkpoint is damaged"):
        go(Measured({1: 0.3, 3: 0.5}), tmp_path / "last")


def test_full_disk_loses_only_the_new_best(tmp_path, caplog):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    lost = "the checkpoint of step 3 could not be written"

    def until(true):  # checkpoints are written in the background
        end = time.monotonic() + 60
        while not true():
            assert time.monotonic() < end
            time.sleep(0.01)

    def full():
        until(lambda: saved(tmp_path) == [1])
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))

    def free():
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    def free_again():
        until(lambda: lost in caplog.text)
        free()

    try:
        assert go(Measured({1: 0.3, 3: 0.5, 5: 0.4, 6: 0.1}, at={2: full, 4: free_again}), tmp_path) == 6
    finally:
        free()
    assert saved(tmp_path) == [5, 6], "of those that are there"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """The working directory of the commands, with the reward of their runs."""
    place = tmp_path_factory.mktemp("best")
    (place / "wavering.py").write_text(WAVERING)
    return place


@pytest.fixture
def call(place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    for module in ("build", "trained"):  # one device: programs for eight take several times as long to compile
        monkeypatch.setattr(f"tunix_like.runs.{module}.build_mesh", lambda *_: None)

    def call(*argv, status=0):
        found, said = cli.main(list(argv)), capsys.readouterr()
        assert found == status, said.err
        return said.out if status == 0 else said.err

    return call


def weights_of(folder):
    with Checkpoints(folder.parent) as checkpoints:
        tree = checkpoints._checkpointer.metadata(folder).item_metadata["state"].tree
        state = checkpoints.restore(
            int(folder.name), jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
        )[0]
    return jax.tree.map(np.asarray, state)


@pytest.mark.parametrize(
    ("last", "lora"), [(5, ()), (2, ("lora.rank=2", "training.max_steps=2"))], ids=["whole", "lora"]
)
def test_commands_use_the_best_checkpoint_of_a_run(place, call, last, lora):
    """Metrics measured from the checkpoint equal those that the run measured at its step. The newest checkpoint is
    bitwise that of a run that keeps no best one."""
    name = "adapters" if lora else "whole"
    said = call("train", YAML, *SMALL, *BEST, *lora, f"training.output_dir={name}")
    found = {row["step"]: row["eval/rewards/mean"] for row in rows(name) if "eval/rewards/mean" in row}
    best = max(found, key=lambda step: (found[step], -step))
    assert sorted(found) == list(range(last + 1)) and len(set(found.values())) > 1
    assert saved(Path(name)) == sorted({best, last})
    line = f"best: eval/rewards/mean {found[best]:.4g} at step {best}, kept in {name}/checkpoints/{best}"
    assert line in said.replace("\n", " ")
    source = [f"{name}/checkpoints/best"] if lora else [name, "--best"]
    said = call("eval", *source, "--out", f"{name}.jsonl").replace("\n", " ")
    assert f"{name}/checkpoints/{best}: 8 problems" in said
    measured = json.loads(Path(f"{name}.summary.json").read_text())["metrics"]["eval/rewards/mean"]
    assert measured == pytest.approx(found[best], rel=1e-6)
    if not lora:
        assert f"{name}/checkpoints/{best} to best" in call("export", name, "best", "--best").replace("\n", " ")
        greedy = "--prompt", "abc>", "rollout.temperature=0"
        assert call("generate", name, "--best", *greedy) == call("generate", f"{name}/checkpoints/{best}", *greedy)
        call("train", YAML, *SMALL, "training.output_dir=plain")
        jax.tree.map(
            np.testing.assert_array_equal,
            weights_of(Path("plain/checkpoints/5").absolute()),
            weights_of(Path("whole/checkpoints/5").absolute()),
        )


def test_damaged_or_unknown_best_checkpoint_raises_a_message(place, call):
    (best,) = {step for step in saved(Path("whole"))} - {5} or {5}
    file = next((place / f"whole/checkpoints/{best}/state/d").iterdir())
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    said = call("eval", "whole", "--best", status=2)
    assert f"whole/checkpoints/{best}: this checkpoint is damaged" in said.replace("\n", "")
    file.write_bytes(whole)
    assert "training.best_metric is unset in its config" in call("eval", "plain", "--best", status=2)
    assert "plain/checkpoints/5" in call("eval", "plain", "--best", "training.best_metric=eval/pass@2")
    assert "no checkpoint has a value of eval/pass@9" in call(
        "export", "whole", "x", "--best", "training.best_metric=eval/pass@9", status=2
    )
    assert "not a run folder" in call("generate", "elsewhere", "--best", "--prompt", "a", status=2)
    assert "--best out" in call("eval", "--compare", "whole", "plain", "--best", status=2)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ("training.best_metric=eval/pass@3",),
            "got 'eval/pass@3', which no evaluation computes. Did you mean 'eval/pass@",
        ),
        (("training.best_metric=eval/mean_length",), "eval/avg@4, eval/high/avg@4"),
        (("training.best_metric=eval/maj@2", "rewards.functions=null"), None),
        (("training.best_metric=eval/pass@1", "training.eval_every_n_steps=null"), "eval/pass@1, eval/pass@2"),
    ],
)
def test_metric_that_no_evaluation_computes_is_rejected(place, call, monkeypatch, overrides, words):
    """The error is raised before anything is compiled, also by a dry run, and although supervised fine-tuning comes
    first."""
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: compiled.append(event) if "backend_compile" in event else None
    )
    argv = ("train", YAML, *SMALL, "training.eval_every_n_steps=2", *overrides, "sft.max_steps=1", "--dry-run")
    said = call(*argv, status=0 if words is None else 2)
    if words is not None:
        assert "training.best_metric: " in said and words in said.replace("\n", " ")
        assert compiled == []


def test_folder_and_held_out_rows_are_needed_in_python(tmp_path):
    import tunix_like
    from tests.tiny_model import HF
    from tunix_like.data import reverse_text

    model, _ = tunix_like.load_model(HF, init="random")
    for folder, words in ((None, "set training.output_dir"), (str(tmp_path), "there are no held-out rows")):
        learner = tunix_like.MaxRLLearner(
            model=model,
            tokenizer=reverse_text.tokenizer(),
            reward_fns=lambda prompts, completions, **_: [0.0] * len(completions),
            rollout_config=tunix_like.RolloutConfig(max_prompt_length=8, max_tokens_to_generate=4),
            training_config=tunix_like.RLTrainingConfig(best_metric="eval/pass@1", max_steps=1, output_dir=folder),
        )
        with pytest.raises(UserError, match=f"training.best_metric: .*{words}"):
            learner.train([reverse_text.record("ab")])
