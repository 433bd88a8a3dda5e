"""Environments of the package `verifiers` (the format of the Environments Hub), as an extension: only the entries of
`data.SOURCES` and `environments.kinds.KINDS` lead here.

`tasks.py` lists the tasks of an environment as rows, and `environments.py` runs its episodes, whose requests become
tokens as those of every agent (`environments/agents.py`). The environment itself runs in another process: `process.py`
starts it, and `program.py` is what runs there.
"""
