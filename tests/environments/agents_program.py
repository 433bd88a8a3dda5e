"""A stand-in for the program that runs an environment of the package `verifiers`: its HTTP endpoint is the real one,
and the agent of an episode uses a client of OpenAI or Anthropic. It calls a tool until an answer has no call."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import socket
import types
from typing import Any

from tunix_like.workers import verifiers_worker
from tunix_like.workers.routes import MODEL
from tunix_like.workers.verifiers_worker import KEY_VARIABLE

SYSTEM, RESULT = "Be brief.", "5"
SCHEMA = {"type": "object"}


def main(channel: socket.socket, settings: dict[str, Any]) -> None:
    asyncio.run(run(channel.dup()))


async def run(channel: socket.socket) -> None:
    # The agents of all episodes of a step wait for answers at the same time.
    asyncio.get_running_loop().set_default_executor(concurrent.futures.ThreadPoolExecutor(32))
    await Episodes(Environment(), None).run(channel)


class Episodes(verifiers_worker.Episodes):
    def _model(self, url: str) -> Any:
        return url


class Data(dict[str, Any]):
    @classmethod
    def model_validate(cls, data: Any) -> Data:
        return cls(data)


class Task:
    def __init__(self, data: Data, config: Any):
        self.data = data

    @staticmethod
    def data_type() -> type[Data]:
        return Data


class Taskset:
    @staticmethod
    def task_type() -> type[Task]:
        return Task


class Environment:
    taskset = Taskset()
    config = types.SimpleNamespace(taskset=types.SimpleNamespace(task=None))

    @contextlib.asynccontextmanager
    async def serving(self) -> Any:
        yield

    def slots(self, task: Task) -> list[Task]:
        return [task]

    async def run_slot(self, task: Task, url: str, on_trace: Any) -> Any:
        trace = types.SimpleNamespace(
            id=os.urandom(8).hex(), rewards={}, metrics={}, stop_condition=None, last_error=None, is_timeout=False
        )
        trace.stop = lambda reason: setattr(trace, "stop_condition", reason)
        on_trace(trace)
        play = responses if task.data["protocol"] == "responses" else messages
        text, counted = await asyncio.to_thread(play, url, trace.id, task.data)
        trace.reward = float(len(text))
        trace.metrics = {"counted": float(counted)}
        return types.SimpleNamespace(traces=[trace], ok=True, last_error=None, is_timeout=False)


def responses(url: str, session: str, data: Data) -> tuple[str, int]:
    import openai

    client = openai.OpenAI(
        base_url=url, api_key=os.environ[KEY_VARIABLE], max_retries=0, default_headers={"x-session-id": session}
    )
    tools = [{"type": "function", "name": "add", "parameters": SCHEMA, "strict": False}] if data["tools"] else []
    given: dict[str, Any] = {"model": MODEL, "tools": tools, "max_output_tokens": 500}
    if data["tools"]:
        given["instructions"] = SYSTEM
    history: list[Any] = [{"role": "user", "content": data["question"]}]
    text = ""
    for _ in range(data["turns"]):
        try:
            if data["stream"]:
                answer = list(client.responses.create(input=history, stream=True, **given))[-1].response
            else:
                answer = client.responses.create(input=history, **given)
        except openai.BadRequestError:
            break  # the limit of tokens or turns
        text = answer.output_text
        history += answer.output
        calls = [item for item in answer.output if item.type == "function_call"]
        history += [{"type": "function_call_output", "call_id": call.call_id, "output": RESULT} for call in calls]
        if not calls:
            if data["tools"]:
                break
            history.append({"role": "user", "content": data["question"]})
    return text, 0


def messages(url: str, session: str, data: Data) -> tuple[str, int]:
    import anthropic

    client = anthropic.Anthropic(
        base_url=url.removesuffix("/v1"), api_key=os.environ[KEY_VARIABLE], max_retries=0,
        default_headers={"x-session-id": session},
    )  # fmt: skip
    given: dict[str, Any] = {"model": MODEL}
    if data["tools"]:
        given |= {"tools": [{"name": "add", "input_schema": SCHEMA}], "system": SYSTEM}
    history: list[Any] = [{"role": "user", "content": data["question"]}]
    # The endpoint answers it without the header too, which verifiers does not send here.
    counted = client.messages.count_tokens(messages=history, extra_headers={"x-session-id": ""}, **given).input_tokens
    text = ""
    for _ in range(data["turns"]):
        try:
            if data["stream"]:
                with client.messages.stream(messages=history, max_tokens=500, **given) as events:
                    answer = events.get_final_message()
            else:
                answer = client.messages.create(messages=history, max_tokens=500, **given)
        except anthropic.BadRequestError:
            break  # the limit of tokens or turns
        text = "".join(block.text for block in answer.content if block.type == "text")
        history.append({"role": "assistant", "content": answer.content})
        calls = [block for block in answer.content if block.type == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": call.id, "content": RESULT} for call in calls]
        if data["tools"] and not calls:
            break
        history.append({"role": "user", "content": results or data["question"]})
    return text, counted
