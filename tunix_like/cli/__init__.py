"""The command line: `main.py` is the entry point and maps errors to exit statuses.

`commands.py` declares every command with its options; each has a file of its name (`train.py`, `eval.py`, `serve.py`).
`screen.py` is what `train` prints before and after the steps, `starts/` has the files that `init` writes.
"""
