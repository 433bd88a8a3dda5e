"""The reward of `qwen3_1.7b.yaml`."""

from tunix_like.rewards import REWARDS


def boxed(prompts, completions, answer, **columns):
    """Returns 1 for each completion whose final answer equals the column `answer`, a number or formula, else 0."""
    return REWARDS["gsm8k_lenient"](prompts, completions, gold=answer)
