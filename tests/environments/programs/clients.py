"""A program that plays a trajectory with a client of OpenAI or Anthropic, as its environment variables configure it. It
calls a tool until an answer has no call, or asks the same question again."""

import json
import os
from pathlib import Path

RESULT = "5"
SCHEMA = {"type": "object"}


def chat(row):
    import openai

    client = openai.OpenAI()
    tools = [{"type": "function", "function": {"name": "add", "parameters": SCHEMA}}] if row["tools"] else openai.omit
    messages = [{"role": "user", "content": row["question"]}]
    for _ in range(row["turns"]):
        given = {"model": "any", "messages": messages, "tools": tools}
        if row["stream"]:
            with client.chat.completions.stream(**given) as events:
                answer = events.get_final_completion().choices[0].message
        else:
            answer = client.chat.completions.create(**given).choices[0].message
        calls = answer.tool_calls or []
        messages.append(answer.to_dict())
        messages += [{"role": "tool", "tool_call_id": call.id, "content": RESULT} for call in calls]
        if row["tools"] and not calls:
            break
        if not calls:
            messages.append({"role": "user", "content": row["question"]})
    return answer.content or ""


def responses(row):
    import openai

    client = openai.OpenAI()
    tools = [{"type": "function", "name": "add", "parameters": SCHEMA, "strict": False}] if row["tools"] else []
    history = [{"role": "user", "content": row["question"]}]
    for _ in range(row["turns"]):
        given = {"model": "any", "input": history, "tools": tools}
        if row["stream"]:
            answer = list(client.responses.create(stream=True, **given))[-1].response
        else:
            answer = client.responses.create(**given)
        calls = [item for item in answer.output if item.type == "function_call"]
        history += answer.output
        history += [{"type": "function_call_output", "call_id": call.call_id, "output": RESULT} for call in calls]
        if row["tools"] and not calls:
            break
        if not calls:
            history.append({"role": "user", "content": row["question"]})
    return answer.output_text


def messages(row):
    import anthropic

    client = anthropic.Anthropic()
    given = {"model": "any", "tools": [{"name": "add", "input_schema": SCHEMA}] if row["tools"] else []}
    history = [{"role": "user", "content": row["question"]}]
    assert client.messages.count_tokens(messages=history, **given).input_tokens == row["size"]
    for _ in range(row["turns"]):
        if row["stream"]:
            with client.messages.stream(messages=history, max_tokens=500, **given) as events:
                answer = events.get_final_message()
        else:
            answer = client.messages.create(messages=history, max_tokens=500, **given)
        calls = [block for block in answer.content if block.type == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": call.id, "content": RESULT} for call in calls]
        history.append({"role": "assistant", "content": answer.content})
        if row["tools"] and not calls:
            break
        history.append({"role": "user", "content": results or row["question"]})
    return "".join(block.text for block in answer.content if block.type == "text")


if __name__ == "__main__":
    row = json.loads(Path(os.environ["TUNIX_LIKE_ROW"]).read_text())
    text = {"chat": chat, "responses": responses, "messages": messages}[row["protocol"]](row)
    print(json.dumps({"reward": len(text)}))
