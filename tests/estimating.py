"""Modules that remember what every forward pass saw and gave, so that estimates can be checked by brute force."""

import itertools
from types import SimpleNamespace

import torch
from helpers import Toy, ToyModule, loader, trainer
from torch.nn import functional
from torch.utils.data import DataLoader

from fairbatch_lightning import FairBatch, GroupIndex, SignedSteps, TrainingRun
from fairbatch_lightning.measure.per_sample import SampleLoss, cross_entropy


class Recording(ToyModule):
    """Keeps what every forward pass saw and gave: (mode, samples, losses); with dropout, so that modes matter."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Dropout(), torch.nn.Linear(16, 2))
        self.passes = []

    def step(self, batch):
        x, y, index = batch
        logits = self(x)
        losses = functional.cross_entropy(logits, y, reduction="none")
        self.passes.append((self.training, index.tolist(), losses.detach().double().tolist()))
        return losses.mean()

    def training_step(self, batch, batch_idx):
        return self.step(batch)

    def on_train_epoch_start(self):
        self.passes.append("epoch")

    def epochs(self):
        """Return the passes of each epoch."""
        groups = itertools.groupby(self.passes, lambda entry: entry == "epoch")
        return [list(entries) for is_mark, entries in groups if not is_mark]


class Watched(Recording):
    """Runs `training_step` to its end in evaluations too: it returns its logits."""

    def step(self, batch):
        x, y, index = batch
        logits = self(x)
        losses = functional.cross_entropy(logits, y, reduction="none")
        self.passes.append((self.training, index.tolist(), losses.detach().double().tolist()))
        return {"loss": losses.mean(), "logits": logits}


class WithValidation(Recording):
    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.step(batch)


def cell_means(passes, dataset):
    """Return the mean loss of every cell over some passes, one sample at a time."""
    sums, counts = torch.zeros(2, 3, dtype=torch.float64), torch.zeros(2, 3, dtype=torch.float64)
    for _, samples, losses in passes:
        for sample, loss in zip(samples, losses, strict=True):
            cell = int(dataset.targets[sample]), int(dataset.group_ids[sample])
            sums[cell] += loss
            counts[cell] += 1
    return sums / counts, counts


def fit(module, data=None, estimate="online", epochs=3, validation=None, fairbatch=None, **options):
    callback = FairBatch(
        **{"groups": "group", "rule": SignedSteps(alpha=0.05), "estimate": estimate, **(fairbatch or {})}
    )
    run = trainer(callback, max_epochs=epochs, **{"num_sanity_val_steps": 0, **options})
    run.fit(module, loader() if data is None else data, validation)
    return callback


def held_out(**kwargs):
    return DataLoader(Toy(130, seed=5), batch_size=40, **kwargs)


def bare_run(device, trainer=None, **settings):
    """Return what an estimate works with, without a Trainer."""
    index, module = GroupIndex.from_values(Toy().targets, Toy().group), SimpleNamespace(device=torch.device(device))
    return TrainingRun(trainer, module, None, index, SampleLoss(index, cross_entropy, None), None, **settings)
