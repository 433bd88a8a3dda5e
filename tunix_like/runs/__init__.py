"""Builds a run from a config, and opens what was trained."""
