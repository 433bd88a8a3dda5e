"""Files of a run: checkpoints, metrics, exports and the run lock.

`checkpoints.py` saves and restores; `checkpoint_files.py` finds damage by checksums. `metrics.py` appends to
`metrics.jsonl` and knows the best step, `loggers.py` tells other trackers and `prometheus.py` Prometheus. `run_lock.py`
and `bucket_lock.py` keep a second process out; `mirror.py` copies a run folder to object storage.
"""
