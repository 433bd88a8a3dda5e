"""What a run leaves on disk: checkpoints, metrics, loggers, locks."""
