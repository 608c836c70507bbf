"""FairBatch in a plain loop, put together by hand: what the callback must do in a Trainer."""

import lightning as L
import torch
from helpers import Toy, ToyModule, loader, trainer
from torch.nn import functional
from torch.utils.data import DataLoader

from fairbatch_lightning import EqualizedOdds, FairSampler, GroupIndex, Measurement, SignedSteps


class ToyData(L.LightningDataModule):
    def setup(self, stage):
        self.dataset = Toy()

    def train_dataloader(self):
        return loader(self.dataset)

    def val_dataloader(self):
        return DataLoader(self.dataset, batch_size=20)


def fit(callback, module=None, data=None, **kwargs):
    module = ToyModule() if module is None else module
    run = trainer(callback, **kwargs)
    run.fit(module, loader() if data is None else data)
    return module


def reference_run(num_epochs, alpha=0.05, num_labels=2):
    """Train by hand with the parts, without Lightning: what the callback must do."""
    dataset, module = Toy(num_labels=num_labels), ToyModule(num_labels)
    index = GroupIndex.from_dataset(dataset, groups="group")
    rule, criterion = SignedSteps(alpha=alpha), EqualizedOdds()
    state = rule.start(index.counts)
    sampler = FairSampler(dataset.targets, dataset.group, 20, drop_last=False)
    optimizer = module.configure_optimizers()
    batches, losses = [], []
    for epoch in range(num_epochs):
        sampler.set_epoch(epoch)
        sampler.shares = state.shares
        for batch in sampler.batches():
            batches.append(batch)
            optimizer.zero_grad()
            functional.cross_entropy(module(dataset.x[batch]), dataset.targets[batch]).backward()
            optimizer.step()
        with torch.no_grad():
            per_sample = functional.cross_entropy(module(dataset.x), dataset.targets, reduction="none")
        cells = torch.zeros(index.shape, dtype=torch.float64)
        cells.index_put_((dataset.targets, dataset.group_ids), per_sample.double(), accumulate=True)
        losses.append(cells / index.counts)
        state = rule.update(state, Measurement(losses[-1], index.counts, index, criterion))
    return module, batches, losses, state.shares


def cells(toy):
    """Count the samples of every cell, `(2, 3)`."""
    return torch.bincount(toy.targets * 3 + toy.group_ids, minlength=6).view(2, 3)


def trained_on(module):
    """Return the samples that a module was trained on, in order."""
    return torch.tensor([index for batch in module.batches for index in batch])
