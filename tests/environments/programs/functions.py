"""Async functions as agents."""

import asyncio
import sys


async def ask(client, text):
    answer = await client.chat.completions.create(model="any", messages=[{"role": "user", "content": text}])
    return answer.choices[0].message.content


async def agent(client, row):
    """Its reward is the number of letters of the answer. It prints a line that looks like another reward."""
    text = await ask(client, row["prompt"])
    does = row.get("does")
    print('{"reward": 77}' if does != "nothing" else "done")
    if does == "error":
        print("before the error", file=sys.stderr)
        raise KeyError("no such key")
    if does == "exit":
        sys.exit(4)
    return None if does == "nothing" else float(len(text))


async def both(client, row, second="a"):
    """Sends two requests at once."""
    first = asyncio.create_task(ask(client, row["prompt"]))
    while not first.done():
        other = await ask(client, second)
        return float(len(await first) + 10 * len(other))


async def asking(client, row, progress, step=0):
    """Its reward is the sum of the numbers of the run."""
    await ask(client, row["prompt"])
    return step + progress


def plain(client, row):
    """Is not async."""
