"""Messages and tools of chats in one form. Prompts, conversations of data and requests of `serve` pass
through `chat_messages`, so a message means the same everywhere."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tunix_like.errors import UserError
from tunix_like.text.tool_calls import arguments_of

_RESULTS = ("tool", "function", "ipython", "observation")
ROLES = ("system", "developer", "user", "assistant", *_RESULTS)
"""Valid roles. Some templates write `<|ROLE|>`, so another role could form any control token, such as `<|end|>`."""

Wrong = Callable[[str, str], UserError]
"""`wrong(field, reason)` returns the error to raise."""


def _wrong(field: str, reason: str) -> UserError:
    return UserError(f"{field}: {reason}.")


def chat_messages(given: Any, name: str = "messages", wrong: Wrong = _wrong) -> list[dict[str, Any]]:
    """Checks a list of messages, and returns it in one form; a second call changes nothing.

    Fields that are None are left out. The content becomes a text: parts of type text are joined, and the result of a
    tool that is an object becomes its JSON text. The arguments of tool calls are objects or, as OpenAI writes them,
    their JSON text. In arguments that are objects, values that are None are left out, because `datasets` adds them to
    the rows of a table; JSON text keeps them.

    Args:
      name: begins the name of a wrong field, such as `messages[2].role`.
    """
    if isinstance(given, str) or not isinstance(given, Sequence) or not given:
        raise wrong(name, f"it must be a list of messages, got {given!r:.80}")
    try:
        return [_message(f"{name}[{place}]", message, wrong) for place, message in enumerate(given)]
    except RecursionError:
        raise wrong(name, "a value is nested too deeply") from None


def _message(name: str, given: Any, wrong: Wrong) -> dict[str, Any]:
    if not isinstance(given, Mapping) or not isinstance(given.get("role"), str):
        raise wrong(name, f"it must be an object with a role, got {given!r:.80}")
    if given["role"] not in ROLES:
        raise wrong(f"{name}.role", f"got {given['role'][:24]!r}; valid: {', '.join(ROLES)}")
    message = {key: value for key, value in given.items() if value is not None}
    calls = message.pop("tool_calls", [])
    if not isinstance(calls, list | tuple):
        raise wrong(f"{name}.tool_calls", "it must be a list")
    message["content"] = _text(f"{name}.content", message.get("content", "" if calls else None), given["role"], wrong)
    if calls:
        message["tool_calls"] = [_call(f"{name}.tool_calls", call, wrong) for call in calls]
    return message


def _text(name: str, content: Any, role: str, wrong: Wrong) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list | tuple) else None
    typed = parts is not None and all(isinstance(part, Mapping) and "type" in part for part in parts)
    if role in _RESULTS and not typed and isinstance(content, Mapping | list | tuple):
        return json.dumps(content, ensure_ascii=False, default=repr)
    if parts is None:
        raise wrong(name, f"it must be a text or a list of parts, got {content!r:.80}")
    texts = [part.get("text") if typed and part["type"] == "text" else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise wrong(name, "only parts of type text are supported")
    return "".join(map(str, texts))


def _call(name: str, given: Any, wrong: Wrong) -> dict[str, Any]:
    function = given.get("function") or given if isinstance(given, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        raise wrong(name, "each call must have a function with a name")
    arguments = function.get("arguments")
    try:
        found = arguments_of(arguments)
    except ValueError:
        raise wrong(name, f"the arguments of {function['name']!r} must be an object or its JSON text") from None
    arguments = arguments if isinstance(arguments, str) else _without_none(found)
    made = {key: value for key, value in function.items() if value is not None} | {"arguments": arguments}
    if function is given:  # a call without the fields of OpenAI
        return {"type": "function", "function": made}
    return {"type": "function"} | {key: value for key, value in given.items() if value is not None} | {"function": made}


def template_messages(given: Any) -> list[dict[str, Any]]:
    """Returns `chat_messages(given)` with all arguments of tool calls as objects, which chat templates write as JSON
    themselves."""
    messages = chat_messages(given)
    for message in messages:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = arguments_of(call["function"]["arguments"])
    return messages


def chat_tools(given: Any, name: str = "tools", wrong: Wrong = _wrong) -> list[dict[str, Any]]:
    """Checks tools: a list of objects, or its JSON text; each object can be JSON text as well. Values that are None are
    left out of objects, as in `chat_messages`."""
    tools = [] if given is None else _parsed(given, name, wrong)
    if not isinstance(tools, list):
        raise wrong(name, f"it must be a list of tools or its JSON text, got {given!r:.80}")
    found = [_parsed(tool, f"{name}[{place}]", wrong) for place, tool in enumerate(tools)]
    for place, tool in enumerate(found):
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
            raise wrong(f"{name}[{place}]", f"a tool must be an object with the name of a function, got {tool!r:.80}")
    return found


def _parsed(value: Any, name: str, wrong: Wrong) -> Any:
    try:
        return json.loads(value.strip() or "[]") if isinstance(value, str) else _without_none(value)
    except ValueError:
        raise wrong(name, f"it is not JSON text: {value!r:.80}") from None
    except RecursionError:
        raise wrong(name, "a value is nested too deeply") from None


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_none(inner) for key, inner in value.items() if inner is not None}
    return [_without_none(item) for item in value] if isinstance(value, list | tuple) else value
