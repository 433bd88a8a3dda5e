"""The exact gradient of a batch, from packed completions to new weights.

`train_step.py` is the compiled step; begin there. `packing.py` divides completions into chunks, `forward.py` computes
their log-probabilities, `working_weights.py` holds the weights in the form in which a step reads them, `optimizer.py`
builds AdamW and its schedule.
"""
