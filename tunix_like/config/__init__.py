"""Configuration: every key, its checks, YAML files and overrides.

Start with `schema.py`: a dataclass per section, and per key its type, default, range and documentation (`keys.py`).
`load.py` makes a `Config` from YAML files (`yaml_files.py`) and overrides. `reference.py` writes `base_config.yaml` and
docs/configuration.md from the schema. `shown.py` says what cards, reports and loggers may show of a configuration.
"""
