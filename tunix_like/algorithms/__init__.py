"""Estimators, losses and objectives: pure functions without a model, files or a host loop."""
