"""An agent that answers a question with a calculator, through the API of OpenAI.

`examples/environments/program.yaml` trains the model behind it. It also runs by itself, with any server of this API:
`TUNIX_LIKE_ROW=row.json OPENAI_BASE_URL=... python calculator_agent.py`.
"""

import ast
import asyncio
import json
import operator
import os
from pathlib import Path

from openai import AsyncOpenAI

OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
TOOL = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluates an arithmetic expression.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}


def evaluate(node):
    if isinstance(node, ast.BinOp):
        return OPERATIONS[type(node.op)](evaluate(node.left), evaluate(node.right))
    return int(ast.literal_eval(node))


def calculator(arguments):
    try:
        return str(evaluate(ast.parse(json.loads(arguments)["expression"], mode="eval").body))
    except (ValueError, SyntaxError, KeyError, TypeError) as error:
        return f"error: {error}"


async def agent(client: AsyncOpenAI, row: dict) -> None:
    """Asks until an answer has no call of the calculator."""
    messages = list(row["prompt"])
    while True:
        given = await client.chat.completions.create(model="policy", messages=messages, tools=[TOOL])
        answer = given.choices[0].message
        if not answer.tool_calls:
            break
        messages.append(answer.to_dict())
        for call in answer.tool_calls:
            result = calculator(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    print(answer.content)


if __name__ == "__main__":
    asyncio.run(agent(AsyncOpenAI(), json.loads(Path(os.environ["TUNIX_LIKE_ROW"]).read_text())))
