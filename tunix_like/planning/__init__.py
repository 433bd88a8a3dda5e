"""Predicts the memory and the time of a run, and chooses the sizes that are `auto`.

`sizes.py` has the `Planner`, which a trainer asks for its chunk size, its rows and the layout of its sampler; begin
there. `memory.py` has the terms of the estimate, `bounds.py` the least bytes and operations.
"""
