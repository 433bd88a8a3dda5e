"""Training on completions of older weights: held-out pass@1 with and without each correction for the sampler.

    python -m benchmarks.old_weights [--ages N ...] [--seeds N] [--json FILE]

The task is `examples/debug/reverse_text.yaml` with strings of up to six letters. The sampler gets the weights that the
trainer had `age` steps before; before step `age` it gets the initial ones. A run takes 15 seconds on two idle cores.
"""

from __future__ import annotations

import argparse
import collections
import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tunix_like.cli.main import main as command
from tunix_like.rollout.collection import Collector

MODES = ("null", "token", "token_mask", "sequence", "sequence_mask")
KEYS = ("data.text_length=6", "rollout.max_tokens_to_generate=12", "training.max_logprob_gap=null")
CONFIG = Path(__file__).parents[1] / "examples" / "debug" / "reverse_text.yaml"


def delayed(collect: Callable[..., Any], age: int) -> Callable[..., Any]:
    """Returns `Collector.__call__` with the weights of `age` calls before."""
    kept: collections.deque[Any] = collections.deque(maxlen=age + 1)

    def call(self: Collector, step: int, params: Any, lap: Any) -> Any:
        kept.append(jax.tree.map(lambda x: jnp.array(x, copy=True), params))  # the step donates the weights
        return collect(self, step, kept[0], lap)

    return call


def trained(age: int, mode: str, seed: int, folder: Path, overrides: Sequence[str] = ()) -> dict[str, float]:
    """Trains one run. Returns held-out pass@1 before and after, and means of the metrics over its steps."""
    collect = Collector.__call__
    Collector.__call__ = delayed(collect, age)  # type: ignore[method-assign]
    try:
        keys = (f"algorithm.sampler_is={mode}", f"training.seed={seed}", f"training.output_dir={folder}")
        if status := command(["train", str(CONFIG), *KEYS, *keys, *overrides]):
            raise SystemExit(status)
    finally:
        Collector.__call__ = collect  # type: ignore[method-assign]
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    scores = [row["eval/pass@1"] for row in rows if "eval/pass@1" in row]
    found = {"before": scores[0], "after": scores[-1]}
    for name in ("logprob_gap/mean", "sampler_is/ess", "sampler_is/outside_frac"):
        values = [row[f"train/{name}"] for row in rows if row.get(f"train/{name}") is not None]
        found[name] = float(np.mean(values)) if values else float("nan")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ages", type=int, nargs="+", default=[0, 1, 4])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results = []
    for age in arguments.ages:
        for mode in MODES if age else MODES[:1]:
            with tempfile.TemporaryDirectory() as folder:
                runs = [trained(age, mode, seed, Path(folder) / str(seed)) for seed in range(arguments.seeds)]
            results.append({"age": age, "sampler_is": mode, "runs": runs})
    print("age  sampler_is     pass@1 before  after  of each seed")
    for row in results:
        after = [run["after"] for run in row["runs"]]
        before = np.mean([run["before"] for run in row["runs"]])
        each = " ".join(f"{value:.3f}" for value in after)
        print(f"{row['age']:3}  {row['sampler_is']:13}  {before:13.3f}  {np.mean(after):5.3f}  {each}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
