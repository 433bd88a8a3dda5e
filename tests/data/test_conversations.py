"""Tests that a conversation reaches the model as its author wrote it, in the column `prompt`, in `messages` and in a
request of `serve`, with templates that treat odd messages as those of Qwen3, Llama 3.1 and Llama 3 do."""

from __future__ import annotations

import json

import pytest

from tests.text.test_tokenizer import auto, bpe
from tests.training.test_sft_conversations import CALLS, LENGTHS, encoded, make
from tunix_like import UserError
from tunix_like.data.source import PromptFormat
from tunix_like.data.stream import render
from tunix_like.environments.chat_messages import RequestError
from tunix_like.environments.history import History
from tunix_like.rewards.served_reward_model import ServedRewardModel
from tunix_like.serving.requests import Settings, chat_request

QWEN3 = (  # contents that are no string are empty; unknown roles vanish; thoughts of earlier turns vanish
    "{%- if tools %}{{- '<|im_start|>system\n' ~ (tools | tojson) ~ '<|im_end|>\n' }}{%- endif %}"
    "{%- for message in messages %}{%- set content = message.content if message.content is string else '' %}"
    "{%- if message.role == 'user' or message.role == 'system' %}"
    "{{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}"
    "{%- elif message.role == 'assistant' %}{{- '<|im_start|>assistant\n' }}"
    "{%- if loop.last %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}{{- content.split('</think>')[-1] | trim }}"
    "{%- for call in message.tool_calls or [] %}{{- '\n<tool_call>\n' ~ (call.function | tojson) ~ '\n</tool_call>' }}"
    "{%- endfor %}{{- '<|im_end|>\n' }}{%- elif message.role == 'tool' %}"
    "{{- '<|im_start|>user\n<tool_response>\n' + content + '\n</tool_response><|im_end|>\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
LLAMA31 = (  # a field with null counts as given; a call hides the text; results are written as JSON
    "{%- for message in messages %}{%- if 'tool_calls' in message %}{%- if message.tool_calls | length != 1 %}"
    "{{- raise_exception('This model only supports single tool-calls at once!') }}{%- endif %}"
    '{%- set call = message.tool_calls[0].function %}{{- \'<|im_start|>assistant\n{"name": "\' + call.name + \'", '
    "\"parameters\": ' ~ (call.arguments | tojson) ~ '}<|im_end|>\n' }}"
    "{%- elif message.role in ('tool', 'ipython') %}{{- '<|im_start|>ipython\n' }}{%- if message.content is iterable %}"
    "{{- message.content | tojson }}{%- else %}{{- message.content }}{%- endif %}{{- '<|im_end|>\n' }}{%- else %}"
    "{{- '<|im_start|>' + message.role + '\n' + message.content | trim + '<|im_end|>\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
LLAMA3 = (  # everything becomes a string
    "{%- for message in messages %}{{- '<|im_start|>' ~ message.role ~ '\n' ~ message.content ~ '<|im_end|>\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
TEMPLATES = {"qwen3": QWEN3, "llama31": LLAMA31, "llama3": LLAMA3}
USER = {"role": "user", "content": "2+2?"}
PARTS = [{"type": "text", "text": "2"}, {"type": "text", "text": "+2?", "image": None}]


def call(arguments, **fields):
    return {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}, **fields}]}


def by_prompt(tokenizer, messages):
    return render(PromptFormat(None)({"prompt": messages}), tokenizer).text


def by_learner(tokenizer, messages):
    return render({"prompt": messages}, tokenizer).text


def by_messages(tokenizer, messages):
    row = {"messages": [*messages, {"role": "assistant", "content": "4"}]}
    first = next(
        (i for i, message in enumerate(messages) if isinstance(message, dict) and message.get("role") == "assistant"),
        None,
    )
    return render(PromptFormat(None)(row), tokenizer).text if first is None else by_prompt(tokenizer, messages)


def by_serve(tokenizer, messages):
    settings = Settings("m", "1", tokenizer.vocab_size, 1 << 20, 1)
    (job,) = chat_request(json.dumps({"messages": messages}).encode(), settings, tokenizer).jobs
    return tokenizer.decode(job.prompt, skip_special_tokens=False)


PATHS = (by_prompt, by_learner, by_messages, by_serve)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("given", "meant", "templates"),
    [
        ([{"role": "user", "content": PARTS}], [USER], TEMPLATES),
        ([USER | {"tool_calls": None, "name": None}], [USER], TEMPLATES),
        ([USER | {"tool_calls": []}], [USER], TEMPLATES),
        ([USER, call('{"x": 1}') | {"content": None}, {"role": "tool", "content": {"a": [1, "é"]}}],
         [USER, call({"x": 1}) | {"content": ""}, {"role": "tool", "content": '{"a": [1, "é"]}'}], ["qwen3"]),
        ([USER, call({"city": "Paris", "x": None, "y": {"z": None}}, id=None), {"role": "tool", "content": [{"t": 2}]}],
         [USER, call({"city": "Paris", "y": {}}) | {"content": ""}, {"role": "tool", "content": '[{"t": 2}]'}],
         ["qwen3", "llama31"]),
        ([USER, call('{"x": null}') | {"content": ""}, {"role": "tool", "content": "4"}],
         [USER, call({"x": None}) | {"content": ""}, {"role": "tool", "content": "4"}], ["qwen3"]),
    ],
)  # fmt: skip
def test_odd_messages_give_the_text_of_plain_ones(tmp_path, path, given, meant, templates):
    """The oracle is transformers, with the messages as they are meant."""
    for name in templates:
        tokenizer = bpe(TEMPLATES[name])
        tokenizer.save(tmp_path)
        expected = auto(tmp_path).apply_chat_template(meant, tokenize=False, add_generation_prompt=True)
        assert path(tokenizer, given) == expected


OWN_TEXT = call({}) | {"content": "I add."}
BAD = [
    ([{"role": "user", "content": None}], TEMPLATES),
    ([{"role": "user"}], TEMPLATES),
    ([{"role": "user", "content": 5}], TEMPLATES),
    ([{"role": "user", "content": {"text": "2+2?"}}], TEMPLATES),
    ([{"role": "user", "content": ["2+2?"]}], TEMPLATES),
    ([{"role": "user", "content": [{"type": "image", "url": "x"}]}], TEMPLATES),
    ([{"role": "user", "content": [{"type": "text", "text": None}]}], TEMPLATES),
    ([{"role": "human", "content": "2+2?"}], TEMPLATES),
    ([{"role": "user<|im_end|>", "content": "2+2?"}], TEMPLATES),
    ([{"role": None, "content": "2+2?"}, USER], TEMPLATES),
    (["2+2?", USER], TEMPLATES),
    ([USER | {"tool_calls": 5}], TEMPLATES),
    ([USER, {"role": "assistant", "tool_calls": [5]}], TEMPLATES),
    ([USER, call("{"), {"role": "tool", "content": "4"}], TEMPLATES),
    ([USER, call([1]), {"role": "tool", "content": "4"}], TEMPLATES),
    # what a template drops
    ([{"role": "developer", "content": "Be brief."}, USER], ["qwen3"]),
    ([USER, call({}), {"role": "observation", "content": "4"}], ["qwen3"]),
    ([USER, call({}), {"role": "tool", "content": "4"}], ["llama3"]),
    ([USER, OWN_TEXT, {"role": "tool", "content": "4"}], ["llama31"]),
    # what cannot be continued
    ([USER, {"role": "assistant", "content": " "}], TEMPLATES),
    ([USER, call({})], ["qwen3", "llama31"]),
    ([USER, {"role": "assistant", "content": "<think>a</think>b"}], ["qwen3"]),
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("given", "templates"), BAD)
def test_what_would_not_reach_the_model_is_an_error(path, given, templates):
    for name in templates:
        if path is by_serve and given[1:2] == [OWN_TEXT]:  # an agent sends back what the model wrote
            assert "I add." not in path(bpe(TEMPLATES[name]), given)
            continue
        with pytest.raises(RequestError if path is by_serve else UserError):
            path(bpe(TEMPLATES[name]), given)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("begun", ["The answer", " The answer", "The answer is ", "The answer\n", "The <", "2+2?", "4"])
def test_prompt_that_ends_with_the_assistant_is_continued_as_by_transformers(tmp_path, path, template, begun):
    tokenizer = bpe(TEMPLATES[template])
    tokenizer.save(tmp_path)
    chat = [USER, {"role": "assistant", "content": begun}]
    expected = auto(tmp_path).apply_chat_template(chat, tokenize=False, continue_final_message=True)
    assert path(tokenizer, chat) == expected and expected.rstrip().endswith(begun.strip())


@pytest.mark.parametrize("begun", ["e", "end", "im", "|", "<", "assistant"])
def test_continued_text_is_not_sought_in_the_text_of_the_template(begun):
    """transformers would find these in the token that ends the turn."""
    chat = [USER, {"role": "assistant", "content": begun}]
    rendered = bpe(TEMPLATES["qwen3"]).render(chat, False)
    assert bpe(TEMPLATES["qwen3"]).encode_prompt(chat, True)[0] == rendered.removesuffix("<|im_end|>\n")


def test_turn_and_judge_see_a_continued_message_as_one(monkeypatch):
    history = History([USER, {"role": "assistant", "content": "The "}], [1, 2], 2)
    history.add_turn("answer", [3])
    whole = [USER, {"role": "assistant", "content": "The answer"}]
    assert history.messages == whole
    judge, asked = ServedRewardModel("http://localhost:1", model="m"), []

    async def ask(self, path, messages):
        asked.append(messages)
        return {"data": [{"probs": [1.0]}]}

    monkeypatch.setattr(type(judge), "ask", ask)
    given = {"prompts": [[USER, {"role": "assistant", "content": "The "}]], "completions": ["answer"]}
    judge.score_groups("judge", given, 1, 1)
    assert asked == [whole]


TOOL = {"type": "function", "function": {"name": "f", "description": "Adds.", "parameters": {"type": "object"}}}
MERGED = {**TOOL, "strict": None, "function": {**TOOL["function"], "return": None}}


@pytest.mark.parametrize("given", [json.dumps([TOOL]), [json.dumps(TOOL)], [MERGED]])
def test_column_tools_as_text_or_merged_structs_gives_the_prompt_of_the_list(given):
    tokenizer = bpe(QWEN3)
    found = render({"prompt": [USER], "tools": given}, tokenizer).text
    assert found == tokenizer.render([USER], tools=[TOOL])


@pytest.mark.parametrize(
    ("column", "template"),
    [
        ("add", QWEN3),
        ("{}", QWEN3),
        ("[5]", QWEN3),
        ([{"type": "function"}], QWEN3),
        ("[" * 100_000, QWEN3),
        (5, QWEN3),
        ([TOOL], LLAMA3),
    ],
)
def test_column_tools_that_the_model_would_not_see_is_an_error(column, template):
    with pytest.raises(UserError, match="column 'tools'"):
        render({"prompt": [USER], "tools": column}, bpe(template))


def test_column_tools_beside_tools_of_the_environment_is_an_error():
    with pytest.raises(UserError, match="column 'tools': the environment has tools"):
        render({"prompt": [USER], "tools": [TOOL]}, bpe(QWEN3).with_template_variables({"tools": [TOOL]}))


def test_a_text_prompt_gets_no_tools():
    assert render({"prompt": "text", "tools": True}, bpe(QWEN3)).text == "text"


def test_null_arguments_of_merged_structs_are_not_trained():
    row = {"prompt": [USER], "answer": [call({"city": "Paris", "x": None}), {"role": "tool", "content": "4"}]}
    row["answer"].append({"role": "assistant", "content": "4"})
    tokenizer = bpe(CALLS)
    text = tokenizer.decode(encoded(make(tokenizer, LENGTHS, batch_size=1), row)[0], False)
    assert "Paris" in text and "null" not in text
