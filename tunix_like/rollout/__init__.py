"""Samples completions of prompts, scores the completions and collects them as groups."""
