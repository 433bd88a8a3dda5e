"""Tests chat templates that fail or render too much text, and prompts of many megabytes: they give an error or a
skipped row. Other conversations are rendered as usual."""

from __future__ import annotations

import time

import jinja2
import pytest

from tests.data.test_tokenizer import CHATML, CHATS, bpe
from tunix_like import UserError
from tunix_like.config.schema import DataConfig
from tunix_like.data.source import PromptFormat
from tunix_like.data.stream import check_prompts, render
from tunix_like.data.tokenizer import Tokenizer
from tunix_like.runtime.untrusted import fill

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
