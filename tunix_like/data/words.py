"""Makes the tokenizer of a generated task that uses a fixed list of words. Each word is one token."""

from __future__ import annotations

from collections.abc import Sequence

from tunix_like.data.tokenizer import Tokenizer

END = "END"
"""The word that ends a turn: the end-of-sequence token. It is not a control token. An answer for SFT can therefore
contain it and have several turns."""

_SPECIAL = ["<pad>", "<bos>", "<unk>", END]


def word_tokenizer(words: Sequence[str]) -> Tokenizer:
    """Returns a tokenizer with one token for each of `words`, `<bos>` in front, and `END` as end of sequence."""
    import tokenizers

    vocabulary = {token: i for i, token in enumerate([*_SPECIAL, *words])}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["<pad>", "<bos>"])
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", vocabulary["<bos>"])]
    )
    return Tokenizer(backend, bos_token="<bos>", eos_token=END, pad_token="<pad>")
