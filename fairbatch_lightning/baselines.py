"""What FairBatch is compared with: simpler ways to even out groups, as callbacks of the same shape."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor
from torch.utils.data import BatchSampler, Subset

from fairbatch_lightning._lightning import AnyCallback
from fairbatch_lightning.columns import Source
from fairbatch_lightning.groups import GroupIndex
from fairbatch_lightning.loaders import TrainLoader, replace_train_loader, with_batches
from fairbatch_lightning.sampler import FairSampler
from fairbatch_lightning.settings import CRITERIA

if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning.pytorch import LightningModule, Trainer


class Cutting(AnyCallback):
    """Trains on as many samples of every group as the smallest group has; the paper's "Cutting" (section 4).

        Trainer(callbacks=[Cutting(groups="race")])

    Which samples are left out is decided once, at random. What this costs is seen where a group is small.

    Args:
        criterion: What is to be even: with "equalized_odds" the groups of every label, with "equal_opportunity" those
            of the positive label, with "demographic_parity" the groups as a whole.
        groups: The sensitive attribute, as for [`FairBatch`][fairbatch_lightning.FairBatch].
        labels: The labels, likewise.
        positive_label: The label that equal opportunity is about, as the data has it.
        loader: Which train DataLoader to act on if there are several: its key in the dict, or its position in the list.
        seed: Decides which samples are left out, and the order of the others.
    """

    def __init__(
        self,
        criterion: str = "equalized_odds",
        *,
        groups: Source = None,
        labels: Source = None,
        positive_label: int | str = 1,
        loader: int | str | None = None,
        seed: int = 0,
    ) -> None:
        if criterion not in CRITERIA:
            raise ValueError(f"Expected argument `criterion` to be one of {list(CRITERIA)} but got {criterion!r}.")
        self._criterion, self._groups, self._labels, self._positive_label = criterion, groups, labels, positive_label
        self._loader, self._seed = loader, seed
        self._undo: Callable[[], None] | None = None
        self._sampler: FairSampler | None = None
        self._trainer: Trainer | None = None
        self._restored: dict[str, Any] | None = None
        self.index: GroupIndex | None = None
        """The cell of every sample that is trained on; None before the training data is known."""

    @property
    def counts(self) -> Tensor | None:
        """How many samples of each cell are trained on, `(Y, Z)`; None before the training data is known."""
        return None if self.index is None else self.index.counts.clone()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Stand in the way of the train DataLoader: Lightning asks for it next."""
        if stage == "fit":
            self._restored = None
            self._undo = replace_train_loader(trainer, lambda given: self._cut_loader(given, trainer))

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leave no trace in the user's objects."""
        self._detach()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave no trace in the user's objects: Lightning calls no teardown when training fails."""
        self._detach()

    def state_dict(self) -> dict[str, Any]:
        """Return the place in the epoch, to go on from there."""
        if self._sampler is None or self._trainer is None:
            return {}
        progress: Any = self._trainer.fit_loop.epoch_loop.batch_progress.current
        return self._sampler.state_dict(progress.processed)  # worker processes have fetched more

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the place until the training data is known."""
        self._restored = state_dict or None
        if self._sampler is not None and state_dict:
            self._sampler.load_state_dict(state_dict)

    def _detach(self) -> None:
        if self._undo is not None:
            self._undo()
        self._undo = None

    def _cut_loader(self, given: Any, trainer: Trainer) -> Any:
        """Return what Lightning was about to train on, without the samples that are left out."""
        found = TrainLoader.find(given, self._loader, "Cutting")
        index = GroupIndex.from_dataset(found.loader.dataset, self._labels, self._groups)
        positive = index.row_of(self._positive_label) if self._criterion == "equal_opportunity" else None
        kept = evened(index, self._criterion, positive, np.random.default_rng(self._seed))
        self.index = index.part(kept)
        processes = trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        settings = {"seed": self._seed, "drop_last": found.drop_last, **processes}
        self._sampler, self._trainer = FairSampler.from_index(self.index, found.batch_size, **settings), trainer
        if self._restored is not None:  # for the first loader after a checkpoint, not for those that replace it
            self._sampler.load_state_dict(self._restored)
            self._restored = None
        batches = BatchSampler(self._sampler, found.batch_size, found.drop_last)
        dataset = Subset(found.loader.dataset, kept.tolist())
        return found.put_back(with_batches(found.loader, batches, dataset=dataset))


def evened(
    index: GroupIndex, criterion: str, positive: int | None, random: np.random.Generator
) -> np.ndarray[Any, Any]:
    """Return the samples that are left when every group is as large as the smallest, in rising order.

    Args:
        index: The cells of all samples.
        criterion: What is to be even, see `Cutting`.
        positive: The row of the positive label, for equal opportunity.
        random: Decides which samples are left.
    """
    labels, groups = (part.numpy() for part in index.labels_and_groups(slice(None)))
    if criterion == "demographic_parity":
        return _smallest_of_each(groups, random)
    kept = []
    for row in range(index.shape[0]):
        samples = np.flatnonzero(labels == row)
        even = positive is None or row == positive
        kept.append(samples[_smallest_of_each(groups[samples], random)] if even else samples)
    return np.sort(np.concatenate(kept))


def _smallest_of_each(groups: np.ndarray[Any, Any], random: np.random.Generator) -> np.ndarray[Any, Any]:
    """Return places of as many samples of every group that occurs as the smallest of them has."""
    present = [np.flatnonzero(groups == group) for group in np.unique(groups)]
    size = min(map(len, present))
    return np.sort(np.concatenate([random.choice(places, size, replace=False) for places in present]))
