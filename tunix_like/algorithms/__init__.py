"""Advantage estimators, policy losses and objectives, as pure functions of arrays.

Start with `objective.py`: an `Objective` combines an estimator, a loss, an aggregation and a KL penalty, and checks
that they fit. `registry.py` finds estimators by name; those of this library are in `advantages.py` and in the files
that it imports. Losses are in `losses.py` and `off_policy.py`, those of pairs in `preferences.py`. What a critic or a
teacher adds is in `ppo.py` and `distillation.py`.
"""
