"""Who watches a run.

`callbacks.py` has what callbacks are told and may ask for, `display.py` the progress and the curves, `guards.py` the
checks for skipped updates and for a sampler that drifts, `diagnosis.py` the reasons why a step learns nothing, and
`fingerprints.py` what compares rewards and rows on resume. Nothing here changes a number of a run. A trainer calls
these modules.
"""
