"""Converts text to token ids and back, and chat messages to text, with the `tokenizers` library.

Reads tokenizer.json, tokenizer_config.json, special_tokens_map.json and chat_template.jinja of a Hugging Face folder.
The stop ids of generation_config.json are not read here: `Tokenizer.with_eos_ids` adds them. This module does not
import transformers, because the import takes more than a second. The tests check that this module and transformers give
the same ids and the same text.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers

from tunix_like.data.tokenizer_files import (
    NAMED_TOKENS,
    add_declared_tokens,
    content,
    find_chat_template,
    read_fields,
    write_files,
)
from tunix_like.errors import UserError
from tunix_like.runtime import chat_templates
from tunix_like.runtime.chat_templates import plain_messages, template_error
from tunix_like.runtime.untrusted import beginnings, parts, refer, refer_deep, texts

if TYPE_CHECKING:
    from tunix_like.types import Message

_LONG_TOKEN = 16
"""Number of characters of a long token. A text with more than this many characters per allowed token is probably too
long."""


class Tokenizer:
    """A tokenizer with its special tokens and its chat template. Token ids are returned as lists of int."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_token: str | None = None,
        eos_token: str | None = None,
        pad_token: str | None = None,
        chat_template: str | None = None,
        eos_ids: Sequence[int] | None = None,
        template_variables: Mapping[str, Any] | None = None,
    ) -> None:
        """Wraps `backend`, which the caller must not change afterwards.

        Args:
          backend: the tokenizer; its truncation and padding are disabled.
          bos_token, eos_token, pad_token: texts of the special tokens.
          chat_template: jinja source, in the Hugging Face dialect.
          eos_ids: further ids that end a completion. The id of `eos_token` always ends a completion (as in vLLM),
            because supervised fine-tuning appends it to every answer.
          template_variables: passed to the chat template at every rendering, e.g. `enable_thinking`.

        Raises:
          UserError: a special token is not in the vocabulary.
        """
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._bos_token, self._eos_token, self._pad_token = bos_token, eos_token, pad_token
        self._chat_template = chat_template
        self._template_variables = dict(template_variables or {})
        # A copy of the backend for `_by_letters`. It is made when first needed, because copying takes a second.
        self._letters: tokenizers.Tokenizer | None = None
        self._bos_id, eos_id = self._id("bos_token", bos_token), self._id("eos_token", eos_token)
        self._eos_id = eos_id
        given = tuple(int(i) for i in eos_ids or ())
        self._eos_ids = given if eos_id is None or eos_id in given else (*given, eos_id)
        pad_id = self._id("pad_token", pad_token)
        self._pad_id = next((i for i in (pad_id, eos_id, *self._eos_ids) if i is not None), 0)
        self._vocab_size = max(backend.get_vocab(with_added_tokens=True).values()) + 1
        added = backend.get_added_tokens_decoder().values()
        self._control = tuple(token.content for token in added if token.special and token.content)

    def _id(self, name: str, token: str | None) -> int | None:
        if token is None:
            return None
        number = self._backend.token_to_id(token)
        if number is None:
            raise UserError(
                f"{name} {token!r} is not in the tokenizer's vocabulary; add it there or set another token."
            )
        return number

    @classmethod
    def from_folder(cls, path: str | Path) -> Tokenizer:
        """Reads the tokenizer of a Hugging Face model folder.

        Only tokenizer.json decides whether a beginning-of-sequence token is added. As in transformers 5,
        `add_bos_token` of tokenizer_config.json is ignored.

        Raises:
          UserError: the folder has no tokenizer.json, or one of its files cannot be parsed (the message names it).
        """
        folder = Path(path)
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise UserError(f"{file} does not exist; set the path to a folder with a Hugging Face tokenizer.json.")
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
            backend.encode("\uffff")  # a vocabulary without its unknown token fails at the first unknown word
        except Exception as error:  # the Rust side raises a bare Exception
            raise UserError(f"{file} is not a readable tokenizer.json: {error}") from error
        config = read_fields(folder / "special_tokens_map.json") | read_fields(folder / "tokenizer_config.json")
        names = {name: content(config.get(name)) for name in NAMED_TOKENS}
        add_declared_tokens(backend, config, [token for token in names.values() if token is not None])
        return cls(
            backend,
            bos_token=names["bos_token"],
            eos_token=names["eos_token"],
            pad_token=names["pad_token"],
            chat_template=find_chat_template(folder, config),
        )

    @classmethod
    def wrap(cls, obj: Any) -> Tokenizer:
        """Returns a `Tokenizer` unchanged, or wraps a copy of a fast tokenizer of transformers.

        Raises:
          UserError: the object is neither a `Tokenizer` nor a fast tokenizer of transformers.
        """
        if isinstance(obj, Tokenizer):
            return obj
        backend = getattr(obj, "backend_tokenizer", None)
        if not isinstance(backend, tokenizers.Tokenizer):
            raise UserError(
                f"tokenizer: {type(obj).__name__} cannot be used; give a tunix_like Tokenizer or a fast tokenizer of "
                "transformers (one with a tokenizer.json)."
            )
        template = obj.chat_template
        return cls(
            tokenizers.Tokenizer.from_str(backend.to_str()),  # a copy, since truncation and padding are disabled
            bos_token=obj.bos_token,
            eos_token=obj.eos_token,
            pad_token=obj.pad_token,
            chat_template=template.get("default") if isinstance(template, dict) else template,
        )

    def with_eos_ids(self, ids: Sequence[int]) -> Tokenizer:
        """Returns a copy in which a completion ends with any of `ids` (from generation_config.json) or with
        `eos_id`."""
        return self._copy(eos_ids=ids)

    def with_template_variables(self, variables: Mapping[str, Any]) -> Tokenizer:
        """Returns a copy that adds `variables`, e.g. `enable_thinking`, to the variables of every chat template
        rendering."""
        return self._copy(template_variables={**self._template_variables, **variables})

    def _copy(self, **changed: Any) -> Tokenizer:
        same: dict[str, Any] = {
            "bos_token": self._bos_token,
            "eos_token": self._eos_token,
            "pad_token": self._pad_token,
            "chat_template": self._chat_template,
            "eos_ids": self._eos_ids,
            "template_variables": self._template_variables,
        }
        return Tokenizer(self._backend, **(same | changed))

    @property
    def vocab_size(self) -> int:
        """Largest id + 1, added tokens included: the minimum number of rows of a model's embedding."""
        return self._vocab_size

    @property
    def pad_id(self) -> int:
        """Id used for padding: the id of the pad token, or else an id that ends a completion, or else 0."""
        return self._pad_id

    @property
    def bos_id(self) -> int | None:
        """Id of the beginning-of-sequence token, or None."""
        return self._bos_id

    @property
    def eos_id(self) -> int | None:
        """Id of `eos_token`, which ends a turn of the chat template; None if there is no such token."""
        return self._eos_id

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """All ids that end a completion; empty if the tokenizer defines none."""
        return self._eos_ids

    @property
    def chat_template(self) -> str | None:
        """The jinja source of the chat template, or None."""
        return self._chat_template

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Encodes `text`; special tokens that are written in the text become their ids, as in transformers.

        Raises:
          UserError: the text is not representable in UTF-8 (it contains a lone surrogate).
        """
        try:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError as error:
            raise UserError(
                f"the text {text!r:.80} cannot be encoded: it contains a lone surrogate (half of a character); write "
                "the whole character, or remove the row."
            ) from error

    def encode_data(self, text: str, most: int) -> list[int]:
        """Returns the first `most` token ids of untrusted text. Control tokens (such as `<|im_end|>`) in the text are
        encoded as plain text. No special tokens are added.

        Raises:
          UserError: the text contains a lone surrogate.
        """
        beginning = self._enough(text, most)
        return self._encode_guarded(refer(beginning, self._control, everything=True), False, most)[1][:most]

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Encodes several texts in parallel threads, without padding."""
        return [row.ids for row in self._backend.encode_batch(list(texts), add_special_tokens=add_special_tokens)]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Decodes `ids` to text, without clean-up of spaces; ids outside the vocabulary are dropped."""
        return self._backend.decode([int(i) for i in ids], skip_special_tokens=skip_special_tokens)

    def token(self, id: int) -> str:
        """Returns the vocabulary entry of an id, for display; `<no token 7>` for the id 7 if there is no entry."""
        token = self._backend.id_to_token(int(id))
        return f"<no token {int(id)}>" if token is None else token

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = True, **template_variables: Any) -> str:
        """Renders a conversation to text with the chat template.

        Args:
          messages: the turns, oldest first.
          add_generation_prompt: append the start of an assistant turn.
          **template_variables: further variables of the template (`enable_thinking=False`).

        Raises:
          UserError: there is no chat template, a message lacks role or content, or the template raises an exception or
            exceeds a limit on time or memory (`chat_templates`).
        """
        turns = plain_messages(messages)
        (text,) = self._rendered([turns], add_generation_prompt, template_variables)
        if isinstance(text, UserError):
            raise text
        return text

    def render_guarded(
        self, conversations: Sequence[Sequence[Message]], add_generation_prompt: bool, **template_variables: Any
    ) -> Iterator[str | UserError]:
        """Yields the text of each conversation, rendered with the chat template, or its error.

        All texts of the messages count as data. Control tokens in these texts are replaced by placeholders, which
        `encode_guarded` encodes as plain text. All control tokens in the result therefore come from the template.

        Args: see `render`.
        """
        guarded = [self._guarded(messages) for messages in conversations]
        good = [turns for turns in guarded if isinstance(turns, list)]
        rendered = self._rendered(good, add_generation_prompt, template_variables)
        for turns in guarded:
            yield next(rendered) if isinstance(turns, list) else turns

    def encode_guarded(self, text: str, most: int) -> list[int]:
        """Encodes a text of `render_guarded`, or a part of such a text. The placeholders that stand for control tokens
        in data are encoded as plain text. Adds no special tokens.

        Args:
          most: if the text has more than `most` ids, the result may be truncated, but to more than `most` ids.

        Raises:
          UserError: the text contains a lone surrogate.
        """
        return self._encode_guarded(text, False, most)[1]

    def _rendered(
        self, conversations: Sequence[list[dict[str, Any]]], add_generation_prompt: bool, further: Mapping[str, Any]
    ) -> Iterator[str | UserError]:
        """Yields the rendered text of each conversation, or its error. `further`: more variables of the template."""
        if self._chat_template is None:
            for _ in conversations:
                yield UserError(
                    "The tokenizer has no chat template; add chat_template.jinja to its folder, or use text prompts "
                    "(data.apply_chat_template=false, no data.system_prompt)."
                )
            return
        tokens = {"bos_token": self._bos_token, "eos_token": self._eos_token, "pad_token": self._pad_token}
        named = {name: token for name, token in tokens.items() if token is not None}
        fixed = {**named, "tools": None, "documents": None, **self._template_variables, **further}
        fixed["add_generation_prompt"] = add_generation_prompt
        requests: list[bytes] = []
        unfit: UserError | None = None
        for turns in conversations:
            try:
                size = sum(map(len, texts(turns)))
                requests.append(chat_templates.request(self._chat_template, {**fixed, "messages": turns}, size))
            except chat_templates.TemplateFailed as error:
                unfit = template_error(turns, error)
                break
        done = 0
        while done < len(requests):
            for text in chat_templates.render(requests[done:]):
                yield text if isinstance(text, str) else template_error(conversations[done], text)
                done += 1
        if unfit is not None:
            yield unfit
            yield from self._rendered(conversations[done + 1 :], add_generation_prompt, further)

    def encode_prompt(
        self, prompt: str | Sequence[Message], apply_chat_template: bool, most: int | None = None
    ) -> tuple[str, list[int]]:
        """Returns the text and the token ids of a prompt, as the model receives them.

        A list of messages is always rendered. If `apply_chat_template` is True, a string is wrapped as a user message
        and rendered. Otherwise, a string is encoded unchanged. Rendered text already contains its special tokens, so
        none are added to it. The ids begin with at most one beginning-of-sequence token. End-of-sequence tokens that
        the tokenizer appends to every text are removed, since the completion follows the prompt.

        Control tokens that are written in a field of a message, or in a column that a prompt template inserted, are
        encoded as plain text. In a string that is the whole prompt, control tokens are encoded as control tokens.

        Args:
          most: if a prompt has more than `most` ids, the result may be truncated, but still has more than `most` ids.
            This bounds the time: 100,000 characters would take up to a second.

        Raises:
          UserError: messages cannot be rendered with the chat template, or a text contains a lone surrogate.
        """
        if isinstance(prompt, str) and not apply_chat_template:
            prompt = prompt if most is None else self._enough(prompt, most)
            guarded_text = refer(prompt, self._control, everything=False)
            text, ids = self._encode_guarded(guarded_text, add_special_tokens=True, most=most)
            # The text may already begin with the token that the tokenizer adds.
            doubled = self._bos_id is not None and ids[:2] == [self._bos_id, self._bos_id]
            return text, ids[1:] if doubled else ids
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        (result,) = self.encode_prompts([messages], most)
        if isinstance(result, UserError):
            raise result
        return result

    def encode_prompts(
        self, prompts: Sequence[str | Sequence[Message]], most: int | None = None
    ) -> Iterator[tuple[str, list[int]] | UserError]:
        """Yields the text and the token ids of each prompt, or its error. Strings are encoded unchanged. Messages are
        rendered with the chat template.

        This is faster than one call of `encode_prompt` per prompt, because rendering and encoding overlap.
        """
        enough = [
            prompt if most is None or isinstance(prompt, str) else self._enough(prompt, most) for prompt in prompts
        ]
        guarded = [prompt if isinstance(prompt, str) else self._guarded(prompt) for prompt in enough]
        rendered = self._rendered([turns for turns in guarded if isinstance(turns, list)], True, {})
        for whole, beginning, prompt in zip(prompts, enough, guarded, strict=True):
            text = next(rendered) if isinstance(prompt, list) else prompt
            result: tuple[str, list[int]] | UserError
            try:
                if isinstance(text, UserError):
                    raise text
                is_text = prompt is text
                result = self.encode_prompt(text, False, most) if is_text else self._encode_guarded(text, False, most)
            except UserError as error:
                result = error
            # A template may drop long texts. If the truncated prompt fits, the whole prompt may fit too and is encoded.
            if beginning is not whole and (isinstance(result, UserError) or len(result[1]) <= (most or 0)):
                (result,) = self.encode_prompts([whole])
            yield result

    def _enough(self, prompt: Any, most: int) -> Any:
        """Truncates the texts of a prompt if the longest text has more than `2 * most` tokens; returns the prompt. The
        longest text still has more than `2 * most` tokens after the truncation. This bounds the time: encoding a text
        of 30 MB takes a minute."""
        longest, size = max(texts(prompt), key=len, default=""), _LONG_TOKEN * max(most, 1)
        while size < len(longest):
            if len(self.encode(longest[:size], add_special_tokens=False)) > 2 * most:
                return beginnings(prompt, size)
            size *= 4
        return prompt

    def _guarded(self, messages: Sequence[Message]) -> list[dict[str, Any]] | UserError:
        """Checks messages and marks all their texts as data, so that control tokens in them are plain text."""
        try:
            return [refer_deep(message, self._control) for message in plain_messages(messages)]
        except UserError as error:
            return error

    def _encode_guarded(self, text: str, add_special_tokens: bool, most: int | None) -> tuple[str, list[int]]:
        """Returns the ids of a text with placeholders for control tokens, and the text without placeholders.

        A placeholder is replaced by the characters of the token, which are encoded separately as plain text. If the
        text has more than `most` ids, the result may be truncated, but still has more than `most` ids.
        """
        pieces = parts(text, self._control)
        if not any(literal for _, literal in pieces):
            return text, self._encode_enough(text, add_special_tokens, most)
        ids = self._open("") if add_special_tokens else []
        for piece, literal in pieces:
            if most is not None and len(ids) > most:
                break
            ids += self._by_letters(piece) if literal else self._encode_enough(piece, False, most)
        return "".join(piece for piece, _ in pieces), ids

    def _encode_enough(self, text: str, add_special_tokens: bool, most: int | None) -> list[int]:
        encode = self._open if add_special_tokens else self._inside
        size = len(text) if most is None else _LONG_TOKEN * max(most, 1)
        while most is not None and size < len(text):
            beginning = encode(text[:size])
            # The last tokens of a truncated text may differ from those of the whole text, hence the factor of two.
            if len(beginning) > 2 * most:
                return beginning
            size *= 4
        return encode(text)

    def _inside(self, text: str) -> list[int]:
        return self.encode(text, add_special_tokens=False)

    def _open(self, text: str) -> list[int]:
        """Encodes `text` with the special tokens that the tokenizer adds, except end-of-sequence tokens after the
        text."""
        ids = self.encode(text)
        return ids[: len(ids) - self._appended_ends]

    @functools.cached_property
    def _appended_ends(self) -> int:
        """The number of end-of-sequence tokens that the post-processor of tokenizer.json appends to every text."""
        if not self._eos_ids:
            return 0
        # The probe must have a token: for an empty text, tokens added before and after it are indistinguishable.
        probe = self._backend.encode(self.token(self._eos_ids[-1]))
        pairs = zip(reversed(probe.ids), reversed(probe.sequence_ids), strict=True)
        appended = itertools.takewhile(lambda pair: pair[1] is None and pair[0] in self._eos_ids, pairs)
        return sum(1 for _ in appended)

    def _by_letters(self, text: str) -> list[int]:
        if self._letters is None:
            self._letters = tokenizers.Tokenizer.from_str(self._backend.to_str())
            self._letters.encode_special_tokens = True
        return self._letters.encode(text, add_special_tokens=False).ids

    def save(self, folder: str | Path) -> None:
        """Writes tokenizer.json, tokenizer_config.json and chat_template.jinja for `transformers.AutoTokenizer`."""
        named = {"bos_token": self._bos_token, "eos_token": self._eos_token, "pad_token": self._pad_token}
        write_files(Path(folder), self._backend, named, self._chat_template)
