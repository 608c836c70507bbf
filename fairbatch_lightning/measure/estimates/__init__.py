"""Estimates: ways to measure the mean loss of every cell with the current model.

In: a `TrainingRun`, and batches as they come by. Out: `CellLosses`. Open `base.py` first.
"""
