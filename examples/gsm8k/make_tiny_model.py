"""Makes a tiny model folder in Hugging Face format, without weights, to run GSM8K or data of one's own on any machine.

    python examples/gsm8k/make_tiny_model.py --data FOLDER --out tiny --family qwen2
    python examples/gsm8k/make_tiny_model.py --data mine.jsonl --column question --out tiny --layers 6 --width 256

The tokenizer is a byte-level BPE of at most --vocab tokens, trained on one column of a JSON-lines file (of a folder:
train.jsonl), with a ChatML template that renders tools. Use the folder as `model.path=tiny model.init=random`. It does
NOT make anything that can solve a problem.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from tunix_like import Tokenizer
from tunix_like.data import Record
from tunix_like.data.jsonl import JsonlRows
from tunix_like.errors import UserError

PAD, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
# ChatML. Tools are written into the system message, and tool calls as in the templates of Qwen2.5.
CHATML = r"""
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{% endif %}
    {{- '# Tools\n\nYou may call these functions:\n<tools>' }}
    {%- for tool in tools %}{{- '\n' + (tool | tojson) }}{% endfor %}
    {{- '\n</tools>\n\nWrite a call as:\n<tool_call>\n{"name": NAME, "arguments": OBJECT}\n</tool_call><|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if not (tools and loop.first and message.role == 'system') %}
    {{- '<|im_start|>' + message.role + '\n' + (message.content or '') }}
    {%- for call in message.tool_calls or [] %}
        {%- set given = call.function.arguments %}
        {{- '\n<tool_call>\n{"name": ' + (call.function.name | tojson) + ', "arguments": ' }}
        {{- (given if given is string else given | tojson) + '}\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}
""".strip()
# How Qwen cuts text before the BPE. transformers rebuilds exactly this for a folder of type qwen2, whatever its
# tokenizer.json says, so another rule would give other ids there.
QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def texts(data: Path, column: str) -> list[str]:
    """The text of a column in every row of a JSON-lines file.

    Raises:
      UserError: a line that is no JSON object, or a row without text in the column.
    """

    def check(row: Record, where: str) -> None:
        if not isinstance(row.get(column), str):
            there = ", ".join(name for name, value in row.items() if isinstance(value, str)) or "none"
            raise UserError(f"{where}: no text in column '{column}'; columns with text: {there}. Name one by --column.")

    return [row[column] for row in JsonlRows(data, check)]


def train_tokenizer(texts: Iterator[str], vocab: int = 2048) -> Tokenizer:
    """A byte-level BPE of at most `vocab` tokens over `texts`, cut as Qwen's is."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(QWEN_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[PAD, IM_START, IM_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return Tokenizer(backend, eos_token=IM_END, pad_token=PAD, chat_template=CHATML)


def model_config(family: str, size: argparse.Namespace, vocab: int, eos: int, pad: int) -> dict[str, Any]:
    """config.json of a model of the family; `size` has the options of the command line. `vocab` is the size of the
    tokenizer: a token beyond it would be sampled, and has no text."""
    config: dict[str, Any] = {
        "architectures": [{"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}[family]],
        "model_type": family,
        "vocab_size": vocab,
        "hidden_size": size.width,
        "intermediate_size": 2 * size.width,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.heads // 2 if size.heads % 2 == 0 else size.heads,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "torch_dtype": "float32",
        "eos_token_id": eos,
        "pad_token_id": pad,
    }
    return config | ({"head_dim": size.width // size.heads, "attention_bias": False} if family == "qwen3" else {})


def make(data: Path, column: str, out: Path, family: str, size: argparse.Namespace) -> None:
    """Writes the folder `out`."""
    tokenizer = train_tokenizer(iter(texts(data, column)), size.vocab)
    tokenizer.save(out)
    eos, pad = tokenizer.eos_ids[0], tokenizer.pad_id
    generation = {"eos_token_id": [eos, pad], "pad_token_id": pad, "do_sample": True}
    config = model_config(family, size, tokenizer.vocab_size, eos, pad)
    for name, value in (("config.json", config), ("generation_config.json", generation)):
        (out / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="JSON-lines file, or a folder with train.jsonl")
    parser.add_argument("--column", default="question", help="column whose text the tokenizer learns from")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--family", choices=("qwen2", "qwen3"), default="qwen2")
    parser.add_argument("--layers", type=int, default=2, help="number of layers (default 2)")
    parser.add_argument("--width", type=int, default=64, help="hidden size, a multiple of 2 x heads (default 64)")
    parser.add_argument("--heads", type=int, default=4, help="attention heads; half as many for keys and values")
    parser.add_argument("--vocab", type=int, default=2048, help="largest number of tokens (default 2048)")
    arguments = parser.parse_args()
    if min(arguments.layers, arguments.width, arguments.heads) < 1 or arguments.width % (2 * arguments.heads):
        parser.error("--width must be a multiple of 2 x --heads, and --layers and --heads at least 1")
    if arguments.vocab < 259:
        parser.error("--vocab must be at least 259: 256 bytes and 3 control tokens")
    data = arguments.data / "train.jsonl" if arguments.data.is_dir() else arguments.data
    if not data.is_file():
        parser.error(f"{data} does not exist: --data names a JSON-lines file, or a folder with train.jsonl")
    try:
        make(data, arguments.column, arguments.out, arguments.family, arguments)
    except UserError as error:
        sys.exit(f"error: {error}")
    print(f"wrote {arguments.out}: a {arguments.family}, to be used with model.init=random")


if __name__ == "__main__":
    main()
