"""Tests chat templates that take too much time or memory, and prompts of many megabytes: they give an error or a
skipped row within seconds. Other conversations are rendered as usual, also many at a time."""

from __future__ import annotations

import os
import signal
import time

import jinja2
import pytest

from tests.data.test_tokenizer import CHATML, CHATS, bpe
from tunix_like import UserError
from tunix_like.config.schema import DataConfig
from tunix_like.data.source import PromptFormat
from tunix_like.data.stream import check_prompts, prompt_batches, render, render_all
from tunix_like.data.tokenizer import Tokenizer
from tunix_like.runtime import chat_templates
from tunix_like.runtime.untrusted import fill

pytestmark = pytest.mark.slow

TURN = [{"role": "user", "content": "hi"}]
RANGE = "{% for a in range(99999) %}"
END = "{% endfor %}"


@pytest.fixture
def limits(monkeypatch):
    """Gives the test its own worker with small limits."""
    monkeypatch.setattr(chat_templates, "_worker", None)
    monkeypatch.setattr(chat_templates, "SECONDS", 0.5)
    monkeypatch.setattr(chat_templates, "MEMORY", 512 * 1024**2)
    yield
    chat_templates._forget()


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (RANGE * 4 + END * 4, "more than 0.5 seconds"),
        ("{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}", "RecursionError|more than 0.5 seconds"),
        ("{{ 10 ** (10 ** 10) }}", "more than 0.5 seconds|memory|MemoryError|digits"),
        ("{{ messages | tojson * 10 ** 10 }}", "memory|MemoryError"),
        ("{{ 'x' * 10 ** 10 }}", "memory|MemoryError"),
        ("{{ '%1000000000s' % 1 }}", "memory|MemoryError|characters"),
        ("{{ '%20000000s' % 1 }}", "more than 10000000 characters"),
        ("{{ '{:>1000000000}'.format(1) }}", "memory|MemoryError|characters"),
        ("{{ 'x'.rjust(10 ** 10) }}", "memory|MemoryError"),
        ("{{ 'a' | center(10 ** 10) }}", "memory|MemoryError"),
        ("{{ 'a b' | replace(' ', 'x' * 10 ** 8) }}", "characters|memory|seconds"),
        ("{% set x = namespace(v='ab') %}" + RANGE + "{% set x.v = x.v ~ x.v %}" + END, "memory|seconds"),
        (RANGE + "{{ messages[0].content * 1000 }}" + END, "characters|memory|seconds"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "OverflowError"),
    ],
)
def test_template_beyond_the_time_or_memory_limit_raises_an_error(limits, template, said):
    begun = time.monotonic()
    with pytest.raises(
        UserError, match=rf"^The tokenizer's chat template failed on a conversation \(user\): .*({said})"
    ):
        bpe(template).render(TURN)
    assert time.monotonic() - begun < 20
    assert bpe().render(TURN).startswith("<|im_start|>user\nhi"), "the next is rendered as ever"


def test_batch_rendering_equals_rendering_one_by_one(limits):
    """Includes a conversation larger than a pipe buffer, and conversations that fail in each possible way."""
    template = (
        "{% if 'loop' in messages[0].content %}" + RANGE * 4 + END * 4 + "{% endif %}"
        "{% if 'bad' in messages[0].content %}{{ raise_exception('bad one') }}{% endif %}" + CHATML
    )
    texts = ["a", "long " * 40_000, "b", "loop", "c", "bad", "d" * 300, *map(str, range(300)), "bad", "\ud800x", "e"]
    rows = [{"prompt": [{"role": "user", "content": text}], "n": i} for i, text in enumerate(texts)]
    rows[2]["prompt"] = "as it is"
    rows[4] = {"question": "no prompt"}
    rows[6]["prompt"] = [{"content": "no role"}]
    rows[8]["prompt"][0]["more"] = lambda: None  # cannot be pickled
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    errors = {
        3: "0.5 seconds",
        4: "needs a 'prompt' column",
        5: "bad one",
        6: "must have 'role'",
        8: "cannot be pickled",
    }
    errors |= {len(texts) - 3: "bad one", len(texts) - 2: "lone surrogate"}
    tokenizer = bpe(template)
    for number, found in enumerate(render_all(rows, tokenizer)):
        if number in errors:
            assert isinstance(found, UserError) and errors[number] in str(found), (number, found)
            continue
        prompt = rows[number]["prompt"]
        made = environment.from_string(CHATML).render(messages=prompt, add_generation_prompt=True)
        expected = prompt if isinstance(prompt, str) else made
        assert found.text == expected and found.tokens == tokenizer.encode(expected) and found.columns == {"n": number}
    assert number == len(rows) - 1


def test_row_with_an_endless_template_loop_is_skipped_or_raises_an_error(limits):
    template = "{% if messages[0].content == 'loop' %}" + RANGE * 4 + END * 4 + "{% endif %}" + CHATML
    rows = [{"prompt": [{"role": "user", "content": text}]} for text in ("a", "b", "loop", "c")]
    with pytest.raises(UserError, match=r"training row 2: .*more than 0.5 seconds"):
        check_prompts(rows, bpe(template), 200, "skip", "training")
    kinds = {"batch_size": 3, "max_prompt_length": 200, "seed": 0, "shuffle": False, "forever": False}
    (batch,) = prompt_batches(rows, bpe(template), **kinds)
    assert [prompt.text[17] for prompt in batch] == ["a", "b", "c"]


def test_dead_or_interrupted_worker_is_replaced(limits):
    tokenizer = bpe()
    text = tokenizer.render(TURN)
    os.kill(chat_templates._worker.process.pid, signal.SIGKILL)
    chat_templates._worker.process.wait()
    assert tokenizer.render(TURN) == text
    with pytest.raises(KeyboardInterrupt):

        def interrupted(*args):
            raise KeyboardInterrupt

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(chat_templates._Worker, "_read", interrupted)
            tokenizer.render(CHATS[1])
    assert tokenizer.render(TURN) == text, "not the answer that was still to come"


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
    last = "{{ messages[0].content[-5:] }}"
    prompt = [{"role": "user", "content": "0123456789" * 10_000 + "END>>"}]
    assert bpe(last).encode_prompt(prompt, True, most=20)[0] == "END>>"
