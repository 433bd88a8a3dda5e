"""The folder of a run: where it is, whether it belongs to this run, and which keys may change on resume.

A run is one folder: `config.yaml` (resolved), `model/` (the model's description, without weights), `metrics.jsonl`,
`checkpoints/`, `sft_checkpoints/`, `rollouts/`.
"""

from __future__ import annotations

from pathlib import Path

from tunix_like.config.load import as_dict, differences, read_yaml, save, temporary_of
from tunix_like.config.schema import (
    Config,
)
from tunix_like.errors import UserError
from tunix_like.models.loading import (
    save_description,
)
from tunix_like.models.lora import (
    save_adapter_config,
)
from tunix_like.runs.build import Parts
from tunix_like.runtime.processes import by_first
from tunix_like.storage.checkpoints import Checkpoints
from tunix_like.storage.run_lock import FILE as LOCK

CHANGEABLE = (
    "training.max_steps",
    "training.output_dir",
    "training.eval_every_n_steps",
    "training.checkpoint_every_n_steps",
    "training.max_checkpoints_to_keep",
    "training.best_metric",
    "training.log_rollouts_every_n_steps",
    "training.log_samples_every_n_steps",
    "training.loggers",
    "training.profile_steps",
    "training.train_micro_batch_size",
    "rollout.max_concurrent_rows",
    "rewards.workers",
    "rewards.timeout_seconds",
    "rewards.memory_gb",
    "eval.",
)
"""Keys (or their beginnings) that a run may be resumed with other values of."""


def run_folder(config: Config, config_path: str | Path, kind: str) -> Path:
    """`training.output_dir`, or `runs/<config>-<kind>-s<seed>`; an estimator that is named by its place
    (`FILE.py:function`) is called by its function there."""
    if config.training.output_dir is not None:
        return Path(config.training.output_dir)
    name = kind.replace(":", ".").rpartition(".")[2]
    return Path("runs") / f"{Path(config_path).stem}-{name}-s{config.training.seed}"


def claim(folder: Path, parts: Parts) -> None:
    """Writes what the run is, or checks that the folder already holds this very run.

    Raises:
      UserError: the folder holds another config; the keys that differ are named, and which of them may.
    """
    begun = newest_checkpoints(folder) is not None
    by_first(lambda: _claim(folder, parts, begun))


def _claim(folder: Path, parts: Parts, begun: bool) -> None:
    file = folder / "config.yaml"
    if file.exists():
        changed = differences(read_yaml(file), as_dict(parts.config))
        fixed = [line for line in changed if not line.startswith(CHANGEABLE)]
        free = [line for line in changed if line.startswith(CHANGEABLE)]
        if fixed and begun:  # without one, nothing is lost by starting over
            raise UserError(
                f"{folder} holds a run with another config:\n  " + "\n  ".join(fixed) + "\n"
                "Use the same values to resume it, or training.output_dir=<another folder> to start anew."
                + ("\nThese differ too, and may:\n  " + "\n  ".join(free) if free else "")
            )
    elif folder.exists() and any(path.name not in (LOCK, temporary_of(file).name) for path in folder.iterdir()):
        raise UserError(f"{folder} is not empty and holds no run; choose another training.output_dir.")
    folder.mkdir(parents=True, exist_ok=True)
    save(parts.config, file)
    save_description(parts.model.config, parts.tokenizer, folder / "model", parts.config.model.param_dtype)
    if parts.model.adapters is not None:
        save_adapter_config(parts.model, folder / "model")


def newest_checkpoints(run: Path) -> Path | None:
    for name in ("checkpoints", "sft_checkpoints"):
        checkpoints = Checkpoints(run / name)
        found = checkpoints.latest_step()
        checkpoints.close()
        if found is not None:
            return run / name
    return None
