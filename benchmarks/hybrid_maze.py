"""The maze of `examples/maze.yaml` learned by an attention model and by a hybrid of Gated DeltaNet and attention.

    python -m benchmarks.hybrid_maze FOLDER [--models attention hybrid] [--seeds N]

Both have 4 layers of the same width, the same SFT up to the same pass rate, and the same MaxRL. Runs that are complete
in FOLDER are not repeated. Intervals are over seeds.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from benchmarks.objectives import call, interval

CONFIG = Path(__file__).parents[1] / "examples" / "maze.yaml"
SHARED = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
MODELS = {
    "attention": SHARED | {"model_type": "qwen2"},
    "hybrid": SHARED
    | {
        "model_type": "qwen3_5_text",
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4,
    },
}
SAMPLES, KS = 64, (1, 4, 16)


def results(model: str, seed: int, folder: Path) -> dict[str, float]:
    """Trains a model, and returns pass@k on the held-out mazes before and after RL."""
    run = folder / f"{model}-s{seed}"
    if not (run / "done").exists():
        config = json.dumps(MODELS[model])
        call("train", str(CONFIG), f"model.config={config}", f"training.seed={seed}", f"training.output_dir={run}")
        (run / "done").touch()
    out = folder / f"{model}-s{seed}.jsonl"
    if not out.with_suffix(".summary.json").exists():
        out.unlink(missing_ok=True)  # half of a pair, from a call that was stopped between the two files
        call("eval", str(run), f"eval.samples={SAMPLES}", f"eval.k=[{', '.join(map(str, KS))}]", "--out", str(out))
    after = json.loads(out.with_suffix(".summary.json").read_text(encoding="utf-8"))["metrics"]
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    (before,) = [row["eval/pass@1"] for row in rows if row.get("step") == 0]
    return {"before": before} | {f"pass@{k}": after[f"eval/pass@{k}"] for k in KS}


def main() -> None:
    """Prints the results, and writes them to FOLDER/results.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    found = []
    for seed in range(arguments.seeds):
        for model in arguments.models:
            row = {"model": model, "seed": seed} | results(model, seed, arguments.folder)
            print(row, flush=True)
            found.append(row)
    (arguments.folder / "results.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    for model in arguments.models:
        rows = [row for row in found if row["model"] == model]
        cells = [interval([row[name] for row in rows]) for name in ("before", *(f"pass@{k}" for k in KS))]
        print(f"| {model} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
