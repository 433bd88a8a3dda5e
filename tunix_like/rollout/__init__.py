"""Samples completions of prompts, scores them and collects them as groups."""
