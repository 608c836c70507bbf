"""A small unfair problem and a module that remembers what it was trained on."""

import importlib
import inspect
import os

import lightning as L
import pytest
import torch
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from fairbatch_lightning import EqualizedOdds, GroupIndex, Measurement

GROUPS = ("a", "b", "c")


def needed(package):
    """Return a package of the extra `reference`; without it the test is skipped, but not in CI."""
    if os.environ.get("FAIRBATCH_SKIP_NOTHING"):
        return importlib.import_module(package)
    return pytest.importorskip(package, reason="pip install -e '.[reference]' for this test")


class Toy(Dataset):
    """Labels depend on x differently in every group, so that losses differ. A sample is (x, y, its index)."""

    def __init__(self, num_samples=240, num_labels=2, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.group_ids = torch.randint(len(GROUPS), (num_samples,), generator=generator)
        self.x = torch.randn(num_samples, 4, generator=generator)
        score = self.x[:, 0] + self.x[:, 1] * (self.group_ids - 1) + self.group_ids / 2
        edges = torch.quantile(score, torch.arange(1, num_labels) / num_labels)
        self.targets = torch.bucketize(score, edges)
        self.group = [GROUPS[i] for i in self.group_ids]

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.targets[index], index


class ToyModule(L.LightningModule):
    """A linear classifier that keeps the indices of every training batch in `batches`."""

    def __init__(self, num_labels=2, lr=0.1):
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Linear(4, num_labels)
        self.lr = lr
        self.batches = []

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y, index = batch
        if self.training:
            self.batches.append(index.tolist())
        loss = functional.cross_entropy(self(x), y)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def loader(dataset=None, batch_size=20, **kwargs):
    return DataLoader(dataset if dataset is not None else Toy(), batch_size=batch_size, shuffle=True, **kwargs)


def named_cells(index):
    """Return the (label name, group name) of every sample of a GroupIndex."""
    labels, groups = index.labels_and_groups(slice(None))
    return [(index.label_names[y], index.group_names[z]) for y, z in zip(labels, groups, strict=True)]


class FollowedRule:
    """A rule, and what it has come to by many updates."""

    def __init__(self, rule, counts):
        self.counts, self.rule = counts, rule
        self.state = rule.start(counts)

    @property
    def shares(self):
        return self.state.shares.clone()

    def update(self, losses, criterion=None, **more):
        measured = measurement(losses, self.counts, criterion, **more)
        self.state = self.rule.update(self.state, measured)
        return self.rule.gaps(measured)


def measurement(losses, counts, criterion=None, samples=None, passed=0.01):
    """Return what an update sees if the cells have these losses; for equalized odds, which takes them as they are."""
    samples = counts if samples is None else samples
    return Measurement(losses, samples, index_of_counts(counts), criterion or EqualizedOdds(), passed)


def index_of_counts(counts):
    """Return a GroupIndex with these numbers of samples in its cells, `(Y, Z)`."""
    counts = torch.as_tensor(counts)
    labels, groups = counts.shape
    cells = torch.arange(counts.numel()).repeat_interleave(counts.flatten()).numpy()
    return GroupIndex(cells, tuple(range(labels)), tuple(map(str, range(labels))), tuple(map(str, range(groups))))


def resume(run, module, data, path, *others):
    """Fit, from a checkpoint if there is one, loaded as plain data; older versions of Lightning cannot."""
    switch = {"weights_only": True} if "weights_only" in inspect.signature(run.fit).parameters else {}
    run.fit(module, data, *others, ckpt_path=path, **switch)


def trainer(*callbacks, max_epochs=3, **kwargs):
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "accelerator": "cpu",
        "devices": 1,
    }
    return L.Trainer(max_epochs=max_epochs, callbacks=list(callbacks), **{**quiet, **kwargs})
