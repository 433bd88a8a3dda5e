"""The rules of built-in tasks that their data, their rewards and their environments share.

`maze.py` follows a path through a maze, `guess.py` has the constants of a game, `numbers.py` (with `units.py`) reads
the number in an answer, and `reasoning_gym.py` makes the generators of that package. The rows of the tasks are in
`data`, and what scores them in `rewards` and `environments`.
"""
