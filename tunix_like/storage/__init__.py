"""Files of a run: checkpoints, metrics, exports and the run lock."""
