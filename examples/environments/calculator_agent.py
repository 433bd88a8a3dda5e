"""An agent that answers a question with a calculator, through the API of OpenAI.

It would run with any server of this API. `examples/environments/program.yaml` trains the model behind it.
"""

import ast
import json
import operator
import os
from pathlib import Path

from openai import OpenAI

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


def main():
    row = json.loads(Path(os.environ["TUNIX_LIKE_ROW"]).read_text())
    messages = row["prompt"]
    client = OpenAI()
    while True:
        answer = client.chat.completions.create(model="policy", messages=messages, tools=[TOOL]).choices[0].message
        if not answer.tool_calls:
            break
        messages.append(answer.to_dict())
        for call in answer.tool_calls:
            result = calculator(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    print(answer.content)


if __name__ == "__main__":
    main()
