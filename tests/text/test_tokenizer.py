"""Tests the tokenizer against transformers: the same ids, the same text, the same rendered chats."""

import json

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from tests.parameters import others_slow
from tests.tiny_model import backend_in
from tunix_like.errors import UserError
from tunix_like.text.tokenizer import Tokenizer
from tunix_like.text.untrusted import fill

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXTS = [
    "",
    "Natalia sold 48/2 = 24 clips , in May .  Isn 't it?",
    " leading and trailing ",
    "naïve café — 3 × 4 ≠ 11\n\n\ttabs",
    "<|im_start|>user\nhi<|im_end|>",
    "日本語 🙂",
]


def bpe(template=CHATML):
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TEXTS * 3, trainer)
    return Tokenizer(backend, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=template)


def words(**kwargs):
    """Returns a word-level tokenizer with a post-processor that prepends <bos>."""
    vocab = {token: i for i, token in enumerate(["<pad>", "<bos>", "<eos>", "<unk>", "UP", "DOWN"])}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["<pad>", "<bos>", "<eos>"])
    backend.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    return Tokenizer(backend, bos_token="<bos>", eos_token="<eos>", **kwargs)


def auto(folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def assert_same(ours, theirs, texts=TEXTS):
    for text in texts:
        for special in (True, False):
            ids = ours.encode(text, add_special_tokens=special)
            assert ids == theirs(text, add_special_tokens=special)["input_ids"], text
            for skip in (True, False):
                assert ours.decode(ids, skip) == theirs.decode(
                    ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
                )


@pytest.mark.parametrize("model_type", others_slow([None, "qwen3", "llama"], "qwen3"))
def test_saved_folder_gives_transformers_the_same_ids_and_text(tmp_path, model_type):
    ours = bpe()
    ours.save(tmp_path)
    if model_type is not None:  # the tokenizer class of the family must not be used
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    theirs = auto(tmp_path)
    assert_same(ours, theirs)
    assert_same(Tokenizer.from_folder(tmp_path), theirs)
    assert (theirs.eos_token, theirs.pad_token) == ("<|im_end|>", "<|endoftext|>")
    assert ours.pad_id == theirs.pad_token_id and ours.eos_ids == (theirs.eos_token_id,)


@pytest.mark.parametrize("model_type", [None, "qwen2", "qwen3", "llama"])
def test_wordlevel_folder_round_trip(tmp_path, model_type):
    ours = words(pad_token="<pad>")
    ours.save(tmp_path)
    if model_type is not None:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    assert_same(ours, auto(tmp_path), ["UP DOWN", "UP <eos> <bos> sideways"])
    again = Tokenizer.from_folder(tmp_path)
    assert again.encode("UP DOWN") == [1, 4, 5] and again.encode("UP", add_special_tokens=False) == [4]
    assert (again.bos_id, again.eos_ids, again.pad_id) == (1, (2,), 0)


def test_tokens_declared_only_in_the_config_are_added_as_transformers_adds_them(tmp_path):
    size = bpe().vocab_size
    bpe().save(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["bos_token"] = {
        "content": "<s>",
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "__type": "AddedToken",
    }
    config["extra_special_tokens"] = ["<tool>"]
    config["add_bos_token"] = True
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours, theirs = Tokenizer.from_folder(tmp_path), auto(tmp_path)
    assert ours.bos_id == theirs.bos_token_id == size and ours.vocab_size == len(theirs) == size + 2
    assert ours.encode("a <tool>")[-1] == size + 1 and size not in ours.encode("a")  # tokenizer.json prepends no bos
    assert_same(ours, theirs, [*TEXTS, "a <tool> b"])


def test_truncation_and_padding_in_the_file_are_ignored(tmp_path):
    ours = bpe()
    ours.save(tmp_path)
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.enable_truncation(3)
    backend.enable_padding(length=50)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.from_folder(tmp_path).encode(TEXTS[1]) == ours.encode(TEXTS[1])


CHATS = [
    [{"role": "user", "content": "1 + 1 < 3 & 'so'?"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "o"},
    ],
]
TEMPLATES = {
    "chatml": CHATML,
    "blocks": "{{ bos_token or '' }}{% for m in messages %}\n  {% if m.role == 'assistant' %}\n    {% generation %}"
    "{{ m.content }}{% endgeneration %}\n  {% continue %}\n  {% endif %}\n"
    "{{ m | tojson }} {{ tools is none }}\n{% endfor %}",
}


@pytest.mark.parametrize("name", sorted(TEMPLATES))
@pytest.mark.parametrize("chat", CHATS)
def test_rendered_chat_equals_transformers(tmp_path, name, chat):
    ours = bpe(TEMPLATES[name])
    ours.save(tmp_path)
    theirs = auto(tmp_path)
    for generate in (True, False):
        text = theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=generate)
        assert ours.render(chat, add_generation_prompt=generate) == text
    text, ids = ours.encode_prompt(chat, apply_chat_template=True)
    continued = chat[-1]["role"] == "assistant"
    how = {"add_generation_prompt": not continued, "continue_final_message": continued}
    assert ids == theirs.apply_chat_template(chat, return_dict=False, **how)
    assert text == theirs.apply_chat_template(chat, tokenize=False, **how)


@pytest.mark.parametrize("kind", ["GPTNeoXTokenizerFast", "GPTNeoXTokenizer", "GPT2Tokenizer", None])
@pytest.mark.parametrize("single", ["<|im_start|> $A <|im_end|>", "$A <|im_end|>", "<|im_start|> $A"])
@pytest.mark.parametrize("flags", [{}, {"add_eos_token": True, "add_bos_token": False}])
def test_tokens_around_a_text_are_those_of_transformers_before_and_after_an_export(tmp_path, kind, single, flags):
    """The class of GPT-NeoX ignores those that tokenizer.json adds."""
    bpe().save(tmp_path)
    backend = backend_in(tmp_path)
    ends = [(token, backend.token_to_id(token)) for token in ("<|im_start|>", "<|im_end|>")]
    backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=ends)
    backend.save(str(tmp_path / "tokenizer.json"))
    config = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"} | flags
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | ({"tokenizer_class": kind} if kind else {})))
    expected = auto(tmp_path)(TEXTS[1])["input_ids"]
    ours = Tokenizer.from_folder(tmp_path)
    assert ours.encode(TEXTS[1]) == expected
    ours.save(tmp_path / "export")
    assert auto(tmp_path / "export")(TEXTS[1])["input_ids"] == expected
    assert Tokenizer.from_folder(tmp_path / "export").encode(TEXTS[1]) == expected


def test_template_variables_and_default_among_several(tmp_path):
    bpe(None).save(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["chat_template"] = [{"name": "tool", "template": "no"}, {"name": "default", "template": "{{ deep }}!"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert Tokenizer.from_folder(tmp_path).render(CHATS[0], deep="thought") == "thought!"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert Tokenizer.from_folder(tmp_path).render(CHATS[0]) == "file"


def test_a_string_is_wrapped_as_a_user_message_only_on_request():
    ours = bpe()
    assert ours.encode_prompt("hi", True)[0] == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert ours.encode_prompt("hi", False) == ("hi", ours.encode("hi"))


def test_bos_is_never_doubled():
    ours = words(chat_template="{{ bos_token }} {{ messages[0].content }}")
    assert ours.encode_prompt("UP", False)[1] == [1, 4]
    assert ours.encode_prompt("<bos> UP", False)[1] == [1, 4]
    assert ours.encode_prompt("UP", True) == ("<bos> UP", [1, 4])


def test_ids_pad_and_eos():
    ours = words()
    assert ours.pad_id == 2 and ours.vocab_size == 6  # without a pad token, the eos id is used
    several = ours.with_eos_ids([2, 5])
    assert several.eos_ids == (2, 5) and ours.eos_ids == (2,) and several.encode("UP") == [1, 4]
    assert ours.token(4) == "UP" and "99" in ours.token(99)
    assert ours.decode([1, 4, 3, 2, 99]) == "UP <unk>"


def test_end_token_of_the_tokenizer_is_always_an_eos_id():
    """Otherwise an SFT answer would end with a token that does not stop the sampler."""
    assert words().with_eos_ids([5]).eos_ids == (5, 2) and words(eos_ids=[0]).eos_ids == (0, 2)
    assert words().with_eos_ids([2, 5]).with_template_variables({}).eos_ids == (2, 5)


TEMPLATE = processors.TemplateProcessing
ENDS = [("<bos>", 1), ("<eos>", 2)]


@pytest.mark.parametrize(
    ("processor", "before", "behind"),
    [
        (TEMPLATE(single="<bos> $A <eos>", special_tokens=ENDS), [1], [2]),
        (TEMPLATE(single="$A <eos> <eos>", special_tokens=ENDS), [], [2, 2]),
        (processors.Sequence([processors.ByteLevel(), TEMPLATE(single="$A <eos>", special_tokens=ENDS)]), [], [2]),
        (processors.RobertaProcessing(("<eos>", 2), ("<bos>", 1)), [1], [2]),
        (TEMPLATE(single="<eos> $A", special_tokens=ENDS), [2], []),
        (TEMPLATE(single="<bos> $A", special_tokens=ENDS), [1], []),
        (TEMPLATE(single="$A <bos>", special_tokens=ENDS), [], [1]),
    ],
)
def test_end_token_that_the_tokenizer_appends_is_removed_from_prompts(tmp_path, processor, before, behind):
    """An end token in the text itself stays, and so do other appended tokens."""
    words().save(tmp_path)
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.post_processor = processor
    backend.save(str(tmp_path / "tokenizer.json"))
    ours, kept = Tokenizer.from_folder(tmp_path), [id for id in behind if id != 2]
    assert ours.encode("UP") == [*before, 4, *behind] == auto(tmp_path)("UP")["input_ids"]
    for text, ids in (("UP DOWN", [4, 5]), ("UP <eos>", [4, 2]), ("", [])):
        assert ours.encode_prompt(text, False)[1] == [*before, *ids, *kept], text
    if not kept:  # a control token in the data, although it is a word of the vocabulary: letters, which are unknown
        filled = fill("UP {word} UP", {"word": "<pad>"})
        assert ours.encode_prompt(filled, False)[1] == [*before, 4, *[3] * len("<pad>"), 4]
    assert ours.encode_prompt("UP " * 1000, False, most=3)[1][: len(before) + 4] == [*before, 4, 4, 4, 4]


def test_wrapped_tokenizer_of_transformers_gives_the_same_ids(tmp_path):
    ours = bpe()
    ours.save(tmp_path)
    theirs = auto(tmp_path)
    wrapped = Tokenizer.wrap(theirs)
    assert_same(wrapped, theirs)
    assert wrapped.eos_ids == ours.eos_ids and wrapped.pad_id == ours.pad_id and wrapped.chat_template == CHATML
    assert Tokenizer.wrap(ours) is ours
    with pytest.raises(UserError, match="dict"):
        Tokenizer.wrap({})


def test_errors_name_the_file_and_the_cause(tmp_path):
    with pytest.raises(UserError, match="tokenizer.json does not exist"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match="tokenizer.json is not a readable"):
        Tokenizer.from_folder(tmp_path)
    words().save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[1")
    with pytest.raises(UserError, match="tokenizer_config.json: not valid JSON"):
        Tokenizer.from_folder(tmp_path)
    with pytest.raises(UserError, match="no chat template"):
        words().render(CHATS[0])
    with pytest.raises(UserError, match="roles must alternate"):
        bpe("{{ raise_exception('roles must alternate') }}").render(CHATS[0])
    with pytest.raises(UserError, match="role"):
        bpe().render([{"content": "hi"}])
    with pytest.raises(UserError, match="sandbox|unsafe"):  # templates are untrusted
        bpe("{{ ''.__class__.__mro__ }}").render(CHATS[0])
    with pytest.raises(UserError, match="<nope>"):
        words(pad_token="<nope>")
