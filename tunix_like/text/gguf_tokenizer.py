"""Makes a tokenizer from the metadata of a GGUF file (`tokenizer.ggml.*`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from tunix_like.errors import UserError
from tunix_like.text.tokenizer import Tokenizer

_UNKNOWN = 2
_CONTROL = 3
_USER_DEFINED = 4
"""Values of `tokenizer.ggml.token_type` (llama.cpp)."""

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CAPITALS = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_SMALL = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SPLITS = {
    "llama-bpe": rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}",
    "qwen2": rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}",
    "tekken": rf"[^\r\n\p{{L}}\p{{N}}]?{_CAPITALS}*{_SMALL}+|[^\r\n\p{{L}}\p{{N}}]?{_CAPITALS}+{_SMALL}*|\p{{N}}|"
    + _REST.replace(r"[\r\n]*|", r"[\r\n/]*|", 1),
}
"""Maps names of pre-tokenizers in GGUF to the expression that splits a text, as in the tokenizer.json of these models.
"""

_WHOLE_WORDS = ("llama-bpe", "tekken")
"""Pre-tokenizers of Llama 3 and Mistral, whose vocabularies have words that no merges lead to."""


def gguf_tokenizer(fields: Mapping[str, Any]) -> Tokenizer:
    """Returns the tokenizer.

    Args:
      fields: the metadata `tokenizer.*` by name.

    Raises:
      UserError: it is of an unsupported kind. The message is to be continued with a cure.
    """
    given = {name.removeprefix("tokenizer.ggml."): value for name, value in fields.items()}
    kind = given.get("model")
    tokens = given.get("tokens") or []
    if kind == "gpt2":
        backend = _byte_level(tokens, given)
    elif kind == "llama" and "scores" in given:
        backend = _sentence_piece(tokens, given)
    else:
        raise UserError(f"its tokenizer of the kind {kind!r} is not supported.")
    types = given.get("token_type") or [1] * len(tokens)
    if len(types) != len(tokens):
        raise UserError(f"its tokenizer has {len(types)} types for {len(tokens)} tokens.")
    for token, of_type in zip(tokens, types, strict=True):
        if of_type == _CONTROL:
            backend.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif of_type == _USER_DEFINED:
            backend.add_tokens([AddedToken(token, normalized=False)])
    named = {name: given.get(f"{name}_token_id") for name in ("bos", "eos", "padding", "eot", "eom")}
    text = {name: tokens[number] for name, number in named.items() if number is not None and number < len(tokens)}
    by_default = kind == "llama" or given.get("pre") in _WHOLE_WORDS  # as in llama.cpp
    if given.get("add_bos_token", by_default) and "bos" in text:
        begin = [(text["bos"], named["bos"])]
        backend.post_processor = processors.Sequence(
            [
                *([processors.ByteLevel(trim_offsets=False)] if kind == "gpt2" else []),
                processors.TemplateProcessing(
                    single=f"{text['bos']} $A", pair=f"{text['bos']} $A {text['bos']}:1 $B:1", special_tokens=begin
                ),
            ]
        )
    ends = [number for name in ("eos", "eot", "eom") if name in text and (number := named[name]) is not None]
    return Tokenizer(
        backend,
        bos_token=text.get("bos"),
        eos_token=text.get("eos"),
        pad_token=text.get("padding"),
        chat_template=fields.get("tokenizer.chat_template"),
        eos_ids=list(dict.fromkeys(ends)),
    )


def _byte_level(tokens: Sequence[str], given: Mapping[str, Any]) -> Backend:
    name = given.get("pre")
    vocabulary = {token: number for number, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ", 1)) for merge in given.get("merges") or []]
    backend = Backend(models.BPE(vocabulary, merges, ignore_merges=name in _WHOLE_WORDS))
    if name in _SPLITS:
        words: list[Any] = [pre_tokenizers.Split(Regex(_SPLITS[name]), behavior="isolated")]
    elif name == "smollm":
        words = [pre_tokenizers.Digits(individual_digits=True)]
    elif name in ("gpt-2", "gpt2"):
        words = []
    else:
        raise UserError(f"its pre-tokenizer {name!r} is not known here.")
    bytes_of_words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=name not in _SPLITS)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*words, bytes_of_words])
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    backend.decoder = decoders.ByteLevel()
    if name == "qwen2":
        backend.normalizer = normalizers.NFC()
    return backend


def _sentence_piece(tokens: Sequence[str], given: Mapping[str, Any]) -> Backend:
    """Returns a BPE tokenizer whose merges follow the scores of the tokens, as those of Llama 2 and Gemma."""
    vocabulary = {token: number for number, token in enumerate(tokens)}
    scores = given["scores"]
    merges: list[tuple[float, int, int]] = []
    for number, token in enumerate(tokens):
        for cut in range(1, len(token)):
            left = vocabulary.get(token[:cut])
            right = vocabulary.get(token[cut:])
            if left is not None and right is not None:
                merges.append((-scores[number], left, right))
    pairs = [(tokens[left], tokens[right]) for _, left, right in sorted(merges)]
    types = given.get("token_type") or []
    unknown = next((token for token, of_type in zip(tokens, types, strict=False) if of_type == _UNKNOWN), None)
    backend = Backend(models.BPE(vocabulary, pairs, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    space: list[Any] = [normalizers.Replace(" ", "▁")]
    words: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if given.get("add_space_prefix", True):
        space = [normalizers.Prepend("▁"), *space]
        words.append(decoders.Strip(" ", 1, 0))
    backend.normalizer = normalizers.Sequence(space)
    backend.decoder = decoders.Sequence(words)
    return backend
