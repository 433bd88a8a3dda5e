"""The command `export`: writes a Hugging Face folder, or the adapters for PEFT."""

from __future__ import annotations

import argparse

from tunix_like.cli.common import chosen_source
from tunix_like.models.loading import export_model
from tunix_like.models.lora import save_adapter
from tunix_like.runs.trained import open_trained
from tunix_like.runtime import console
from tunix_like.storage.output_folder import check_target


def export(arguments: argparse.Namespace) -> None:
    """Writes the model, with adapters merged into the weights, to a new folder. With `--adapter`, writes only the
    adapters."""
    # Checked before the weights are read, because reading takes minutes.
    check_target(arguments.out, arguments.overwrite, arguments.source)
    overrides = [*arguments.overrides, "model.attention=auto"]  # the attention kernel of the run can need other devices
    trained = open_trained(chosen_source(arguments.source, arguments.best), overrides, mesh=None)
    if arguments.adapter:
        save_adapter(trained.model, arguments.out, overwrite=arguments.overwrite)
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
        return
    ends = trained.config.rollout.eos_tokens
    tokenizer = trained.tokenizer if ends is None else trained.tokenizer.with_eos_ids(ends)
    export_model(trained.model, tokenizer, arguments.out, overwrite=arguments.overwrite)
    console.print_text(f"wrote {trained.origin} to {arguments.out}; load it with transformers or tunix-like")
