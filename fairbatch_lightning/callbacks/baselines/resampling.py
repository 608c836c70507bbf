"""Even out the sizes of the groups: leave samples out, or repeat them."""

from __future__ import annotations

from typing import Any

import numpy as np

from fairbatch_lightning.callbacks.baselines.base import ForCriterion
from fairbatch_lightning.cells.index import GroupIndex
from fairbatch_lightning.cells.values import Array
from fairbatch_lightning.rules.criteria import Criterion, DemographicParity


class EqualSizes(ForCriterion):
    """Trains on equally many samples of every group; `Cutting` and `Boosting` say how many."""

    _to_largest: bool

    def __init__(
        self, criterion: str | Criterion = "equalized_odds", *, across_labels: bool = False, **arguments: Any
    ) -> None:
        super().__init__(criterion, **arguments)
        if across_labels and isinstance(self.criterion, DemographicParity):
            raise ValueError(
                'Expected argument `across_labels` to be left out with "demographic_parity", which evens out groups'
                " whatever their labels, but got True."
            )
        self._across_labels = across_labels

    def samples(self, index: GroupIndex) -> Array:
        """Return the samples to train on, in rising order: some left out, or some several times."""
        random = np.random.default_rng(self._seed)
        labels, groups = (part.numpy() for part in index.labels_and_groups(slice(None)))
        if isinstance(self.criterion, DemographicParity):
            return even(groups, random, to_largest=self._to_largest)
        if self._across_labels:
            return even(index.cells, random, to_largest=self._to_largest)
        only = self.only_row(index)
        chosen = []
        for row in range(index.shape[0]):
            samples = np.flatnonzero(labels == row)
            if only is None or row == only:
                samples = samples[even(groups[samples], random, to_largest=self._to_largest)]
            chosen.append(samples)
        return np.sort(np.concatenate(chosen))


class Cutting(EqualSizes):
    """Trains on as many samples of every group as the smallest group has; the paper's "Cutting" (section 4).

        Trainer(callbacks=[Cutting(groups="race")])

    With "equalized_odds" the groups of every label are evened out, with "equal_opportunity" those of the positive
    label, with "demographic_parity" the groups as a whole. Which samples are left out is decided once, at random, by
    `seed`. What this costs is seen where a group is small.

    Args:
        criterion: Which of these.
        across_labels: Whether to make all cells equally large instead, for the first two, so that labels become equally
            frequent as well. The accuracies that the paper reports speak for this.
        arguments: As for [`FairBatch`][fairbatch_lightning.FairBatch]: groups, labels, loader, seed.
    """

    _to_largest = False


class Boosting(EqualSizes):
    """Repeats samples until every group is as large as the largest; the paper's "Boosting" (section 4).

        Trainer(callbacks=[Boosting(groups="race")])

    What is evened out depends on the arguments as for [`Cutting`][fairbatch_lightning.callbacks.baselines.Cutting]. All
    samples are trained on; which of them once more than others is decided once, at random, by `seed`. Epochs become
    longer.
    """

    _to_largest = True


def even(groups: Array, random: np.random.Generator, *, to_largest: bool) -> Array:
    """Return places in `groups`, in rising order: of every group as many as of the smallest, or of the largest.

    >>> even(np.array([0, 0, 0, 7]), np.random.default_rng(0), to_largest=True)
    array([0, 1, 2, 3, 3, 3])
    """
    present = [np.flatnonzero(groups == group) for group in np.unique(groups)]
    size = (max if to_largest else min)(map(len, present))
    chosen = []
    for places in present:
        laps, rest = divmod(size, len(places))
        chosen += [places] * laps + [random.choice(places, rest, replace=False)]
    return np.sort(np.concatenate(chosen))
