"""A stand-in for the server of a judge or reward model: answers after a delay, and fails with a given probability.

    python -m benchmarks.judge_server --port 8123 --seconds 0.5 --failures 0.05

The score of an answer that contains `quality N` is N; of two answers the one with the larger N is better. A reward
model also adds 100 for each message before the answer. `/requests` returns the number of attempts of each call since it
was read.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import math
import random
import re

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

STATUSES = (429, 500, 503, 529)


def make_app(seconds: float, failures: float, seed: int = 0, labels: int = 1) -> Starlette:
    counts, draws = collections.Counter[str](), random.Random(seed)

    async def fails(text: str) -> bool:
        counts[text] += 1
        failing = draws.random() < failures
        await asyncio.sleep(seconds)
        return failing

    def overloaded() -> JSONResponse:
        return JSONResponse({"error": {"message": "overloaded"}}, draws.choice(STATUSES))

    async def classify(http: Request) -> JSONResponse:
        """The protocol of vLLM: https://docs.vllm.ai/en/stable/models/pooling_models/classify/"""
        body = await http.json()
        *before, answer = body["messages"]
        if await fails(answer["content"]):
            return overloaded()
        if answer["role"] != "assistant" or before[-1]["role"] != "user" or "<|" in str(body["messages"]):
            return JSONResponse({"error": {"message": "the text would be read as other roles"}}, 400)
        number = re.search(r"quality (\d+)", answer["content"])
        logit = 100.0 * len(before) + int(number[1] if number else 0)
        value = 1 / (1 + math.exp(-logit)) if body.get("use_activation", True) else logit
        data = [{"index": 0, "label": "LABEL_0", "probs": [value] * labels, "num_classes": labels}]
        usage = {"prompt_tokens": 100, "completion_tokens": 0, "total_tokens": 100}
        return JSONResponse({"id": "1", "object": "list", "created": 0, "model": "judge", "data": data, "usage": usage})

    async def chat(http: Request) -> JSONResponse:
        text = (await http.json())["messages"][-1]["content"]
        if await fails(text):
            return overloaded()
        found = [int(number) for number in re.findall(r"quality (\d+)", text)]
        verdict = f"Score: {found[0]}" if len(found) == 1 else f"Better: {_better(*found)}"
        message = {"role": "assistant", "content": f"Reasons.\n{verdict}"}
        usage = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        body = {"id": "1", "object": "chat.completion", "created": 0, "model": "judge", "choices": [choice]}
        return JSONResponse(body | {"usage": usage})

    async def models(http: Request) -> JSONResponse:
        return JSONResponse({"object": "list", "data": [{"id": "judge", "object": "model", "created": 0}]})

    async def requests(http: Request) -> JSONResponse:
        found = [*counts.values()]
        counts.clear()
        return JSONResponse(found)

    return Starlette(
        routes=[
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/classify", classify, methods=["POST"]),
            Route("/v1/models", models),
            Route("/requests", requests),
        ]
    )


def _better(first: int, second: int) -> str:
    return "equal" if first == second else "A" if first > second else "B"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--failures", type=float, default=0.05)
    arguments = parser.parse_args()
    app = make_app(arguments.seconds, arguments.failures)
    uvicorn.run(app, port=arguments.port, log_level="warning")


if __name__ == "__main__":
    main()
