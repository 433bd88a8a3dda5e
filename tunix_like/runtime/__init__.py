"""Runtime services: processes, console output, progress, profiling, input files and user code."""
