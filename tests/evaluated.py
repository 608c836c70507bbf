"""A module that can be validated and tested, held-out data, and what a monitor has to find on it."""

import torch
from helpers import GROUPS, Toy, ToyModule, loader, trainer
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader


class Evaluated(ToyModule):
    """Calls `self(x)` in validation and test."""

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self(batch[0])

    test_step = validation_step


def held_out(dataset=None, batch_size=33, **kwargs):
    """A DataLoader that is not shuffled."""
    return DataLoader(Toy(seed=1) if dataset is None else dataset, batch_size=batch_size, **kwargs)


def by_hand(module, dataset, num_labels=2):
    """The confusion of a module's predictions on a dataset, without our code for it."""
    with torch.no_grad():
        logits = module.net(dataset.x)
    guesses = logits.argmax(1) if logits.shape[1] > 1 else (logits[:, 0] > 0).long()
    counts = torch.zeros(len(GROUPS), num_labels, num_labels, dtype=torch.long)
    for group, label, guess in zip(dataset.group_ids, dataset.targets, guesses, strict=True):
        counts[group, label, guess] += 1
    return counts


def fit_with_log(folder, name, *callbacks, test=True, validation=None, **options):
    """Train with a CSV log, and return where it is."""
    run = trainer(*callbacks, logger=CSVLogger(folder, name="", version=name), log_every_n_steps=1, **options)
    model = Evaluated()
    run.fit(model, loader(), validation or held_out())
    if test:
        run.test(model, held_out(Toy(seed=2)), verbose=False)
    return folder / name
