"""The reward of `qwen3_1.7b.yaml`: partial credit for the format."""

import re

TAGS = "</reasoning>", "<answer>", "</answer>"


def partial_credit(completions, gold, **columns):
    """Returns for each completion 1 (`gold` in the last box, and each of TAGS once, in this order), 0.5 (only `gold`),
    0.1 (only the form) or 0 (neither, or no box)."""
    return [_score(completion, right) for completion, right in zip(completions, gold, strict=True)]


def _score(completion, gold):
    marked = re.findall(r"<answer>(.*?)</answer>", completion, re.DOTALL)
    boxes = re.findall(r"\\boxed\s*\{?([^{}]*)", marked[-1] if marked else completion)
    if not boxes:
        return 0.0
    right = boxes[-1].replace(",", "").strip() == gold.replace(",", "")
    places = [completion.find(tag) for tag in TAGS]
    formed = all(completion.count(tag) == 1 for tag in TAGS) and places == sorted(places)
    return (1.0 if formed else 0.5) if right else (0.1 if formed else 0.0)
