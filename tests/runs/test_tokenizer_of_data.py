"""Tests which tokenizer a run takes if its data and its pretrained model both have one."""

import pytest

from tests.environments.test_bridge import QWEN25
from tests.tiny_model import HF
from tunix_like import UserError, load_model
from tunix_like.config.load import load
from tunix_like.data import load_source, reverse_text
from tunix_like.models.loading import export_model
from tunix_like.runs.build import chosen_tokenizer, load_policy
from tunix_like.text.tokenizer import Tokenizer


def policy(folder, data, *more):
    config = load(None, [f"model.path={folder}", f"data.name={data}", "data.train_size=8", "data.eval_size=2", *more])
    own = chosen_tokenizer(config, load_source(config.data))
    return load_policy(config, own, abstract=True, mesh=None)[1]


@pytest.fixture
def folder(tmp_path):
    """A pretrained model with the tokenizer of `reverse_text`, and a chat template."""
    letters = reverse_text.tokenizer()
    tokenizer = Tokenizer(letters._backend, eos_token="<eos>", chat_template=QWEN25)
    export_model(load_model(HF | {"vocab_size": tokenizer.vocab_size}, init="random")[0], tokenizer, tmp_path / "model")
    return tmp_path / "model"


def test_rows_in_another_vocabulary_are_refused(folder):
    with pytest.raises(UserError, match="another tokenizer than data.name=maze"):
        policy(folder, "maze")
    assert policy(folder, "maze", "model.init=random").vocab_size != policy(folder, "reverse_text").vocab_size


def test_chats_are_read_with_the_tokenizer_of_the_model(folder):
    assert policy(folder, "calculator").vocab_size == policy(folder, "reverse_text").vocab_size
