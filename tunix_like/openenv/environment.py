"""Defines the environment `openenv`: each trajectory is a session of an OpenEnv server, which may run on another
machine."""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from tunix_like.environments.deadline import patience
from tunix_like.environments.protocol import EnvStepResult, checked_number, checked_step, show
from tunix_like.environments.tools import ToolCalls, ToolResult
from tunix_like.errors import EnvironmentMisconfigured, UserError
from tunix_like.openenv.session import (
    InvalidAction,
    ServerFull,
    Session,
    checked_url,
    require_websockets,
    schemas_of_server,
    tools_of_server,
)
from tunix_like.text.tool_calls import ToolCall, without_thinking

RELEASE_SECONDS = 3.0
"""Maximum time in seconds to wait for a free session of the server. The server can count a session for a short time
after the session has ended."""

_FENCE = re.compile(r"\A```\w*\n(.*?)\n?```\Z", re.DOTALL)


class ActionForm(NamedTuple):
    """How the text of a turn becomes an action for an OpenEnv server.

    Attributes:
      kind: what the text contains: tool calls, each of which is one action (`tools`), the value of one field of the
        action as text (`text`) or as JSON (`value`), or the whole action as JSON (`object`).
      field: for `text` and `value`, the name of the field.
      fields: for `object`, the names of the required fields, or of all fields if none is required.
    """

    kind: Literal["tools", "text", "value", "object"]
    field: str = ""
    fields: tuple[str, ...] = ()


class OpenEnv:
    """The environment of one trajectory, which is a session of an OpenEnv server.

    `reset` sends all columns of the data row; the server passes on the columns that its environment accepts. The schema
    of the server's actions determines how a turn becomes an action (see `action_form`). A turn that is not a valid
    action does not reach the environment of the server. The answer to an invalid turn or a failed tool call is a text
    that begins with "error:".

    Args:
      url: address of the server, e.g. http://127.0.0.1:8000.
      action: the field of the action that gets the text of a turn. If `action` is None, the schema determines the
        field.
      observation: the field of the observation that is shown to the model. If `observation` is None, all fields except
        `metadata` are shown.

    Raises:
      UserError: the address is not valid, or an argument is not text.
    """

    def __init__(self, url: str, action: str | None = None, observation: str | None = None):
        for name, value in (("action", action), ("observation", observation)):
            if value is not None and not isinstance(value, str):
                raise UserError(f"environment.arguments: {name} is {show(value)}; write the name of a field.")
        self.url = checked_url(url)
        self.action = action
        self.observation = observation
        self._wrong = 0
        self._calls = ToolCalls()  # without a schema: the server checks the arguments
        self._session: Session | None = None

    def tool_schemas(self) -> list[dict[str, Any]]:
        """Returns the JSON schemas of the server's tools; none if its actions are not tool calls. This method is called
        once before training, and also checks that the server can be used."""
        require_websockets()
        form = _form_of(self.url, self.action)
        return tools_of_server(self.url) if form.kind == "tools" else []

    def reset(self, **columns: Any) -> str | list[dict[str, str]] | None:
        """Opens a session, resets the environment of the session and returns the first observation. A newline is put
        before an observation that is text, which follows the prompt.

        Raises:
          EnvironmentMisconfigured: the server has no free session, or the observation lacks the configured field.
          EnvironmentUnavailable: the server cannot be reached.
          UserError: the reset failed.
        """
        self.close()
        answer = self._opened(columns)
        if answer.get("done") is True:
            raise UserError(f"OpenEnv server {self.url}: the episode is over after the reset, before the first turn.")
        try:
            shown = self._shown(answer["observation"])
        except UserError as error:
            raise EnvironmentMisconfigured(str(error)) from None
        return f"\n{shown}" if isinstance(shown, str) else shown

    def _opened(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """Opens a session and resets it. If the server is full, waits up to `RELEASE_SECONDS` for a free session."""
        end = time.monotonic() + patience(RELEASE_SECONDS)
        while True:
            self._session = Session(self.url)
            try:
                return self._session.call("reset", columns)
            except ServerFull:
                if time.monotonic() > end:
                    raise
            time.sleep(0.2)

    def step(self, completion: str) -> EnvStepResult:
        """Sends the action in a turn, or one action for each tool call in the turn, to the OpenEnv server."""
        form = _form_of(self.url, self.action)
        if form.kind == "tools":
            return self._calls.step(completion, self._run_tool)
        try:
            result = self._act(action_of(form, completion), self._shown)
        except InvalidAction as error:
            self._wrong += 1
            result = EnvStepResult(f"error: {error}")
        return result._replace(info={**result.info, "action_errors": float(self._wrong)})

    def close(self) -> None:
        if self._session is not None:
            self._session.close()
        self._session = None

    def _act(self, action: Mapping[str, Any], show: Callable[[Mapping[str, Any]], Any]) -> EnvStepResult:
        """Sends one action. `show` converts the observation to the text or messages that the model sees. See
        `Session.call` for the errors."""
        if self._session is None:
            raise UserError("OpenEnv: a step came before the reset.")
        answer = self._session.call("step", action)
        observation = answer["observation"]
        where = f"OpenEnv server {self.url}: step"
        reward = 0.0 if answer.get("reward") is None else checked_number(answer["reward"], f"{where}: reward")
        numbers = answer.get("metadata") or observation.get("metadata")
        info = numbers if isinstance(numbers, Mapping) else {}
        return checked_step((show(observation), reward, answer.get("done", False), info), where)

    def _run_tool(self, call: ToolCall) -> ToolResult:
        action = {"type": "call_tool", "tool_name": call.name, "arguments": call.arguments}
        try:
            result = self._act(action, tool_result)
        except InvalidAction as error:
            return ToolResult(f"error: {error}", failed=True)
        text = str(result.observation or "")
        return ToolResult(text, text.startswith("error:"), result.reward, result.done, result.info)

    def _shown(self, observation: Mapping[str, Any]) -> str | list[dict[str, str]] | None:
        """Returns the part of an observation that the model sees. Raises UserError if it lacks the configured field."""
        if self.observation is not None and self.observation not in observation:
            raise UserError(
                f"environment.arguments: the observation of {self.url} has no field '{self.observation}'; it has: "
                f"{', '.join(observation) or 'none'}."
            )
        return text_of(observation if self.observation is None else {"": observation[self.observation]})


def action_form(schema: Mapping[str, Any], field: str | None) -> ActionForm:
    """Returns how the text of a turn becomes an action, given the JSON schema of actions.

    If `field` is not None, the turn is the value of this field. If `field` is None and actions have the fields
    `tool_name` and `arguments`, each tool call of the turn is an action. Otherwise, if exactly one field is required,
    or no field is required and there is exactly one field, the turn is the value of this field. In all other cases, the
    turn is the whole action as a JSON object.

    The model writes the value of a field that can be text as plain text, and all other values as JSON.

    Raises:
      UserError: actions do not have the field `field`, or require further fields.
    """
    fields = {name: each for name, each in (schema.get("properties") or {}).items() if name != "metadata"}
    required = [name for name in schema.get("required") or [] if name in fields]
    if field is None and {"tool_name", "arguments"} <= set(fields):
        return ActionForm("tools")
    if field is None:
        candidates = required or list(fields)
        if len(candidates) != 1:
            return ActionForm("object", fields=tuple(candidates))
        field = candidates[0]
    elif fields and field not in fields:
        raise UserError(
            f"environment.arguments: the actions of the server have no field '{field}'; they have: {', '.join(fields)}."
        )
    elif missing := [name for name in required if name != field]:
        raise UserError(
            f"environment.arguments: the actions of the server need {', '.join(missing)} besides '{field}'; unset "
            "action, then the model writes the whole action as a JSON object."
        )
    return ActionForm("text" if _takes_text(fields.get(field, {})) else "value", field)


def _takes_text(schema: Mapping[str, Any]) -> bool:
    kinds = schema.get("type", [])
    if isinstance(kinds, str):
        return kinds == "string"
    if kinds:
        return "string" in kinds
    options = schema.get("anyOf") or schema.get("oneOf")
    return any(map(_takes_text, options)) if options else "$ref" not in schema and "allOf" not in schema


def action_of(form: ActionForm, completion: str) -> dict[str, Any]:
    """Converts the text of a turn to an action. First, `<think>` blocks are removed, and, if the action is JSON, a
    Markdown code fence around it. Raises InvalidAction if the text is not the JSON that `form` needs."""
    text = without_thinking(completion).strip()
    if form.kind == "text":
        return {form.field: text}
    if fenced := _FENCE.match(text):
        text = fenced[1]
    named = f" with {', '.join(form.fields)}" if form.fields else ""
    wanted = f"the value of {form.field} as JSON" if form.kind == "value" else f"an action as a JSON object{named}"
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise InvalidAction(f"the turn is not valid JSON; write {wanted}") from None
    if form.kind == "value":
        return {form.field: value}
    if not isinstance(value, dict):
        raise InvalidAction(f"the turn is not a JSON object; write {wanted}")
    return value


def text_of(observation: Mapping[str, Any]) -> str | list[dict[str, str]] | None:
    """Returns an observation as text or messages; None if the observation has no content.

    `metadata` and fields that are null or empty are ignored. If exactly one field remains, the value of this field is
    returned: a list of messages as messages, any other value as text. Several fields are returned as a JSON object.
    """
    kept = {
        name: value for name, value in observation.items() if name != "metadata" and value not in (None, "", [], {})
    }
    if len(kept) != 1:
        return json.dumps(kept, ensure_ascii=False) if kept else None
    (value,) = kept.values()
    if isinstance(value, list) and all(map(_is_message, value)):
        return [{"role": message["role"], "content": message["content"]} for message in value]
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(value.get(name), str) for name in ("role", "content"))


def tool_result(observation: Mapping[str, Any]) -> str:
    """Returns the text of the result of a tool call; the text of a failed call begins with "error:"."""
    if error := observation.get("error"):
        return f"error: {error.get('message', error) if isinstance(error, Mapping) else error}"
    result = observation["result"] if "result" in observation else text_of(observation)
    if not isinstance(result, Mapping) or not isinstance(result.get("content"), list):
        return result if isinstance(result, str) else "" if result is None else json.dumps(result, ensure_ascii=False)
    parts = [str(part["text"]) for part in result["content"] if isinstance(part, Mapping) and "text" in part]
    return ("error: " if result.get("is_error") else "") + "\n".join(parts)


@functools.cache  # the cache is filled before the processes of trajectories are forked
def _form_of(url: str, field: str | None) -> ActionForm:
    return action_form(schemas_of_server(url)["action"], field)
