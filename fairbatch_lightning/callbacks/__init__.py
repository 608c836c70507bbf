"""Callbacks: what goes into `Trainer(callbacks=[...])`; here, and nowhere else, the loop closes.

In: a Trainer. Out: fair training (`fairbatch.py`; `fit.py` is one fit of it) or a look at how fair it is (`monitor.py`).
Open `fairbatch.py` first; `base.py` is what all callbacks that change batches share.
"""
