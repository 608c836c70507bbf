"""Callbacks: what goes into `Trainer(callbacks=[...])`; here, and nowhere else, the loop closes.

In: a Trainer. Out: fair training, or a look at how fair it is (`monitor.py`). Open `fairbatch.py` first: the one line;
`fit.py` is one fit of it, `base.py` what all callbacks share that change batches.
"""
