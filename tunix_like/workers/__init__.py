"""Processes that run foreign code: reward functions and environments. A call that hangs or crashes stops no run.

`process.py` starts and kills a process, `child.py` is what runs in it, and `messages.py` is what the two exchange.
`fork_server.py` imports the code once and forks a process per call; `supervisor.py` watches time and memory of calls,
and `failures.py` says why one failed. Pools of such processes are in `rewards/pool.py` and `environments/pool.py`.
"""
