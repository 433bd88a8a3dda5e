"""Makes the tokenizer of a generated task that uses a fixed list of words. Each word is one token."""

from __future__ import annotations

from collections.abc import Sequence

from tunix_like.data.tokenizer import Tokenizer

END = "END"
"""The word that ends a turn. Its token is the end-of-sequence token, but is not marked as special. In an SFT answer,
the word is therefore encoded as this token, and the answer can have several turns."""

_SPECIAL = ["<pad>", "<bos>", "<unk>", END]


def word_tokenizer(words: Sequence[str]) -> Tokenizer:
    """Returns a tokenizer with one token for each of `words`. It adds `<bos>` in front of a text, and its
    end-of-sequence token is `END`."""
    import tokenizers

    vocabulary = {token: i for i, token in enumerate([*_SPECIAL, *words])}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["<pad>", "<bos>"])
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", vocabulary["<bos>"])]
    )
    return Tokenizer(backend, bos_token="<bos>", eos_token=END, pad_token="<pad>")
