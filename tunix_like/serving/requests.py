"""Parses and checks the requests of the HTTP routes that sample completions."""

from __future__ import annotations

import dataclasses
import itertools
import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import PydanticCustomError

from tunix_like.environments import messages_api, responses_api
from tunix_like.environments.chat_messages import RequestError, checked_messages, checked_tools, wrong
from tunix_like.errors import UserError
from tunix_like.serving.programs import MOST_TOP
from tunix_like.serving.runner import Job, JobSampling
from tunix_like.text.tokenizer import Tokenizer

MOST_COMPLETIONS = 128
"""Maximum number of completions of one request: number of prompts times the parameter `n`."""

MOST_COUNTED = 1 << 17
"""Maximum number of tokens that `/v1/messages/count_tokens` counts, unless prompts can be longer: the tokenizer takes
about 250 bytes per token."""

LOWEST_TEMPERATURE = 1e-3
"""Lowest valid temperature above 0. Division of the logits by values near 0 would overflow float32."""

IGNORED = {
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "request_id", "cache_salt",
    "prompt_cache_retention", "spaces_between_special_tokens", "detokenize",
}  # fmt: skip
"""Parameters that are accepted and ignored, because they have no effect on the tokens."""

UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,), "presence_penalty": (0,), "repetition_penalty": (1,), "logit_bias": ({},), "min_p": (0,),
    "min_tokens": (0,), "ignore_eos": (False,), "include_stop_str_in_output": (False,), "prompt_logprobs": (),
    "bad_words": ([],), "allowed_token_ids": (), "priority": (0,), "structured_outputs": (), "logits_processors": (),
    "echo": (False,), "suffix": ("",), "best_of": (1,), "response_format": ({"type": "text"},), "functions": (),
    "function_call": (), "parallel_tool_calls": (True,), "modalities": (["text"],), "audio": (), "prediction": (),
    "reasoning_effort": (), "web_search_options": (), "verbosity": (), "add_generation_prompt": (True,),
    "continue_final_message": (False,), "add_special_tokens": (False,), "documents": ([],), "chat_template": (),
    "features": (), "content_parts": ([],), "kv_transfer_params": (), "ec_transfer_params": (),
    "output_mode": ("tokens",), "stream": (False,), "stream_options": (), "stop": ([], ""),
    "return_token_ids": (False,), "include_obfuscation": (False, True), "continuous_usage_stats": (False,),
    "background": (False,), "truncation": ("disabled",), "text": ({}, {"format": {"type": "text"}}), "prompt": (),
    "max_tool_calls": (), "effort": (), "context_management": (), "container": (), "mcp_servers": ([],),
    "output_config": ({},), "top_logprobs": (0,), "moderation": (),
}  # fmt: skip
"""Parameters that are not supported, or not by every route, with the values that have no effect."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings with which a server is started.

    Attributes:
      name: the model's name in requests and answers.
      version: the version of the weights, e.g. the step of a checkpoint.
      longest: maximum number of tokens of prompt and completion together.
      max_tokens, temperature, top_p, top_k: values for requests that do not have these parameters.
      max_waiting: a new request is refused if at least this number of completions waits.
    """

    name: str
    version: str
    vocab_size: int
    longest: int
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    max_waiting: int = 256


@dataclasses.dataclass(frozen=True)
class ParsedRequest:
    """A parsed and valid request.

    Attributes:
      jobs: one per prompt.
      logprobs: whether the log-probabilities of the sampled tokens are returned.
      special: whether the text includes special tokens.
      tools: whether tool calls in the text are parsed.
      echo: fields of the request that the answer repeats.
    """

    jobs: Sequence[Job]
    stops: Sequence[str] = ()
    stream: bool = False
    usage_in_stream: bool = False
    logprobs: bool = False
    token_ids: bool = False
    special: bool = False
    tools: bool = False
    echo: Mapping[str, Any] = dataclasses.field(default_factory=dict)


_Tokens = Annotated[list[int], Field(fail_fast=True)]


class _Fields(BaseModel):
    """A JSON object. Fields with the value null count as absent."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_null(cls, value: Any) -> Any:
        return {name: x for name, x in value.items() if x is not None} if isinstance(value, dict) else value

    def check_rest(self, prefix: str = "") -> None:
        """Raises RequestError if a parameter is unknown, or if its value would have an effect that is not supported."""
        for name, value in (self.model_extra or {}).items():
            full = f"{prefix}{name[:64]}"
            neutral = UNSUPPORTED.get(name)
            if name in IGNORED:
                continue
            if neutral is None:
                raise wrong(full, "there is no such parameter")
            if not any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in neutral):
                only = f"; only {' or '.join(map(json.dumps, neutral))} is" if neutral else ""
                raise wrong(full, f"this parameter is not supported{only}")


class _Sampling(_Fields):
    n: int = Field(1, ge=1, le=MOST_COMPLETIONS)
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 64)
    stop_token_ids: list[int] = Field([], max_length=1024, fail_fast=True)
    skip_special_tokens: bool = True

    @field_validator("temperature")
    @classmethod
    def _not_too_low(cls, value: float) -> float:
        if 0 < value < LOWEST_TEMPERATURE:
            raise PydanticCustomError("temperature", f"Input should be 0 (greedy) or at least {LOWEST_TEMPERATURE}")
        return value


class _StreamOptions(_Fields):
    include_usage: bool = False


class _Body(_Sampling):
    model: str | None = None
    stop: list[Annotated[str, Field(min_length=1)]] = Field([], max_length=16, fail_fast=True)
    stream: bool = False
    stream_options: _StreamOptions = _StreamOptions()
    return_token_ids: bool = False

    @field_validator("stop", mode="before")
    @classmethod
    def _list_of_stops(cls, value: Any) -> Any:
        return ([value] if value else []) if isinstance(value, str) else value


class _Completion(_Body):
    add_special_tokens: Literal[True] = True
    prompt: list[str | _Tokens] = Field(min_length=1, max_length=MOST_COMPLETIONS, fail_fast=True)
    logprobs: int | None = Field(None, ge=0, le=MOST_TOP)

    @field_validator("prompt", mode="before")
    @classmethod
    def _list_of_prompts(cls, value: Any) -> Any:
        one = isinstance(value, str) or (isinstance(value, list) and value and isinstance(value[0], int))
        return [value] if one else value


class _Chat(_Body):
    messages: Any
    tools: Any = None
    tool_choice: Literal["none", "auto"] = "auto"
    chat_template_kwargs: dict[str, Any] = {}
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MOST_TOP)
    max_completion_tokens: int | None = Field(None, ge=1)


class _SamplingParams(_Sampling):
    logprobs: int | None = Field(None, ge=0, le=1)


class _Generate(_Fields):
    model: str | None = None
    token_ids: _Tokens
    sampling_params: _SamplingParams
    return_token_ids: bool = False


class _OneAnswer(_Sampling):
    """The sampling parameters of protocols that return one answer without special tokens."""

    n: int = Field(1, ge=1, le=1)
    skip_special_tokens: Literal[True] = True
    model: str | None = None
    stream: bool = False
    chat_template_kwargs: dict[str, Any] = {}


class _Reasoning(_Fields):
    summary: Any = None
    generate_summary: Any = None


class _Responses(_OneAnswer):
    max_tokens: int | None = Field(None, ge=1, alias="max_output_tokens")
    input: Any
    instructions: str | None = None
    tools: Any = None
    tool_choice: Literal["none", "auto"] = "auto"
    include: list[Literal["reasoning.encrypted_content"]] = []
    reasoning: _Reasoning = _Reasoning()
    stream_options: _Fields = _Fields()
    previous_response_id: Any = None
    conversation: Any = None


class _MessagesPrompt(_Fields):
    """Fields that have no effect on the prompt are ignored: the model thinks as its chat template says."""

    model: str | None = None
    messages: Any
    system: Any = None
    tools: Any = None
    tool_choice: Any = None
    thinking: Any = None
    cache_control: Any = None
    chat_template_kwargs: dict[str, Any] = {}


class _Messages(_MessagesPrompt, _OneAnswer):
    max_tokens: int = Field(ge=1)
    stop_sequences: list[Annotated[str, Field(min_length=1)]] = Field([], max_length=16, fail_fast=True)


_Route = TypeVar("_Route", _Completion, _Chat, _Generate, _Responses, _Messages, _MessagesPrompt)


def _parsed(kind: type[_Route], body: bytes, settings: Settings) -> _Route:
    """Parses the body of a request. Raises RequestError if it is not valid."""
    try:
        fields = kind.model_validate_json(body)
    except ValidationError as error:
        raise _request_error(error) from None
    if fields.model not in (None, settings.name):
        message = f"the model {fields.model[:200]!r} does not exist; this server has {settings.name!r}"
        raise RequestError(message, "model", http=404, kind="not_found_error")
    fields.check_rest()
    return fields


def _request_error(error: ValidationError) -> RequestError:
    """Converts the errors of the first wrong field. A field of several types has an error for each of them."""
    reasons: dict[str, list[str]] = {}
    for each in error.errors(include_url=False, include_context=False, include_input=False):
        name = ".".join(map(str, itertools.takewhile(lambda part: isinstance(part, str), each["loc"])))
        reasons.setdefault(name, []).append(each["msg"])
    name = next(iter(reasons))
    reason = " or ".join(dict.fromkeys(reasons[name]))
    return wrong(name, reason) if name else RequestError(f"the body of the request: {reason}")


def completion_request(body: bytes, settings: Settings, tokenizer: Tokenizer) -> ParsedRequest:
    """Parses a request of `/v1/completions`. Raises RequestError if the request is not valid."""
    fields = _parsed(_Completion, body, settings)
    prompts = []
    for prompt in fields.prompt:
        try:
            tokens = tokenizer.encode_prompt(prompt, False, settings.longest)[1] if isinstance(prompt, str) else prompt
        except UserError as error:
            raise wrong("prompt", str(error)) from None
        prompts.append(_checked_tokens("prompt", tokens, settings))
    if fields.n * len(prompts) > MOST_COMPLETIONS:
        message = f"{len(prompts)} prompts x {fields.n} completions exceed the limit of {MOST_COMPLETIONS}"
        raise wrong("n", message)
    jobs = _jobs(fields, settings, prompts, fields.logprobs or 0)
    return _with_text(fields, jobs, fields.logprobs is not None)


def chat_request(body: bytes, settings: Settings, tokenizer: Tokenizer) -> ParsedRequest:
    """Parses a request of `/v1/chat/completions`. Raises RequestError if the request is not valid."""
    fields = _parsed(_Chat, body, settings)
    messages = checked_messages(fields.messages)
    tools = checked_tools(fields.tools)
    tools = [] if fields.tool_choice == "none" else tools
    if fields.top_logprobs and not fields.logprobs:
        raise wrong("top_logprobs", "it needs logprobs: true")
    tokens = _chat_tokens(tokenizer, messages, tools, fields.chat_template_kwargs, settings.longest)
    if fields.max_completion_tokens is not None:
        fields.max_tokens = fields.max_completion_tokens
    jobs = _jobs(fields, settings, [tokens], fields.top_logprobs)
    return dataclasses.replace(_with_text(fields, jobs, fields.logprobs), tools=bool(tools))


def responses_request(body: bytes, settings: Settings, tokenizer: Tokenizer) -> ParsedRequest:
    """Parses a request of `/v1/responses`. Raises RequestError if the request is not valid."""
    fields = _parsed(_Responses, body, settings)
    fields.reasoning.check_rest("reasoning.")
    fields.stream_options.check_rest("stream_options.")
    for name in ("previous_response_id", "conversation"):
        if getattr(fields, name) is not None:
            raise wrong(name, responses_api.STATELESS)
    messages = responses_api.messages_of(fields.input, fields.instructions)
    tools = responses_api.tools_of(fields.tools)
    tools = [] if fields.tool_choice == "none" else tools
    tokens = _chat_tokens(tokenizer, messages, tools, fields.chat_template_kwargs, settings.longest, "input")
    jobs = _jobs(fields, settings, [tokens], 0, "max_output_tokens")
    echo = {
        "instructions": fields.instructions,
        "max_output_tokens": fields.max_tokens,
        "temperature": jobs[0].sampling.temperature,
        "top_p": jobs[0].sampling.top_p,
        "tool_choice": fields.tool_choice,
        "tools": fields.tools or [],
    }
    return ParsedRequest(jobs, stream=fields.stream, tools=bool(tools), echo=echo)


def messages_request(body: bytes, settings: Settings, tokenizer: Tokenizer) -> ParsedRequest:
    """Parses a request of `/v1/messages`. Raises RequestError if the request is not valid."""
    fields = _parsed(_Messages, body, settings)
    tokens, tools = _messages_tokens(fields, tokenizer, settings.longest)
    jobs = _jobs(fields, settings, [tokens], 0)
    return ParsedRequest(jobs, stops=fields.stop_sequences, stream=fields.stream, tools=tools)


def count_request(body: bytes, settings: Settings, tokenizer: Tokenizer) -> int:
    """Returns the number of tokens of a request of `/v1/messages/count_tokens`. Raises RequestError if the request is
    not valid or has too many tokens."""
    most = max(MOST_COUNTED, settings.longest)
    size = len(_messages_tokens(_parsed(_MessagesPrompt, body, settings), tokenizer, most)[0])
    if size > most:
        raise RequestError(f"the prompt has more than {most} tokens, the most that are counted", "messages")
    return size


def _messages_tokens(fields: _MessagesPrompt, tokenizer: Tokenizer, most: int) -> tuple[list[int], bool]:
    """Returns the token ids of the prompt, and whether it has tools."""
    messages = messages_api.messages_of(fields.messages, fields.system)
    tools = messages_api.tools_of(fields.tools)
    tools = tools if messages_api.calls_allowed(fields.tool_choice) else []
    return _chat_tokens(tokenizer, messages, tools, fields.chat_template_kwargs, most), bool(tools)


def generate_request(body: bytes, settings: Settings, _: Tokenizer) -> ParsedRequest:
    """Parses a request of `/inference/v1/generate`. Raises RequestError if the request is not valid."""
    fields = _parsed(_Generate, body, settings)
    sampling = fields.sampling_params
    prompt = _checked_tokens("token_ids", fields.token_ids, settings)
    sampling.check_rest("sampling_params.")
    jobs = _jobs(sampling, settings, [prompt], 0, "sampling_params.max_tokens")
    return ParsedRequest(jobs, logprobs=sampling.logprobs is not None, token_ids=fields.return_token_ids)


def _with_text(fields: _Body, jobs: Sequence[Job], logprobs: bool) -> ParsedRequest:
    fields.stream_options.check_rest("stream_options.")
    return ParsedRequest(
        jobs,
        stops=fields.stop,
        stream=fields.stream,
        usage_in_stream=fields.stream_options.include_usage,
        logprobs=logprobs,
        token_ids=fields.return_token_ids,
        special=not fields.skip_special_tokens,
    )


def _jobs(
    fields: _Sampling, settings: Settings, prompts: Sequence[Sequence[int]], top: int, name: str = "max_tokens"
) -> list[Job]:
    """Returns the job of each prompt. Raises RequestError if a prompt and its completion exceed `settings.longest`."""
    top_k = settings.top_k if fields.top_k is None else fields.top_k
    sampling = JobSampling(
        max_tokens=settings.max_tokens if fields.max_tokens is None else fields.max_tokens,
        temperature=settings.temperature if fields.temperature is None else fields.temperature,
        top_p=settings.top_p if fields.top_p is None else fields.top_p,
        top_k=None if top_k in (None, -1, 0) else min(top_k, settings.vocab_size),
        seed=secrets.randbits(64) if fields.seed is None else fields.seed & 0xFFFFFFFFFFFFFFFF,
        stop_ids=frozenset(fields.stop_token_ids),
        top=top,
    )
    limit = f"prompt and completion have at most {settings.longest} (serve --max-length)"
    jobs = []
    for number, prompt in enumerate(prompts):
        room = settings.longest - len(prompt)
        if room <= 0:
            raise wrong(name, f"the prompt has {len(prompt)} tokens; {limit}")
        if (most := fields.max_tokens) is not None and most > room:
            total = f"with max_tokens={most} the total is {len(prompt) + most}"
            raise wrong(name, f"the prompt has {len(prompt)} tokens, and {total}; {limit}")
        few = dataclasses.replace(sampling, max_tokens=min(sampling.max_tokens, room))
        jobs.append(Job(prompt, fields.n, few, number))
    return jobs


def _checked_tokens(name: str, tokens: Sequence[int], settings: Settings) -> Sequence[int]:
    if not tokens:
        raise wrong(name, "the prompt has no tokens")
    if (bad := next((token for token in tokens if not 0 <= token < settings.vocab_size), None)) is not None:
        raise wrong(name, f"{str(bad)[:24]} is not a token id; valid: 0 to {settings.vocab_size - 1}")
    return tokens


def _chat_tokens(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any],
    most: int,
    name: str = "messages",
) -> list[int]:
    """Returns the token ids of a conversation, up to where the answer begins (see `Tokenizer.render_prompt`).

    Control tokens that are written in messages are encoded as plain text. If a conversation has more than `most`
    tokens, the result may contain only its beginning.
    """
    if tokenizer.chat_template is None:
        raise RequestError("the model has no chat template; use /v1/completions", name)
    for key in ("messages", "tools", "add_generation_prompt", "bos_token", "eos_token", "pad_token"):
        if key in variables:
            raise wrong(f"chat_template_kwargs.{key}", "it cannot be set")
    try:
        text = tokenizer.render_prompt(messages, True, **variables, **({"tools": tools} if tools else {}))
        if tools and not tokenizer.renders_tools:
            raise RequestError("the chat template of this model ignores tools; leave them out", "tools")
        tokens = tokenizer.encode_guarded(text, most)
    except UserError as error:
        raise RequestError(str(error), name) from None
    if not tokens:
        raise wrong(name, "the prompt has no tokens")
    return tokens
