"""Cells: from a dataset to the label and group of every sample, without loading a single one.

In: the user's dataset, and where its labels and groups are. Out: `GroupIndex`. Open `index.py` first; `lookup.py` finds
the columns, `advice.py` says what else could be meant, `values.py` understands what is in them, `classes.py` knows
which of the model's classes a label is.
"""
