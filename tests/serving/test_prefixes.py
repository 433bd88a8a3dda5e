"""Tests that prompts which begin like earlier ones are not computed again, and that completions do not change."""

from __future__ import annotations

import concurrent.futures
import gc
import random
import weakref

import httpx
import jax
import numpy as np
import pytest

from tests.models.layer_kinds import SHARED_KEYS
from tests.parameters import others_slow
from tests.serving import served
from tunix_like.config.schema import MeshConfig
from tunix_like.models.sharding import build_mesh, place_params
from tunix_like.serving.prefixes import Prefixes
from tunix_like.serving.runner import Runner, Weights

VOCABULARY, LONGEST = 20, 600
MODELS = {
    "plain": served.random_model(VOCABULARY),
    "windows": served.random_model(VOCABULARY, windows=(70, None), attention_cap=5.0),
    "keys of earlier layers": served.random_model(VOCABULARY, **SHARED_KEYS),
}


class Entry:
    """A value of the store: the prompt, and the version of the weights for which it was made."""

    def __init__(self, prompt, version):
        self.prompt, self.version = prompt, version


class Oracle:
    """The store as a list of `(prompt, size)`, least recently used first, which is searched completely."""

    def __init__(self, room):
        self.room, self.entries = room, []

    def longest(self, prompt):
        return max((common(prompt, each) for each, _ in self.entries), default=0)

    def use(self, prompt):
        self.entries.sort(key=lambda entry: entry[0] == prompt)  # stable

    def add(self, prompt, size):
        self.entries = [entry for entry in self.entries if entry[0] != prompt]
        for each, _ in sorted((entry for entry in self.entries if entry[0] < prompt), reverse=True):
            if prompt[: len(each)] != each:
                break
            self.entries = [entry for entry in self.entries if entry[0] != each]
        while sum(size for _, size in self.entries) + size > self.room:
            self.entries.pop(0)
        self.entries.append((prompt, size))


def common(first, second):
    return next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(map(len, (first, second)))
    )


@pytest.mark.slow
def test_the_store_is_a_list_that_is_searched_completely():
    """10,000 random schedules: prompts with common prefixes, evictions, and new weights, which clear the store."""
    found = dropped = 0
    for seed in range(10_000):
        rng = random.Random(seed)
        room, version = rng.randint(8, 60), 0
        store, oracle, prompts, alive = Prefixes(room), Oracle(room), [()], weakref.WeakSet()
        for _ in range(rng.randint(3, 13)):
            if rng.random() < 0.03:
                version += 1
                store.clear()
                oracle = Oracle(room)
                continue
            base = rng.choice(prompts)
            start = base[: rng.choice([rng.randint(0, len(base)), len(base)])]
            prompt = (start + tuple(rng.choices(range(3), k=rng.randint(0, 3))) or (0,))[:8]
            prompts.append(prompt)
            match = store.find(prompt)
            assert (0 if match is None else match[1]) == oracle.longest(prompt)
            if match is not None:
                earlier, length = match
                entry = store.use(earlier)
                oracle.use(earlier)
                assert (entry.version, entry.prompt) == (version, earlier) and prompt[:length] == earlier[:length]
                found += 1
            if rng.random() < 0.8:
                size = rng.randint(len(prompt), 8)
                made = Entry(prompt, version)
                alive.add(made)
                store.add(prompt, made, size)
                oracle.add(prompt, size)
                del made
            entry = None
            assert sorted(each.prompt for each in alive) == sorted(each for each, _ in oracle.entries), (
                "others are freed"
            )
            dropped += len(oracle.entries) < len(set(prompts))
    assert found > 30_000 and dropped > 30_000


def runner_of(name, mesh=None, rows=16):
    graphdef, params = MODELS[name]
    return Runner(Weights(graphdef, place_params(params, mesh), (), mesh), rows, LONGEST)


def check_prompts(runner, prompts, tolerance=1e-5):
    """Compares the results of `prefill` with those of whole prompts; returns the number of reused tokens of each."""
    reused = []
    for prompt in prompts:
        width = runner.prompt_width(len(prompt))
        cost = runner.tokens_of([prompt], width)
        (got,), (whole,) = runner.prefill([prompt], width), runner._prefill([prompt], width)
        assert cost == (width if got.reused == 0 else len(prompt) - got.reused)
        assert got.width == width and got.prompts.lengths.tolist() == [len(prompt)]
        np.testing.assert_allclose(got.prompts.hidden, whole.prompts.hidden, rtol=0, atol=tolerance)
        for (k, v), (whole_k, whole_v) in zip(got.prompts.cache, whole.prompts.cache, strict=True):
            assert k.shape == whole_k.shape and v.shape == whole_v.shape
            length = len(prompt)
            np.testing.assert_allclose(k[..., :length], whole_k[..., :length], rtol=0, atol=tolerance)
            np.testing.assert_allclose(v[:, :, :length], whole_v[:, :, :length], rtol=0, atol=tolerance)
        reused.append(got.reused)
    return reused


def related_prompts():
    """Returns prompts, and the number of tokens of each that need not be computed."""
    rng = np.random.default_rng(0)
    a, b = (tuple(rng.integers(0, VOCABULARY, 600).tolist()) for _ in range(2))
    cases = [
        (a[:400], 0),
        (a[:400], 400),  # equal
        (a[:380] + b[:20], 400 - 128),  # the last 128 tokens are computed, although 380 tokens are equal
        (a[:400] + b[:150], 550 - 256),  # continued in two chunks
        (a[:140] + b[:259], 0),  # too many tokens differ
        (a[:300], 300 - 128),  # a prefix of an earlier prompt, whose hidden state is not that of token 300
        (a[:230], 230 - 128),  # in narrower arrays
        (a[:220] + b[:80], 300 - 128),
        (a[:100], 0),  # too short
        (b, 0),
        (b, 600),
    ]
    return zip(*cases, strict=True)


@pytest.mark.parametrize("name", others_slow(MODELS, "plain", "windows"))
def test_a_continued_prompt_is_the_whole_prompt(name):
    prompts, reused = related_prompts()
    # The last model has five layers; one of 17,600 values differed by 1.1e-5.
    tolerance = 3e-5 if name == "keys of earlier layers" else 1e-5
    assert check_prompts(runner_of(name), prompts, tolerance) == list(reused)


@pytest.mark.slow
def test_a_continued_prompt_is_the_whole_prompt_on_a_mesh():
    mesh = build_mesh(MeshConfig(shape=[2, 2]), jax.devices()[:4])
    prompts, reused = related_prompts()
    with jax.set_mesh(mesh):
        assert check_prompts(runner_of("windows", mesh, rows=64), prompts) == list(reused)


def test_new_arrays_forget_the_prompts():
    runner, (prompt, *_) = runner_of("plain"), next(related_prompts())
    (kept,) = runner.prefill([prompt], 512)
    array = weakref.ref(kept.prompts.hidden)
    del kept
    gc.collect()
    assert array() is not None
    runner.reset()
    gc.collect()
    assert array() is None and runner.tokens_of([prompt], 512) == 512


def conversations(seed):
    """Returns requests in the order in which a client sends them: turns of conversations, with a system prompt."""
    rng = np.random.default_rng(seed)
    letters = lambda count: "".join(rng.choice(list("abcdefgh"), count))  # noqa: E731
    system, texts = "h" * 60 + "abc" * 80, []
    for _ in range(3):
        history = system
        for _ in range(3):
            history += letters(rng.integers(5, 60)) + ">"
            texts.append(history)
            history += letters(10)
    return texts


@pytest.mark.slow
def test_answers_are_those_without_reuse(monkeypatch):
    """Several clients send conversations, and each request several times at once."""
    weights, tokenizer = served.letters()
    texts = conversations(3)
    bodies = [
        {
            "prompt": text,
            "max_tokens": 20,
            "temperature": kind,
            "seed": 3,
            "n": 2,
            "logprobs": 0,
            "return_token_ids": True,
        }
        for text in texts
        for kind in (0.0, 1.0)
    ]

    def answers():
        with served.running(weights, tokenizer, rows=4, longest=LONGEST) as (url, server):
            with concurrent.futures.ThreadPoolExecutor(6) as pool:
                send = lambda body: httpx.post(f"{url}/v1/completions", json=body, timeout=120).json()  # noqa: E731
                found = [*pool.map(send, [body for body in bodies for _ in range(2)])]
            return found, server.metrics

    got, metrics = answers()
    monkeypatch.setattr(Prefixes, "find", lambda *given: None)
    expected, without = answers()
    for one, other in zip(got, expected, strict=True):
        for choice, whole in zip(one["choices"], other["choices"], strict=True):
            assert choice["token_ids"] == whole["token_ids"]
            logprobs, wanted = (each["logprobs"]["token_logprobs"] for each in (choice, whole))
            np.testing.assert_allclose(logprobs, wanted, rtol=0, atol=1e-5)
    prompts = metrics.value("prompt_tokens_total")
    assert without.value("prompt_tokens_total") == prompts
    assert metrics.value("reused_prompt_tokens_total") > 0.6 * prompts
    assert without.value("reused_prompt_tokens_total") < 0.6 * prompts
