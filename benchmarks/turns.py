"""`python -m benchmarks.turns`: the time of completions of several turns, compared with one turn and with repeated
prefill.

Three sides sample the same number of tokens per completion, alternately: one turn; several turns, whose replies are
appended to the cache; and several turns where the prompt of each turn is the whole history, which is prefilled again.
The model counts: token `i` is followed by `i + 1`, so that every turn has the same length. Its arithmetic is that of
any other model of its size.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from tunix_like.models.config import DecoderConfig
from tunix_like.models.decoder import Decoder
from tunix_like.rollout.requests import collect
from tunix_like.rollout.sampler import Sampler
from tunix_like.types import Reply, Request, SamplingParams, Turn

PROMPTS, SIZE, PROMPT = 4, 8, 96
TURN, REPLY, TURNS = 32, 12, 8
VOCABULARY, WIDTH, LAYERS = 512, 256, 6
GREEDY = SamplingParams(0.0)


class Appends:
    """Replies to every turn at once, except to the last one."""

    lockstep = True

    def __init__(self, turns: int):
        self.most, self.turns, self.ready = turns, {}, []

    def opening(self, group: int, sample: int) -> list[int]:
        return []

    def submit(self, turns: Sequence[Turn]) -> None:
        for turn in turns:
            index = turn.group, turn.sample
            number = self.turns[index] = self.turns.get(index, 0) + 1
            self.ready.append(Reply(*index, reply() if number < self.most else None))

    def replies(self, wait: bool) -> list[Reply]:
        ready, self.ready = self.ready, []
        return ready


def reply() -> list[int]:
    """Returns an observation whose last token makes the next turn start at token 0."""
    return [*range(TURN, TURN + REPLY - 1), TURN - 1]


def counting_model() -> tuple[Any, Any]:
    """Returns graph and weights of a model that counts to `TURN - 1`, modulo `TURN`."""
    config = DecoderConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=4 * WIDTH,
        num_layers=LAYERS,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        tie_embeddings=False,
    )
    graphdef, state = nnx.split(Decoder(config, rngs=nnx.Rngs(0)))
    params = nnx.to_pure_dict(state)
    for layer in params["layers"].values():  # the layers are computed as usual and add zero
        for part, name in (("self_attn", "o_proj"), ("mlp", "down_proj")):
            layer[part][name]["kernel"] = np.zeros_like(layer[part][name]["kernel"])
    embedding, head = np.zeros((VOCABULARY, WIDTH), np.float32), np.zeros((WIDTH, VOCABULARY), np.float32)
    for token in range(VOCABULARY):
        embedding[token, token % WIDTH] = 1.0
    for token in range(TURN):
        head[token, (token + 1) % TURN] = 1.0
    params["embed_tokens"]["embedding"], params["lm_head"]["kernel"] = embedding, head
    return graphdef, jax.device_put(params)


def sampler(graphdef: Any, eos_ids: Sequence[int], max_prompt: int, max_tokens: int) -> Sampler:
    """Returns a sampler with these limits."""
    return Sampler(graphdef, eos_ids, max_prompt_length=max_prompt, max_tokens=max_tokens)


def sides(graphdef: Any, params: Any) -> dict[str, Any]:
    """Returns the three sides as functions that return the number of sampled tokens."""
    prompts = [[*range(TURN, TURN + PROMPT - 1), TURN - 1]] * PROMPTS
    key, end = jax.random.key(0), (TURN - 1,)
    requests = [Request(tokens, number, SIZE) for number, tokens in enumerate(prompts)]
    one_turn = sampler(graphdef, (), PROMPT, TURN * TURNS)
    in_turns = sampler(graphdef, end, PROMPT, (TURN + REPLY) * TURNS)
    again = sampler(graphdef, end, PROMPT + (TURN + REPLY) * TURNS, TURN)

    def single() -> int:
        return int(collect(one_turn.generate(params, requests, key, GREEDY), requests).lengths.sum())

    def appended() -> int:
        out = collect(in_turns.generate(params, requests, key, GREEDY, Appends(TURNS)), requests)
        assert out.finished.all()
        return int(out.token_mask.sum())

    def prefilled() -> int:
        histories = [list(prompt) for prompt in prompts for _ in range(SIZE)]
        sampled = 0
        for _ in range(TURNS):
            rows = [Request(tokens, number, 1) for number, tokens in enumerate(histories)]
            out = collect(again.generate(params, rows, key, GREEDY), rows)
            sampled += int(out.lengths.sum())
            for row, history in enumerate(histories):
                history += [*out.tokens[row, 0, : out.lengths[row, 0]].tolist(), *reply()]
        return sampled

    return {"one turn": single, "appended": appended, "prefilled again": prefilled}


def measure(repeats: int) -> dict[str, Any]:
    """Runs all sides alternately, after one run of each for the compilations."""
    runs = sides(*counting_model())
    counts = {name: run() for name, run in runs.items()}
    assert len(set(counts.values())) == 1, counts
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    pairs = zip(*seconds.values(), strict=True)
    ratios = [(appended / single, again / appended) for single, appended, again in pairs]
    return {
        "tokens": counts["one turn"],
        "seconds": seconds,
        "appended / one turn": [ratio for ratio, _ in ratios],
        "prefilled again / appended": [ratio for _, ratio in ratios],
    }


def main() -> None:
    """Prints medians with their spread, and writes them to `--json FILE`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found = measure(arguments.repeats)
    print(f"{PROMPTS} prompts x {SIZE}, {TURNS} turns of {TURN} tokens, replies of {REPLY}: {found['tokens']} tokens")
    for name, values in found["seconds"].items():
        print(f"{name:<28}{statistics.median(values):>8.3f} s  ({min(values):.3f} to {max(values):.3f})")
    for name in ("appended / one turn", "prefilled again / appended"):
        values = found[name]
        print(f"{name:<28}{statistics.median(values):>8.2f}    ({min(values):.2f} to {max(values):.2f})")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
