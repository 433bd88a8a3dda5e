"""Manages the run folder: its path, the check that it belongs to the run, and the config keys that may change on
resume.

A run folder contains `config.yaml` (resolved), `model/` (the model's description, without weights), `metrics.jsonl`,
`checkpoints/`, `sft_checkpoints/`, `rollouts/` and `skipped/` (the inputs of skipped updates).
"""

from __future__ import annotations

from pathlib import Path

from tunix_like.config.load import as_dict, differences, read_yaml, save, temporary_of, with_defaults
from tunix_like.config.schema import Config
from tunix_like.errors import UserError
from tunix_like.models.loading import save_description
from tunix_like.models.lora import save_adapter_config
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
    "rollout.mesh",
    "rollout.urls",
    "rollout.weights_folder",
    "rollout.request_timeout_seconds",
    "rollout.wait_for_servers_seconds",
    "environment.arguments.url",
    "environment.workers",
    "environment.timeout_seconds",
    "environment.memory_gb",
    "data.overlong_prompts",
    "rewards.workers",
    "rewards.timeout_seconds",
    "rewards.memory_gb",
    "eval.",
)
"""Keys, or prefixes of keys, whose values may change when a run is resumed."""


def run_folder(config: Config, config_path: str | Path, kind: str) -> Path:
    """Returns `training.output_dir`; if it is not set, `runs/<config>-<kind>-s<seed>`.

    `<config>` is the name of the config file without its ending. `kind` is the name of the advantage estimator. For an
    estimator `FILE.py:function`, only the name of the function is used.
    """
    if config.training.output_dir is not None:
        return Path(config.training.output_dir)
    name = kind.replace(":", ".").rpartition(".")[2]
    return Path("runs") / f"{Path(config_path).stem}-{name}-s{config.training.seed}"


def claim(folder: Path, parts: Parts) -> None:
    """Checks that a run may use the folder, and writes the config and the model description of the run into the folder.

    Raises:
      UserError: the folder has checkpoints of a run with another config, or the folder is not empty and is not a run
        folder. In the first case, the message lists the keys that differ: first those that must be equal, then those
        that may differ.
    """
    begun = newest_checkpoints(folder) is not None
    by_first(lambda: _claim(folder, parts, begun))


def _claim(folder: Path, parts: Parts, begun: bool) -> None:
    file = folder / "config.yaml"
    if file.exists():
        saved = with_defaults(read_yaml(file), as_dict(Config()))
        changed = differences(saved, as_dict(parts.config))
        fixed = [line for line in changed if not line.startswith(CHANGEABLE)]
        free = [line for line in changed if line.startswith(CHANGEABLE)]
        if fixed and begun:  # without a checkpoint, the run can start again without loss
            raise UserError(
                f"{folder} holds a run with another config:\n  " + "\n  ".join(fixed) + "\n"
                "Use the same values to resume it, or training.output_dir=<another folder> to start a new run."
                + ("\nThese keys differ too, which is allowed:\n  " + "\n  ".join(free) if free else "")
            )
    elif folder.exists() and any(path.name not in (LOCK, temporary_of(file).name) for path in folder.iterdir()):
        raise UserError(f"{folder} is not empty and is not a run folder; choose another training.output_dir.")
    folder.mkdir(parents=True, exist_ok=True)
    save(parts.config, file)
    save_description(parts.model.config, parts.tokenizer, folder / "model", parts.config.model.param_dtype)
    if parts.model.adapters is not None:
        save_adapter_config(parts.model, folder / "model")


def newest_checkpoints(run: Path) -> Path | None:
    """Returns the folder of a run's RL checkpoints. If there are no RL checkpoints, returns the folder of the SFT
    checkpoints, or None if the run has no checkpoint at all."""
    for name in ("checkpoints", "sft_checkpoints"):
        checkpoints = Checkpoints(run / name)
        step = checkpoints.latest_step()
        checkpoints.close()
        if step is not None:
            return run / name
    return None
