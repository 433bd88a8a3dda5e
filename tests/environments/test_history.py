"""Tests conversations that are rendered again at each turn: their ids equal those of transformers, and a row is
restarted when they change."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from tests.environments.test_bridge import BUILT, FAMILIES, QWEN3, QWEN25, TEXTS, TOOLS, OfTransformers, tool, user
from tunix_like import EnvironmentConfig, UserError
from tunix_like.environments.history import Continuation, Histories
from tunix_like.text.tokenizer import Tokenizer


def build_thinking(template=QWEN3):
    """Returns a byte-level tokenizer whose tokens of thoughts and calls are not control tokens, as in Qwen3, and the
    same tokenizer of transformers."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<|im_end|>", "<|endoftext|>", "<|im_start|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=340, special_tokens=[AddedToken(each, special=True) for each in special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
    )  # fmt: skip
    backend.train_from_iterator(TEXTS, trainer)
    plain = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
    backend.add_tokens([AddedToken(each, special=False, normalized=False) for each in plain])
    ids = [backend.token_to_id(end) for end in special[:2]]
    ours = Tokenizer(backend, eos_token="<|im_end|>", chat_template=template, eos_ids=ids)
    theirs = OfTransformers(tokenizer_object=backend, eos_token="<|im_end|>", chat_template=template)
    return ours, theirs


ROOT = Path(__file__).resolve().parents[2]


def histories_of(tokenizer, tools=False, history="template"):
    config = EnvironmentConfig(max_observation_tokens=4096, history=history)
    return Histories(tokenizer, True, tokenizer.eos_ids, tools, config)


THOUGHT = "<think>\nhm\n</think>\n\n"
CALL = 'so\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
BROKEN = '<tool_call>{"name": 1</tool_call>'
TURNS = [
    (THOUGHT + "first", [user("go on")], True),
    ("second", [user("go on")], False),
    (THOUGHT + CALL, [tool("2")], False),
    (THOUGHT + BROKEN, [tool("error: x"), tool("y")], False),
    ("", [], True),
    ("third", [], True),
    (THOUGHT + "fourth", [user("and <|im_end|>?")], True),
]
"""Turns, what the environment adds, and whether Qwen3's template then rewrites the history. After a user message it
removes the thoughts of earlier turns; after a message of a tool it keeps them. An empty turn that is the last message
gets an empty thought."""


@pytest.mark.parametrize("name", ["qwen25", "qwen3", "example"])
def test_ids_equal_those_of_transformers(name):
    example = (ROOT / "examples/environments/chatml_tools.jinja").read_text(encoding="utf-8")
    ours, theirs = build_thinking({"qwen25": QWEN25, "qwen3": QWEN3, "example": example}[name])
    ours.with_template_variables({"tools": TOOLS}).check_tools("tools")
    ours = ours.with_template_variables({"tools": TOOLS})
    histories, messages = histories_of(ours, True), [user("Question")]
    row = ours.encode_prompt(messages, True)[1]
    prompt, history = list(row), histories.begin(messages, row)
    restarts = []
    for text, new, _ in TURNS:
        tokens = [*ours.encode(text, add_special_tokens=False), ours.eos_id]
        history.add_turn(text, tokens)
        found = histories.add(history, new)
        row = [*prompt, *found.tokens] if found.restart else [*row, *tokens, *found.tokens]
        messages = [*messages, {"role": "assistant", "content": text}, *new]
        harmless = [{k: v.replace("<|im_end|>", "X") for k, v in message.items()} for message in messages]
        expected = theirs.apply_chat_template(harmless, tools=TOOLS, add_generation_prompt=True, return_dict=False)
        if harmless == messages:
            assert row == expected == history.tokens
        assert row.count(ours.eos_id) == expected.count(ours.eos_id), "a control token in an observation is text"
        restarts.append(found.restart)
    assert restarts == ([rewrites for *_, rewrites in TURNS] if name == "qwen3" else [False] * len(TURNS))
    assert history.rewritten == sum(restarts)


def test_unusual_tokens_restart_a_row():
    """Covers tokens that differ from those of their text, and an end of the turn that differs from the template's."""
    ours, theirs = build_thinking(QWEN25)
    histories = histories_of(ours)
    prompt = ours.encode_prompt([user("Question")], True)[1]
    usual, letters = ours.encode("answer"), [i for letter in "answer" for i in ours.encode(letter)]
    assert usual != letters
    messages = [user("Question"), {"role": "assistant", "content": "answer"}, user("x")]
    whole = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    for tokens, restart in (([*usual, ours.eos_ids[0]], False), ([*usual, ours.eos_ids[1]], True),
                            ([*letters, ours.eos_ids[0]], True)):  # fmt: skip
        history = histories.begin([user("Question")], prompt)
        history.add_turn("answer", tokens)
        found = histories.add(history, [user("x")])
        assert found.restart == restart
        assert [*prompt, *([] if restart else tokens), *found.tokens] == whole


def test_failed_observation_does_not_change_the_history():
    """Covers a prompt that a later message changes, and a template that fails."""
    template = (
        "{% for m in messages %}{% if m.content == 'fail' %}{{ raise_exception('no') }}{% endif %}"
        "{% if loop.first and messages[-1].content == 'other' %}X{% endif %}"
        "<|im_start|>{{ m.content }}<|im_end|>{% endfor %}<|im_start|>"
    )
    ours, _ = build_thinking(template)
    prompt = ours.encode_prompt([user("Q")], True)[1]
    histories = histories_of(ours)
    history = histories.begin([user("Q")], prompt)
    history.add_turn("A", [*ours.encode("A"), ours.eos_id])
    same = [*history.messages], [*history.tokens]
    for text, problem in (
        ("fail", "failed on a conversation"), ("other", "does not begin with the prompt"), ("\ud800", "surrogate")
    ):  # fmt: skip
        with pytest.raises(UserError, match=problem):
            histories.add(history, [user(text)])
        assert (history.messages, history.tokens) == same
    assert histories.add(history, [user("good")]) == Continuation(ours.encode("<|im_start|>good<|im_end|><|im_start|>"))
    assert len(history.messages) == 3


def test_sampled_history_keeps_only_the_last_token():
    """The tokens of an observation depend on the end of the turn and on nothing before it."""
    ours, _ = build_thinking(QWEN25)
    prompt, turn = ours.encode_prompt([user("Q")], True)[1], [*ours.encode("A longer answer"), ours.eos_id]
    begun = histories_of(ours, history="sampled").begin([user("Q")], prompt)
    history, whole = begun.copy(), histories_of(ours).begin([user("Q")], prompt)
    assert history.prompt == len(prompt) and history.opening == []
    for _ in range(3):
        for each in (history, whole):
            each.add_turn("A longer answer", turn)
        added = histories_of(ours, history="sampled").add(history, [user("next")])
        assert added == histories_of(ours).add(whole, [user("next")])
        assert history.tokens == whole.tokens[-1:] and len(whole.tokens) > len(prompt)
    assert begun.tokens == prompt[-1:]


@pytest.mark.parametrize("name", FAMILIES)
def test_conversation_of_each_family_starts_with_its_prompt(name):
    ours = BUILT[name][0]
    prompt = ours.encode_prompt([user("Q")], True)[1]
    history = histories_of(ours).begin([user("Q")], prompt)
    assert history.tokens == list(prompt) and not history.opening


OPENED = QWEN3.replace(
    "{{- '<|im_start|>assistant\n' }}{%- endif %}", "{{- '<|im_start|>assistant\n<think>\n' }}{%- endif %}"
)
"""Opens the thought in the prompt, as the templates of models that always think do."""


@pytest.mark.parametrize(
    ("template", "variables", "opening", "turns"),
    [
        (QWEN3, {"enable_thinking": False}, "<think>\n\n</think>\n\n", ["one", "two"]),
        (OPENED, {}, "<think>\n", ["hm\n</think>\n\none", "well\n</think>\n\ntwo"]),
    ],
)
def test_opening_that_later_turns_drop_is_in_the_row(template, variables, opening, turns):
    """Every later turn keeps the prompt of the group."""
    ours, theirs = build_thinking(template)
    ours = ours.with_template_variables(variables)
    histories, messages = histories_of(ours), [user("Question")]
    whole = ours.encode_prompt(messages, True)[1]
    history = histories.begin(messages, whole)
    assert ours.decode(history.opening) == opening
    prompt, row = whole[: history.prompt], whole
    for text in turns:
        tokens = [*ours.encode(text, add_special_tokens=False), ours.eos_id]
        history.add_turn(text, tokens)
        found = histories.add(history, [user("next")])
        row = [*prompt, *found.tokens]
        messages = [*messages, {"role": "assistant", "content": text}, user("next")]
        assert found.restart and row == theirs.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False, **variables
        )


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages | length }}{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}",
        QWEN3.replace("<think>\n\n</think>", "think " * 100).replace("is false", "is not false").replace(
            "enable_thinking is defined and ", ""),
    ],
)  # fmt: skip
def test_template_whose_prompt_changes_is_rejected(template):
    """Covers a template that writes the number of messages first, and one with a long end of the prompt."""
    ours, _ = build_thinking(template)
    with pytest.raises(
        UserError, match=r"^environment\.history=template: after a later turn, .* Set environment\.hist"
    ):
        histories_of(ours)
