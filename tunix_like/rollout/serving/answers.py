"""Builds the answers of the HTTP routes that sample completions. An answer is sent whole or as a stream of events."""

from __future__ import annotations

import abc
import itertools
import json
import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Any

from tunix_like.data.tokenizer import Tokenizer
from tunix_like.rollout.serving.chat import CallStream, parsed_calls
from tunix_like.rollout.serving.jobs import Job, Part
from tunix_like.rollout.serving.requests import Request, Settings
from tunix_like.rollout.serving.text import TextStream


class Choice:
    """One completion of a request. `add` appends new tokens to the completion.

    Attributes:
      tokens, logprobs: the tokens so far and their log-probabilities. If a stop string ended the completion, the last
        token is the one that completes the stop string.
      text: the text so far, without the last characters that later tokens can still change. If the answer is not
        streamed and there are no stop strings, the text is empty until the completion has ended.
      reason: "stop" or "length"; None if the completion has not ended.
      stopped_by: the stop string, or the token id from the parameter `stop_token_ids`, that ended the completion; None
        if the completion has not ended or ended for another reason.
    """

    def __init__(self, index: int, job: Job, request: Request, tokenizer: Tokenizer):
        self.index, self.job = index, job
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.text = ""
        self.reason: str | None = None
        self.stopped_by: str | int | None = None
        self._decode = lambda tokens: tokenizer.decode(tokens, skip_special_tokens=not request.special)
        # Without a stream and without stop strings, the text is decoded once, when the completion has ended.
        self._stream = TextStream(self._decode, request.stops) if request.stream or request.stops else None

    def add(self, part: Part) -> str:
        """Adds the tokens of `part` to the completion; returns the new text."""
        text, used = "", len(part.tokens)
        self.reason, self.stopped_by = part.reason, part.stop_id
        if self._stream is not None:
            text, used, stop = self._stream.add(part.tokens, last=part.reason is not None)
            if stop is not None:
                self.reason, self.stopped_by = "stop", stop
        self.tokens += part.tokens[:used]
        self.logprobs += part.logprobs[:used]
        if self._stream is None and self.reason is not None:
            text = self._decode(self.tokens)
        self.text += text
        return text


class Answer(abc.ABC):
    """The answer to one request: holds the completions, and formats the completions for the HTTP route of the request.

    Subclasses implement `choice`.
    """

    kind, prefix = "", ""

    def __init__(self, request: Request, settings: Settings, tokenizer: Tokenizer):
        self.request, self.settings, self.tokenizer = request, settings, tokenizer
        self.id, self.created = f"{self.prefix}{secrets.token_hex(16)}", int(time.time())
        pairs = [(job, sample) for job in request.jobs for sample in range(job.count)]
        self.choices = {pair: Choice(index, pair[0], request, tokenizer) for index, pair in enumerate(pairs)}

    def whole(self) -> dict[str, Any]:
        """Returns the JSON object of the whole answer. All completions must have ended."""
        choices = [self.choice(choice) for choice in self.choices.values()]
        return {**self.head(self.kind), "choices": choices, "usage": self.usage()}

    def head(self, kind: str) -> dict[str, Any]:
        """Returns the first fields of the answer: id, kind of the object, time and name of the model."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.settings.name}

    def usage(self) -> dict[str, int]:
        """Returns the numbers of prompt and completion tokens. A prompt counts once, even if it has several
        completions."""
        prompt = sum(len(job.prompt) for job in self.request.jobs)
        completion = sum(len(choice.tokens) for choice in self.choices.values())
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    @abc.abstractmethod
    def choice(self, choice: Choice) -> dict[str, Any]:
        """Returns the JSON object of a completion that has ended."""

    def token_text(self, token: int) -> str:
        """Returns the text of one token."""
        return self.tokenizer.decode([token], skip_special_tokens=False)


class StreamedAnswer(Answer):
    """An answer that can also be sent as a stream of server-sent events."""

    def events(self, choice: Choice, text: str, tokens: slice) -> Iterator[str]:
        """Yields the server-sent events for new tokens of a completion.

        Args:
          choice: the completion, including the new tokens.
          text: the new text.
          tokens: the indices of the new tokens.
        """
        for content in self.deltas(choice, text, tokens):
            body = {**self.head(self.streamed_kind), "choices": [content]}
            yield event(body | ({"usage": None} if self.request.usage_in_stream else {}))

    def last_events(self) -> Iterator[str]:
        """Yields the events at the end of the stream: the numbers of tokens, if requested, and the mark `[DONE]`."""
        if self.request.usage_in_stream:
            yield event({**self.head(self.streamed_kind), "choices": [], "usage": self.usage()})
        yield "data: [DONE]\n\n"

    @property
    def streamed_kind(self) -> str:
        """The value of the field `object` in an event of a streamed answer."""
        return self.kind

    @abc.abstractmethod
    def deltas(self, choice: Choice, text: str, tokens: slice) -> Iterator[dict[str, Any]]:
        """Yields one JSON object per server-sent event, with the new text `text` and the new tokens (indices `tokens`)
        of a completion."""


class CompletionAnswer(StreamedAnswer):
    """The answer to a request of the HTTP route `/v1/completions`."""

    kind, prefix = "text_completion", "cmpl-"

    def __init__(self, request: Request, settings: Settings, tokenizer: Tokenizer):
        super().__init__(request, settings, tokenizer)
        self._offsets: dict[Choice, int] = {}  # number of characters of the tokens that were returned

    def choice(self, choice: Choice) -> dict[str, Any]:
        """Returns the JSON object of a completion that has ended."""
        return self._choice(choice, choice.text, slice(0, None))

    def deltas(self, choice: Choice, text: str, tokens: slice) -> Iterator[dict[str, Any]]:
        """Yields one JSON object with the new text and tokens of a completion, or nothing if there is nothing to
        send."""
        if text or choice.reason is not None or ((self.request.logprobs or self.request.token_ids) and choice.tokens):
            yield self._choice(choice, text, tokens)

    def _choice(self, choice: Choice, text: str, tokens: slice) -> dict[str, Any]:
        found: dict[str, Any] = {
            "index": choice.index,
            "text": text,
            "logprobs": self._logprobs(choice, tokens) if self.request.logprobs else None,
            "finish_reason": choice.reason,
            "stop_reason": choice.stopped_by,
        }
        if self.request.token_ids:
            found["token_ids"] = choice.tokens[tokens]
            found["prompt_token_ids"] = list(choice.job.prompt) if tokens.start == 0 else None
        return found

    def _logprobs(self, choice: Choice, tokens: slice) -> dict[str, Any]:
        """Returns the field `logprobs` for a slice of the tokens of a completion. The slice must begin where the slice
        of the previous call for this completion ended."""
        texts = [self.token_text(token) for token in choice.tokens[tokens]]
        *offsets, self._offsets[choice] = itertools.accumulate(map(len, texts), initial=self._offsets.get(choice, 0))
        return {
            "tokens": texts,
            "token_logprobs": choice.logprobs[tokens],
            "top_logprobs": None,
            "text_offset": offsets,
        }


class ChatAnswer(StreamedAnswer):
    """The answer to a request of the HTTP route `/v1/chat/completions`."""

    kind, prefix, streamed_kind = "chat.completion", "chatcmpl-", "chat.completion.chunk"

    def __init__(self, request: Request, settings: Settings, tokenizer: Tokenizer):
        super().__init__(request, settings, tokenizer)
        self._calls = {choice: CallStream() for choice in self.choices.values()} if request.tools else {}
        self._begun: set[Choice] = set()

    def whole(self) -> dict[str, Any]:
        """Returns the JSON object of the whole answer. All completions must have ended."""
        prompt = {"prompt_token_ids": list(self.request.jobs[0].prompt)} if self.request.token_ids else {}
        return super().whole() | prompt

    def choice(self, choice: Choice) -> dict[str, Any]:
        """Returns the JSON object of a completion that has ended."""
        content, calls = parsed_calls(choice.text) if self.request.tools else (choice.text, [])
        message: dict[str, Any] = {"role": "assistant", "content": None if calls and not content else content}
        if calls:
            message["tool_calls"] = calls
        found = {"index": choice.index, "message": message, **self._rest(choice, slice(0, None), bool(calls))}
        return found

    def deltas(self, choice: Choice, text: str, tokens: slice) -> Iterator[dict[str, Any]]:
        """Yields the JSON objects with the new text, tool calls and tokens of a completion, one per server-sent
        event."""
        if choice not in self._begun:
            self._begun.add(choice)
            yield {
                "index": choice.index,
                "delta": {"role": "assistant", "content": ""},
                "logprobs": None,
                "finish_reason": None,
            }
        calls: list[dict[str, Any]] = []
        if self.request.tools:
            text = self._calls[choice].add(text)
            if choice.reason is not None:
                rest, calls = self._calls[choice].finish()
                text += rest
        delta: dict[str, Any] = {"content": text} if text or not calls else {}
        if calls:
            delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(calls)]
        more = self.request.logprobs or self.request.token_ids
        if text or calls or choice.reason is not None or more:
            yield {"index": choice.index, "delta": delta, **self._rest(choice, tokens, bool(calls))}

    def _rest(self, choice: Choice, tokens: slice, called: bool) -> dict[str, Any]:
        """Returns the fields after the message in the JSON object of a completion: log-probabilities, reason of the
        end, and token ids if requested. `called` is True if the completion has tool calls."""
        logprobs = [self._logprob(*each) for each in zip(choice.tokens[tokens], choice.logprobs[tokens], strict=True)]
        found: dict[str, Any] = {
            "logprobs": {"content": logprobs, "refusal": None} if self.request.logprobs else None,
            "finish_reason": "tool_calls" if called and choice.reason == "stop" else choice.reason,
            "stop_reason": choice.stopped_by,
        }
        if self.request.token_ids:
            found["token_ids"] = choice.tokens[tokens]
        return found

    def _logprob(self, token: int, logprob: float) -> dict[str, Any]:
        text = self.token_text(token)
        known = None if "\ufffd" in text else list(text.encode())  # an incomplete character has no bytes
        return {"token": text, "logprob": logprob, "bytes": known, "top_logprobs": []}


class GenerateAnswer(Answer):
    """The answer to a request of the HTTP route `/inference/v1/generate`, in the format of vLLM."""

    def whole(self) -> dict[str, Any]:
        """Returns the JSON object of the whole answer. All completions must have ended."""
        found = super().whole()
        del found["object"]
        found["request_id"] = found.pop("id")
        found["output_mode"] = "tokens"
        found["prompt_token_ids"] = list(self.request.jobs[0].prompt) if self.request.token_ids else None
        return found

    def choice(self, choice: Choice) -> dict[str, Any]:
        """Returns the JSON object of a completion that has ended."""
        return {
            "index": choice.index,
            "token_ids": choice.tokens,
            "logprobs": {"content": self._logprobs(choice)} if self.request.logprobs else None,
            "finish_reason": choice.reason,
            "stop_reason": choice.stopped_by,
            "weight_versions": [{"version": self.settings.version, "start": 0, "end": len(choice.tokens)}],
        }

    def _logprobs(self, choice: Choice) -> Sequence[dict[str, Any]]:
        """Returns the tokens with their log-probabilities. Each token is given in the two fields `token` and
        `token_id`, because some clients read `token` and other clients read `token_id`."""
        return [
            {
                "token": f"token_id:{token}",
                "token_id": token,
                "logprob": logprob,
                "rank": None,
                "top_logprobs": [{"token_id": token, "logprob": logprob, "rank": None}],
            }
            for token, logprob in zip(choice.tokens, choice.logprobs, strict=True)
        ]


def event(body: Any) -> str:
    """Returns the text of a server-sent event with the JSON form of `body`."""
    return f"data: {json.dumps(body, ensure_ascii=False, separators=(',', ':'))}\n\n"
