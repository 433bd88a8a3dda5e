"""`tunix-like report`: runs as one HTML page and as figures, made from what the runs wrote."""
