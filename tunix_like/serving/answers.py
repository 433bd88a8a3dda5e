"""Builds the answers of the HTTP routes that sample completions. An answer is sent whole or as a stream of events."""

from __future__ import annotations

import abc
import itertools
import json
import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Any

from tunix_like.environments.chat_messages import RequestError, parsed_calls
from tunix_like.environments.messages_api import MessagesReply, error_of
from tunix_like.environments.responses_api import ResponsesReply
from tunix_like.environments.wire import Event, ProtocolReply, Usage, is_opened, sse
from tunix_like.serving.batcher import NewTokens
from tunix_like.serving.requests import ParsedRequest, Settings
from tunix_like.serving.runner import Job
from tunix_like.serving.text import CallStream, TextStream
from tunix_like.text.tokenizer import Tokenizer

_MOST_OPENING = 8
"""Number of tokens at the end of a prompt that can open a thought."""


class Choice:
    """One completion of a request.

    Attributes:
      tops: the most probable tokens at each position with their log-probabilities; empty if not requested.
      text: the text so far, without the last characters that later tokens can still change.
      reason: "stop" or "length"; None if the completion has not ended.
      stopped_by: the stop string or the token id of `stop_token_ids` that ended the completion. The last of `tokens`
        completes the stop string.
    """

    def __init__(self, index: int, job: Job, request: ParsedRequest, tokenizer: Tokenizer):
        self.index = index
        self.job = job
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.tops: list[Sequence[tuple[int, float]]] = []
        self.text = ""
        self.reason: str | None = None
        self.stopped_by: str | int | None = None
        self._decode = lambda tokens: tokenizer.decode(tokens, skip_special_tokens=not request.special)
        # Without a stream and without stop strings, the text is decoded once, when the completion has ended.
        self._stream = TextStream(self._decode, request.stops) if request.stream or request.stops else None

    def add(self, part: NewTokens) -> str:
        """Adds the tokens of `part` to the completion; returns the new text."""
        text = ""
        used = len(part.tokens)
        self.reason = part.reason
        self.stopped_by = part.stop_id
        if self._stream is not None:
            text, used, stop = self._stream.add(part.tokens, last=part.reason is not None)
            if stop is not None:
                self.reason = "stop"
                self.stopped_by = stop
        self.tokens += part.tokens[:used]
        self.logprobs += part.logprobs[:used]
        self.tops += part.tops[:used]
        if self._stream is None and self.reason is not None:
            text = self._decode(self.tokens)
        self.text += text
        return text


class Answer(abc.ABC):
    """The answer to one request, in the format of its HTTP route."""

    def __init__(self, request: ParsedRequest, settings: Settings, tokenizer: Tokenizer):
        self.request = request
        self.settings = settings
        self.tokenizer = tokenizer
        pairs = [(job, sample) for job in request.jobs for sample in range(job.count)]
        self.choices = {pair: Choice(index, pair[0], request, tokenizer) for index, pair in enumerate(pairs)}

    @abc.abstractmethod
    def whole(self) -> dict[str, Any]:
        """Returns the JSON object of the whole answer. All completions must have ended."""

    @abc.abstractmethod
    def events(self, choice: Choice, text: str, tokens: slice) -> Iterator[str]:
        """Yields the server-sent events for the new text of a completion and its new tokens with the indices
        `tokens`."""

    @abc.abstractmethod
    def last_events(self) -> Iterator[str]:
        """Yields the events at the end of the stream."""

    def failed(self, error: RequestError) -> str:
        """Returns the event of an error during the stream."""
        return event(error_content(error))


class ChoicesAnswer(Answer):
    """An answer with a list of choices, one per completion."""

    kind = ""
    streamed_kind = ""
    prefix = ""

    def __init__(self, request: ParsedRequest, settings: Settings, tokenizer: Tokenizer):
        super().__init__(request, settings, tokenizer)
        self.id = f"{self.prefix}{secrets.token_hex(16)}"
        self.created = int(time.time())

    def whole(self) -> dict[str, Any]:
        choices = [self.choice(choice) for choice in self.choices.values()]
        return {**self.head(self.kind), "choices": choices, "usage": self.usage()}

    def head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.settings.name}

    def usage(self) -> dict[str, int]:
        """Returns the numbers of tokens. A prompt counts once, even if it has several completions."""
        prompt = sum(len(job.prompt) for job in self.request.jobs)
        completion = sum(len(choice.tokens) for choice in self.choices.values())
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    @abc.abstractmethod
    def choice(self, choice: Choice) -> dict[str, Any]:
        """Returns the JSON object of a completion that has ended."""

    def token_text(self, token: int) -> str:
        return self.tokenizer.decode([token], skip_special_tokens=False)

    def events(self, choice: Choice, text: str, tokens: slice) -> Iterator[str]:
        for content in self.deltas(choice, text, tokens):
            body = {**self.head(self.streamed_kind), "choices": [content]}
            yield event(body | ({"usage": None} if self.request.usage_in_stream else {}))

    def last_events(self) -> Iterator[str]:
        """Yields the events at the end of the stream: the numbers of tokens, if requested, and the mark `[DONE]`."""
        if self.request.usage_in_stream:
            yield event({**self.head(self.streamed_kind), "choices": [], "usage": self.usage()})
        yield "data: [DONE]\n\n"

    def deltas(self, choice: Choice, text: str, tokens: slice) -> Iterator[dict[str, Any]]:
        """Yields the choice in each of these events."""
        raise NotImplementedError


class CompletionAnswer(ChoicesAnswer):
    """The answer to a request of the HTTP route `/v1/completions`."""

    kind = streamed_kind = "text_completion"
    prefix = "cmpl-"

    def __init__(self, request: ParsedRequest, settings: Settings, tokenizer: Tokenizer):
        super().__init__(request, settings, tokenizer)
        self._offsets: dict[Choice, int] = {}  # number of characters of the tokens that were returned

    def choice(self, choice: Choice) -> dict[str, Any]:
        return self._choice(choice, choice.text, slice(0, None))

    def deltas(self, choice: Choice, text: str, tokens: slice) -> Iterator[dict[str, Any]]:
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
        """Each slice of the tokens of a completion must begin where the previous one ended."""
        texts = [self.token_text(token) for token in choice.tokens[tokens]]
        *offsets, self._offsets[choice] = itertools.accumulate(map(len, texts), initial=self._offsets.get(choice, 0))
        return {
            "tokens": texts,
            "token_logprobs": choice.logprobs[tokens],
            "top_logprobs": self._tops(choice, tokens, texts) if choice.tops else None,
            "text_offset": offsets,
        }

    def _tops(self, choice: Choice, tokens: slice, texts: Sequence[str]) -> list[dict[str, float]]:
        """Returns for each position the log-probabilities of the most probable tokens and of the sampled token, by
        text. If several tokens have the same text, the most probable of them counts."""
        found = []
        for sampled, logprob, top in zip(texts, choice.logprobs[tokens], choice.tops[tokens], strict=True):
            texts_of = {self.token_text(token): value for token, value in reversed(top)}
            found.append(dict(reversed(texts_of.items())) | ({} if sampled in texts_of else {sampled: logprob}))
        return found


class ChatAnswer(ChoicesAnswer):
    """The answer to a request of the HTTP route `/v1/chat/completions`."""

    kind = "chat.completion"
    streamed_kind = "chat.completion.chunk"
    prefix = "chatcmpl-"

    def __init__(self, request: ParsedRequest, settings: Settings, tokenizer: Tokenizer):
        super().__init__(request, settings, tokenizer)
        self._calls = {choice: CallStream() for choice in self.choices.values()} if request.tools else {}
        self._begun: set[Choice] = set()

    def whole(self) -> dict[str, Any]:
        prompt = {"prompt_token_ids": list(self.request.jobs[0].prompt)} if self.request.token_ids else {}
        return super().whole() | prompt

    def choice(self, choice: Choice) -> dict[str, Any]:
        content, calls = parsed_calls(choice.text) if self.request.tools else (choice.text, [])
        message: dict[str, Any] = {"role": "assistant", "content": None if calls and not content else content}
        if calls:
            message["tool_calls"] = calls
        return {"index": choice.index, "message": message, **self._rest(choice, slice(0, None), bool(calls))}

    def deltas(self, choice: Choice, text: str, tokens: slice) -> Iterator[dict[str, Any]]:
        if choice not in self._begun:
            self._begun.add(choice)
            delta: dict[str, Any] = {"role": "assistant", "content": ""}
            yield {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}
        calls: list[dict[str, Any]] = []
        if self.request.tools:
            text = self._calls[choice].add(text)
            if choice.reason is not None:
                rest, calls = self._calls[choice].finish()
                text += rest
        delta = {"content": text} if text or not calls else {}
        if calls:
            delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(calls)]
        more = self.request.logprobs or self.request.token_ids
        if text or calls or choice.reason is not None or more:
            yield {"index": choice.index, "delta": delta, **self._rest(choice, tokens, bool(calls))}

    def _rest(self, choice: Choice, tokens: slice, called: bool) -> dict[str, Any]:
        found: dict[str, Any] = {
            "logprobs": {"content": self._logprobs(choice, tokens), "refusal": None} if self.request.logprobs else None,
            "finish_reason": "tool_calls" if called and choice.reason == "stop" else choice.reason,
            "stop_reason": choice.stopped_by,
        }
        if self.request.token_ids:
            found["token_ids"] = choice.tokens[tokens]
        return found

    def _logprobs(self, choice: Choice, tokens: slice) -> list[dict[str, Any]]:
        tops = choice.tops[tokens] if choice.tops else [()] * len(choice.tokens[tokens])
        return [
            self._logprob(token, logprob) | {"top_logprobs": [self._logprob(*each) for each in top]}
            for token, logprob, top in zip(choice.tokens[tokens], choice.logprobs[tokens], tops, strict=True)
        ]

    def _logprob(self, token: int, logprob: float) -> dict[str, Any]:
        text = self.token_text(token)
        known = None if "\ufffd" in text else list(text.encode())  # an incomplete character has no bytes
        return {"token": text, "logprob": logprob, "bytes": known}


class GenerateAnswer(ChoicesAnswer):
    """The answer to a request of the HTTP route `/inference/v1/generate`, in the format of vLLM. It has no stream."""

    def whole(self) -> dict[str, Any]:
        body = super().whole()
        del body["object"]
        prompt = list(self.request.jobs[0].prompt) if self.request.token_ids else None
        return body | {"request_id": body.pop("id"), "output_mode": "tokens", "prompt_token_ids": prompt}

    def choice(self, choice: Choice) -> dict[str, Any]:
        return {
            "index": choice.index,
            "token_ids": choice.tokens,
            "logprobs": {"content": self._logprobs(choice)} if self.request.logprobs else None,
            "finish_reason": choice.reason,
            "stop_reason": choice.stopped_by,
            "weight_versions": [{"version": self.settings.version, "start": 0, "end": len(choice.tokens)}],
        }

    def _logprobs(self, choice: Choice) -> Sequence[dict[str, Any]]:
        """Some clients read `token`, others `token_id`."""
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


class ReplyAnswer(Answer):
    """An answer in the form of a protocol (see `ProtocolReply`)."""

    def __init__(self, request: ParsedRequest, settings: Settings, tokenizer: Tokenizer):
        super().__init__(request, settings, tokenizer)
        (self._choice,) = self.choices.values()
        end = tokenizer.decode(request.jobs[0].prompt[-_MOST_OPENING:], skip_special_tokens=False)
        self._reply = self._made(is_opened(end))
        self._calls = CallStream() if request.tools else None
        self._begun = False

    @abc.abstractmethod
    def _made(self, opened: bool) -> ProtocolReply: ...

    def whole(self) -> dict[str, Any]:
        for _ in self._events(self._choice.text):
            pass
        return self._reply.body

    def events(self, choice: Choice, text: str, tokens: slice) -> Iterator[str]:
        yield from map(sse, self._events(text))

    def last_events(self) -> Iterator[str]:
        yield from ()

    def _events(self, text: str) -> Iterator[Event]:
        """Yields the events of new text, and those of the end if the completion has ended."""
        job = self._choice.job
        choice = self._choice
        usage = Usage(len(job.prompt), len(choice.tokens), job.reused)
        if not self._begun:
            self._begun = True
            yield from self._reply.begin(usage)
        content = text if self._calls is None else self._calls.add(text)
        if choice.reason is None:
            yield from self._reply.add(content)
            return
        rest, calls = ("", []) if self._calls is None else self._calls.finish()
        stop = choice.stopped_by if isinstance(choice.stopped_by, str) else None
        yield from self._reply.finish(content + rest, calls, choice.reason, stop, usage)


class ResponsesAnswer(ReplyAnswer):
    """The answer to a request of the HTTP route `/v1/responses`."""

    def _made(self, opened: bool) -> ProtocolReply:
        return ResponsesReply(self.settings.name, opened, self.request.echo)

    def failed(self, error: RequestError) -> str:
        return sse({"type": "error", "code": error.kind, "message": str(error), "param": None, "sequence_number": 0})


class MessagesAnswer(ReplyAnswer):
    """The answer to a request of the HTTP route `/v1/messages`."""

    def _made(self, opened: bool) -> ProtocolReply:
        return MessagesReply(self.settings.name, opened)

    def failed(self, error: RequestError) -> str:
        return sse(error_of(str(error), error.http))


def error_content(error: RequestError) -> dict[str, Any]:
    """Returns the body of an error response in the format of OpenAI."""
    return {"error": {"message": str(error), "type": error.kind, "param": error.param, "code": error.http}}


def event(body: Any) -> str:
    """Returns the text of a server-sent event with the JSON form of `body`."""
    return f"data: {json.dumps(body, ensure_ascii=False, separators=(',', ':'))}\n\n"
