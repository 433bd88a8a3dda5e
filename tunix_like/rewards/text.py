"""Rewards that compare plain text."""

from __future__ import annotations

from typing import Any


def exact_match(prompts: list[str], completions: list[str], answer: list[Any], **_: Any) -> list[float]:
    """Returns 1 for each completion that equals its `answer`, else 0. White space at both ends is ignored."""
    return [
        float(completion.strip() == str(right).strip()) for completion, right in zip(completions, answer, strict=True)
    ]
