"""Converts text to token ids and back, and chat messages to text, with the `tokenizers` library.

Reads tokenizer.json, tokenizer_config.json, special_tokens_map.json and chat_template.jinja of a Hugging Face folder.
The stop ids of generation_config.json are not read here: `Tokenizer.with_eos_ids` adds them. This module does not
import transformers, because the import takes more than a second. The tests check that this module and transformers give
the same ids and the same text.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers

from tunix_like.errors import UserError
from tunix_like.text import chat_templates
from tunix_like.text.chat_templates import template_error
from tunix_like.text.conversations import chat_messages, template_messages
from tunix_like.text.tokenizer_files import (
    NAMED_TOKENS,
    add_declared_tokens,
    content,
    drop_additions,
    find_chat_template,
    read_fields,
    write_files,
)
from tunix_like.text.untrusted import beginnings, parts, refer, refer_deep, texts

if TYPE_CHECKING:
    from tunix_like.types import Message

_LONG_TOKEN = 16
"""Number of characters of a long token. A text with more than this many characters per allowed token is probably too
long."""

_QUESTION: Message = {"role": "user", "content": "Question"}
_TOOL = {
    "type": "function",
    "function": {
        "name": "find",
        "description": "Finds a text.",
        "parameters": {
            "type": "object",
            "properties": {"text": {"type": "string", "description": "The text."}},
            "required": ["text"],
        },
    },
}
"""A tool that shows whether a chat template renders tools."""


class Tokenizer:
    """A tokenizer with its special tokens and its chat template. Token ids are returned as lists of int.

    Attributes:
      vocab_size: largest id + 1, added tokens included: the minimum number of rows of a model's embedding.
      pad_id: id of the pad token, or else an id that ends a completion, or else 0.
      bos_id: id of the beginning-of-sequence token, or None.
      eos_id: id of `eos_token`, which ends a turn of the chat template, or None.
      eos_ids: all ids that end a completion; empty if the tokenizer defines none.
      chat_template: the jinja source of the chat template, or None.
    """

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
          bos_token: text of the token that begins a sequence.
          eos_token: text of the token that ends a turn. If it is not special in `backend`
            (`add_special_tokens`), it stays in the text of completions, which rewards compare with answers.
          pad_token: text of the padding token.
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
        self._named = {"bos_token": bos_token, "eos_token": eos_token, "pad_token": pad_token}
        self.chat_template = chat_template
        self._template_variables = dict(template_variables or {})
        self.bos_id, self.eos_id = self._id("bos_token", bos_token), self._id("eos_token", eos_token)
        eos_id = self.eos_id
        given = tuple(int(i) for i in eos_ids or ())
        self.eos_ids = given if eos_id is None or eos_id in given else (*given, eos_id)
        pad_id = self._id("pad_token", pad_token)
        self.pad_id = next((i for i in (pad_id, eos_id, *self.eos_ids) if i is not None), 0)
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values()) + 1
        named = {self.bos_id, self.pad_id, *self.eos_ids}
        added = backend.get_added_tokens_decoder().items()
        control = {i: token.content for i, token in added if token.content and (token.special or i in named)}
        self._control = tuple(control.values())
        self._control_ids = frozenset(control)
        self._templates_with_tools: dict[str | None, bool] = {}  # whether each chat template writes tools
        self._written: set[tuple[Any, ...]] = set()  # the forms of conversations that the template writes completely

    def __repr__(self) -> str:
        template = "no chat template" if self.chat_template is None else "a chat template"
        return f"Tokenizer({self.vocab_size:,} tokens, {template}, ends a completion with {list(self.eos_ids)})"

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
        """Reads the tokenizer of a Hugging Face model folder. Only tokenizer.json decides whether a
        beginning-of-sequence token is added: as in transformers 5, `add_bos_token` of tokenizer_config.json is
        ignored, and a tokenizer of the class of GPT-NeoX adds none."""
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
        drop_additions(backend, config)
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
        """Returns a `Tokenizer` unchanged, or wraps a copy of a fast tokenizer of transformers."""
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

    def with_own_pad(self, most: int) -> Tokenizer:
        """Returns a tokenizer whose pad token ends no completion, with at most `most` ids: this one if its pad token is
        such a token; else a copy with another special token or a new token as its pad token, or without one."""
        ends = {*self.eos_ids, self.bos_id}
        if self._named["pad_token"] is not None and self.pad_id not in ends:
            return self
        added = self._backend.get_added_tokens_decoder().items()
        free = [token.content for i, token in added if token.special and i not in ends and i < most]
        pad = min(free, key=lambda token: ("pad" not in token.lower(), token), default=None)
        if pad is not None or self.vocab_size >= most:
            return self._copy(pad_token=pad)
        backend = tokenizers.Tokenizer.from_str(self._backend.to_str())
        backend.add_special_tokens([tokenizers.AddedToken("<|pad|>", special=True, normalized=False)])
        return self._copy(backend, pad_token="<|pad|>")

    def _copy(self, backend: tokenizers.Tokenizer | None = None, **changed: Any) -> Tokenizer:
        same: dict[str, Any] = {
            **self._named,
            "chat_template": self.chat_template,
            "eos_ids": self.eos_ids,
            "template_variables": self._template_variables,
        }
        return Tokenizer(backend or self._backend, **(same | changed))

    def has_same_tokens(self, other: Tokenizer) -> bool:
        """Returns whether both have the same token for each id."""
        return bool(self._backend.get_vocab() == other._backend.get_vocab())

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Encodes `text`; special tokens that are written in the text become their ids, as in transformers."""
        try:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError as error:
            raise UserError(
                f"the text {text!r:.80} cannot be encoded: it contains a lone surrogate (half of a character); write "
                "the whole character, or remove the row."
            ) from error

    def encode_data(self, text: str, most: int) -> list[int]:
        """Returns the first `most` token ids of untrusted text. Control tokens (such as `<|im_end|>`) in the text are
        encoded as plain text. No special tokens are added."""
        beginning = self._enough(text, most)
        return self._encode_guarded(refer(beginning, self._control, everything=True), False, most)[1][:most]

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
          UserError: there is no chat template, a message is invalid (see `conversations.chat_messages`), or the
            template raises an exception or renders too much text.
        """
        variables = {**self._template_variables, **template_variables}
        return self._rendered(template_messages(messages), add_generation_prompt, variables)

    def render_guarded(
        self, messages: Sequence[Message], add_generation_prompt: bool = True, /, **template_variables: Any
    ) -> str:
        """Renders a conversation as `render` does, but all texts of the messages and of the template variables (such as
        `tools`) count as data: control tokens in them are replaced by placeholders, which `encode_guarded` encodes as
        plain text. All control tokens in the result therefore come from the template."""
        turns = [refer_deep(message, self._control) for message in template_messages(messages)]
        given = {name: refer_deep(value, self._control) for name, value in template_variables.items()}
        return self._rendered(turns, add_generation_prompt, {**self._own_variables, **given})

    def render_prompt(
        self, messages: Sequence[Message], drops_own_text: bool = False, /, **template_variables: Any
    ) -> str:
        """Renders a conversation as `render_guarded` does, up to where a completion begins: after the start of an
        assistant's turn or, if the last message is the assistant's, after its text, which the completion continues (as
        with `continue_final_message` of transformers).

        Args:
          drops_own_text: whether the template may drop the text beside a tool call of the assistant, as that of Llama
            3.1 does: agents send back what the model wrote.

        Raises:
          UserError: see `render`; the template drops a text or a tool call; or the last message is one of the assistant
            that has tool calls, no text, or another text in the template.
        """
        turns = chat_messages(messages)
        continued = turns[-1]["role"] == "assistant"
        text = self.render_guarded(turns, not continued, **template_variables)
        own = [turn | {"content": ""} if drops_own_text and "tool_calls" in turn else turn for turn in turns]
        self.check_written(own, **template_variables)
        if not continued:
            return text
        kept = refer_deep(turns[-1]["content"], self._control).strip()
        word = "continuedword"  # in place of the text, it finds what the template writes before and behind
        marked = self.render_guarded([*turns[:-1], turns[-1] | {"content": word}], False, **template_variables)
        before, found, behind = marked.rpartition(word)
        written = text[len(before) : len(text) - len(behind)]
        same = bool(found) and text.startswith(before) and text.endswith(behind) and written.strip() == kept
        if not kept or not same or "tool_calls" in turns[-1]:
            raise UserError(
                "a prompt that ends with a message of the assistant is continued, but its last message has tool calls, "
                "no text, or a text that the chat template changes; let the prompt end with another message."
            )
        return before + written

    def check_written(self, messages: Sequence[Message], /, **template_variables: Any) -> None:
        """Raises UserError if the chat template drops the text or a tool call of a message. Texts and names are
        replaced by words to find them, because a template may trim, escape or shorten a text."""
        turns = template_messages(messages)
        shape = (*((turn["role"], bool(turn["content"].strip()), len(turn.get("tool_calls", ()))) for turn in turns),)
        known = (shape, *sorted(template_variables))
        if known in self._written:
            return
        words: list[tuple[str, str]] = []

        def word(what: str) -> str:
            words.append((f"word{len(words)}end", what))
            return words[-1][0]

        for place, turn in enumerate(turns):
            if turn["content"].strip():
                turn["content"] = word(f"the text of message {place} (role '{turn['role']}')")
            for call in turn.get("tool_calls", ()):
                call["function"]["name"] = word(f"the tool calls of message {place}")
        text = self._rendered(turns, False, {**self._template_variables, **template_variables})
        if dropped := next((what for word, what in words if word not in text), None):
            raise UserError(
                f"the chat template drops {dropped}, which the model would not see; use a template that writes all "
                "messages, or put the text into a message of another role."
            )
        if len(turns) <= 16 and len(self._written) < 1000:  # clients of a server choose the forms
            self._written.add(known)

    @property
    def has_tools(self) -> bool:
        """Whether every prompt gets tools, such as those of an environment."""
        return bool(self._template_variables.get("tools"))

    def check_tools(self, what: str) -> None:
        """Raises UserError if the chat template fails, or ignores tools. `what` begins the message."""
        if not self.renders_tools:
            raise UserError(
                f"{what}: the chat template ignores tools, so the model would not know them; write one that renders "
                "`tools` to chat_template.jinja in the model's folder. A model of a hub id, package or GGUF file gets "
                "a folder by `tunix-like export MODEL FOLDER`; then set model.path=FOLDER."
            )

    @property
    def renders_tools(self) -> bool:
        """Whether the chat template writes tools into prompts."""
        known = self._templates_with_tools
        if self.chat_template not in known:
            known[self.chat_template] = self.render([_QUESTION], tools=[_TOOL]) != self.render([_QUESTION], tools=None)
        return known[self.chat_template]

    def encode_guarded(self, text: str, most: int) -> list[int]:
        """Encodes a text of `render_guarded`, or a part of it, without special tokens. If it has more than `most` ids,
        the result may be truncated, but to more than `most` ids."""
        return self._encode_guarded(text, False, most)[1]

    def _rendered(self, turns: list[dict[str, Any]], add_generation_prompt: bool, variables: Mapping[str, Any]) -> str:
        """Renders messages. `variables`: those of the template in addition to the messages and the special tokens."""
        if self.chat_template is None:
            raise UserError(
                "The tokenizer has no chat template; add chat_template.jinja to its folder, or use text prompts "
                "(data.apply_chat_template=false, no data.system_prompt)."
            )
        named = {name: token for name, token in self._named.items() if token is not None}
        given = {**named, "tools": None, "documents": None, **variables, "messages": turns}
        given["add_generation_prompt"] = add_generation_prompt
        try:
            return chat_templates.render(self.chat_template, given, sum(map(len, texts(turns))))
        except chat_templates.TemplateFailed as error:
            raise template_error(turns, error) from error

    def encode_prompt(
        self,
        prompt: str | Sequence[Message],
        apply_chat_template: bool,
        most: int | None = None,
        **template_variables: Any,
    ) -> tuple[str, list[int]]:
        """Returns the text and the token ids of a prompt, as the model receives them.

        A list of messages is always rendered (see `render_prompt`). If `apply_chat_template` is True, a string is
        wrapped as a user message and rendered. Otherwise, a string is encoded unchanged. Rendered text already contains
        its special tokens, so none are added to it. The ids begin with at most one beginning-of-sequence token.
        End-of-sequence tokens that the tokenizer appends to every text are removed, since the completion follows the
        prompt.

        Control tokens that are written in a field of a message, in a template variable, or in a column that a prompt
        template inserted, are encoded as plain text. In a string that is the whole prompt, control tokens are encoded
        as control tokens.

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
            doubled = self.bos_id is not None and ids[:2] == [self.bos_id, self.bos_id]
            return text, ids[1:] if doubled else ids
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        beginning = messages if most is None else self._enough(messages, most)
        if beginning is not messages:
            with contextlib.suppress(UserError):
                text, ids = self._encode_guarded(self.render_prompt(beginning, **template_variables), False, most)
                if most is not None and len(ids) > most:
                    return text, ids
            # A template may drop long texts, so the whole prompt may fit.
            most = None
        return self._encode_guarded(self.render_prompt(messages, **template_variables), False, most)

    def _enough(self, prompt: Any, most: int) -> Any:
        """Truncates the texts of a prompt, but the longest to more than `2 * most` tokens. This bounds the time:
        encoding a text of 30 MB takes a minute."""
        longest = max(texts(prompt), key=len, default="")
        size = _LONG_TOKEN * max(most, 1)
        while size < len(longest):
            if len(self.encode(longest[:size], add_special_tokens=False)) > 2 * most:
                return beginnings(prompt, size)
            size *= 4
        return prompt

    @functools.cached_property
    def _own_variables(self) -> dict[str, Any]:
        return {name: refer_deep(value, self._control) for name, value in self._template_variables.items()}

    def _encode_guarded(self, text: str, add_special_tokens: bool, most: int | None) -> tuple[str, list[int]]:
        """Returns the text without placeholders, and its ids, in which the characters of each replaced token are
        encoded as plain text. If there are more than `most` ids, the result may be truncated, but still has more than
        `most`."""
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
        """Encodes `text` with the special tokens that the tokenizer adds before it."""
        ids = self.encode(text)
        return ids[: len(ids) - self._appended_ends]

    @functools.cached_property
    def _appended_ends(self) -> int:
        """The number of end-of-sequence tokens that the tokenizer appends to every text."""
        if not self.eos_ids:
            return 0
        # The probe must have a token: for an empty text, tokens added before and after it are indistinguishable.
        probe = self._backend.encode(self.token(self.eos_ids[-1]))
        pairs = zip(reversed(probe.ids), reversed(probe.sequence_ids), strict=True)
        appended = itertools.takewhile(lambda pair: pair[1] is None and pair[0] in self.eos_ids, pairs)
        return sum(1 for _ in appended)

    @functools.cached_property
    def _letters(self) -> tokenizers.Tokenizer:
        """A copy of the backend without special tokens, made when first needed, because copying takes a second."""
        copy = tokenizers.Tokenizer.from_str(self._backend.to_str())
        copy.encode_special_tokens = True
        return copy

    def _by_letters(self, text: str) -> list[int]:
        ids = self._letters.encode(text, add_special_tokens=False).ids
        if self._control_ids.isdisjoint(ids):
            return ids
        # The token is a word of the model's vocabulary, or is not marked as special.
        pieces = (self._letters.encode(letter, add_special_tokens=False).ids for letter in text)
        return [i for ids in pieces for i in ids if i not in self._control_ids]

    def save(self, folder: str | Path) -> None:
        """Writes tokenizer.json, tokenizer_config.json and chat_template.jinja for `transformers.AutoTokenizer`."""
        write_files(Path(folder), self._backend, self._named, self.chat_template)
