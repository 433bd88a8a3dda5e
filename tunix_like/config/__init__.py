"""Configuration: keys, YAML files, command-line overrides and the generated reference pages."""
