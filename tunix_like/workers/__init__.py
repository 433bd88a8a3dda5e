"""Processes that run foreign code: reward functions, environments, agents and programs of the package `verifiers`."""
