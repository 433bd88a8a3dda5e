"""A stand-in server with vLLM's HTTP routes. It samples with this library's decoder, and faults can be injected."""

import asyncio
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
from aiohttp import web
from flax import nnx

from tunix_like.errors import UserError
from tunix_like.models.loading import load_model
from tunix_like.models.lora import load_adapter

WIDTH = 32


@jax.jit(static_argnums=(0,))
def _logprobs(graphdef, params, tokens, temperature):
    return jax.nn.log_softmax(nnx.merge(graphdef, params)(tokens[None])[0] / temperature)


class StandIn:
    """Serves on its own port until `stop`. After another `start` it has its initial weights.

    Attributes:
      faults: functions `f(answer) -> answer`, each applied to one request for tokens. An exception ends the connection.
        A returned number is the status of the answer, a returned text its body.
      clients: the connection of each request.
      asked: the bodies of the requests for tokens.
      adapters: the loaded adapters by name.
      lora_rank: the value of `--max-lora-rank`; None: started without `--enable-lora`.
    """

    def __init__(
        self, folder, tokenizer, version="0.32.0", missing=(), key=None, max_model_len=512, lora_rank=None, updates=True
    ):
        self.folder, self.tokenizer, self.vllm, self.key = str(folder), tokenizer, version, key
        self.missing, self.limit = missing, max_model_len
        self.lora_rank, self.updates = lora_rank, updates
        self.faults, self.asked, self.routes, self.delay = [], [], [], 0.0
        self.clients = []
        self.rng, self.port = np.random.default_rng(0), 0
        self.start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def start(self):
        self.version, self.adapters = "default", {}
        self._load(self.folder)
        self._loop, ready = asyncio.new_event_loop(), threading.Event()

        async def serve():
            app = web.Application(client_max_size=1 << 26)
            app.router.add_route("*", "/{route:.*}", self._handle)
            self._runner = web.AppRunner(app, shutdown_timeout=0.1)
            await self._runner.setup()
            site = web.TCPSite(self._runner, "127.0.0.1", self.port)
            await site.start()
            self.port = site._server.sockets[0].getsockname()[1]
            ready.set()

        def run():
            self._loop.create_task(serve())
            self._loop.run_forever()

        self._pool = ThreadPoolExecutor(1)
        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()
        assert ready.wait(10)

    def stop(self):
        """Stops the server as SIGKILL does: connections end, and the port is free."""
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._pool.shutdown()

    def tokens_of(self, text):
        return [token for token in self.tokenizer.encode(text) if token != self.tokenizer.bos_id]

    def _load(self, folder):
        self.model = load_model(folder)[0]

    def _load_adapter(self, body):
        if self.lora_rank is None or body["lora_name"] in self.adapters:
            return 500 if self.lora_rank is None else 400
        try:
            self.adapters[body["lora_name"]] = load_adapter(self.model, body["lora_path"])
        except UserError:
            return 404
        return 200

    def _models(self):
        base = {"id": "model", "max_model_len": self.limit, "parent": None}
        return {"data": [base, *({"id": name, "parent": "model"} for name in self.adapters)]}

    def _server_info(self):
        lora = None if self.lora_rank is None else {"max_lora_rank": self.lora_rank}
        return {
            "vllm_config": {"lora_config": lora},
            "vllm_env": {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": self.updates},
        }

    async def _handle(self, request):
        route = f"/{request.match_info['route']}"
        self.routes.append(route)
        self.clients.append(request.transport)
        if self.key is not None and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        if route in self.missing:
            return web.json_response({"detail": "Not Found"}, status=404)
        body = await request.json() if request.method == "POST" and request.can_read_body else {}
        if route == "/inference/v1/generate":
            return await self._answer(request, body, "token_ids", self._sample)
        if route == "/v1/completions":
            return await self._answer(request, body, "prompt", self._score)
        if route == "/v1/load_lora_adapter":
            return web.Response(text="Success, or an error", status=self._load_adapter(body))
        answers = {
            "/health": lambda: None,
            "/version": lambda: {"version": self.vllm},
            "/weight_info": lambda: {"weight_version": self.version},
            "/v1/models": self._models,
            "/server_info": self._server_info,
            "/v1/unload_lora_adapter": lambda: self.adapters.pop(body["lora_name"], None) and None,
            "/tokenize": lambda: {"tokens": self.tokens_of(body["prompt"])},
            "/update_weight_version": lambda: setattr(self, "version", body["new_version"]),
            "/collective_rpc": lambda: self._load(body["kwargs"]["weights_path"]),
        }
        return web.json_response(answers.get(route, lambda: None)())

    async def _answer(self, request, body, needed, answer):
        if needed not in body:
            return web.json_response({"error": "Field required"}, status=400)
        if body.get("model", "model") not in ("model", *self.adapters):
            return web.json_response({"error": "The model does not exist"}, status=404)
        self.asked.append(body)
        await asyncio.sleep(self.delay)
        loop = asyncio.get_running_loop()
        answer = await loop.run_in_executor(self._pool, answer, body)
        if self.faults:
            try:
                answer = self.faults.pop(0)(answer)
            except ConnectionError:
                request.transport.abort()
                raise
        if isinstance(answer, int):
            return web.json_response({"error": "as told"}, status=answer)
        return web.Response(text=answer if isinstance(answer, str) else json.dumps(answer))

    def _sample(self, body):
        given, tokens, content = body["sampling_params"], list(body["token_ids"]), []
        graphdef, state = nnx.split(self.adapters.get(body.get("model"), self.model))
        params = nnx.to_pure_dict(state)
        start = len(tokens)
        while True:
            padded = jnp.asarray(tokens + [0] * (WIDTH - len(tokens)))
            logprobs = np.asarray(_logprobs(graphdef, params, padded, given["temperature"]))[len(tokens) - 1]
            token = int(self.rng.choice(len(logprobs), p=np.exp(logprobs) / np.exp(logprobs).sum()))
            best = np.argsort(-logprobs)[: given["logprobs"]]
            top = [{"token_id": int(i), "logprob": float(logprobs[i])} for i in {token, *best.tolist()}]
            content.append({"token_id": token, "logprob": float(logprobs[token]), "top_logprobs": top})
            tokens.append(token)
            stopped = token in given["stop_token_ids"]
            if stopped or len(content) == given["max_tokens"]:
                break
        return {
            "choices": [
                {
                    "token_ids": tokens[start:],
                    "logprobs": {"content": content},
                    "finish_reason": "stop" if stopped else "length",
                    "weight_versions": [{"version": self.version, "start": 0, "end": len(content)}],
                }
            ]
        }

    def _score(self, body):
        """Returns the log-probabilities of the tokens of a prompt, as vLLM does with `prompt_logprobs: 0`."""
        tokens = body["prompt"]
        graphdef, state = nnx.split(self.model)
        padded = jnp.asarray(tokens + [0] * (WIDTH - len(tokens)))
        logprobs = np.asarray(_logprobs(graphdef, nnx.to_pure_dict(state), padded, 1.0))
        values = [{str(token): {"logprob": float(logprobs[i, token])}} for i, token in enumerate(tokens[1:])]
        return {"choices": [{"text": "", "prompt_logprobs": [None, *values]}]}


def until(condition, seconds=30):
    limit = time.monotonic() + seconds
    while not condition() and time.monotonic() < limit:
        time.sleep(0.02)
    return condition()
