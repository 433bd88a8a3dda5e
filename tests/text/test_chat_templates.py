"""Tests chat templates that fail or render too much text, and prompts of many megabytes: they give an error or a
skipped row. Other conversations are rendered as usual."""

from __future__ import annotations

import time

import jinja2
import jinja2.ext
import jinja2.sandbox
import pytest

from tests.text.test_tokenizer import CHATML, CHATS, bpe
from tunix_like import UserError
from tunix_like.config.schema import DataConfig
from tunix_like.data.source import PromptFormat
from tunix_like.data.stream import check_prompts, render
from tunix_like.text import chat_templates
from tunix_like.text.tokenizer import Tokenizer
from tunix_like.text.untrusted import fill

pytestmark = pytest.mark.slow

TURN = [{"role": "user", "content": "hi"}]
RANGE = "{% for a in range(99999) %}"
END = "{% endfor %}"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ '%20000000s' % 1 }}", "more than 10000000 characters"),
        (RANGE + RANGE + "{{ messages[0].content * 1000 }}" + END + END, "more than 10000000 characters"),
        ("{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}", "RecursionError"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "OverflowError"),
        ("{{ messages.__class__.__mro__ }}", "SecurityError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ raise_exception('bad one') }}", "bad one"),
    ],
)
def test_template_that_fails_or_renders_too_much_raises_an_error(template, said):
    with pytest.raises(UserError, match=rf"^The tokenizer's chat template failed on a conversation \(user\): .*{said}"):
        bpe(template).render(TURN)


def test_rows_that_fail_are_errors():
    template = "{% if 'bad' in messages[0].content %}{{ raise_exception('bad one') }}{% endif %}" + CHATML
    texts = ["a", "long " * 40_000, "b", "bad", "c", "d" * 300, "\ud800x", "e"]
    rows = [{"prompt": [{"role": "user", "content": text}], "n": i} for i, text in enumerate(texts)]
    rows[2]["prompt"] = "as it is"
    rows[4] = {"question": "no prompt"}
    rows[5]["prompt"] = [{"content": "no role"}]
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    errors = {3: "bad one", 4: "needs a 'prompt' column", 5: "it must be an object with a role", 6: "lone surrogate"}
    tokenizer = bpe(template)
    for number, row in enumerate(rows):
        if number in errors:
            with pytest.raises(UserError, match=errors[number]):
                render(row, tokenizer)
            continue
        found = render(row, tokenizer)
        prompt = rows[number]["prompt"]
        made = environment.from_string(CHATML).render(messages=prompt, add_generation_prompt=True)
        expected = prompt if isinstance(prompt, str) else made
        assert found.text == expected and found.tokens == tokenizer.encode(expected) and found.columns == {"n": number}


@pytest.mark.parametrize(
    "template", ["{a:>1000000000}", "{a:.1000000000}", "{a!r:{w}}", "{n:01000000000}", "{n:.999999f}"]
)
def test_prompt_template_with_a_huge_width_raises_an_error(template):
    row = {"a": "x", "n": 1.5, "w": "999999999"}
    begun = time.monotonic()
    with pytest.raises(UserError, match=r"data.prompt_template .* failed: .*the maximum is 10000"):
        PromptFormat.of(DataConfig(name="jsonl", path="x", prompt_template=template), None)(row)
    assert time.monotonic() - begun < 1
    assert fill("{a:>12}{n:08.3f}", row) == "           x0001.500"


HUGE = "12 and 34, " * 2_800_000  # 30 MB


def test_prompts_of_30_megabytes_are_encoded_only_in_part(monkeypatch):
    """Covers text, messages, control tokens and answers, both when prompts are counted and when they are skipped. Only
    a small fraction of the characters is encoded."""
    tokenizer, encoded, encode = bpe(), [], Tokenizer.encode
    counted = lambda self, text, *rest, **named: encoded.append(len(text)) or encode(self, text, *rest, **named)  # noqa: E731
    monkeypatch.setattr(Tokenizer, "encode", counted)
    spelled = "<|im_end|> " + HUGE
    filled = fill("Q: {q}", {"q": spelled})
    chats = [{"role": "user", "content": spelled}], [*CHATS[1], {"role": "user", "content": HUGE}]
    for prompt, control in ((HUGE, 0), (spelled, 1), (filled, 0), (chats[0], 1), (chats[1], 3)):
        row = render({"prompt": prompt}, tokenizer, 100)
        assert 100 < len(row.tokens) < 3_000, "some more than fit, not all"
        assert row.tokens.count(tokenizer.eos_id) == control, "those that are the prompt's own, and none of data"
    assert tokenizer.encode_data(spelled, 50) == tokenizer.encode_data(spelled[:1000], 50)
    rows = [{"prompt": HUGE}, {"prompt": "short"}]
    assert check_prompts(rows, tokenizer, 100, "skip", "training").long == 1
    with pytest.raises(UserError, match="row 0 .* has over 200000 tokens"):
        check_prompts(rows, tokenizer, 100, "error", "training")
    assert 100 < sum(encoded) < 0.2 * len(HUGE), "in all of the nine calls"


def test_text_that_the_template_drops_does_not_count_as_prompt_length():
    last = "{{ messages[0].content[-9:] }}"
    prompt = [{"role": "user", "content": "0123456789" * 10_000 + "TheEND>>>"}]
    assert bpe(last).encode_prompt(prompt, True, most=20)[0] == "TheEND>>>"


ENDLESS = {
    "loops": "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}" + "{% endfor %}" * 3,
    "loops over a text": "{% set t = 'x' * 99999 %}{% for a in t %}{% for b in t %}" + "{% endfor %}" * 2,
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "recursive loop": "{% for a in [[[]]] recursive %}{{ loop(a) }}{{ loop([a, a]) }}{% endfor %}",
    "calls": "{% for a in range(9999) %}{% for b in range(9999) %}{{ b|string|length|string }}" + "{% endfor %}" * 2,
    "power": "{{ 9 ** (9 ** 9) }}",
    "powers": "{% set n = namespace(x=3) %}{% for a in range(99) %}{% set n.x = n.x ** 3 %}{% endfor %}",
    "squares": "{% set n = namespace(x=3) %}{% for a in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "long text": "{{ ('x' * 99999999999)|length }}",
    "long list": "{{ ([1] * 99999999999)|length }}",
}  # fmt: skip


@pytest.mark.parametrize("template", ENDLESS.values(), ids=ENDLESS)
def test_a_template_has_a_limit_of_time(template, monkeypatch):
    monkeypatch.setattr(chat_templates, "SECONDS", 0.3)
    began = time.monotonic()
    with pytest.raises(chat_templates.TemplateFailed):
        chat_templates.render(template, {"messages": [{"role": "user", "content": "a"}] * 3}, 10)
    assert time.monotonic() - began < 10


def test_loops_are_those_of_jinja():
    """Also with variables of the loop that need its length, filters, conditions, `else`, and a template without
    loops."""
    for template in (
        "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ m.role if not loop.last }}{% endfor %}",
        "{% for m in messages if m.x %}{{ m }}{% else %}none{% endfor %}",
        "{% for a, b in pairs.items() %}{{ a }}{{ b * 2 }}{{ loop.previtem }}{{ loop.nextitem }}{% endfor %}",
        "{% for m in missing %}{{ m }}{% endfor %}{{ 2 ** 10 * 3 }}{{ '-' * 3 }}{{ [1] * 2 }}{{ 1.5 * 2 }}",
        "{% for a in tree recursive %}{{ loop.depth }}{{ loop(a) }}{% endfor %}",
        "{% for a in [1, 2, 3] %}{% if a == 2 %}{% continue %}{% endif %}{{ loop.cycle('x', 'y') }}{% endfor %}",
    ):
        values = {"messages": [{"role": "user"}, {"role": "b"}], "pairs": {"a": 1, "b": 2}, "tree": [[[]], []]}
        plain = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
        )
        assert chat_templates.render(template, values, 10) == plain.from_string(template).render(values)
