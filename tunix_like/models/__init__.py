"""Decoder models: configuration, layers, sharding, and reading and writing weights."""
