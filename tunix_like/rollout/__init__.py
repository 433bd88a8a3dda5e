"""Sampling: completions of prompts, their scores, and the groups of a step.

Start with `collection.py`: `Collector` asks an engine for completions, scores them and repeats until the groups of a
step are complete. `rollouts.py` scores completions (`Task`), `scoring.py` also the turns of trajectories, and
`requests.py` is between an engine and the arrays of a batch. The engine in this process is `sampler.py`; `schedule.py`
and `turns.py` decide which completion is in which row of its arrays, and `decoding.py` and `logits.py` are its compiled
programs. `engines/` has the engine for servers and finds engines of users.
"""
