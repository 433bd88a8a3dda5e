"""Advantage estimators, policy losses and objectives, as pure functions."""

LARGEST_REWARD = 1e15
"""Largest absolute reward that is accepted. The squares of accepted rewards fit into float32."""
