"""Advantage estimators, policy losses and objectives, as pure functions of arrays.

Start with `objective.py`: an `Objective` combines an estimator, a loss, an aggregation and a KL penalty, and checks
that they fit. `registry.py` finds estimators by name; most are in `advantages.py`. Losses are in `losses.py` and
`off_policy.py`, those of pairs in `preferences.py`. Advantages of single tokens are in `ppo.py` (a critic),
`distillation.py` (a teacher), `turns.py` and `token_baseline.py`.
"""
