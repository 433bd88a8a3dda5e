"""Prompts to scored groups: the engine, sampling, collection."""
