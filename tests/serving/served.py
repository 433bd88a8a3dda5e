"""Models, tokenizers and servers for the tests of serving: random models of letters, and a model with a fixed
answer."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
import uvicorn
from flax import nnx
from tokenizers import AddedToken

from tests.environments.test_bridge import QWEN25
from tests.tiny_model import letters_backend
from tunix_like.models.config import DecoderConfig
from tunix_like.models.decoder import Decoder
from tunix_like.serving.app import make_app
from tunix_like.serving.connections import http_config
from tunix_like.serving.requests import Settings
from tunix_like.serving.runner import Runner, Weights
from tunix_like.serving.server import ModelServer
from tunix_like.text.tokenizer import Tokenizer

NAME = "letters"


def random_model(vocabulary: int, seed: int = 0, **more: Any) -> tuple[Any, Any]:
    """Returns graph and weights of a model, `more` options of whose configuration are given. The weights are large
    enough for logits that differ."""
    config = DecoderConfig(
        vocab_size=vocabulary, hidden_size=16, intermediate_size=24, num_heads=4, num_kv_heads=2, head_dim=8,
        qkv_bias=True, **{"num_layers": 2, "qk_norm": True} | more,
    )  # fmt: skip
    rng = np.random.default_rng(seed)
    graphdef, state = nnx.split(Decoder(config, rngs=nnx.Rngs(seed)))
    spread = lambda x: x + jnp.asarray(0.3 * rng.normal(size=x.shape), x.dtype)  # noqa: E731
    return graphdef, jax.tree.map(spread, nnx.to_pure_dict(state))


def letters() -> tuple[Weights, Tokenizer]:
    """Returns a random model whose tokens are letters."""
    tokenizer = Tokenizer(letters_backend(), eos_token="<eos>")
    graphdef, params = random_model(tokenizer.vocab_size)
    return Weights(graphdef, params, tokenizer.eos_ids), tokenizer


def speaker(words: Sequence[str], template: str = QWEN25) -> tuple[Weights, Tokenizer]:
    """Returns a chat model that answers every prompt with `words`, one token each, and its byte-level tokenizer."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    special = [AddedToken(each, special=True) for each in ("<|im_end|>", "<|im_start|>")]
    trainer = tokenizers.trainers.BpeTrainer(
        special_tokens=special, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator([""], trainer)
    backend.add_tokens([AddedToken(word, special=False, normalized=False) for word in words if len(word) > 1])
    tokenizer = Tokenizer(backend, eos_token="<|im_end|>", chat_template=template)
    ids = [backend.encode(word, add_special_tokens=False).ids[0] for word in words]
    (newline,) = backend.encode("\n", add_special_tokens=False).ids
    return Weights(
        *successor_model(tokenizer.vocab_size, [newline, *ids, tokenizer.eos_ids[0]]), tokenizer.eos_ids
    ), tokenizer


def successor_model(vocabulary: int, chain: Sequence[int]) -> tuple[Any, Any]:
    """Returns a model that predicts after each token of `chain` the next one. The layers are computed as usual and add
    zero."""
    width = -(-vocabulary // 4) * 4
    config = DecoderConfig(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=8, num_layers=1, num_heads=2, num_kv_heads=1,
        head_dim=8, tie_embeddings=False,
    )  # fmt: skip
    graphdef, state = nnx.split(Decoder(config, rngs=nnx.Rngs(0)))
    params = nnx.to_pure_dict(state)
    for layer in params["layers"].values():
        for part, name in (("self_attn", "o_proj"), ("mlp", "down_proj")):
            layer[part][name]["kernel"] = jnp.zeros_like(layer[part][name]["kernel"])
    head = np.zeros((width, vocabulary), np.float32)
    assert len(set(chain)) == len(chain), "a token has one successor"
    for token, following in itertools.pairwise(chain):
        head[token, following] = 2.0
    params["embed_tokens"]["embedding"] = jnp.eye(vocabulary, width)
    params["lm_head"]["kernel"] = jnp.asarray(head)
    return graphdef, params


def settings_of(weights: Weights, longest: int, **changed: Any) -> Settings:
    vocabulary = nnx.merge(weights.graphdef, weights.params).config.vocab_size
    return Settings(NAME, "7", vocabulary, longest, **({"max_tokens": 24} | changed))


@contextlib.contextmanager
def running(
    weights: Weights,
    tokenizer: Tokenizer,
    rows: int = 8,
    longest: int = 200,
    key: str | None = None,
    most: int | None = None,
    **changed: Any,
) -> Iterator[tuple[str, ModelServer]]:
    """Yields the address of a server that runs in a thread, with all parts from HTTP to the decoder."""
    settings = settings_of(weights, longest, **changed)
    server = ModelServer(settings, tokenizer, Runner(weights, rows, longest))
    http = uvicorn.Server(http_config(make_app(server, key), most, port=0))

    async def run() -> None:
        server.open()
        await http.serve()

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    try:
        while not http.started:
            thread.join(0.02)
            assert thread.is_alive()
        yield f"http://127.0.0.1:{http.servers[0].sockets[0].getsockname()[1]}", server
    finally:
        http.should_exit = True
        thread.join()
        server.batcher.close()


@contextlib.contextmanager
def listening(app: Any) -> Iterator[str]:
    """Yields the address of a server of an ASGI application, which runs in a thread."""
    http = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", lifespan="off"))
    thread = threading.Thread(target=http.run)
    thread.start()
    try:
        while not http.started:
            thread.join(0.02)
            assert thread.is_alive()
        yield f"http://127.0.0.1:{http.servers[0].sockets[0].getsockname()[1]}"
    finally:
        http.should_exit = True
        thread.join()
