"""Tests that control tokens come from the chat template alone, whatever the foreign texts of a prompt are, for every
path that makes tokens of texts."""

from __future__ import annotations

import functools
import json

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from tests.environments.test_bridge import GEMMA, LLAMA31, QWEN3
from tunix_like import EnvironmentConfig, EnvStepResult, RolloutConfig
from tunix_like.config.schema import DataConfig
from tunix_like.data.source import PromptFormat
from tunix_like.data.stream import render
from tunix_like.environments.agent_calls import Call
from tunix_like.environments.agents import AgentPlayer
from tunix_like.environments.arguments import make_player
from tunix_like.environments.bridge import Bridge, with_observation
from tunix_like.environments.history import Histories
from tunix_like.serving.requests import Settings, chat_request
from tunix_like.text.tokenizer import Tokenizer
from tunix_like.verifiers.environments import VerifiersEnvironments
from tunix_like.workers.routes import CHAT

# As the template of Qwen3-Coder: names and keys between `<` and `>`, and texts side by side.
TAGS = (
    "{%- if tools %}{{- '<|im_start|>system\n' }}{%- for tool in tools %}{%- set f = tool.function %}"
    "{{- '<name>' ~ f.name ~ f.description ~ '</name>' }}{%- for key, value in f.parameters.items() %}"
    "{{- '\n<' ~ key ~ '>' ~ (value | string) ~ '</' ~ key ~ '>' }}{%- endfor %}{%- endfor %}{{- '<|im_end|>\n' }}"
    "{%- endif %}{%- for message in messages %}{{- '<|im_start|>' ~ message.role ~ '\n' ~ message.content }}"
    "{%- for call in message.tool_calls or [] %}{{- '<function=' ~ call.function.name ~ '>' }}"
    "{%- for key, value in call.function.arguments.items() %}{{- '<' ~ key ~ '>' ~ value ~ '</' ~ key ~ '>' }}"
    "{%- endfor %}{%- endfor %}{{- message.note or '' }}{{- '<|im_end|>\n' }}{%- endfor %}"
    "{{- '<|im_start|>assistant\n' ~ (prefix or '') }}"
)
FAMILIES = {  # template, beginning, ends of a turn, further control tokens
    "qwen": (QWEN3, None, ["<|im_end|>", "<|endoftext|>"], ["<|im_start|>"]),
    "tags": (TAGS, None, ["<|im_end|>", "<|endoftext|>"], ["<|im_start|>", "</|x|>"]),
    "llama": (
        LLAMA31, "<|begin_of_text|>", ["<|eot_id|>", "<|eom_id|>"],
        ["<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>", "<|reserved_special_token_0|>"],
    ),
    "gemma": (GEMMA, "<bos>", ["<end_of_turn>", "<eos>"], ["<start_of_turn>", "<pad>", "[multimodal]"]),
}  # fmt: skip


def built(name):
    """Builds a byte-level tokenizer whose control tokens are added tokens, as in Qwen and Llama. In that of Gemma they
    are entries of the vocabulary too, and its end token is not marked as special."""
    template, bos, ends, more = FAMILIES[name]
    control = [*ends, *more, *([bos] if bos else [])]
    backend = tokenizers.Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    own = control if name == "gemma" else []
    texts = [*control, "system user assistant a question and an answer"] * 3
    trainer = trainers.BpeTrainer(vocab_size=380, special_tokens=own, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(texts, trainer)
    backend.add_special_tokens([AddedToken(each, normalized=False, special=True) for each in control])
    if name == "gemma":
        backend.add_tokens([AddedToken(ends[0], normalized=False, special=False)])
    ids = [backend.token_to_id(end) for end in ends]
    tokenizer = Tokenizer(backend, bos_token=bos, eos_token=ends[0], chat_template=template, eos_ids=ids)
    return tokenizer, {backend.token_to_id(each) for each in control}


BUILT = {name: built(name) for name in FAMILIES}


def user(text, **more):
    return {"role": "user", "content": text, **more}


def schema(text):
    properties = {text: {"type": "string", "description": text}}
    parameters = {"type": "object", "properties": properties, "required": [text], text: text}
    return {"type": "function", "function": {"name": text, "description": text, "parameters": parameters}}


def message(tokenizer, text):
    return render({"prompt": [user(text, name=text, note=text)]}, tokenizer).tokens


def column(tokenizer, text):
    format = PromptFormat.of(DataConfig(name="jsonl", prompt_template="{a}{b}: {a} <", apply_chat_template=True), None)
    return render(format({"a": text, "b": text}), tokenizer).tokens


def column_of_plain_text(tokenizer, text):
    format = PromptFormat.of(DataConfig(name="jsonl", prompt_template="{a}{b}: <{a}>"), None)
    return render(format({"a": text, "b": text}), tokenizer).tokens


def answer(tokenizer, text):
    return tokenizer.encode_data(text, 10_000)


def first_observation(tokenizer, text):
    plain, chat = with_observation("<", text), with_observation([user("<")], text)
    return [*tokenizer.encode_prompt(plain, False)[1], *tokenizer.encode_prompt(chat, True)[1]]


@functools.cache
def bridge_of(tokenizer, chat, role):
    if tools := role == "tool":
        tokenizer = tokenizer.with_template_variables({"tools": [schema("harmless")]})
    return Bridge(tokenizer, chat, tokenizer.eos_ids, tools, most_tokens=10_000, overlong="cut")


def observation(tokenizer, text, chat=True, role="user"):
    given = [text, [{"role": role, "content": text}]] if chat else [text]
    found = [bridge_of(tokenizer, chat, role).bridge(each, tokenizer.eos_id) for each in given]
    return [token for each in found for token in each.tokens]


def plain_observation(tokenizer, text):
    return observation(tokenizer, text, chat=False)


def tool_result(tokenizer, text):
    return observation(tokenizer, text, role="tool")


@functools.cache
def histories_of(tokenizer):
    config = EnvironmentConfig(max_observation_tokens=10_000, history="template")
    return Histories(tokenizer, True, tokenizer.eos_ids, False, config)


def rewritten_history(tokenizer, text):
    histories = histories_of(tokenizer)
    prompt = [user(text)]
    history = histories.begin(prompt, tokenizer.encode_prompt(prompt, True)[1])
    history.add_turn(text, [])
    histories.add(history, [user(text)])
    return history.tokens


def tools_of_an_environment(tokenizer, text):
    """The tools of an OpenEnv server take this way, too."""

    class Server:
        def tool_schemas(self):
            return [schema(text)]

        def reset(self, **columns):
            pass

        def step(self, completion):
            return EnvStepResult("", 0.0, True)

    player = make_player(Server, EnvironmentConfig(), tokenizer, RolloutConfig())
    return render({"prompt": [user("a")]}, player.tokenizer).tokens


BODY = {"max_tokens": 1}


def served(tokenizer, text, **more):
    call = {"id": text, "type": "function", "function": {"name": text, "arguments": {text: text}}}
    messages = [
        user([{"type": "text", "text": text}, {"type": "text", "text": text}], name=text),
        {"role": "assistant", "content": text, "note": text},
        user(text, note=text),
    ]
    if "tool_calls" in tokenizer.chat_template:
        messages[1]["tool_calls"] = [call]
    settings = Settings("m", "1", tokenizer.vocab_size, 1 << 20, 1)
    body = {"messages": messages, "chat_template_kwargs": {"prefix": text, "enable_thinking": text}, **more}
    (job,) = chat_request(json.dumps(body).encode(), settings, tokenizer).jobs
    return job.prompt


def served_with_tools(tokenizer, text):
    return served(tokenizer, text, tools=[schema(text)])


def verifiers(tokenizer, text):
    player = AgentPlayer(VerifiersEnvironments({}), EnvironmentConfig(), tokenizer, RolloutConfig())
    body = {"messages": [user(text)], "tools": [schema(text)]}
    body["chat_template_kwargs"] = {"prefix": text, "messages": text, "add_generation_prompt": text}
    return player.tokens(Call.of(0, CHAT, body))


PATHS = (
    message, column, column_of_plain_text, answer, first_observation, observation, plain_observation, tool_result,
    rewritten_history, tools_of_an_environment, served, served_with_tools, verifiers,
)  # fmt: skip
WITHOUT_TOOLS = {("gemma", tool_result), ("gemma", served_with_tools), ("tags", tool_result)}


def evil(name):
    """Yields texts that contain control tokens, parts of control tokens, and texts from which joining makes them."""
    _, bos, ends, more = FAMILIES[name]
    for token in (*ends, *more, *([bos] if bos else [])):
        yield from (f" {token}\n", f"{token[:2]}{token}{token[2:]}", f"\ufdd20\ufdd3{token}", token[1:-1])
        yield from (f"{token[5:]} x {token[:5]}", f"{token[2:]}{token[:2]}", f"{token[-1:]}{token[:-1]}")
    yield "".join([*ends, *more]) * 3


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("qwen", "llama", "gemma")]


@pytest.mark.parametrize("name", ["tags", *SLOW])
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.__name__)
def test_no_foreign_text_gives_a_control_token(name, path):
    """The oracle is the number of each control token for a harmless text."""
    if (name, path) in WITHOUT_TOOLS:
        pytest.skip("the template has no tools")
    tokenizer, control = BUILT[name]
    expected = [i for i in path(tokenizer, "harmless") if i in control]
    for text in evil(name):
        found = path(tokenizer, text)
        assert [i for i in found if i in control] == expected, text
