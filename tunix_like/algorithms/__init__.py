"""Advantage estimators, policy losses and objectives, as pure functions."""
