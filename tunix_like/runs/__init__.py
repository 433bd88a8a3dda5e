"""Builds runs from configs, trains them, and opens trained models."""
