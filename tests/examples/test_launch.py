"""Tests the recipes of examples/launch: their commands parse and their configurations load, the manifests follow the
schema of JobSet, and hosts and chips are those of the slice. No cluster is used."""

from __future__ import annotations

import ast
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.process import ROOT
from tunix_like.cli.main import parse
from tunix_like.config.load import load
from tunix_like.runs.checks import check_config
from tunix_like.runtime.accelerators import KINDS

LAUNCH = ROOT / "examples" / "launch"
FILES = sorted(path.name for path in LAUNCH.iterdir())
MANIFESTS = [name for name in FILES if name.endswith(".yaml") and name != "skypilot.yaml"]
TYPES = {"object": dict, "array": list, "string": str, "boolean": bool, "integer": int}
SLICES = {"tpu-v5-lite-podslice": "v5e", "tpu-v5p-slice": "v5p", "tpu-v6e-slice": "v6e"}
"""Maps GKE's names of accelerators to ours. Hosts of a slice with several hosts have 4 chips."""


def manifest(name: str) -> dict[str, Any]:
    return yaml.safe_load((LAUNCH / name).read_text(encoding="utf-8"))


def pods(name: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Returns the replicated jobs of a manifest, each with the specification of its pods."""
    return [(job, job["template"]["spec"]["template"]["spec"]) for job in manifest(name)["spec"]["replicatedJobs"]]


def problems(schema: dict[str, Any], value: Any, path: str = "") -> list[str]:
    """Returns where `value` differs from a schema of Kubernetes."""
    if not isinstance(value, TYPES.get(schema.get("type", ""), object)):  # no type: an integer or a string
        return [f"{path}: {value!r} is not of type {schema['type']}"]
    found = [f"{path}: {value!r} is none of {schema['enum']}"] if value not in schema.get("enum", [value]) else []
    if isinstance(value, list):
        return found + [
            each for i, item in enumerate(value) for each in problems(schema["items"], item, f"{path}[{i}]")
        ]
    if not isinstance(value, dict) or not ({"properties", "additionalProperties"} & set(schema)):
        return found
    found += [f"{path}: {name} is missing" for name in schema.get("required", []) if name not in value]
    known, others = schema.get("properties", {}), schema.get("additionalProperties")
    for name, item in value.items():
        each = known.get(name, others)
        found += [f"{path}: unknown key {name}"] if each is None else problems(each, item, f"{path}.{name}")
    return found


def run(script: str, folder: Path, *argv: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a script with bash. Programs of `folder`/bin come first on the path; `~` is `folder`."""
    place = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "HOME": str(folder)}
    return subprocess.run(
        ["bash", "-c", script, "bash", *argv], env=os.environ | place | environment, capture_output=True, text=True,
        check=False,
    )  # fmt: skip


def stand_in(folder: Path, name: str, status: str = "0") -> None:
    """Writes a program that prints its arguments as a shell line."""
    program = folder / name
    program.parent.mkdir(parents=True, exist_ok=True)
    program.write_text(f'#!/bin/bash\necho "${{0##*/}}" "${{@@Q}}"\nexit {status}\n')
    program.chmod(0o755)


def check_command(words: list[str], chips: int) -> None:
    """Checks a command line from `train` on, whose run has `chips` devices, all along `data` and `fsdp`."""
    arguments = parse(words)
    assert arguments.command == "train"
    config, _ = check_config(load(ROOT / arguments.config, arguments.overrides))
    assert config.training.output_dir is not None and config.data.batch_size % chips == 0


@pytest.mark.parametrize("name", FILES)
def test_headers_say_command_replacements_and_what_was_run(name):
    text = (LAUNCH / name).read_text(encoding="utf-8")
    header = text.removeprefix("#!/usr/bin/env bash\n").split("\n\n")[0]
    lines = [line for line in header.splitlines() if line.startswith("#")]
    assert any(f"examples/launch/{name}" in line for line in lines)
    assert any(re.search(r"\b[Rr]eplace\b", line) for line in lines) and any(
        line.startswith("# Run: ") for line in lines
    )


@pytest.mark.parametrize("name", MANIFESTS)
def test_manifests_follow_the_schema_of_jobset(name):
    schema = yaml.safe_load(Path(__file__).with_name("jobset_schema.yaml").read_text(encoding="utf-8"))
    assert problems(schema, manifest(name)) == []


def test_the_schema_finds_mistakes():
    schema = yaml.safe_load(Path(__file__).with_name("jobset_schema.yaml").read_text(encoding="utf-8"))
    wrong = manifest("jobset_v5e_16.yaml")
    wrong["spec"]["replicatedJobs"][0] |= {"replicas": "1", "replica": 1}
    del wrong["spec"]["failurePolicy"]["rules"][0]["name"]
    wrong["spec"]["failurePolicy"]["rules"][0]["action"] = "Fail"
    assert [each.rpartition(".")[2] for each in problems(schema, wrong)] == [
        "rules[0]: name is missing",
        "action: 'Fail' is none of ['FailJobSet', 'RestartJobSet', 'RestartJobSetAndIgnoreMaxRestarts', 'RestartJob', "
        "'RestartJobAndIgnoreMaxRestarts']",
        "replicas: '1' is not of type integer",
        "replicatedJobs[0]: unknown key replica",
    ]


@pytest.mark.parametrize("name", MANIFESTS)
def test_hosts_and_chips_are_those_of_the_slice(name):
    for job, pod in pods(name):
        spec = job["template"]["spec"]
        assert spec["parallelism"] == spec["completions"]
        limits = [container["resources"]["limits"] for container in pod["containers"]]
        if (chips := limits[0].get("google.com/tpu")) is None:
            continue
        shape = pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"]
        kind = SLICES[pod["nodeSelector"]["cloud.google.com/gke-tpu-accelerator"]]
        assert shape in KINDS[kind].slices.values() and chips == 4
        assert spec["parallelism"] * chips == math.prod(map(int, shape.split("x")))
        assert f"{kind}_{spec['parallelism'] * chips}" in name and (job["replicas"] == 2) == ("2x" in name)


def test_pathways_serves_the_slices_that_the_workers_are():
    (_, head), (workers, worker) = pods("pathways_2x_v5e_16.yaml")
    manager = next(each for each in head["initContainers"] if each["name"] == "pathways-rm")
    shape = worker["nodeSelector"]["cloud.google.com/gke-tpu-topology"]
    assert {f"--instance_count={workers['replicas']}", f"--instance_type=tpuv5e:{shape}"} < set(manager["args"])


@pytest.mark.parametrize("name", MANIFESTS)
def test_commands_of_manifests(name):
    chips = sum(
        job["replicas"] * job["template"]["spec"]["parallelism"] * container["resources"]["limits"]["google.com/tpu"]
        for job, pod in pods(name)
        for container in pod["containers"]
        if "google.com/tpu" in container["resources"]["limits"]
    )
    train = [(job, pod, each) for job, pod in pods(name) for each in pod["containers"] if each["name"] == "train"]
    ((job, pod, container),) = train
    check_command(container["args"], chips)
    mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    assert set(mounts) == {each["name"] for each in pod["volumes"]}
    assert f"training.output_dir={mounts['runs']}/" in "".join(container["args"])
    (rule,) = job["template"]["spec"]["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"] == {"containerName": "train", "operator": "In", "values": [2]}
    assert pod["restartPolicy"] == "Never", "Kubernetes requires it for a podFailurePolicy"


def test_images_are_those_of_the_dockerfile():
    dockerfile = (LAUNCH / "Dockerfile").read_text(encoding="utf-8")
    assignments = ast.parse((ROOT / "setup.py").read_text(encoding="utf-8")).body
    extras = next(
        each for each in assignments if isinstance(each, ast.Assign) and "EXTRAS" in ast.unparse(each.targets)
    )
    assert isinstance(extras.value, ast.Dict)
    names = {ast.literal_eval(key) for key in extras.value.keys if key is not None}
    images = {
        match[1] for name in FILES for match in re.finditer(r"/tunix-like:(\w+)", (LAUNCH / name).read_text("utf-8"))
    }
    listed = re.search(r"ACCELERATOR: (\w+), (\w+), (\w+) or (\w+)", dockerfile)
    assert listed is not None and images <= set(listed.groups()) <= names


def test_the_image_has_all_that_the_package_is_built_from(tmp_path):
    """Builds the package from the files that are copied before the installation."""
    before = (LAUNCH / "Dockerfile").read_text(encoding="utf-8").partition("\nRUN ")[0]
    for line in re.findall(r"^COPY (.*) \S+$", before, re.MULTILINE):
        for name in line.split():
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, tmp_path / name)
    subprocess.run([sys.executable, "setup.py", "-q", "build_py", "-d", "built"], cwd=tmp_path, check=True)
    assert (tmp_path / "built/tunix_like/examples/maze.yaml").is_file()


@pytest.mark.parametrize("nodes", [1, 2])
def test_skypilot_command(tmp_path, nodes):
    task = manifest("skypilot.yaml")
    stand_in(tmp_path, "venv/bin/tunix-like")
    addresses = "\n".join(["10.0.0.1", "10.0.0.2"][:nodes])
    node = {"SKYPILOT_NODE_IPS": addresses, "SKYPILOT_NUM_NODES": str(nodes), "SKYPILOT_NODE_RANK": str(nodes - 1)}
    words = shlex.split(run(task["run"], tmp_path, **node).stdout)[1:]
    check_command(words, 8 * nodes)
    arguments = parse(words)
    assert (arguments.coordinator, arguments.num_processes, arguments.process_id) == (
        "10.0.0.1:12345",
        nodes,
        nodes - 1,
    )
    assert all(any(word.startswith(f"training.output_dir={folder}/") for word in words) for folder in task["volumes"])
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [70, 75]


@pytest.mark.parametrize("pathways", [False, True])
def test_xpk_command(tmp_path, pathways):
    stand_in(tmp_path, "bin/xpk")
    environment = {"PATHWAYS": "1", "BUCKET": "gs://bucket"} if pathways else {"PATHWAYS": ""}
    environment |= {"REGISTRY": "registry", "STORAGE": "filestore"}
    script = f"{LAUNCH / 'xpk.sh'} cluster project zone 2 --spot"
    words = shlex.split(run(script, tmp_path, **environment).stdout)
    options = dict(word.split("=", 1) for word in words if "=" in word)
    kind = "create-pathways" if pathways else "create"
    assert words[:3] == ["xpk", "workload", kind] and words[-1] == "--spot" and options["--num-slices"] == "2"
    home, program, *command = shlex.split(options["--command"])
    assert (home, program) == ("HF_HOME=/runs/huggingface", "tunix-like")
    assert options["--tpu-type"] == "v5litepod-16" and options["--storage"] == "filestore"
    check_command(command, 32)
    assert options["--docker-image"] == f"registry/tunix-like:{'pathways' if pathways else 'tpu'}"


@pytest.mark.parametrize(
    ("status", "restarts", "again"),
    [
        (0, 0, False),
        (1, 0, False),
        (2, 0, False),
        (70, 0, True),
        (74, 1, True),
        (75, 0, True),
        (143, 19, True),
        (70, 20, False),
    ],
)
def test_slurm_script_queues_the_job_again(tmp_path, status, restarts, again):
    stand_in(tmp_path, "bin/srun", str(status))
    stand_in(tmp_path, "bin/scontrol")
    environment = {"SLURM_JOB_ID": "7", "SCRATCH": "/scratch", "SLURM_RESTART_COUNT": str(restarts)}
    done = run(str(LAUNCH / "slurm.sh"), tmp_path, **environment)
    first, *others = done.stdout.splitlines()
    assert done.returncode == status and others == (["scontrol 'requeue' '7'"] if again else [])
    words = shlex.split(first)
    check_command(words[words.index("tunix-like") + 1 :], 32)
