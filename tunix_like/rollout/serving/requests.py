"""Parses and checks the requests of the three HTTP routes that sample completions."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Mapping
from typing import Any

from tunix_like.data.tokenizer import Tokenizer
from tunix_like.errors import UserError
from tunix_like.rollout.serving.chat import chat_tokens, checked_messages, checked_tools
from tunix_like.rollout.serving.fields import Fields, RequestError
from tunix_like.rollout.serving.jobs import Job, JobSampling

MOST_COMPLETIONS = 128
"""Maximum number of completions of one request: number of prompts times the parameter `n`."""

MOST_STOPS, MOST_STOP_IDS = 16, 1024
LOWEST_TEMPERATURE = 1e-3
"""Lowest valid temperature above 0. Division of the logits by values near 0 would overflow float32."""

IGNORED = {
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "request_id", "cache_salt",
    "prompt_cache_retention", "spaces_between_special_tokens", "detokenize",
}  # fmt: skip
"""Parameters of requests that are accepted and ignored, because they have no effect on the tokens."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,), "presence_penalty": (0,), "repetition_penalty": (1,), "logit_bias": ({},), "min_p": (0,),
    "min_tokens": (0,), "ignore_eos": (False,), "include_stop_str_in_output": (False,), "prompt_logprobs": (),
    "bad_words": ([],), "allowed_token_ids": (), "priority": (0,), "structured_outputs": (), "logits_processors": (),
}  # fmt: skip
"""Parameters of requests that are not supported. A request may set such a parameter only to one of its listed values,
which have no effect."""

OF_COMPLETIONS: dict[str, tuple[Any, ...]] = {"echo": (False,), "suffix": ("",), "best_of": (1,)}
OF_CHAT: dict[str, tuple[Any, ...]] = {
    "response_format": ({"type": "text"},), "functions": (), "function_call": (), "parallel_tool_calls": (True,),
    "modalities": (["text"],), "audio": (), "prediction": (), "reasoning_effort": (), "web_search_options": (),
    "verbosity": (), "add_generation_prompt": (True,), "continue_final_message": (False,), "echo": (False,),
    "add_special_tokens": (False,), "documents": ([],), "chat_template": (),
}  # fmt: skip
OF_GENERATE: dict[str, tuple[Any, ...]] = {
    "features": (), "content_parts": ([],), "priority": (0,), "kv_transfer_params": (), "ec_transfer_params": (),
    "output_mode": ("tokens",), "stream": (False,), "stream_options": (),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings with which a server is started.

    Attributes:
      name: the model's name in requests and answers.
      version: the version of the weights, e.g. the step of a checkpoint.
      vocab_size: number of token ids of the model.
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
class Request:
    """A parsed and valid request.

    Attributes:
      jobs: one per prompt: the prompt, the number of its completions (parameter `n`) and their sampling parameters.
      stops: strings that end a completion.
      logprobs: whether the log-probabilities of the sampled tokens are returned.
      special: whether the text includes special tokens.
      tools: whether tool calls in the text are parsed.
    """

    jobs: tuple[Job, ...]
    stops: tuple[str, ...] = ()
    stream: bool = False
    usage_in_stream: bool = False
    logprobs: bool = False
    token_ids: bool = False
    special: bool = False
    tools: bool = False


def completion_request(body: Mapping[str, Any], settings: Settings, tokenizer: Tokenizer) -> Request:
    """Parses and checks a request of `/v1/completions`. Raises RequestError if the request is not valid."""
    fields = Fields(body)
    _check_model(fields, settings)
    prompts = _prompts(fields, settings, tokenizer)
    if (logprobs := fields.integer("logprobs", None, 0)) not in (None, 0):
        raise fields.error(
            "logprobs", f"got {logprobs}; only 0, the log-probability of the sampled token, is supported"
        )
    fields.neutral(OF_COMPLETIONS)
    request = _request(fields, settings, prompts, fields.integer("max_tokens", None, 1))
    return dataclasses.replace(request, logprobs=logprobs is not None)


def chat_request(body: Mapping[str, Any], settings: Settings, tokenizer: Tokenizer) -> Request:
    """Parses and checks a request of `/v1/chat/completions`. Raises RequestError if the request is not valid."""
    fields = Fields(body)
    _check_model(fields, settings)
    messages = checked_messages(fields.take("messages"))
    tools = checked_tools(fields.take("tools"))
    if (choice := fields.take("tool_choice")) not in (None, "none", "auto"):
        raise fields.error("tool_choice", f"got {str(choice)[:80]}; valid: none, auto")
    if choice == "none":
        tools = []
    variables = fields.mapping("chat_template_kwargs")
    if fields.integer("top_logprobs", 0, 0):
        raise fields.error("top_logprobs", "only 0 is supported: the log-probability of the sampled token")
    logprobs = fields.flag("logprobs")
    fields.neutral(OF_CHAT)
    tokens = chat_tokens(tokenizer, messages, tools, variables, settings.longest)
    both = [fields.integer(name, None, 1) for name in ("max_completion_tokens", "max_tokens")]
    request = _request(fields, settings, [tokens], both[0] if both[0] is not None else both[1])
    return dataclasses.replace(request, logprobs=logprobs, tools=bool(tools))


def generate_request(body: Mapping[str, Any], settings: Settings) -> Request:
    """Parses and checks a request of `/inference/v1/generate`. Raises RequestError if the request is not valid."""
    fields = Fields(body)
    _check_model(fields, settings)
    tokens = fields.list_of("token_ids", _is_int, "token ids", 1 << 24)
    prompt = _checked_tokens(fields, "token_ids", tokens, settings)
    given = fields.take("sampling_params")
    if not isinstance(given, dict):
        raise fields.error("sampling_params", "it must be an object")
    token_ids = fields.flag("return_token_ids")
    fields.neutral(OF_GENERATE)
    fields.finish(IGNORED)
    inner = Fields(given, "sampling_params.")
    logprobs = inner.integer("logprobs", None, 0, 1)
    inner.neutral({"stop": ([], ""), "stream": (False,), "return_token_ids": (False,)})
    request = _request(inner, settings, [prompt], inner.integer("max_tokens", None, 1))
    return dataclasses.replace(request, logprobs=logprobs is not None, token_ids=token_ids)


def _check_model(fields: Fields, settings: Settings) -> None:
    name = fields.text("model")
    if name not in (None, settings.name):
        message = f"the model {name[:200]!r} does not exist; this server has {settings.name!r}"
        raise RequestError(message, "model", http=404, kind="not_found_error")


def _request(fields: Fields, settings: Settings, prompts: list[list[int]], max_tokens: int | None) -> Request:
    """Reads the parameters that all three HTTP routes for sampling accept, and builds the request. Raises RequestError
    if a parameter is not valid or not known."""
    temperature = fields.number("temperature", settings.temperature, 0, 100)
    if 0 < temperature < LOWEST_TEMPERATURE:
        raise fields.error(
            "temperature", f"got {temperature:g}; it must be 0 (greedy) or at least {LOWEST_TEMPERATURE}"
        )
    top_k = fields.integer("top_k", settings.top_k, -1)
    n = fields.integer("n", 1, 1, MOST_COMPLETIONS)
    if n * len(prompts) > MOST_COMPLETIONS:
        raise fields.error("n", f"{len(prompts)} prompts x {n} completions exceed the limit of {MOST_COMPLETIONS}")
    seed = fields.integer("seed", None, -(1 << 63), (1 << 64) - 1)
    stop_ids = fields.list_of("stop_token_ids", _is_int, "token ids", MOST_STOP_IDS)
    sampling = JobSampling(
        max_tokens=1,
        temperature=temperature,
        top_p=fields.number("top_p", settings.top_p, 0, 1, above=True),
        top_k=None if top_k in (None, -1, 0) else min(top_k, settings.vocab_size),
        seed=secrets.randbits(64) if seed is None else seed & 0xFFFFFFFFFFFFFFFF,
        stop_ids=frozenset(stop_ids),
    )
    stops = fields.take("stop")
    stops = [stops] if isinstance(stops, str) and stops else stops or []
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops) or len(stops) > MOST_STOPS:
        raise fields.error("stop", f"it must be a text, or a list of at most {MOST_STOPS} texts")
    if "" in stops:
        raise fields.error("stop", "a stop string is empty; remove it")
    stream, options = fields.flag("stream"), Fields(fields.mapping("stream_options"), "stream_options.")
    usage = options.flag("include_usage")
    options.neutral({"include_obfuscation": (False, True), "continuous_usage_stats": (False,)})
    options.finish()
    skip = fields.take("skip_special_tokens")
    if skip not in (None, True, False):
        raise fields.error("skip_special_tokens", "it must be true or false")
    token_ids = fields.flag("return_token_ids")
    fields.neutral(NEUTRAL)
    fields.finish(IGNORED)
    jobs = []
    for number, prompt in enumerate(prompts):
        most = _room(fields, settings, len(prompt), max_tokens)
        jobs.append(Job(prompt, n, dataclasses.replace(sampling, max_tokens=most), number))
    return Request(tuple(jobs), tuple(stops), stream, usage, False, token_ids, skip is False)


def _room(fields: Fields, settings: Settings, prompt: int, max_tokens: int | None) -> int:
    """Returns the maximum number of tokens of a completion. Raises RequestError if a prompt of `prompt` tokens and the
    completion have more than `settings.longest` tokens together."""
    longest = settings.longest
    if prompt >= longest:
        raise fields.error(
            "max_tokens", f"the prompt has {prompt} tokens; prompt and completion have at most {longest}"
        )
    if max_tokens is None:
        return min(settings.max_tokens, longest - prompt)
    if prompt + max_tokens > longest:
        raise fields.error(
            "max_tokens",
            f"the prompt has {prompt} tokens, and with max_tokens={max_tokens} the total is {prompt + max_tokens}; "
            f"prompt and completion have at most {longest}",
        )
    return max_tokens


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _checked_tokens(fields: Fields, name: str, tokens: list[int], settings: Settings) -> list[int]:
    if not tokens:
        raise fields.error(name, "the prompt has no tokens")
    if wrong := next((token for token in tokens if not 0 <= token < settings.vocab_size), None):
        raise fields.error(name, f"{str(wrong)[:24]} is not a token id; valid: 0 to {settings.vocab_size - 1}")
    return tokens


def _prompts(fields: Fields, settings: Settings, tokenizer: Tokenizer) -> list[list[int]]:
    """Reads the field `prompt` of a request of `/v1/completions`. Returns the token ids of each prompt."""
    given = fields.take("prompt")
    if isinstance(given, str) or (isinstance(given, list) and given and all(map(_is_int, given))):
        given = [given]
    if not isinstance(given, list) or not given:
        raise fields.error("prompt", "it must be a text, a list of token ids, or a list of these")
    if len(given) > MOST_COMPLETIONS:
        raise fields.error("prompt", f"it has {len(given)} prompts, at most {MOST_COMPLETIONS} are allowed")
    prompts = []
    for prompt in given:
        if isinstance(prompt, str):
            try:
                tokens = tokenizer.encode_prompt(prompt, False, settings.longest)[1]
            except UserError as error:
                raise fields.error("prompt", str(error)) from None
        elif isinstance(prompt, list) and all(map(_is_int, prompt)):
            tokens = prompt
        else:
            raise fields.error("prompt", "it must be a text, a list of token ids, or a list of these")
        prompts.append(_checked_tokens(fields, "prompt", tokens, settings))
    return prompts
