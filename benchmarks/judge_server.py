"""A stand-in for the server of a judge: answers after a delay, and fails with a given probability.

    python -m benchmarks.judge_server --port 8123 --seconds 0.5 --failures 0.05

The score of an answer that contains `quality N` is N; of two answers the one with the larger N is better. `/requests`
returns the number of attempts of each call since it was read.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import random
import re

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

STATUSES = (429, 500, 503, 529)


def make_app(seconds: float, failures: float, seed: int = 0) -> Starlette:
    counts, draws = collections.Counter[str](), random.Random(seed)

    async def chat(http: Request) -> JSONResponse:
        fails = draws.random() < failures
        text = (await http.json())["messages"][-1]["content"]
        counts[text] += 1
        await asyncio.sleep(seconds)
        if fails:
            return JSONResponse({"error": {"message": "overloaded"}}, draws.choice(STATUSES))
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
