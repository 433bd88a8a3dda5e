"""Tests two real processes on the loopback interface, with two simulated devices each: their communication, and a run
that is stopped, killed and resumed, compared with the same run in one process."""

from __future__ import annotations

import functools
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from tests.buckets import EMULATED, bucket_in
from tests.tiny_model import HF
from tests.traces import tracks_of
from tunix_like.cli import main as cli
from tunix_like.errors import UserError
from tunix_like.models.config import DecoderConfig
from tunix_like.models.decoder import Decoder
from tunix_like.models.loading import save_model
from tunix_like.runs.trained import open_trained
from tunix_like.runtime import processes, trace
from tunix_like.storage.metrics import rows

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
BOUND = 60
"""Seconds within which the remaining processes must end after one process has ended (heartbeat: 30)."""

RUN = [
    "train", str(ROOT / "examples" / "debug" / "reverse_text.yaml"), "training.output_dir=run",
    "model.config.vocab_size=16", "model.config.hidden_size=8", "model.config.intermediate_size=8",
    "model.config.num_hidden_layers=1", "model.config.num_attention_heads=2", "mesh.shape=[2,2]",
    "data.batch_size=4", "data.train_size=30", "data.eval_size=4", "eval.batch_size=4", "eval.samples=2",
    "algorithm.num_generations=4", "sft.max_steps=0", "training.max_steps=6", "training.checkpoint_every_n_steps=2",
    "training.log_rollouts_every_n_steps=1", "rewards.functions=[{name: reward.py:graded}]",
    "rewards.workers=0",
]  # fmt: skip

REWARD = """
import os, pathlib, signal

calls = 0

def graded(prompts, completions, answer, **_):
    global calls
    import jax
    calls += 1
    for name in ("SIGTERM", "SIGKILL"):  # once, in the second process alone, after so many calls
        order = pathlib.Path(name)
        if jax.process_index() == 1 and order.exists() and calls == int(order.read_text()):
            order.unlink()
            os.kill(os.getpid(), getattr(signal, name))
    with open(f"scored-{jax.process_count()}-{jax.process_index()}", "a") as file:
        file.write(f"{len(completions)}\\n")
    return [
        sum(a == b for a, b in zip(text, gold)) / len(gold) + 0.01 * len(text)
        for text, gold in zip(completions, answer)
    ]
"""

UNIT = """
import json, sys
import jax, numpy as np
from tunix_like.runtime import processes
from tunix_like.errors import UserError

folder = sys.argv[1]
processes.start()  # as SLURM's variables say
index = jax.process_index()
told = {}

def refused(name, work):
    try:
        told[name] = work()
    except UserError as error:
        told[name] = f"error: {error}"

def share(items):
    if index == 1 and 99 in items:
        raise UserError("only the second process knows 99")
    return [[item, index, "\\u00fc", float("nan")] for item in items]

told["gather"] = processes.gather({"index": index, "text": "x" * 1000 * index})
told["spread"] = processes.across_processes(range(5), share)
told["few"] = processes.across_processes([7], share)
refused("error", lambda: processes.across_processes([1, 2, 3, 99], share))
told["after"] = processes.any_of(index == 1)
refused("by_first", lambda: processes.by_first(lambda: 1 / 0 if index else "from 0"))

from tunix_like.config.schema import MeshConfig
from tunix_like.data.stream import prompt_batches
from tunix_like.models.loading import load_model
from tunix_like.models.sharding import build_mesh, check_divides, fetch, place_replicated
from tunix_like.text.tokenizer import Tokenizer
import tokenizers

vocab = {"<eos>": 0, "<unk>": 1} | {f"w{i}": i for i in range(2, 16)}
backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="<unk>"))
backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
tokenizer = Tokenizer(backend, eos_token="<eos>")
seen = []

class Rows(list):
    def __getitem__(self, place):
        seen.append(place)
        return super().__getitem__(place)

rows = Rows({"prompt": " ".join(["w3"] * (1 + i % 4)), "number": i} for i in range(12))
kinds = dict(batch_size=4, max_prompt_length=3, seed=1, shuffle=True, forever=False)
stream = prompt_batches(rows, tokenizer, **kinds)
first = [prompt.columns["number"] for prompt in next(stream)]
place = stream.get_state()
told["batches"] = [first, *([prompt.columns["number"] for prompt in batch] for batch in stream)]
told["loaded"] = sorted(seen)
again = prompt_batches(rows, tokenizer, **kinds)
again.set_state(place)
told["resumed"] = [[prompt.columns["number"] for prompt in batch] for batch in again]
refused("unsendable", lambda: next(prompt_batches([{"prompt": "w3", "bad": np.zeros(2)}] * 4, tokenizer, **kinds)))

endless = kinds | {"max_prompt_length": 0, "forever": True}
refused("filtered", lambda: next(prompt_batches(rows, tokenizer, **endless)))

mesh = build_mesh(MeshConfig(shape=[2, 2]))
told["nan"] = fetch(place_replicated(np.array([1, np.nan], np.float32), mesh), mesh).tolist()
told["own nan"] = fetch(jax.numpy.array([1, np.nan]), mesh).tolist()
refused("no mesh", lambda: check_divides(None, None))

from tunix_like.planning import sizes
from tunix_like.rollout.rollouts import score_completions
from tunix_like.types import Problem

sizes._reported_memory = lambda: 1000 + 10 * index
told["memory"] = sizes.device_memory()
problems = [Problem(0, "a", [1], {"answer": "x"}), Problem(1, "b", [1], {})]
reward = lambda prompts, completions, answer: [float(a == c) for a, c in zip(answer, completions)]
told["scores"] = score_completions([("r", reward, 2.0)], problems, ["x", "y", "x", "y"], 2).total.tolist()
model, _ = load_model(folder, mesh=mesh)
kernel = model.layers[0].mlp.up_proj.kernel[...]
told["parts"] = [list(shard.data.shape) for shard in kernel.addressable_shards]
told["whole"] = fetch(kernel, mesh).tolist()

import time
import types
from pathlib import Path
from tests.training.test_loop import Counting, run
from tunix_like.training import loop

class Slow(loop.MetricsLog):
    def close(self):
        if index == 0:
            time.sleep(1)
            Path(folder, name).touch()

def ended():
    raise kind(1, True)

for name, kind in (("end", None), ("stop", loop.Stopped)):
    begin = (lambda step: None) if kind is None else (lambda step: ended())
    phase = Counting(0)
    phase.cut = begin
    try:
        run(phase, checkpoints=None, log=Slow(None), checkpoint_every=1)
    except loop.Stopped:
        pass
    told[name] = Path(folder, name).exists()

class InOne(loop.Callback):
    def __init__(self, act):
        self.act = act

    def on_row(self, run, row):
        if index == 1 and run.step == 2:
            self.act(run)

def fails(run):
    raise OSError("only here")

def trained(act):
    phase = Counting(5)
    run(phase, checkpoints=None, log=loop.MetricsLog(None), checkpoint_every=9, callbacks=[InOne(act)])
    return phase.done

told["stopped by one"] = trained(lambda run: run.stop("enough"))
refused("failed in one", lambda: trained(fails))
print(json.dumps(told))
"""


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def start(argv, cwd, devices, **environment):
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": str(devices), "PYTHONPATH": str(ROOT)} | environment
    return subprocess.Popen(
        argv, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )  # fmt: skip


def ends(processes, limit=240):
    """Returns `[(exit status, stdout, stderr)]`. No process outlives the call."""
    try:
        said = [process.communicate(timeout=limit) for process in processes]
        return [(process.returncode, *each) for process, each in zip(processes, said, strict=True)]
    finally:
        for process in processes:
            process.kill()


def two(cwd, only_second=(), both=(), **second_environment):
    """Runs two processes. After the second has ended, the first must end within `BOUND`."""
    place = ["--coordinator", f"127.0.0.1:{free_port()}", "--num-processes", "2", "--process-id"]
    own = (["0"], {}), (["1", *only_second], second_environment)
    argv = [sys.executable, "-m", "tunix_like", *RUN, *both, *place]
    pair = [start([*argv, *each], cwd, 2, **environment) for each, environment in own]
    try:
        second = (pair[1].wait(240), *pair[1].communicate())
        first = pair[0].communicate(timeout=BOUND)
        return [(pair[0].returncode, *first), second]
    finally:
        for process in pair:
            process.kill()


def reproducible_metrics(folder):
    """Returns the metrics of a run, without those that depend on a clock or on the compiler."""
    clocks = ("train/time/", "train/perf/", "train/step_time_sec")
    return [{name: value for name, value in row.items() if not name.startswith(clocks)} for row in rows(folder)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Runs one process with all four devices."""
    cwd = tmp_path_factory.mktemp("alone")
    (cwd / "reward.py").write_text(REWARD)
    ((code, _, error),) = ends([start([sys.executable, "-m", "tunix_like", *RUN], cwd, 4)])
    assert code == 0, error[-3000:]
    return cwd


def test_stopped_and_killed_run_of_two_equals_the_uninterrupted_run(alone, tmp_path):
    """The result is bitwise that of an uninterrupted run of two processes. It equals that of one process up to
    rounding, because sums over the devices of several processes have another order."""
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "SIGTERM").write_text("3")  # evaluation, step 1, step 2
    stopped = two(tmp_path)
    assert [code for code, _, _ in stopped] == [75, 75], stopped
    assert reproducible_metrics(tmp_path / "run")[-1]["step"] == 2
    assert "after step 2, which is saved" in stopped[0][2] and "resumes" in stopped[1][2]

    (tmp_path / "SIGKILL").write_text("3")  # steps 3, 4 and 5, whose rewards are not computed yet
    (code, _, error), (killed, _, _) = two(tmp_path)
    assert killed == -9 and code != 0
    assert code == -6 or "Start all processes again with the same command" in error  # ended by jax or by this library
    assert reproducible_metrics(tmp_path / "run")[-1]["step"] == 4

    finished = two(tmp_path)
    assert [code for code, _, _ in finished] == [0, 0], finished
    assert "MaxRLLearner" in finished[0][1] and finished[1][1].replace("[Gloo]", "").count("train") == 0
    whole = tmp_path / "whole"
    whole.mkdir()
    (whole / "reward.py").write_text(REWARD)
    assert [code for code, _, _ in two(whole)] == [0, 0]
    steps = tracks_of(whole / "run" / trace.FILE)["steps"]
    assert [step["name"] for step in steps] == [f"train {number}" for number in range(1, 7)], "of one process"
    assert reproducible_metrics(tmp_path / "run") == reproducible_metrics(whole / "run")
    for file in (whole / "run" / "rollouts").glob("*.jsonl"):
        assert (tmp_path / "run" / "rollouts" / file.name).read_text() == file.read_text()
    assert_same_weights(whole / "run", tmp_path / "run")
    shares = [(tmp_path / f"scored-2-{i}").read_text().split() for i in (0, 1)]
    assert set(shares[0]) == set(shares[1]) == {"8", "4"}  # half of 4 groups of 4, of 4 problems with 2 samples
    for row, expected in zip(reproducible_metrics(tmp_path / "run"), reproducible_metrics(alone / "run"), strict=True):
        assert row == {name: pytest.approx(value, rel=1e-3, abs=1e-5) for name, value in expected.items()}
    assert_same_weights(alone / "run", tmp_path / "run", tolerance=1e-4)


@pytest.mark.parametrize("storage", [pytest.param("gs", marks=EMULATED)])
def test_run_of_two_in_a_bucket(storage, tmp_path):
    """Two processes that share the local copy stop and resume; with a local copy each, they are refused."""
    (tmp_path / "reward.py").write_text(REWARD)
    with bucket_in(storage, tmp_path) as bucket:
        both = [f"training.output_dir={bucket}/run"]
        for code, _, error in two(tmp_path, both=both, TUNIX_LIKE_CACHE=str(tmp_path / "other")):
            assert code == 2 and "which all processes of a run must share: set TUNIX_LIKE_CACHE" in error, error
        (tmp_path / "SIGTERM").write_text("3")
        stopped = two(tmp_path, both=both)
        assert [code for code, _, _ in stopped] == [75, 75], stopped
        shutil.rmtree(tmp_path / "cache")
        finished = two(tmp_path, both=both)
        assert [code for code, _, _ in finished] == [0, 0], finished
        assert [code for code, _, _ in two(tmp_path)] == [0, 0]
        assert_same_weights(tmp_path / "run", f"{bucket}/run")


def test_invalid_input_of_one_process_ends_all(tmp_path):
    (tmp_path / "reward.py").write_text(REWARD)
    (code, _, error), (refused, _, reason) = two(tmp_path, only_second=["training.max_steps=0"])
    assert refused == 2 and "training.max_steps: got 0" in reason and "Abort" not in reason
    assert code == -6 or (code == 70 and "another process is gone" in error)


def assert_same_weights(one, other, tolerance=0.0):
    ours, theirs = (open_trained(str(run), mesh=None) for run in (one, other))
    assert ours.origin.endswith("/6") and theirs.origin.endswith("/6")
    compare = functools.partial(np.testing.assert_allclose, rtol=0, atol=tolerance)
    jax.tree.map(compare, ours.params, theirs.params)


def test_exchange_between_processes(tmp_path):
    model = Decoder(DecoderConfig.from_hf(HF | {"vocab_size": 16, "num_key_value_heads": 2}), rngs=nnx.Rngs(0))
    params = nnx.to_pure_dict(nnx.state(model))
    save_model(params, model.config, None, tmp_path)
    job = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2"}
    own = [{"SLURM_PROCID": str(i), "SLURM_LOCALID": str(i)} for i in (0, 1)]
    ran = ends([start([sys.executable, "-c", UNIT, str(tmp_path)], ROOT, 2, **job, **each) for each in own])
    assert [code for code, _, _ in ran] == [0, 0], ran
    told = [json.loads(out.splitlines()[-1]) for _, out, _ in ran]
    for name in ("gather", "error", "after", "by_first", "batches", "resumed", "unsendable", "whole"):
        assert told[0][name] == told[1][name], name
    assert told[0]["gather"] == [{"index": 0, "text": ""}, {"index": 1, "text": "x" * 1000}]
    assert [row[:3] for row in told[0]["spread"]] == [[0, 0, "ü"], [1, 0, "ü"], [2, 1, "ü"], [3, 1, "ü"], [4, 1, "ü"]]
    assert np.isnan(told[1]["spread"][0][3]) and told[1]["few"][0][0] == 7
    assert told[0]["error"] == "error: only the second process knows 99"
    assert told[0]["after"] is True and told[0]["by_first"] == "from 0"
    assert told[0]["unsendable"].startswith("error: the data column 'bad' contains a ndarray")
    assert "none of the 12 rows has a usable prompt" in told[0]["filtered"]
    for each in told:
        assert str(each["nan"]) == str(each["own nan"]) == "[1.0, nan]"
        assert each["memory"] == 1000 and each["scores"] == [2.0, 0.0, 0.0, 0.0]
        assert "there are 2 processes, each of which would train its own model" in each["no mesh"]
        assert each["end"] and each["stop"], "none leaves before the loggers of the first are done"
    # Each row is loaded by one process at most; a left-over row is loaded by none, and long rows are omitted.
    assert not set(told[0]["loaded"]) & set(told[1]["loaded"])
    numbers = [number for batch in told[0]["batches"] for number in batch]
    assert len(set(numbers)) == 8 and all(number % 4 < 3 for number in numbers)
    assert told[0]["resumed"] == told[0]["batches"][1:]
    kernel = params["layers"][0]["mlp"]["up_proj"]["kernel"]
    np.testing.assert_array_equal(told[0]["whole"], kernel)
    assert told[0]["parts"] == told[1]["parts"] == [[4, 4], [4, 4]]
    assert [each["stopped by one"] for each in told] == [2, 2]
    assert all("callback InOne.on_row: OSError: only here" in each["failed in one"] for each in told)


SOME = {
    "must be given together": [["--coordinator", "localhost:1"], ["--process-id", "0", "--num-processes", "2"]],
    "host and port of process 0": [["--coordinator", "localhost", "--process-id", "0", "--num-processes", "2"]],
}


@pytest.mark.parametrize(("said", "options"), [(said, each) for said, options in SOME.items() for each in options])
def test_incomplete_options_are_rejected(said, options):
    done = subprocess.run(
        [sys.executable, "-m", "tunix_like", *RUN, *options], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and said in done.stderr


LATE = (
    "import sys; from tunix_like.cli.main import main; from tunix_like.runtime import processes; "
    "processes.START_SECONDS, processes.NOTE_SECONDS = 3, 0.5; sys.exit(main(sys.argv[1:]))"
)


def test_failed_connection_ends_with_a_message(tmp_path):
    """jax alone ends with a segmentation fault (the port is in use) or aborts after five minutes."""
    taken = socket.create_server(("127.0.0.1", 0))
    there = f"127.0.0.1:{taken.getsockname()[1]}"
    cases = [
        (
            ["-m", "tunix_like"],
            there,
            "0",
            f"--coordinator {there}: port {there[10:]} is in use by another run or program",
        ),
        (["-c", LATE], f"127.0.0.1:{free_port()}", "1", "no answer after 3 seconds"),
        (["-c", LATE], f"127.0.0.1:{free_port()}", "0", "did not find each other"),
    ]
    options = ["--num-processes", "2", "--coordinator"]
    with taken:
        started = [
            start([sys.executable, *how, *RUN, *options, at, "--process-id", index], tmp_path, 2)
            for how, at, index, _ in cases
        ]
        found = ends(started, 120)
    for (status, _, error), (*_, said) in zip(found, cases, strict=True):
        lines = [line for line in error.splitlines() if line.startswith("error: ")]
        assert status == 2 and len(lines) == 1 and said in lines[0], error
        assert ("waiting for the other processes" in error) == ("port" not in said), error


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]", "no-such-host.invalid"])
def test_check_of_a_free_port_leaves_it_free(host):
    port = free_port()
    for _ in range(2):
        processes.check_port(f"{host}:{port}")
    with socket.create_server(("127.0.0.1", port)), pytest.raises(UserError, match=f"port {port} is in use"):
        processes.check_port(f"{host}:{port}")
    with pytest.raises(UserError, match="port 70000.*1 to 65535"):
        processes.check_port(f"{host}:70000")


def test_connection_waits_for_a_late_coordinator():
    port, service = free_port(), []

    def later():
        time.sleep(0.8)
        make = jax._src.distributed._jax.get_distributed_runtime_service
        service.append(make(f"[::]:{port}", 2, heartbeat_timeout=10, shutdown_timeout=1))

    thread = threading.Thread(target=later)
    thread.start()
    processes.wait_for(f"localhost:{port}", 60)
    thread.join()
    assert service
    with pytest.raises(UserError, match="is in use"):
        processes.check_port(f"localhost:{port}")
    service[0].shutdown()


@pytest.mark.parametrize(
    ("environment", "several"),
    [
        ({}, False),
        ({"SLURM_NTASKS": "4"}, False),  # a batch script or an interactive shell, not started by srun
        ({"SLURM_NTASKS": "4", "SLURM_STEP_NODELIST": "a[1-4]"}, True),
        ({"SLURM_NTASKS": "1", "SLURM_STEP_NODELIST": "a1"}, False),
        ({"TPU_WORKER_HOSTNAMES": "host-0"}, False),
        ({"TPU_WORKER_HOSTNAMES": "host-0,host-1"}, True),
        ({"TPU_WORKER_HOSTNAMES": "host-0", "MEGASCALE_NUM_SLICES": "2"}, True),
        ({"TPU_WORKER_HOSTNAMES": "host-0", "MEGASCALE_NUM_SLICES": "1"}, False),
    ],
)
def test_options_from_a_scheduler(monkeypatch, environment, several):
    for name in ("SLURM_NTASKS", "SLURM_STEP_NODELIST", "TPU_WORKER_HOSTNAMES", "TPU_PROCESS_ADDRESSES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("MEGASCALE_NUM_SLICES", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    joined = []
    monkeypatch.setattr(processes, "start", lambda *place: joined.append(place))
    monkeypatch.setattr(processes, "leave_refused", lambda status: None)  # jax would end the process of the tests
    assert cli.main(["eval", "no-such-folder", "data.name=maze"]) == 2
    assert joined == ([(None, None, None)] if several else [])


def test_pathways_is_registered_before_jax_is_used(monkeypatch, capsys):
    """`JAX_PLATFORMS` is read by jax at its import, so here it is only the sign for the command."""
    monkeypatch.setenv("JAX_PLATFORMS", "proxy")
    monkeypatch.setitem(sys.modules, "pathwaysutils", None)
    assert cli.main(["eval", "no-such-folder"]) == 2
    assert "pip install 'tunix-like[pathways]'" in capsys.readouterr().err
    called = []
    monkeypatch.setitem(sys.modules, "pathwaysutils", types.SimpleNamespace(initialize=lambda: called.append(True)))
    assert cli.main(["eval", "no-such-folder"]) == 2
    assert called == [True] and "no-such-folder" in capsys.readouterr().err
