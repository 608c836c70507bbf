"""Measure: from a module and its batches to the loss of every cell.

In: logits, as `logits.py` reads them, and the cells of their samples. Out: the mean loss of every cell. Open
`estimates/base.py` first: what an estimate is; each of the others in that folder is one way to measure.
"""
