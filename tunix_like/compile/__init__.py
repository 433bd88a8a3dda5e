"""Compiles the programs of a run for devices that this machine does not have, and reads their memory and costs.

Start with `report.py`, which `doctor --config` runs. `programs.py` builds the programs of a run, `devices.py` finds the
compilers, and `costs.py` counts operations, bytes and predicted times in what they wrote (`hlo.py`).
"""
