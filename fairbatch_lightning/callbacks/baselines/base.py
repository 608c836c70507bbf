"""What baselines have in common that depend on what is to be equal."""

from __future__ import annotations

from typing import Any

from fairbatch_lightning._support.checks import chosen
from fairbatch_lightning.callbacks.base import ChangesBatches
from fairbatch_lightning.cells.index import GroupIndex
from fairbatch_lightning.rules.criteria import CRITERIA, Criterion, EqualOpportunity


class ForCriterion(ChangesBatches):
    """A baseline that depends on what is to be equal.

    Args:
        criterion: "equal_opportunity", "equalized_odds" or "demographic_parity", or an object, such as
            `EqualOpportunity(positive_label="hired")`.
        arguments: Of every callback that changes batches: groups, labels, loader, seed.
    """

    def __init__(self, criterion: str | Criterion = "equalized_odds", **arguments: Any) -> None:
        super().__init__(**arguments)
        self.criterion = chosen("criterion", criterion, CRITERIA, Criterion)
        if type(self.criterion) not in CRITERIA.values() or self.criterion.min_samples > 1:
            raise ValueError(
                f"Expected argument `criterion` of {type(self).__name__} to be one of {list(CRITERIA)}, or an object of"
                f" those with nothing but a `positive_label`, but got {self.criterion}."
            )

    def only_row(self, index: GroupIndex) -> int | None:
        """Return the row of the only label that it is about; None for all, whether or not there is a positive one."""
        if isinstance(self.criterion, EqualOpportunity):
            return index.positive_row(self.criterion.positive_label)
        return None
