"""Environments: trajectories of several turns, with tools, in worker processes or in this one."""
