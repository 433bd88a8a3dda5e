"""`python -m benchmarks.speculation RUN_OR_FILE ... --model MODEL`: which share of drafted tokens siblings would give.

The sampler draws a token from its logits and a key of (problem, sample, position), so a drafted token is right exactly
if it is the token that is drawn: stored completions tell which drafts would have been accepted. All completions of a
batch advance together. A draft is what followed the latest occurrence of the last n tokens (n = 3, else 2) in the
prompt and in all completions of the group so far. The tail of a batch begins when a quarter of its completions is left.
`tokens per step` is the speed-up if a step takes as long with the draft as without it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from tunix_like.models.opening import load_model
from tunix_like.text.tokenizer import Tokenizer

TAIL = 0.25
ORDERS = (3, 2)


class Index:
    """The n-grams of a group of completions. `texts[0]` is the prompt."""

    def __init__(self, prompt: list[int], size: int) -> None:
        self.texts: list[list[int]] = [[], *([] for _ in range(size))]
        self.found: dict[tuple[int, ...], tuple[int, int]] = {}
        for token in prompt:
            self.add(0, token)
        for text in self.texts[1:]:
            text.extend(prompt[-max(ORDERS) :])  # the first drafts follow the end of the prompt

    def add(self, number: int, token: int) -> None:
        text = self.texts[number]
        for order in ORDERS:
            if len(text) >= order:
                self.found[tuple(text[-order:])] = number, len(text)
        text.append(token)

    def draft(self, number: int, length: int) -> list[int]:
        for order in ORDERS:
            place = self.found.get(tuple(self.texts[number][-order:]))
            if place is not None:
                source, start = place
                return self.texts[source][start : start + length]
        return []


def simulated(groups: list[tuple[list[int], list[list[int]]]], length: int) -> dict[str, float]:
    """Returns tokens per step, and the share of drafted tokens that are accepted, of a batch and of its tail."""
    indices = [Index(prompt, len(texts)) for prompt, texts in groups]
    left = {(g, i): 0 for g, (_, texts) in enumerate(groups) for i, text in enumerate(texts) if text}
    tail = TAIL * len(left)
    counts = {name: [0, 0, 0, 0] for name in ("all", "tail")}  # tokens, steps of rows, drafted, accepted
    while left:
        parts = ["all", *(["tail"] if len(left) <= tail else [])]
        for (g, i), done in list(left.items()):
            text = groups[g][1][i]
            draft = indices[g].draft(i + 1, length)
            accepted = 0
            while accepted < len(draft) and done + accepted < len(text) and draft[accepted] == text[done + accepted]:
                accepted += 1
            new = text[done : done + accepted + 1]
            for token in new:
                indices[g].add(i + 1, token)
            for part in parts:
                for place, number in enumerate((len(new), 1, len(draft), accepted)):
                    counts[part][place] += number
            left[g, i] = done + len(new)
            if left[g, i] >= len(text):
                del left[g, i]
    found = {}
    for part, (tokens, steps, drafted, accepted) in counts.items():
        found[f"{part}: tokens per step"] = tokens / max(steps, 1)
        found[f"{part}: accepted"] = accepted / max(drafted, 1)
    return found


def batches(path: Path, tokenizer: Tokenizer) -> Iterator[list[tuple[list[int], list[list[int]]]]]:
    """Yields the groups of each step of a run, or of a file of `eval --out`, as token ids."""
    files = sorted((path / "rollouts").glob("step_*.jsonl")) if path.is_dir() else [path]
    for file in files:
        groups: dict[str, list[list[int]]] = {}
        for line in file.read_text().splitlines():
            row = json.loads(line)
            for text in row["completions"] if "completions" in row else [row["completion"]]:
                ids = tokenizer.encode_data(text, 10_000)
                groups.setdefault(row["prompt"] if isinstance(row["prompt"], str) else json.dumps(row["prompt"]), [])
                groups[row["prompt"] if isinstance(row["prompt"], str) else json.dumps(row["prompt"])].append(ids)
        yield [(tokenizer.encode_prompt(prompt, False)[1], texts) for prompt, texts in groups.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="+", type=Path)
    parser.add_argument("--model", required=True, help="whose tokenizer made the completions")
    parser.add_argument("--lengths", nargs="*", type=int, default=[4, 8], help="tokens of a draft")
    arguments = parser.parse_args()
    _, tokenizer = load_model(arguments.model)
    assert tokenizer is not None
    for path in arguments.paths:
        found = list(batches(path, tokenizer))
        for length in arguments.lengths:
            rows = [simulated(batch, length) for batch in found]
            means = {name: sum(row[name] for row in rows) / len(rows) for name in rows[0]}
            print(path.name, f"draft {length}:", ", ".join(f"{name} {value:.2f}" for name, value in means.items()))


if __name__ == "__main__":
    main()
