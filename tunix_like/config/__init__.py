"""Configuration: the keys, YAML files and overrides, the reference pages."""
