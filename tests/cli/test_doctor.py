"""Tests the report of `doctor` for working machines and for machines with problems."""

from __future__ import annotations

import fnmatch
import importlib
import importlib.metadata
import os
import re
import types
from pathlib import Path

import jax
import pytest

from tunix_like.cli import doctor
from tunix_like.runtime import accelerators


def named_checks():
    return {check.name: check for check in doctor.report()}


@pytest.fixture(scope="module")
def here():
    return named_checks()


def test_doctor_reports_no_problem_on_this_machine(here, capsys):
    assert all(check.works for check in here.values())
    assert here["jax"].found == f"{jax.__version__} (tested: {', '.join(doctor.TESTED_JAX)})"
    assert here["flax"].found == importlib.metadata.version("flax")
    assert here["device 3"].found.startswith("cpu")
    assert re.search(r"\d+ cores, \d+\.\d GiB", here["host"].found)
    assert doctor.print_report() == 0
    assert jax.__version__ in capsys.readouterr().out


def test_core_packages_are_those_of_setup():
    text = Path(__file__).parents[2].joinpath("setup.py").read_text(encoding="utf-8")
    core = text.partition("CORE = [")[2].partition("\n]")[0]
    assert set(re.findall(r'^    "([a-z0-9-]+)>=', core, flags=re.MULTILINE)) == set(doctor.CORE)


@pytest.mark.parametrize(
    ("version", "told"),
    [("0.10.2", False), ("0.11.0", False), ("0.12.0.1", False), ("0.12.9", False), ("0.10.1", True), ("0.13.0", True),
     ("1.0", True), ("0.13.0.dev20261101", True)],
)  # fmt: skip
def test_newer_jax_than_tested_is_reported_and_works(version, told, monkeypatch):
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version if name == "jax" else real(name))
    check = named_checks()["jax"]
    assert check.works and check.found.startswith(f"{version} (tested: 0.")
    assert ("pip install 'jax>=0.10.2,<0.13'" in check.advice) is told


def test_documentation_names_the_tested_versions_once():
    root = Path(__file__).parents[2]
    pages = {name: (root / name).read_text(encoding="utf-8") for name in ("README.md", "docs/contributing.md")}
    assert all(f"| {version} |" in pages["docs/contributing.md"] for version in doctor.TESTED_JAX)
    assert not any(version in pages["README.md"] for version in doctor.TESTED_JAX)
    assert f'"jax>={doctor.TESTED_JAX[0]}"' in (root / "setup.py").read_text(encoding="utf-8")


def test_package_that_fails_to_import_is_named_with_status_1(monkeypatch, capsys):
    real = importlib.import_module

    def broken(name, *rest):
        if name == "optax":
            raise ImportError("no such symbol")
        return real(name, *rest)

    monkeypatch.setattr(importlib, "import_module", broken)
    checks = named_checks()
    assert not checks["optax"].works
    assert "no such symbol" in checks["optax"].found
    assert "pip install" in checks["optax"].advice
    assert doctor.print_report() == 1
    capsys.readouterr()


def test_missing_extra_is_reported_with_its_install_command(monkeypatch):
    real = importlib.metadata.version

    def version(name):
        if name in doctor.EXTRAS:
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    checks = named_checks()
    for name, (extra, _) in doctor.EXTRAS.items():
        assert checks[name].works and f"tunix-like[{extra}]" in checks[name].advice


def test_an_accelerator_that_jax_does_not_see(monkeypatch):
    monkeypatch.setattr(accelerators.glob, "glob", lambda pattern: ["/dev/nvidia0"] if "nvidia" in pattern else [])
    assert any("tunix-like[cuda13]" in check.advice for check in doctor.report())
    monkeypatch.setattr(accelerators.glob, "glob", lambda pattern: ["/dev/accel0"] if "accel" in pattern else [])
    monkeypatch.setattr(accelerators.shutil, "which", lambda _: None)
    assert any("tunix-like[tpu]" in check.advice for check in doctor.report())


@pytest.mark.parametrize(
    ("libtpu", "files", "variables", "expected"),
    [
        (True, {}, {}, "cpu"),
        (True, {}, {"TPU_SKIP_MDS_QUERY": "1", "TPU_ML_PLATFORM": "JAX"}, "cpu"),  # set by jax on every machine
        (False, {}, {}, None),
        (True, {"/dev/accel0": ""}, {}, None),
        (True, {"/dev/nvidia0": ""}, {}, None),
        (True, {}, {"TPU_WORKER_ID": "0"}, None),
        (True, {}, {"JAX_PLATFORMS": "tpu"}, "tpu"),
        (True, {"0/vendor": "0x1ae0", "0/device": "0x0063"}, {}, None),
        (True, {"0/vendor": "0x1ae0", "0/device": "0x0042"}, {}, "cpu"),
        (True, {"0/vendor": "0x8086", "0/device": "0x0063"}, {}, "cpu"),
    ],
)
def test_libtpu_on_a_machine_without_a_tpu(monkeypatch, tmp_path, libtpu, files, variables, expected):
    for name, text in files.items():
        if not name.startswith("/"):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(text)

    def found(pattern):
        vendors = [str(file) for file in tmp_path.glob("*/vendor")]
        return vendors if "pci" in pattern else fnmatch.filter(files, pattern)

    for name in [name for name in os.environ if name.startswith("TPU_")] + ["JAX_PLATFORMS"]:
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(accelerators.glob, "glob", found)
    monkeypatch.setattr(accelerators.shutil, "which", lambda name: None)
    monkeypatch.setattr(accelerators.os.path, "exists", lambda path: False)
    monkeypatch.setattr(accelerators.importlib.util, "find_spec", lambda name: libtpu or None)
    accelerators.avoid_absent_tpu()
    assert os.environ.get("JAX_PLATFORMS") == expected


def test_jax_without_a_working_backend_is_reported(monkeypatch):
    def fail():
        raise RuntimeError("no backend")

    monkeypatch.setattr(jax, "devices", fail)
    check = named_checks()["devices"]
    assert not check.works
    assert "no backend" in check.found


@pytest.mark.parametrize(
    ("platform", "stats", "said"),
    [
        ("gpu", {"bytes_limit": 4 * 2**30, "bytes_in_use": 2**30}, "3.0 of 4.0 GiB free"),
        ("cpu", None, "host memory"),
        ("tpu", None, "memory unknown (not reported by the device)"),
    ],
)
def test_device_memory_in_gib(monkeypatch, platform, stats, said):
    device = types.SimpleNamespace(id=7, platform=platform, device_kind="kind", memory_stats=lambda: stats)
    monkeypatch.setattr(jax, "devices", lambda: [device])
    assert named_checks()["device 7"].found == f"{platform} kind, {said}"


def test_the_hub_cache(tmp_path, monkeypatch):
    (tmp_path / "hub" / "models--a--b").mkdir(parents=True)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert "1 models, HF_HUB_OFFLINE not set" in named_checks()["Hugging Face cache"].found
    monkeypatch.setenv("HF_HUB_CACHE", "/absent")
    assert "HF_HUB_OFFLINE=1" in named_checks()["Hugging Face cache"].advice
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert named_checks()["Hugging Face cache"].found == "/absent: 0 models, HF_HUB_OFFLINE set"
