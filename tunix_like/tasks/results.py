"""The range of rewards, and the bins of pass rates."""

LARGEST_REWARD = 1e15
"""Largest absolute reward that is accepted. The squares of accepted rewards fit into float32."""

PASS_RATES = ("0", "(0, 1/8]", *(f"({i}/8, {i + 1}/8]" for i in range(1, 7)), "(7/8, 1)", "1")
"""Labels of the pass-rate bins: no completion passed, eight bins of equal width, all completions passed."""
