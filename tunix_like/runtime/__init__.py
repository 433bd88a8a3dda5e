"""Services that any package may use: output (`console.py`, `progress.py`, `output.py`), several processes as one run
(`processes.py`), files (`atomic.py`, `input_files.py`, `object_storage.py`), functions of users (`user_code.py`) and
when in a run they are called (`moment.py`), measurements (`profile.py`, `trace.py`, `accelerators.py`), and memory
of the host (`host_memory.py`).
"""
