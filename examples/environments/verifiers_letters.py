"""An environment of the package `verifiers`: reverse a few letters, with a second try after a wrong answer.

It needs no network and no other program: the harness runs in the process of the environment.
"""

import itertools
import random

import aiohttp
import verifiers.v1 as vf

__all__ = ["LettersTaskset", "TwoTries"]

LETTERS = "abcdefgh"
AGAIN = "?"


class LettersData(vf.TaskData):
    answer: str


class LettersTask(vf.Task[LettersData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        """1 if the last reply is right and was not cut off."""
        return float(trace.last_reply == self.data.answer and not trace.is_truncated)

    @vf.metric
    async def right_at_once(self, trace: vf.Trace) -> float:
        return float(trace.num_turns == 1 and trace.last_reply == self.data.answer)


class LettersConfig(vf.TasksetConfig):
    length: int = 4
    split: str = "train"


class LettersTaskset(vf.Taskset[LettersTask, LettersConfig]):
    """All words of the length, in a random order; every tenth is in the split `test`."""

    def load(self):
        words = ["".join(word) for word in itertools.product(LETTERS, repeat=self.config.length)]
        random.Random(0).shuffle(words)
        for number, word in enumerate(words):
            if (number % 10 == 0) == (self.config.split == "test"):
                yield LettersTask(LettersData(prompt=word, answer=word[::-1]), self.config.task)


class TwoTriesConfig(vf.HarnessConfig):
    tries: int = 2


class TwoTries(vf.Harness[TwoTriesConfig]):
    """Asks again after a wrong answer."""

    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        messages = [{"role": "user", "content": data.prompt}]
        headers = {"authorization": f"Bearer {secret}"}
        async with aiohttp.ClientSession(headers=headers) as session:
            for _ in range(self.config.tries):
                body = {"model": ctx.model, "messages": messages}
                async with session.post(f"{endpoint}/chat/completions", json=body) as response:
                    if response.status != 200:  # the limit of tokens or turns
                        return vf.ProgramResult(exit_code=1, stdout="", stderr=await response.text())
                    reply = (await response.json())["choices"][0]["message"]["content"]
                if reply == data.answer:
                    break
                messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": AGAIN}]
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")
