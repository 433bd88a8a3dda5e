"""Tests the tokens between two turns: they equal those of transformers for the whole conversation, control tokens come
from the template only, and the limit on tokens holds."""

from __future__ import annotations

import time

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from tunix_like import UserError
from tunix_like.environments.bridge import Bridge, TemplateDifference, with_observation
from tunix_like.errors import EnvironmentMisconfigured
from tunix_like.text.tokenizer import Tokenizer
from tunix_like.text.untrusted import Filled, fill

TOOLS_QWEN = (
    "{{- '# Tools\n<tools>' }}{%- for tool in tools %}{{- '\n' ~ (tool | tojson) }}{%- endfor %}"
    '{{- \'\n</tools>\nAnswer with <tool_call>{"name": ..., "arguments": ...}</tool_call>\' }}'
)
HEAD_QWEN = (
    "{%- if tools %}{{- '<|im_start|>system\n' }}{%- if messages[0].role == 'system' %}"
    "{{- messages[0].content ~ '\n' }}{%- endif %}"
    + TOOLS_QWEN
    + "{{- '<|im_end|>\n' }}{%- elif messages[0].role == 'system' %}"
    "{{- '<|im_start|>system\n' ~ messages[0].content ~ '<|im_end|>\n' }}{%- endif %}"
)
TOOL_QWEN = (
    "{%- if messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}"
    "{{- '\n<tool_response>\n' ~ message.content ~ '\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}"
)
START_QWEN = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
PLAIN_QWEN = "{{- '<|im_start|>' ~ message.role ~ '\n' ~ message.content ~ '<|im_end|>\n' }}"
QWEN25 = (
    HEAD_QWEN + "{%- for message in messages %}{%- if message.role == 'tool' %}" + TOOL_QWEN + "{%- elif not "
    "(loop.first and message.role == 'system') %}" + PLAIN_QWEN + "{%- endif %}{%- endfor %}" + START_QWEN
)
QWEN3 = (
    HEAD_QWEN + "{%- set ns = namespace(last=-1) %}{%- for message in messages %}{%- if message.role == 'user' %}"
    "{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}"
    "{%- for message in messages %}{%- if message.role == 'tool' %}" + TOOL_QWEN
    + "{%- elif message.role == 'assistant' %}{%- set thought = '' %}{%- set content = message.content %}"
    "{%- if '</think>' in content %}{%- set thought = content.split('</think>')[0].split('<think>')[-1]"
    ".strip('\n') %}{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}"
    "{{- '<|im_start|>assistant\n' }}"
    "{%- if loop.index0 > ns.last and (loop.last or thought) %}{{- '<think>\n' ~ thought ~ '\n</think>\n\n' }}"
    "{%- endif %}{{- content ~ '<|im_end|>\n' }}{%- elif not (loop.first and message.role == 'system') %}"
    + PLAIN_QWEN + "{%- endif %}{%- endfor %}" + START_QWEN
    + "{%- if add_generation_prompt and enable_thinking is defined and enable_thinking is false %}"
    "{{- '<think>\n\n</think>\n\n' }}{%- endif %}"
)  # fmt: skip
LLAMA31 = (
    "{{- bos_token }}{%- if tools %}{%- set first = messages[0].content | trim %}{%- set messages = messages[1:] %}"
    "{{- '<|start_header_id|>user<|end_header_id|>\n\nGiven these functions, answer with JSON.\n\n' }}"
    "{%- for tool in tools %}{{- (tool | tojson(indent=4)) ~ '\n\n' }}{%- endfor %}{{- first ~ '<|eot_id|>' }}"
    "{%- endif %}{%- for message in messages %}{%- set role = 'ipython' if message.role == 'tool' else message.role %}"
    "{{- '<|start_header_id|>' ~ role ~ '<|end_header_id|>\n\n' }}"
    "{{- (message.content | tojson if role == 'ipython' else message.content | trim) ~ '<|eot_id|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{{ '<start_of_turn>' + message.role.replace('assistant', 'model') + '\n' + message.content | trim"
    " + '<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
GLM = (  # no token ends the assistant's turn: the start of the next message does
    "{{- '[gMASK]' }}{%- if tools %}{{- '<|system|>\n' }}" + TOOLS_QWEN + "{%- endif %}{%- for message in messages %}"
    "{{- ('<|observation|>' if message.role == 'tool' else '<|' ~ message.role ~ '|>') ~ '\n' ~ message.content }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|assistant|>\n' }}{%- endif %}"
)
FAMILIES = {  # template, beginning, ends of a turn, further control tokens
    "qwen25": (QWEN25, None, ["<|im_end|>", "<|endoftext|>"], ["<|im_start|>"]),
    "qwen3": (QWEN3, None, ["<|im_end|>", "<|endoftext|>"], ["<|im_start|>", "<think>", "</think>"]),
    "llama": (LLAMA31, "<|bos|>", ["<|eot_id|>", "<|eom_id|>"], ["<|start_header_id|>", "<|end_header_id|>"]),
    "gemma": (GEMMA, "<bos>", ["<end_of_turn>", "<eos>"], ["<start_of_turn>"]),
    "glm": (GLM, None, ["<|user|>", "<|observation|>"], ["<|assistant|>", "<|system|>", "[gMASK]"]),
}
WITH_TOOLS = [name for name in FAMILIES if name != "gemma"]
TOOLS = [
    {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}},
]
TEXTS = ["Question text, an answer, another question.\n\nassistant user system tool response"] * 3


class OfTransformers:
    """The same tokenizer of transformers, which is imported for the first chat."""

    def __init__(self, **settings):
        self.settings = settings

    def apply_chat_template(self, messages, **options):
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast(**self.settings).apply_chat_template(messages, **options)


def build(name, template=None, **changed):
    """Returns a byte-level tokenizer of a family, and the same tokenizer of transformers."""
    own, bos, ends, more = FAMILIES[name]
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = [*ends, *more, *([bos] if bos else [])]
    trainer = trainers.BpeTrainer(
        vocab_size=340, special_tokens=[AddedToken(each, special=True, **changed) for each in special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
    )  # fmt: skip
    backend.train_from_iterator(TEXTS, trainer)
    ids = [backend.token_to_id(end) for end in ends]
    ours = Tokenizer(backend, bos_token=bos, eos_token=ends[0], chat_template=template or own, eos_ids=ids)
    theirs = OfTransformers(tokenizer_object=backend, bos_token=bos, eos_token=ends[0], chat_template=template or own)
    return ours, theirs


BUILT = {name: build(name) for name in FAMILIES}


def bridge_of(tokenizer, tools=(), most=4096, overlong="cut"):
    with_tools = tokenizer.with_template_variables({"tools": tools}) if tools else tokenizer
    return Bridge(with_tools, True, tokenizer.eos_ids, bool(tools), most_tokens=most, overlong=overlong)


def tokens_of(bridge, observation, end):
    bridged = bridge.bridge(observation, end)
    assert not bridged.cut
    return bridged.tokens


def user(text):
    return {"role": "user", "content": text}


def tool(text):
    return {"role": "tool", "content": text}


def conversations(name):
    yield [], ["one", "two\n\n three "]
    if name in ("qwen25", "llama"):  # other templates reject two turns in a row, or rewrite the first
        yield [], ["", None, "x"]
    if name in WITH_TOOLS:
        yield TOOLS, [[tool("4")], "and then?", [tool('{"a": "b"}')]]
        yield TOOLS, [[tool("4"), tool("5")]] if name != "glm" else [[tool("4")]]
        yield [], [[user("a"), user("b")], [{"role": "system", "content": "s"}]] if name != "glm" else ["a"]


CASES = [(name, *case) for name in FAMILIES for case in conversations(name)]


@pytest.mark.parametrize(("name", "tools", "observations"), CASES)
def test_rows_are_the_ids_of_the_whole_conversation(name, tools, observations):
    """This holds if the template does not rewrite earlier turns and the sampled tokens are those of the text."""
    ours, theirs = BUILT[name]
    bridge = bridge_of(ours, tools)
    messages = [user("Question")]
    row = ours.with_template_variables({"tools": tools or None}).encode_prompt(messages, True)[1]
    for number, observation in enumerate(observations):
        answer = f"answer {number}"
        new = [user(observation)] if isinstance(observation, str) and observation else observation or []
        end = ours.eos_ids[1] if name == "glm" and new[0]["role"] == "tool" else ours.eos_id
        row = [*row, *ours.encode(answer, add_special_tokens=False), end, *tokens_of(bridge, observation, end)]
        messages = [*messages, {"role": "assistant", "content": answer}, *new]
        rendered = theirs.apply_chat_template(
            messages, tools=tools or None, add_generation_prompt=True, return_dict=False
        )
        assert row == rendered


def test_sampled_end_token_is_kept_and_not_added_again():
    for name in ("qwen25", "llama", "gemma"):
        ours, _ = BUILT[name]
        first, second = (tokens_of(bridge_of(ours), "x", end) for end in ours.eos_ids)
        assert first == second
    ours, _ = BUILT["glm"]  # the start of the next message ends the turn: it is added unless it was sampled
    assert ours.decode(tokens_of(bridge_of(ours), "x", ours.eos_ids[0]), False) == "\nx<|assistant|>\n"
    assert ours.decode(tokens_of(bridge_of(ours), "x", ours.eos_ids[1]), False) == "<|user|>\nx<|assistant|>\n"


def test_end_of_turn_that_is_no_end_token_of_the_policy_is_added():
    ours, _ = BUILT["qwen25"]
    bridge = Bridge(ours, True, [ours.eos_ids[1]], most_tokens=99, overlong="cut")
    tokens = tokens_of(bridge, "x", ours.eos_ids[1])
    assert ours.decode(tokens, False) == "<|im_end|>\n<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"


def test_sampled_thoughts_and_unusual_tokens_are_kept():
    """Qwen3 removes earlier thoughts from a conversation. A row keeps them, and the bridge is unchanged."""
    ours, theirs = BUILT["qwen3"]
    added = tokens_of(bridge_of(ours), "next", ours.eos_id)
    answer = "<think>\nhm\n</think>\n\nanswer"
    sampled = [i for letter in answer.split("answer")[0] for i in ours.encode(letter)] + ours.encode("answer")
    assert ours.decode(sampled, False) == answer and sampled != ours.encode(answer)
    prompt = ours.encode_prompt([user("Question")], True)[1]
    row = [*prompt, *sampled, ours.eos_id, *added]
    assert row[len(prompt) :][: len(sampled)] == sampled
    messages = [user("Question"), {"role": "assistant", "content": answer}, user("next")]
    rewritten = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert "<think>" not in rewritten and ours.decode(row, False) == rewritten.replace("answer", answer)
    off = ours.with_template_variables({"enable_thinking": False})
    assert ours.decode(tokens_of(bridge_of(off), "x", ours.eos_id), False).endswith("<think>\n\n</think>\n\n")


def test_tokens_after_the_end_token_are_those_of_the_whole_text():
    """The end token removes the spaces after it, as in Phi 3."""
    ours, theirs = build("qwen25", rstrip=True)
    tokens = tokens_of(bridge_of(ours), "two", ours.eos_id)
    messages = [user("Q"), {"role": "assistant", "content": "A"}, user("two")]
    whole = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert tokens == whole[-len(tokens) :] and whole[-len(tokens) - 1] == ours.eos_id
    assert ours.decode(tokens, False).startswith("<|im_start|>"), "without the line break of the template"


RESERVED = {number: "\ufffd" for number in range(0xFDD0, 0xFDF0)}
CONTROL = [token for *_, ends, more in FAMILIES.values() for token in (*ends, *more)]
ANY_TEXT = st.lists(st.one_of(st.text(max_size=20), st.sampled_from(CONTROL)), max_size=6).map("".join)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(texts=st.lists(ANY_TEXT, min_size=1, max_size=4), name=st.sampled_from(list(FAMILIES)), chat=st.booleans())
def test_control_tokens_in_any_text_are_plain_text(texts, name, chat):
    ours, _ = BUILT[name]
    bridge = Bridge(ours, chat, ours.eos_ids, most_tokens=4096, overlong="unscored")
    special = {ours.encode(token, False)[0] for token in (*FAMILIES[name][2], *FAMILIES[name][3])}
    plain = [i for i in tokens_of(bridge, "x", ours.eos_id) if i in special]
    for text in texts:
        tokens, text = tokens_of(bridge, text, ours.eos_id), text.translate(RESERVED)
        whole = ours.decode(tokens, False)
        if not chat:
            assert whole == text and not special & set(tokens)
            continue
        assert (text.strip() if name in ("llama", "gemma") else text) in whole
        if text:
            assert [i for i in tokens if i in special] == plain


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    parts=st.lists(st.tuples(ANY_TEXT, st.integers(1, 40)), min_size=1, max_size=3),
    most=st.integers(60, 200),
    name=st.sampled_from(["qwen25", "llama"]),
    chat=st.booleans(),
)
@pytest.mark.slow
def test_an_overlong_observation_is_shortened_to_fit_or_reported(parts, most, name, chat):
    ours, _ = BUILT[name]
    free, cut, unscored = (
        Bridge(ours, chat, ours.eos_ids, most_tokens=limit, overlong=how)
        for limit, how in ((100_000, "cut"), (most, "cut"), (most, "unscored"))
    )
    for text in [text * times for text, times in parts]:
        whole, shorter = free.bridge(text, ours.eos_id), cut.bridge(text, ours.eos_id)
        if len(whole.tokens) <= most:
            assert whole == shorter == unscored.bridge(text, ours.eos_id)
            continue
        with pytest.raises(UserError, match=f"^the observation takes more than {most} tokens$"):
            unscored.bridge(text, ours.eos_id)
        assert shorter.cut and len(shorter.tokens) <= most
        shown = ours.decode(shorter.tokens, False)
        kept, omitted = shown.rsplit(" ... (", 1)
        omitted = int(omitted.split(" characters omitted)")[0])
        assert kept.endswith(text[: len(text) - omitted].translate(RESERVED).lstrip()), "its beginning is kept"


def test_shortening_fills_the_limit_and_cuts_the_longest_message():
    ours, _ = BUILT["qwen25"]
    bridge = bridge_of(ours, TOOLS, most=200)
    result = bridge.bridge([tool("short"), tool("x" * 5000), tool("also")], ours.eos_id)
    text = ours.decode(result.tokens, False)
    assert result.cut and 190 <= len(result.tokens) <= 200
    assert "<tool_response>\nshort\n</tool_response>" in text and "<tool_response>\nalso\n</tool_response>" in text
    assert "x ... (" in text and "characters omitted)\n</tool_response>" in text
    plain = Bridge(ours, False, ours.eos_ids, most_tokens=60, overlong="cut")
    assert ours.decode(plain.bridge("a" * 100, ours.eos_id).tokens).endswith("a ... (67 characters omitted)")


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("unit", ["word ", "x", " ", "<|im_end|>", "é"])
def test_shortening_ten_megabytes_is_fast(unit, chat):
    ours, _ = BUILT["qwen25"]
    bridge = Bridge(ours, chat, ours.eos_ids, most_tokens=256, overlong="cut")
    bridge.bridge("x", ours.eos_id)
    begun = time.process_time()  # processor time, because elapsed time depends on the load of the machine
    result = bridge.bridge(unit * (10_000_000 // len(unit)), ours.eos_id)
    assert time.process_time() - begun < 5
    assert result.cut and 200 < len(result.tokens) <= 256


@pytest.mark.parametrize(
    "observation",
    [
        7,
        [7],
        [{"role": "user"}],
        [{"role": "assistant", "content": "x"}],
        [{"role": "user", "content": 7}],
        "\ud800",
        [{"role": "user", "content": "x", "name": "y" * 10**7}],  # cannot be shortened
    ],
)
def test_invalid_observation_is_an_error(observation):
    ours, _ = BUILT["qwen25"]
    with pytest.raises(UserError) as caught:
        bridge_of(ours, most=99).bridge(observation, ours.eos_id)
    assert "\n" not in str(caught.value) and not isinstance(caught.value, EnvironmentMisconfigured)


OWN = "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
NUMBERED = OWN.replace("<|im_end|>\n", "<|im_end|>\n{{ loop.index }}")
TOOLS_LAST = (
    "{% for message in messages %}{% if loop.last and tools %}{{ tools | tojson }}{% endif %}"
    "<|im_start|>{{ message.content }}<|im_end|>{% endfor %}"
)
NO_TOOL = (
    "{{ tools }}{% for m in messages %}{% if m.role != 'tool' %}<|im_start|>{{ m.content }}<|im_end|>{% endif %}"
    "{% endfor %}"
)
RAISES = (
    "{{ tools }}{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tool role') }}{% endif %}"
    "<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
)
LAST_END = "{% for m in messages %}<|im_start|>{{ m.content }}{% if loop.last %}<|im_end|>{% endif %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "tools", "said"),
    [
        (NUMBERED, (), "adds for a message of role 'user' depends on the earlier turns or on the tools"),
        (TOOLS_LAST, TOOLS, "adds for a message of role 'user' depends on the earlier turns or on the tools"),
        (OWN, TOOLS, "ignores tools"),
        (NO_TOOL, TOOLS, "ignores messages of role 'tool'"),
        (RAISES, TOOLS, "a message of role 'tool' cannot follow an assistant's turn. .*no tool role"),
        ("<|im_start|>x<|im_end|>", (), "writes the text of an assistant's turn 0 times"),
        (OWN + "{{ messages[-1].content }}", (), "writes the text of an assistant's turn 2 times"),
        (LAST_END, (), "ends the assistant's turn differently if messages follow"),
        ("{{ raise_exception('never') }}", (), "never"),
    ],
)
def test_template_with_inconsistent_additions_is_rejected(template, tools, said):
    ours, _ = build("qwen25", template)
    with pytest.raises(UserError, match=rf"^environment: .*{said}") as caught:
        bridge_of(ours, tools)
    assert "\n" not in str(caught.value)


def test_missing_template_raises_a_message():
    ours, _ = BUILT["qwen25"]
    bare = Tokenizer(ours._backend, eos_token="<|im_end|>")
    with pytest.raises(UserError, match="no chat template; add chat_template.jinja"):
        bridge_of(bare)
    with pytest.raises(UserError, match="tools need a chat template"):
        Bridge(bare, False, bare.eos_ids, True, most_tokens=99, overlong="cut")
    text = Bridge(bare, False, bare.eos_ids, most_tokens=99, overlong="cut")
    with pytest.raises(EnvironmentMisconfigured, match="an observation is messages, but the prompts are plain text"):
        text.bridge([user("x")], bare.eos_id)
    assert tokens_of(text, None, bare.eos_id) == tokens_of(text, "", bare.eos_id) == []
    with pytest.raises(UserError, match=r"max_observation_tokens=30: a text that is shortened to nothing takes more"):
        bridge_of(ours, most=30)
    with pytest.raises(UserError, match=r"max_observation_tokens=8: an empty message takes more tokens"):
        bridge_of(ours, most=8, overlong="unscored")


def test_role_is_checked_at_its_first_use():
    for name, role, said in (("gemma", "tool", "must alternate"), ("gemma", "system", "must alternate")):
        ours, _ = BUILT[name]
        bridge = bridge_of(ours)
        with pytest.raises(UserError, match=rf"a message of role '{role}' cannot follow .*{said}"):
            bridge.bridge([{"role": role, "content": "x"}], ours.eos_id)
        assert tokens_of(bridge, "x", ours.eos_id)
    ours, _ = build("qwen25", NO_TOOL)
    with pytest.raises(UserError, match="ignores messages of role 'tool'"):
        bridge_of(ours).bridge([tool("x")], ours.eos_id)


def test_tools_are_in_the_prompt():
    for name in WITH_TOOLS:
        ours, theirs = BUILT[name]
        ours = ours.with_template_variables({"tools": TOOLS})
        ours.check_tools("tools")
        text, ids = ours.encode_prompt([user("Q")], True)
        assert '"Adds."' in text
        assert ids == theirs.apply_chat_template(
            [user("Q")], tools=TOOLS, add_generation_prompt=True, return_dict=False
        )
    with pytest.raises(UserError, match="ignores tools, .* to chat_template.jinja .* set model.path=FOLDER"):
        BUILT["gemma"][0].check_tools("tools")


def test_the_first_observation_is_added_to_the_prompt():
    chat = [{"role": "system", "content": "s"}, user("Q")]
    assert with_observation(chat, " and more") == [chat[0], user("Q and more")] and chat[1] == user("Q")
    assert with_observation(chat, [tool("x")]) == [*chat, tool("x")]
    assert with_observation(chat, None) == with_observation(chat, []) == with_observation(chat, "") == chat
    assert with_observation("Q", None) == "Q" and with_observation("Q", " x") == "Q x"
    with pytest.raises(UserError, match="first observation is messages, but the prompt is text"):
        with_observation("Q", [user("x")])
    with pytest.raises(UserError, match="must be text or a list of messages; it is a int"):
        with_observation("Q", 7)
    with pytest.raises(UserError, match="the content of the prompt's last message is not"):
        with_observation([{"role": "user", "content": [{"type": "text", "text": "Q"}]}], "x")


def test_control_tokens_of_a_first_observation_are_plain_text():
    ours, _ = BUILT["qwen25"]
    end = "<|im_end|>"
    for prompt in ("Q" + end, fill("{q}" + end, {"q": end})):
        text, ids = ours.encode_prompt(with_observation(prompt, end), False)
        assert text == prompt + end and ids.count(ours.eos_id) == 1
    assert isinstance(with_observation(fill("{q}", {"q": end}), "x"), Filled)
    _, ids = ours.encode_prompt(with_observation([user("Q")], end), True)
    assert ids.count(ours.eos_id) == 1


@pytest.mark.parametrize(
    ("closing", "ends", "end", "bridge"),
    [
        ("<|im_end|>\n", [0, 1], "<|im_end|>", "\nQ:x<|im_end|>\n"),
        (" <|endoftext|>", [0, 1], "<|endoftext|>", "Q:x <|endoftext|>"),
        ("</answer><|endoftext|><|im_end|>", [0, 1], "<|endoftext|>", "<|im_end|>Q:x</answer><|endoftext|><|im_end|>"),
        ("</answer><|endoftext|><|im_end|>", [0], "<|im_end|>", "Q:x</answer><|endoftext|><|im_end|>"),
        ("\n", [0, 1], "", "\nQ:x\n"),
        ("", [], "", "Q:x"),
    ],
)
def test_addition_starts_after_the_first_end_token_of_the_turn(closing, ends, end, bridge):
    template = "{% for m in messages %}Q:{{ m.content }}" + closing.replace("\n", "{{ '\n' }}") + "{% endfor %}"
    ours, _ = build("qwen25", template)
    ids = [ours.eos_ids[i] for i in ends]
    assert TemplateDifference(ours, ids, False).end == end
    made = Bridge(ours, True, ids, most_tokens=99, overlong="cut")
    assert ours.decode(tokens_of(made, "x", 0), False) == bridge
