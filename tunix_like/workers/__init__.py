"""Processes that run foreign code: reward functions, environments and programs of the package `verifiers`."""
