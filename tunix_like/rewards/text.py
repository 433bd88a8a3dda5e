"""Rewards on plain text. They know the columns they name, and do NOT know tokens or chat."""

from __future__ import annotations

from typing import Any


def exact_match(prompts: list[str], completions: list[str], answer: list[Any], **_: Any) -> list[float]:
    """1 where the completion equals the column `answer`, white space at both ends aside, else 0."""
    return [
        float(completion.strip() == str(right).strip()) for completion, right in zip(completions, answer, strict=True)
    ]
