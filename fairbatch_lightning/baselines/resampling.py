"""Even out the sizes of the groups: leave samples out, or repeat them."""

from __future__ import annotations

import numpy as np

from fairbatch_lightning.baselines.base import ForCriterion
from fairbatch_lightning.draws import Array
from fairbatch_lightning.groups import GroupIndex


class Cutting(ForCriterion):
    """Trains on as many samples of every group as the smallest group has; the paper's "Cutting" (section 4).

        Trainer(callbacks=[Cutting(groups="race")])

    With "equalized_odds" the groups of every label are evened out, with "equal_opportunity" those of the positive
    label, with "demographic_parity" the groups as a whole. Which samples are left out is decided once, at random, by
    `seed`. What this costs is seen where a group is small.
    """

    def samples(self, index: GroupIndex) -> Array:
        """Return the samples that are left."""
        positive = self.positive(index) if self.criterion == "equal_opportunity" else None
        return evened(index, self.criterion, positive, np.random.default_rng(self._seed))


class Boosting(ForCriterion):
    """Repeats samples until every group is as large as the largest; the paper's "Boosting" (section 4).

        Trainer(callbacks=[Boosting(groups="race")])

    What is evened out depends on the criterion as for [`Cutting`][fairbatch_lightning.baselines.Cutting]. All samples
    are trained on; which of them once more than others is decided once, at random, by `seed`. Epochs become longer.
    """

    def samples(self, index: GroupIndex) -> Array:
        """Return all samples, some of them several times."""
        positive = self.positive(index) if self.criterion == "equal_opportunity" else None
        return evened(index, self.criterion, positive, np.random.default_rng(self._seed), to_largest=True)


def evened(
    index: GroupIndex, criterion: str, positive: int | None, random: np.random.Generator, *, to_largest: bool = False
) -> Array:
    """Return samples of which every group has as many as the smallest, or as the largest, in rising order.

    Args:
        index: The cells of all samples.
        criterion: What is to be even, see `Cutting`.
        positive: The row of the positive label, for equal opportunity.
        random: Decides which samples are left out, or repeated once more than others.
        to_largest: Repeat samples instead of leaving some out.
    """
    labels, groups = (part.numpy() for part in index.labels_and_groups(slice(None)))
    if criterion == "demographic_parity":
        return _even_groups(groups, random, to_largest)
    chosen = []
    for row in range(index.shape[0]):
        samples = np.flatnonzero(labels == row)
        even = criterion == "equalized_odds" or row == positive
        chosen.append(samples[_even_groups(groups[samples], random, to_largest)] if even else samples)
    return np.sort(np.concatenate(chosen))


def _even_groups(groups: Array, random: np.random.Generator, to_largest: bool) -> Array:
    """Return places, of every group that occurs the same number."""
    present = [np.flatnonzero(groups == group) for group in np.unique(groups)]
    size = (max if to_largest else min)(map(len, present))
    chosen = []
    for places in present:
        laps, rest = divmod(size, len(places))
        chosen += [places] * laps + [random.choice(places, rest, replace=False)]
    return np.sort(np.concatenate(chosen))
