"""Tools of a request that the chat template does not show to the model are refused."""

from __future__ import annotations

import pytest

from tests.environments.test_bridge import build
from tunix_like.environments.chat_messages import RequestError
from tunix_like.serving.requests import _chat_tokens

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
HELLO = [{"role": "user", "content": "hello"}]


def test_templates_that_ignore_tools():
    tokenizer, _ = build("qwen25")
    shown = _chat_tokens(tokenizer, HELLO, [TOOL], {}, 1000)
    plain = _chat_tokens(tokenizer, HELLO, [], {}, 1000)
    assert len(shown) > len(plain)
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    assert _chat_tokens(tokenizer, HELLO, [], {}, 1000)
    with pytest.raises(RequestError, match="ignores tools"):
        _chat_tokens(tokenizer, HELLO, [TOOL], {}, 1000)
