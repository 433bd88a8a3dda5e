"""An environment of the package `verifiers`. The column `answer` selects how its episodes end."""

import asyncio
import os
import time

import aiohttp
import verifiers.v1 as vf

__all__ = ["Odd", "OddTaskset"]

KINDS = ("fine", "hang", "block", "exit", "raise", "nan", "program")


class OddData(vf.TaskData):
    answer: str


class OddTask(vf.Task[OddData]):
    @vf.reward
    async def half(self, trace: vf.Trace) -> float:
        if self.data.answer == "raise":
            raise ValueError("scoring failed")
        return float("nan") if self.data.answer == "nan" else 0.5


class OddConfig(vf.TasksetConfig):
    rows: int = len(KINDS)


class OddTaskset(vf.Taskset[OddTask, OddConfig]):
    def load(self):
        for kind in KINDS[: self.config.rows]:
            yield OddTask(OddData(prompt="ab", answer=kind))


class OddHarnessConfig(vf.HarnessConfig):
    pass


class Odd(vf.Harness[OddHarnessConfig]):
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        kind = trace.task.data.answer
        if kind == "program":
            return vf.ProgramResult(exit_code=127, stdout="", stderr="no such program")
        async with aiohttp.ClientSession(headers={"authorization": f"Bearer {secret}"}) as session:
            body = {"model": ctx.model, "messages": [{"role": "user", "content": data.prompt}]}
            async with session.post(f"{endpoint}/chat/completions", json=body) as response:
                if response.status != 200:
                    return vf.ProgramResult(exit_code=1, stdout="", stderr=await response.text())
        print("standard output is not read as a message")
        if kind == "hang":
            await asyncio.sleep(1000)
        if kind == "block":
            time.sleep(1000)  # the whole process hangs
        if kind == "exit":
            os._exit(3)
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")
