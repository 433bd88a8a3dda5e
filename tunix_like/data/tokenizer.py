"""The documented place of `Tokenizer`, which is defined in `text/tokenizer.py`."""

from tunix_like.text.tokenizer import Tokenizer as Tokenizer
