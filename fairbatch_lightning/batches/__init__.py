"""Batches: from shares of the cells to the batches of the user's DataLoader.

In: a `GroupIndex` and shares. Out: batches, and which samples and cells each of them holds. Open `sampler.py` first;
`draws.py` and `epoch.py` are what it is made of, `train_loader.py` and `delivery.py` put it into a DataLoader.
"""
