"""`tunix-like report`: an HTML page and figures from the files of runs.

`reading.py` reads a run folder, `contents.py` chooses curves and summaries, `page.py` writes the page and `figures.py`
the figures. `replay.py` repeats a skipped update, `gradients.py` measures the gradient of each prompt, `card.py` writes
the card of an exported model. None of it runs code of the run, except `replay` and `gradients`.
"""
