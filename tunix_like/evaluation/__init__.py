"""Evaluates a policy on held-out problems.

`evaluate.py` samples and scores them, `statistics.py` computes pass@k, votes and intervals, `compare.py` compares the
evaluations of two models problem by problem.
"""
