"""Reads, checks and writes the special tokens and the chat template of a Hugging Face folder: tokenizer_config.json,
special_tokens_map.json and chat_template.jinja."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from tunix_like.errors import UserError
from tunix_like.runtime.input_files import read_object

NAMED_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")
_MORE_TOKENS = ("extra_special_tokens", "additional_special_tokens")
_CURE = "Correct it, or download it again."


def read_fields(file: Path) -> dict[str, Any]:
    """Reads an optional JSON file with special tokens, and checks the fields that are used."""
    if not file.is_file():
        return {}
    config = read_object(file, _CURE)

    def check(name: str, good: bool, what: str) -> None:
        if not good:
            raise UserError(f"{file}: {name} must be {what}. {_CURE}")

    for name in NAMED_TOKENS:
        check(name, config.get(name) is None or _is_token(config[name]), "a token: its text, or a mapping with content")
    declared = config.get("added_tokens_decoder") or {}
    valid = isinstance(declared, dict) and all(map(str.isdecimal, declared))
    valid = valid and all(isinstance(token, dict) and _is_token(token) for token in declared.values())
    check("added_tokens_decoder", valid, "a mapping of ids to tokens, each with its content")
    for name in _MORE_TOKENS:
        more = config.get(name) or []
        check(name, isinstance(more, list | dict) and all(map(_is_token, _items(more))), "a list of tokens")
    template = config.get("chat_template")
    several = isinstance(template, list) and all(
        isinstance(item, dict) and isinstance(item.get("name"), str) and isinstance(item.get("template"), str)
        for item in template
    )
    check(
        "chat_template",
        template is None or isinstance(template, str) or several,
        "a text, or a list of named templates",
    )
    return config


def _is_token(token: Any) -> bool:
    return isinstance(content(token), str)


def _items(tokens: Any) -> list[Any]:
    return list(tokens.values() if isinstance(tokens, Mapping) else tokens)


def content(token: Any) -> Any:
    """Returns the text of a special token, which is given as a string or as the fields of an AddedToken."""
    return token.get("content") if isinstance(token, Mapping) else token


def _added_token(fields: Mapping[str, Any], special: bool) -> tokenizers.AddedToken:
    switches = {
        name: bool(fields[name]) for name in ("lstrip", "rstrip", "single_word", "normalized") if name in fields
    }
    return tokenizers.AddedToken(fields["content"], special=special, **switches)


def add_declared_tokens(backend: tokenizers.Tokenizer, config: Mapping[str, Any], named: Sequence[str]) -> None:
    """Adds the special tokens `named` and the tokens that tokenizer_config.json declares, unless tokenizer.json has
    them."""
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    declared = sorted((config.get("added_tokens_decoder") or {}).items(), key=lambda item: int(item[0]))
    tokens = [_added_token(fields, bool(fields.get("special"))) for _, fields in declared]
    more = next((_items(config[name]) for name in _MORE_TOKENS if config.get(name)), [])
    tokens += [
        _added_token(token if isinstance(token, Mapping) else {"content": token, "normalized": False}, True)
        for token in [*named, *more]
    ]
    for token in tokens:
        if token.content not in known:
            known.add(token.content)
            (backend.add_special_tokens if token.special else backend.add_tokens)([token])


def drop_additions(backend: tokenizers.Tokenizer, config: Mapping[str, Any]) -> None:
    """Removes the tokens that tokenizer.json adds to every text, if transformers ignores them: its class for GPT-NeoX
    builds this part of the tokenizer anew."""
    if str(config.get("tokenizer_class")).removesuffix("Fast") == "GPTNeoXTokenizer":
        backend.post_processor = tokenizers.processors.TemplateProcessing(single="$A:0", pair="$A:0 $B:1")


def find_chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """Returns the template in chat_template.jinja or else the (default) one in tokenizer_config.json."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise UserError(f"{file}: cannot be read as text in UTF-8 ({error}). {_CURE}") from None
    template = config.get("chat_template")
    if isinstance(template, list):
        return {item["name"]: item["template"] for item in template}.get("default")
    return template


def write_files(
    folder: Path, backend: tokenizers.Tokenizer, named: Mapping[str, str | None], chat_template: str | None
) -> None:
    """Writes tokenizer.json, tokenizer_config.json and chat_template.jinja for `transformers.AutoTokenizer`."""
    folder.mkdir(parents=True, exist_ok=True)
    # PreTrainedTokenizerFast uses tokenizer.json unchanged; the class of a model family rebuilds parts of it.
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    config |= {name: token for name, token in named.items() if token is not None}
    if not isinstance(backend.model, tokenizers.models.BPE):
        # For a config.json of type qwen2, transformers 5 ignores `tokenizer_class` and rebuilds any vocabulary as
        # the BPE of Qwen. A word-level tokenizer is then wrong without an error. An auto_map without a class
        # prevents this.
        config["auto_map"] = {"AutoTokenizer": [None, ""]}
    backend.save(str(folder / "tokenizer.json"))
    text = json.dumps(config, indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")
    if chat_template is not None:
        (folder / "chat_template.jinja").write_text(chat_template, encoding="utf-8")
