"""Tests runs that are killed, stopped by signals, or cannot write: the final weights equal those of an uninterrupted
run."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.cli.calls import SCRIPT, SMALL, YAML, call
from tunix_like.cli import main as cli
from tunix_like.storage.metrics import rows as metric_rows

pytestmark = pytest.mark.slow

# At its call number STOP_AT the reward signals that it is reached, and waits until it is killed or told to continue. It
# also kills the process while a checkpoint is written (arrays, but no checksums), or limits the file size to 0.
REWARD = """
import os, pathlib, resource, signal, time

from tunix_like.storage import checkpoint_files

calls = 0
write = checkpoint_files.write_checksums

def killed(folder):
    if folder.name.startswith(os.environ.get("KILL_WRITING", "none")):
        os.kill(os.getpid(), signal.SIGKILL)
    write(folder)

checkpoint_files.write_checksums = killed

def reward(prompts, completions, answer):
    global calls
    calls += len(prompts) == 32  # an evaluation asks for a quarter as many
    if calls == int(os.environ.get("STOP_AT", -1)):
        pathlib.Path("reached").touch()
        while not pathlib.Path("go").exists():
            time.sleep(0.01)
    if calls == int(os.environ.get("FULL_AT", -1)):
        while not pathlib.Path("run/checkpoints/15").exists():  # it is written in the background
            time.sleep(0.01)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    return [0.5 * (len(c) % 2) + 0.25 * (c[:1] == a[:1]) for c, a in zip(completions, answer)]
"""
LONG = (
    *SMALL,
    "algorithm.advantage_estimator=grpo",
    "algorithm.beta=0.05",
    "rewards.functions=[{name: reward.py:reward}]",
    "rewards.workers=0",
    "eval.samples=1",
    "eval.k=[1]",
    "training.max_steps=20",
    "training.checkpoint_every_n_steps=5",
    "training.output_dir=run",
)


def exported(folder):
    assert cli.main(["export", str(folder / "run"), str(folder / "out")]) == 0
    return load_file(folder / "out" / "model.safetensors")


@pytest.fixture(scope="module")
def unkilled(tmp_path_factory):
    """The exported weights and the metrics of an uninterrupted run of 20 steps."""
    folder = tmp_path_factory.mktemp("unkilled")
    (folder / "reward.py").write_text(REWARD)
    call(SCRIPT, "train", YAML, *LONG, cwd=folder)
    return exported(folder), metric_rows(folder / "run")


def stopped_at_call(call, folder, number, **environment):
    """Starts the run, sends it the signal at this call of its reward, and returns its exit status and output."""
    for name in ("reached", "go"):
        (folder / name).unlink(missing_ok=True)
    with subprocess.Popen(
        [SCRIPT, "train", YAML, *LONG], cwd=folder, env=os.environ | environment | {"STOP_AT": str(call)}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as process:  # fmt: skip
        for _ in range(3000):
            if (folder / "reached").exists() or process.poll() is not None:
                break
            time.sleep(0.1)
        process.send_signal(number)
        time.sleep(0.1)
        (folder / "go").touch()
        said, _ = process.communicate(timeout=120)
    return process.returncode, said


def test_run_continues_after_its_terminal_is_closed(tmp_path, unkilled):
    """First the reader of both streams ends after a line, and SIGHUP comes twice, as from a closed terminal: the step
    is saved, with exit status 75. Then standard output is full, standard error is closed, and SIGHUP is ignored, as
    under nohup: the run finishes. Its weights and metrics are bitwise those of the uninterrupted run."""
    (tmp_path / "reward.py").write_text(REWARD)
    settings = os.environ | {"STOP_AT": "4"}
    with subprocess.Popen(
        [SCRIPT, "train", YAML, *LONG], cwd=tmp_path, env=settings, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True,
    ) as process:  # fmt: skip
        assert process.stdout.readline()
        process.stdout.close()
        hang_up(process, tmp_path, process.pid)
    assert process.returncode == 75 and steps_of(tmp_path) == [4]
    said = (tmp_path / "run" / "output.log").read_text()
    assert "train  3/20" in said and "SIGHUP: the run stops after the current step\n" in said
    assert "stopped by a signal after step 4, which is saved; the same command resumes" in said

    shell = 'trap "" HUP; exec "$@" > /dev/full 2>&-'
    with subprocess.Popen(
        ["sh", "-c", shell, "sh", SCRIPT, "train", YAML, *LONG], cwd=tmp_path, env=settings, start_new_session=True
    ) as process:
        hang_up(process, tmp_path, process.pid)
    assert process.returncode == 0
    assert_like(tmp_path, unkilled)


def hang_up(process, folder, group):
    """Sends SIGHUP twice to the process group at call STOP_AT of the reward."""
    for _ in range(3000):
        if (folder / "reached").exists() or process.poll() is not None:
            break
        time.sleep(0.1)
    os.killpg(group, signal.SIGHUP)
    os.killpg(group, signal.SIGHUP)
    (folder / "reached").unlink()
    (folder / "go").touch()
    process.wait(120)
    (folder / "go").unlink()


def without_times(rows):
    return [{k: v for k, v in row.items() if "time" not in k and "perf" not in k} for row in rows]


def assert_like(folder, unkilled):
    weights, rows = unkilled
    found = exported(folder)
    assert found.keys() == weights.keys() and all(np.array_equal(found[key], weights[key]) for key in weights)
    assert without_times(metric_rows(folder / "run")) == without_times(rows)
    assert rows[-1]["train/kl"] > 0 and {row.get("step") for row in rows} >= set(range(21))


def steps_of(folder):
    return sorted(int(path.name) for path in (folder / "run" / "checkpoints").iterdir() if path.name.isdigit())


def first_step(said):
    return int(re.search(r"^train +([1-9]\d*)/20", said, re.M).group(1))


def test_interrupted_run_has_the_weights_of_the_uninterrupted_run(tmp_path, unkilled):
    """The run is killed in a step, killed while a checkpoint has its arrays but no checksums, stopped by SIGTERM, and
    killed in a step again. Then its newest checkpoint is damaged, and the disk is full. After the last resumption,
    weights and metrics are bitwise those of the uninterrupted run."""
    (tmp_path / "reward.py").write_text(REWARD)
    code, said = stopped_at_call(4, tmp_path, signal.SIGKILL)
    assert code == -signal.SIGKILL and steps_of(tmp_path) == [], said
    assert (tmp_path / "run" / "run.lock").exists()

    said = call(SCRIPT, "train", YAML, *LONG, cwd=tmp_path, code=-signal.SIGKILL, KILL_WRITING="10.").stdout
    assert first_step(said) == 1 and "sft 4/4" not in said and steps_of(tmp_path) == [5]
    assert list((tmp_path / "run" / "checkpoints").glob("10.*")), "it was about to get its number"

    code, said = stopped_at_call(7, tmp_path, signal.SIGTERM)  # step 12, because it starts with step 6
    assert code == 75 and first_step(said) == 6 and "/run/checkpoints/5\n" in said, said
    assert steps_of(tmp_path)[-1] == 12 and not (tmp_path / "run" / "run.lock").exists()

    code, said = stopped_at_call(5, tmp_path, signal.SIGKILL)  # step 17
    assert code == -signal.SIGKILL and first_step(said) == 13, said
    # The write of step 15 and the removal of old steps happen in the background.
    assert steps_of(tmp_path) in ([10, 12], [10, 12, 15], [12, 15])
    before, newest = steps_of(tmp_path)[-2:]
    checkpoints = tmp_path / "run" / "checkpoints"
    with next((checkpoints / str(newest) / "state" / "d").iterdir()).open("r+b") as file:
        byte = file.read(1)
        file.seek(0)
        file.write(bytes([byte[0] ^ 4]))

    # From step 17 on nothing can be written. The run trains to its end and lists what is missing.
    done = call(SCRIPT, "train", YAML, *LONG, cwd=tmp_path, code=74, FULL_AT=str(17 - before))
    assert first_step(done.stdout) == before + 1 and "train 20/20" in done.stdout
    assert f"checkpoints/{newest}: this checkpoint is damaged: state/d/" in done.stderr
    assert f"step {before} is used instead" in done.stderr and (checkpoints / f"{newest}.damaged").is_dir()
    assert "the checkpoint of step 20 could not be written" in done.stderr
    assert "metrics.jsonl: its last 4 rows could not be written" in done.stderr
    assert "error: " in done.stderr and "Is the disk full" in done.stderr
    assert done.stderr.count("completions of step") == 1 and steps_of(tmp_path)[-1] == 15

    assert first_step(call(SCRIPT, "train", YAML, *LONG, cwd=tmp_path).stdout) == 16
    assert_like(tmp_path, unkilled)
