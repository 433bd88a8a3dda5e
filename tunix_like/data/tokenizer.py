"""Where version 0.2 had `Tokenizer`, for code that imports it from here. It is in `text/tokenizer.py`."""

from tunix_like.text.tokenizer import Tokenizer as Tokenizer
