"""Evaluates a policy on held-out problems, and compares evaluations."""
