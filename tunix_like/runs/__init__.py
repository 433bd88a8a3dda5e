"""From a configuration to a run, and from a run folder to a model.

`checks.py` checks a configuration, `build.py` assembles data, model, rewards and learner; `recipe.py` runs them in
order (folder, SFT, training, evaluation). `folder.py` decides whether a run may use its folder. `trained.py` opens what
a run trained, `sweep.py` starts several runs.
"""
