"""Trainers: RL learners, supervised fine-tuning, and learning from pairs.

Start with `loop.py`, whose `run` repeats `Trainer.step`. `trainer.py` is the base of `learner.py` (RL; one class per
estimator in `learners.py`), `sft.py` and `preferences.py`. In a step of RL, `rollouts_ahead.py` gives scored groups,
and `updates.py` turns them into new weights with the compiled step of the package `step`. `companions.py`, `teacher.py`
and `critic.py` are the models beside the policy. `token_signals.py` has the advantages of single tokens: those of a
teacher or critic, of turns, and of `otb`.
"""
