"""`tunix-like report`: builds an HTML page and figures from the files of runs."""
