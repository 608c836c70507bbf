"""Labels and groups with known numbers of samples per cell, for tests that count what is drawn."""

import numpy as np
import torch

SIZES = {
    "binary": [[40, 160], [250, 50]],
    "one sample in a cell": [[1, 99], [60, 40]],
    "20 cells": [[100 + 13 * y + 29 * z for z in range(5)] for y in range(4)],
    "empty cell": [[30, 0, 50], [20, 40, 60]],
    "one group": [[70], [130]],
    "one label": [[70, 130]],
    "100 cells": [[7 + y for z in range(10)] for y in range(10)],
}


def data(sizes, seed=0):
    """Return labels and groups, shuffled, with the given number of samples per cell."""
    sizes = torch.tensor(sizes)
    cells = torch.arange(sizes.numel()).repeat_interleave(sizes.flatten())
    cells = cells[torch.randperm(len(cells), generator=torch.Generator().manual_seed(seed))]
    return cells // sizes.shape[1], cells % sizes.shape[1]


def random_shares(labels, groups, seed=0):
    """Return shares that are very unequal, and 0 for empty cells."""
    counts = torch.zeros(int(labels.max()) + 1, int(groups.max()) + 1)
    counts.index_put_((labels, groups), torch.ones(len(labels)), accumulate=True)
    shares = torch.rand(counts.shape, generator=torch.Generator().manual_seed(seed)) ** 3 * (counts > 0)
    return shares.double() / shares.double().sum(1, keepdim=True)


def batches(sampler):
    """Return the samples of an epoch, one batch in each row."""
    return torch.tensor(list(sampler)).view(-1, sampler.batch_size)


def weighted_data(num_samples=600, seed=0):
    """Return random labels and groups, as arrays."""
    random = np.random.default_rng(seed)
    return random.integers(2, size=num_samples), random.integers(3, size=num_samples)


def some_weights(num_samples, seed=0):
    """Return weights that are very unequal."""
    return np.random.default_rng(seed).random(num_samples) ** 3 + 0.01
