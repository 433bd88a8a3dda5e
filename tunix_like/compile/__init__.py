"""Compiles the programs of a run for devices that this machine does not have, and reads their memory and costs."""
