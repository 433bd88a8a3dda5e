"""The command `export`: writes a Hugging Face folder, or the adapters for PEFT."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from tunix_like.cli.common import chosen_source
from tunix_like.config.urls import plain_hub_id
from tunix_like.errors import UserError, one_line
from tunix_like.models.loading import export_model
from tunix_like.models.lora import save_adapter
from tunix_like.report.card import card_files
from tunix_like.runs.trained import Trained, open_trained
from tunix_like.runtime import console
from tunix_like.runtime.object_storage import is_remote
from tunix_like.storage.checkpoint_files import step_of
from tunix_like.storage.output_folder import check_target


def export(arguments: argparse.Namespace) -> None:
    """Writes the model, with adapters merged into the weights, to a new folder. With `--adapter`, writes only the
    adapters."""
    # Checked before the weights are read, because reading takes minutes.
    check_target(arguments.out, arguments.overwrite, arguments.source)
    if arguments.push is not None:
        arguments.push = plain_hub_id(arguments.push, "export: --push")
        _check_push(arguments.push, arguments.out)
    overrides = [*arguments.overrides, "model.attention=auto"]  # the attention kernel of the run can need other devices
    trained = open_trained(chosen_source(arguments.source, arguments.best), overrides, mesh=None)
    further = _card(trained, arguments)
    if arguments.adapter:
        save_adapter(trained.model, arguments.out, overwrite=arguments.overwrite, further=further)
        console.print_text(f"wrote the adapters of {trained.origin} to {arguments.out}; load them with peft")
        if trained.config.model.init == "random":
            console.print_text(
                "the base model was initialised at random and is not exported: the adapters are useless with any other "
                "base"
            )
        if trained.model.quantized is not None:
            console.print_text(
                f"the adapters were trained on a base in {trained.model.quantized}: with the original weights, outputs "
                "differ by the quantisation error; the merged export has no such error"
            )
        _push(arguments)
        return
    ends = trained.config.rollout.eos_tokens
    tokenizer = trained.tokenizer if ends is None else trained.tokenizer.with_eos_ids(ends)
    export_model(trained.model, tokenizer, arguments.out, overwrite=arguments.overwrite, further=further)
    console.print_text(f"wrote {trained.origin} to {arguments.out}; load it with transformers or tunix-like")
    _push(arguments)


def _check_push(name: str, out: str) -> None:
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name) is None:
        raise UserError(f"export: --push {name}: give OWNER/NAME.")
    if is_remote(out):
        raise UserError(f"export: --push uploads a local folder; {out} is in object storage.")
    try:
        import huggingface_hub  # noqa: F401
    except ImportError as error:
        needs = f"export: --push needs the hub package ({one_line(error)})"
        raise UserError(f"{needs}: pip install 'tunix-like[hub]'") from None


def _push(arguments: argparse.Namespace) -> None:
    """Uploads the exported folder to a private repository of the Hugging Face hub; without `--yes` only says so."""
    if arguments.push is None:
        return
    files = sorted(path for path in Path(arguments.out).iterdir() if path.is_file())
    size = sum(path.stat().st_size for path in files)
    what = f"{len(files)} files ({size / 1e6:.1f} MB) to the private repository {arguments.push}"
    if not arguments.yes:
        names = ", ".join(path.name for path in files)
        console.print_text(
            f"--push would upload {what}: {names}. Read the files, choose --license, and add --yes --overwrite."
        )
        return
    from huggingface_hub import HfApi

    try:
        api = HfApi()
        place = api.create_repo(arguments.push, private=True, exist_ok=True)
        api.upload_folder(repo_id=arguments.push, folder_path=arguments.out, commit_message="Export of tunix_like")
    except Exception as error:  # of the hub, or of the HTTP client that it uses
        failed = f"the upload to {arguments.push} failed: {one_line(error)}"
        raise UserError(f"{arguments.out} is complete; {failed}") from error
    console.print_text(f"uploaded {what}: {place}")


def _card(trained: Trained, arguments: argparse.Namespace) -> dict[str, bytes]:
    """Returns the files of the card of a model of a run; none for a model folder, and for a run in object storage."""
    checkpoint = Path(trained.origin)
    run = checkpoint.parent.parent
    if is_remote(trained.origin) or not (run / "config.yaml").is_file() or step_of(checkpoint.name) is None:
        return {}
    return card_files(checkpoint, trained.config, arguments.adapter, arguments.license)
