"""Environments on OpenEnv servers, as an extension: only the entry of `environments.registry.ENVIRONMENTS` leads here.

`environment.py` translates between turns and actions, and `session.py` exchanges messages with a server.
"""
