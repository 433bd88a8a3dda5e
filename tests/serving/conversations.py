"""A chat template that renders tool calls as models write them, and answers with a thought and a call."""

from __future__ import annotations

from tests.environments.test_bridge import HEAD_QWEN, PLAIN_QWEN, START_QWEN, TOOL_QWEN

THOUGHT_AND_CALL = [
    "<think>\nhm", "\n</think>\n\n", "Let me add.", "\n<tool_call>\n", '{"name": "add", ',
    '"arguments": {"a": 2, "b": 3}', "}\n</tool_call>",
]  # fmt: skip
"""One token each. The template renders this answer as it is written here."""

OPENED = ["hm", *THOUGHT_AND_CALL[1:]]
"""The answer if the template opens the thought in the prompt."""


def template(opened: bool = False) -> str:
    """Returns a chat template. If `opened`, it begins each answer with a thought."""
    think = "<think>\n" if opened else ""
    turn = (
        f"{{{{- '<|im_start|>assistant\n{think}' ~ message.content }}}}{{%- for call in message.tool_calls or [] %}}"
        '{{- \'\n<tool_call>\n{"name": "\' ~ call.function.name ~ \'", "arguments": \' ~ '
        "(call.function.arguments | tojson) ~ '}\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\n' }}"
    )
    start = START_QWEN.replace("assistant\n", f"assistant\n{think}")
    return (
        HEAD_QWEN + "{%- for message in messages %}{%- if message.role == 'tool' %}" + TOOL_QWEN
        + "{%- elif message.role == 'assistant' %}" + turn
        + "{%- elif not (loop.first and message.role == 'system') %}" + PLAIN_QWEN + "{%- endif %}{%- endfor %}" + start
    )  # fmt: skip
