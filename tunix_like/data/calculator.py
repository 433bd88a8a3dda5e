"""Generates questions about products of two three-digit numbers, as chats in which the model can call a calculator.

A tiny model cannot learn these products, but it can learn to copy the digits into a call of the calculator and to copy
the result. The SFT answer to a training question is such a call with probability 1 / `CALLS`, and the product
otherwise. The prompt of some training rows already contains a call and its result. The SFT answer of these rows is
always the product.
"""

from __future__ import annotations

import random
import re
from typing import TYPE_CHECKING

from tunix_like.data.source import STRING_BYTES, DataSource, MappedRows, Record, check_generated
from tunix_like.errors import UserError
from tunix_like.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tunix_like.config.schema import DataConfig

SMALLEST = 100
LARGEST = 999
CALLS = 6
"""Among the training rows whose prompt is only a question, one in `CALLS` has a call of the calculator as SFT answer.
The SFT answer of the other rows is the product."""

CONTINUED = 3
"""In one of `CONTINUED` training rows, the prompt already contains a call of the calculator and its result."""

DEFAULT_TRAIN = 8000
DEFAULT_EVAL = 128

_OPEN = '<tool_call>{"name": "calculator", "arguments": {"expression": "'
_CLOSE = '"}}</tool_call>'
_STRINGS = [
    _OPEN,
    _CLOSE,
    "<tool_response>\n",
    "\n</tool_response>",
    "# Tools\n",
    "calculator(expression)\n",
    "system\n",
    "user\n",
    "assistant\n",
    "What is ",
    " * ",
    "#### ",
    "error: ",
]
"""Fixed strings of the chat format. Each is one token."""

_CHAT_TEMPLATE = (
    "{%- if tools %}<|im_start|>system\n# Tools\n{% for tool in tools %}{{ tool.function.name }}"
    "({{ tool.function.parameters.properties | join(', ') }})\n{% endfor %}<|im_end|>\n{% endif %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ message.content }}\n</tool_response>"
    "{%- else %}<|im_start|>{{ message.role }}\n{{ message.content }}{% endif %}"
    '{%- for call in message.tool_calls or [] %}<tool_call>{{ \'{"name": "\' ~ call.function.name ~ \'", '
    "\"arguments\": ' ~ (call.function.arguments | tojson) ~ '}' }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def load(config: DataConfig) -> DataSource:
    """Generates random questions with the seed `data.seed`. Held-out questions are generated first, and no training row
    contains one of them."""
    eval_size = DEFAULT_EVAL if config.eval_size is None else config.eval_size
    train_size = DEFAULT_TRAIN if config.train_size is None else config.train_size
    existing = (LARGEST - SMALLEST + 1) ** 2
    if eval_size > existing // 2:
        raise UserError(f"data.eval_size={eval_size} is more than half of the {existing} possible questions; lower it.")
    check_generated(config, train_size + eval_size, 4 * STRING_BYTES)
    rng = random.Random(config.seed)
    held_out: dict[tuple[int, int], None] = {}
    while len(held_out) < eval_size:
        held_out[_draw(rng)] = None
    train: list[tuple[int, int, bool, bool]] = []
    while len(train) < train_size:
        factors = _draw(rng)
        if factors not in held_out:
            train.append((*factors, rng.random() * CALLS < 1, rng.random() * CONTINUED < 1))
    questions = [(*factors, False, False) for factors in held_out]
    rows = MappedRows(train, record), MappedRows(questions, record)
    return DataSource(rows[0], rows[1], tokenizer(), reward="gsm8k", chats=True)


def _draw(rng: random.Random) -> tuple[int, int]:
    # `random()` gives the same sequence on every Python version; `randrange` does not guarantee that.
    count = LARGEST - SMALLEST + 1
    return SMALLEST + int(rng.random() * count), SMALLEST + int(rng.random() * count)


def record(drawn: tuple[int, int, bool, bool]) -> Record:
    """Builds the row of a question: `prompt` (messages), `answer` (for SFT) and `gold` (the product, for the reward).
    `drawn` has the two factors, whether `answer` is a call of the calculator, and whether `prompt` already contains the
    call and its result (`answer` is then the product)."""
    first, second, calls, continued = drawn
    question = f"{first} * {second}"
    product = str(first * second)
    call = f"{_OPEN}{question}{_CLOSE}"
    prompt = [{"role": "user", "content": f"What is {question}?"}]
    if continued:
        prompt += [{"role": "assistant", "content": call}, {"role": "tool", "content": product}]
    return {"prompt": prompt, "answer": call if calls and not continued else f"#### {product}", "gold": product}


def tokenizer() -> Tokenizer:
    """Builds the tokenizer of this task: one token for each string in `_STRINGS` and each other character. Its template
    is ChatML with tools in the Hermes format, which lists only the names of tools and parameters."""
    import tokenizers

    special = ["<pad>", "<|im_start|>", "<|im_end|>"]
    characters = [*"0123456789+-*/%.()?e, \n", *"abcdfghijklmnopqrstuvwxyz", *'ABCDEFGHIJKLMNOPQRSTUVWXYZ_:;#{}<>"']
    vocabulary = {token: i for i, token in enumerate([*special, "<unk>", *_STRINGS, *characters])}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    longest_first = sorted(_STRINGS, key=len, reverse=True)
    pattern = "|".join([*map(re.escape, longest_first), r"[\s\S]"])
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated")
    backend.decoder = tokenizers.decoders.Fuse()  # no spaces between the tokens
    backend.add_special_tokens(special)
    return Tokenizer(backend, eos_token="<|im_end|>", pad_token="<pad>", chat_template=_CHAT_TEMPLATE)
