"""Processes, progress, console output, profiling, user code."""
