"""The server: continuous batching of requests over the in-process decoder, and its HTTP interface."""
