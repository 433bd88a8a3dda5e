"""How to sample: logits to tokens, prompts to completions."""
