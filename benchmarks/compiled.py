"""The programs that `benchmarks.peer_compiled` compiles with two libraries, and the costs of a compiled program.

Of this library it imports only the description of devices and the reader of compiled programs, which need no other
package, because it also runs in the peer's environment.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tunix_like.compile.costs import Counter, Trips
from tunix_like.compile.devices import described_devices, parse_devices
from tunix_like.runtime.accelerators import Accelerator


@dataclasses.dataclass(frozen=True)
class Work:
    """What both sides compile, with Qwen3-1.7B's widths.

    Attributes:
      devices: as `tunix-like doctor --devices`, of a TPU.
      layers: layers of the model.
      prompts, group: prompts of an update, and completions per prompt.
      prompt_length, length: tokens of a prompt and of a completion, all of full length.
      rows: completions that are sampled at once.
      tiny: whether the widths are tiny ones, for a test.
    """

    devices: str = "v5e-8"
    layers: int = 4
    prompts: int = 8
    group: int = 8
    prompt_length: int = 384
    length: int = 768
    rows: int = 128
    tiny: bool = False

    @property
    def model(self) -> dict[str, Any]:
        """The `config.json` of the model."""
        sizes = (128, 256, 2, 1, 1024) if self.tiny else (2048, 6144, 16, 8, 151936)
        width, inner, heads, kv_heads, vocabulary = sizes
        return {
            "model_type": "qwen3",
            "vocab_size": vocabulary,
            "hidden_size": width,
            "intermediate_size": inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": 128,
            "rope_theta": 1e6,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
            "max_position_embeddings": 4096,
        }

    @property
    def target(self) -> tuple[Accelerator, int]:
        """The kind and the number of the devices."""
        kind, number, _ = parse_devices(self.devices)
        assert kind is not None, f"{self.devices} has no kind"
        return kind, number

    def described(self) -> Any:
        """Returns jax devices that programs can be compiled for."""
        return described_devices(*self.target)


def read_costs(lower: Callable[[], Any], trips: Trips, loop: str | None = None) -> dict[str, Any]:
    """Compiles a program and returns its memory and costs on one device, as JSON values.

    Args:
      lower: lowers the program.
      trips: trips of its loops whose number is data.
      loop: a loop by its scope, whose one trip is counted; None: the whole program is.
    """
    start = time.perf_counter()
    lowered = lower()
    traced = time.perf_counter()
    compiled = lowered.compile()
    seconds, memory = time.perf_counter() - traced, compiled.memory_analysis()
    counter = Counter(compiled.as_text(), trips)
    costs = counter.total() if loop is None else counter.one_trip(loop)
    written = max(0, memory.output_size_in_bytes - memory.alias_size_in_bytes)
    return {
        "arguments": memory.argument_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes + written,
        "cycles": costs.cycles,
        "operations": costs.operations,
        "memory_bytes": costs.memory_bytes,
        "collectives": costs.collectives,
        "numbers": costs.numbers,
        "kernels": costs.kernels,
        "unknown": sorted(counter.unknown - {loop}),
        "trace_seconds": traced - start,
        "compile_seconds": seconds,
    }


def serve(programs: dict[str, Callable[[Work], dict[str, Any]]]) -> None:
    """The main function of a side: `PROGRAM WORK_AS_JSON OUT`; compiles the program and writes its costs to OUT."""
    program, work, out = sys.argv[1:]
    found = programs[program](Work(**json.loads(work)))
    Path(out).write_text(json.dumps(found) + "\n", encoding="utf-8")
