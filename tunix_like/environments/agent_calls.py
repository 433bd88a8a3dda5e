"""Reads the requests of agents, and writes the answers, in the form of the protocol of the request: OpenAI's chat
completions or responses, or Anthropic's messages."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from tunix_like.environments import messages_api, responses_api
from tunix_like.environments.chat_messages import THOUGHT, RequestError, checked_messages, checked_tools, parsed_calls
from tunix_like.environments.messages_api import MessagesReply
from tunix_like.environments.responses_api import ResponsesReply
from tunix_like.environments.wire import THINK, ProtocolReply, Usage, sse
from tunix_like.text.tool_calls import arguments_of
from tunix_like.workers.routes import CHAT, COUNT, MESSAGES, MODEL, RESPONSES

NEUTRAL: dict[str, dict[str, tuple[Any, ...]]] = {
    CHAT: {
        "n": (None, 1), "stop": (None, [], ""), "logprobs": (None, False), "top_logprobs": (None, 0),
        "tool_choice": (None, "auto", "none"), "response_format": (None, {"type": "text"}), "logit_bias": (None, {}),
    },
    RESPONSES: {
        "previous_response_id": (None,), "conversation": (None,), "background": (None, False), "prompt": (None,),
        "top_logprobs": (None, 0), "tool_choice": (None, "auto", "none"),
        "text": (None, {}, {"format": {"type": "text"}}),
    },
    MESSAGES: {"stop_sequences": (None, []), "mcp_servers": (None, []), "output_config": (None, {})},
    COUNT: {},
}  # fmt: skip
"""Fields of a request that are not supported in training, by route, and the only values that a request may give them.
Other sampling parameters of a request are ignored, because the settings in `rollout` apply."""

MOST_DEPTH = 100
"""Maximum depth of lists and objects in a request."""

FULL = "the limit of tokens or turns of this trajectory is reached"
"""Why requests are refused at the end of a trajectory."""


class Call(NamedTuple):
    """A request that an agent sends to the model.

    Attributes:
      id: number of the request in the process that received it.
      route: the HTTP route of the request.
      variables: variables of the chat template, including `tools`.
      stream: whether the answer is sent as a stream of events.
    """

    id: int
    route: str
    messages: list[dict[str, Any]]
    variables: dict[str, Any]
    stream: bool

    @staticmethod
    def of(id: int, route: str, body: Mapping[str, Any]) -> Call:
        """Makes a `Call` from the JSON body of a request. Raises RequestError if the request is not supported in
        training."""
        for name, values in NEUTRAL[route].items():
            if body.get(name) not in values:
                raise RequestError(f"{name}: got {str(body[name])[:80]}; it is not supported in training", name)
        messages, tools = _conversation(route, body)
        variables = body.get("chat_template_kwargs") or {}
        if not isinstance(variables, dict):
            raise RequestError("chat_template_kwargs: it must be an object", "chat_template_kwargs")
        variables = {**variables, **({"tools": [dict(tool) for tool in tools]} if tools else {})}
        calls = [call for message in messages for call in message.get("tool_calls") or ()]
        arguments = [arguments_of(call["function"]["arguments"]) for call in calls]
        if _is_too_deep([messages, variables, arguments]):
            raise RequestError(f"the request is nested more than {MOST_DEPTH} levels deep")
        return Call(id, route, messages, variables, bool(body.get("stream")))

    @property
    def latest(self) -> list[dict[str, Any]]:
        """The messages of the request after its last message with the role assistant."""
        turns = [index for index, message in enumerate(self.messages) if message["role"] == "assistant"]
        return self.messages[turns[-1] + 1 if turns else 0 :]


def _is_too_deep(value: Any) -> bool:
    """Returns whether lists and objects are nested so deeply that a function which calls itself could fail."""
    level = [value]
    for _ in range(MOST_DEPTH):
        level = [
            inner
            for each in level
            if isinstance(each, dict | list)
            for inner in (each.values() if isinstance(each, dict) else each)
        ]
    return bool(level)


def _conversation(route: str, body: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Returns the chat messages and the tools of a request."""
    given, choice = body.get("tools"), body.get("tool_choice")
    if route == RESPONSES:
        messages = responses_api.messages_of(body.get("input"), body.get("instructions"))
        return messages, [] if choice == "none" else responses_api.tools_of(given)
    if route == CHAT:
        return checked_messages(body.get("messages")), [] if choice == "none" else checked_tools(given)
    allowed = messages_api.calls_allowed(choice)
    messages = messages_api.messages_of(body.get("messages"), body.get("system"))
    return messages, messages_api.tools_of(given) if allowed else []


def answer_of(call: Call, text: str, reason: str, tokens: tuple[int, int]) -> dict[str, Any]:
    """Returns the message that tells the process with the request `call` to answer it with a turn of the policy.

    Args:
      text: the turn. Tool calls in this text are parsed if the request has tools.
      reason: "stop", or "length" if the token limit ended the turn.
      tokens: number of tokens of the prompt and of the turn.
    """
    content, calls = parsed_calls(text) if "tools" in call.variables else (text, [])
    if call.route != CHAT:
        opened = THOUGHT in content and not content.lstrip().startswith(THINK)
        made: ProtocolReply = MessagesReply(MODEL, opened)
        if call.route == RESPONSES:
            made = ResponsesReply(MODEL, opened, {})
        events = [*made.begin(Usage(*tokens)), *made.finish(content, calls, reason, None, Usage(*tokens))]
        body: Any = "".join(map(sse, events)) if call.stream else made.body
        return _message(call.id, 200, body, call.stream)
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = calls
        reason = "tool_calls" if reason == "stop" else reason
    usage = dict(zip(("prompt_tokens", "completion_tokens", "total_tokens"), (*tokens, sum(tokens)), strict=True))
    head = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": MODEL}
    if not call.stream:
        choice = {"index": 0, "message": message, "finish_reason": reason, "logprobs": None}
        body = {**head, "object": "chat.completion", "choices": [choice], "usage": usage}
        return _message(call.id, 200, body)
    if calls:
        message["tool_calls"] = [{"index": index, **each} for index, each in enumerate(calls)]
    chunks: list[dict[str, Any]] = [
        {"choices": [{"index": 0, "delta": message, "finish_reason": None}]},
        {"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]},
        {"choices": [], "usage": usage},
    ]
    lines = [json.dumps({**head, "object": "chat.completion.chunk", **chunk}) for chunk in chunks]
    return _message(call.id, 200, "".join(f"data: {line}\n\n" for line in [*lines, "[DONE]"]), stream=True)


def count_of(call: Call, tokens: int) -> dict[str, Any]:
    """Returns the message with the number of tokens of a request of the route `COUNT`."""
    return _message(call.id, 200, {"input_tokens": tokens})


def refusal_of(call: int, route: str, status: int, reason: str) -> dict[str, Any]:
    """Returns the message that tells the process with the request of the number `call` to refuse it. `status` is the
    HTTP status of the refusal."""
    if route in (MESSAGES, COUNT):
        return _message(call, status, messages_api.error_of(reason, status))
    return _message(call, status, {"error": {"message": reason, "type": "invalid_request_error", "code": status}})


def _message(call: int, status: int, body: Any, stream: bool = False) -> dict[str, Any]:
    return {"kind": "answer", "call": call, "status": status, "body": body, "stream": stream}
