"""The server of `serve`: it answers HTTP requests with the decoder in this process, with continuous batching.

A request enters at `app.py`, is parsed by `requests.py` and waits in `server.py`, the side of the event loop.
`batcher.py` runs in a thread and decides what is sampled next; `runner.py` and `programs.py` do it on the device.
`answers.py` and `text.py` write the new tokens as the answer. `connections.py` limits connections.
"""
