"""The smallest model that can be trained on `reverse_text`, as a Hugging Face config, and its tokenizer."""

from __future__ import annotations

import tempfile
from pathlib import Path

import tokenizers

from tunix_like.data import reverse_text

HF = {
    "model_type": "qwen2",
    "vocab_size": 13,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}


def backend_in(folder: Path) -> tokenizers.Tokenizer:
    """Loads the tokenizer of a folder without the settings of `tunix_like`."""
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


def letters_backend() -> tokenizers.Tokenizer:
    """Returns the tokenizer of `reverse_text`."""
    with tempfile.TemporaryDirectory() as folder:
        reverse_text.tokenizer().save(folder)
        return backend_in(Path(folder))
