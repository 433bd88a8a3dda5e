"""Async functions as agents."""

import asyncio
import sys


async def ask(client, text):
    answer = await client.chat.completions.create(model="any", messages=[{"role": "user", "content": text}])
    return answer.choices[0].message.content


async def agent(client, row):
    """Its reward is the number of letters of the answer. It prints lines that look like one."""
    text = await ask(client, row["prompt"])
    print('{"reward": 77}')
    return float(len(text))


async def silent(client, row):
    await ask(client, row["prompt"])


async def both(client, row, second="a"):
    """Sends two requests at once."""
    first = asyncio.create_task(ask(client, row["prompt"]))
    while not first.done():
        other = await ask(client, second)
        return float(len(await first) + 10 * len(other))


async def wrong(client, row):
    await ask(client, row["prompt"])
    print("before the error", file=sys.stderr)
    raise KeyError("no such key")


async def endless(client, row):
    while True:
        await ask(client, row["prompt"])


def plain(client, row):
    """Is not async."""
