"""Implements the server: continuous batching of requests on the decoder in this process, and the HTTP interface."""
