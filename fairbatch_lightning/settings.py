"""The user's settings: checked at once, with the shorthand strings resolved here and nowhere else."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral

from fairbatch_lightning.columns import Source
from fairbatch_lightning.controller import Alpha, ShareController, check_settings
from fairbatch_lightning.criteria import (
    Compare,
    Criterion,
    DemographicParity,
    EqualizedOdds,
    EqualOpportunity,
)
from fairbatch_lightning.estimate import Estimate
from fairbatch_lightning.evaluated import ExactEstimate, SampledEstimate
from fairbatch_lightning.groups import GroupIndex
from fairbatch_lightning.importance import Importance, ImportanceSampling, LossRank
from fairbatch_lightning.losses import PerSampleLoss, resolve_loss
from fairbatch_lightning.online import OnlineEstimate
from fairbatch_lightning.validation import ValidationEstimate
from fairbatch_lightning.values import check_at_least

CRITERIA: dict[str, Callable[[int], Criterion]] = {
    "equal_opportunity": EqualOpportunity,
    "equalized_odds": lambda positive: EqualizedOdds(),
    "demographic_parity": DemographicParity,
}
ESTIMATES: dict[str, Callable[[], Estimate]] = {
    "exact": ExactEstimate,
    "sampled": SampledEstimate,
    "online": OnlineEstimate,
    "validation": ValidationEstimate,
}
IMPORTANCES: dict[str, Callable[[], Importance]] = {"loss": LossRank}


@dataclass(frozen=True)
class Settings:
    """The arguments of [`FairBatch`][fairbatch_lightning.FairBatch], where they are described."""

    criterion: str | Criterion
    groups: Source
    labels: Source
    alpha: Alpha
    threshold: float
    min_share: float
    min_samples: int
    compare: Compare
    pull: float
    positive_label: int | str
    loss: PerSampleLoss | str | None
    logits: str | None
    estimate: str | Estimate
    update_every: str | int
    importance: str | Importance | None
    loader: str | int | None
    seed: int

    def __post_init__(self) -> None:
        check_settings(self.alpha, self.threshold, self.min_share, self.compare, self.pull)
        self._check_criterion()
        self.per_sample_loss()
        self._check_estimate()
        named = isinstance(self.importance, str) and self.importance in IMPORTANCES
        if not (self.importance is None or named or isinstance(self.importance, Importance)):
            raise ValueError(
                f"Expected argument `importance` to be None, one of {list(IMPORTANCES)} or an Importance object but got"
                f" {self.importance!r}."
            )
        if self.logits is not None and not isinstance(self.logits, str):
            raise ValueError(f"Expected argument `logits` to be the name of a submodule but got {self.logits!r}.")
        every = self.update_every
        if every != "epoch" and (isinstance(every, bool | str) or not isinstance(every, Integral) or every < 1):
            raise ValueError(
                f'Expected argument `update_every` to be "epoch" or a positive number of batches but got {every!r}.'
            )
        check_at_least("min_samples", self.min_samples, 1)
        check_at_least("seed", self.seed, 0)

    def per_sample_loss(self) -> PerSampleLoss:
        """Return the function that gives one loss per sample."""
        return resolve_loss(self.loss)

    def new_criterion(self, index: GroupIndex) -> Criterion:
        """Return the criterion for labels as the data has them."""
        if isinstance(self.criterion, Criterion):
            return self.criterion
        compares_all = self.criterion == "equalized_odds"
        return CRITERIA[self.criterion](0 if compares_all else positive_row(index, self.positive_label))

    def new_controller(self, index: GroupIndex) -> ShareController:
        """Return a controller that starts at ordinary sampling of the data."""
        return ShareController(
            index.counts,
            alpha=self.alpha,
            threshold=self.threshold,
            min_share=self.min_share,
            compare=self.compare,
            pull=self.pull,
        )

    def new_estimate(self) -> Estimate:
        """Return the estimate for one fit: what that leaves behind in it does not reach the next."""
        return ESTIMATES[self.estimate]() if isinstance(self.estimate, str) else copy.deepcopy(self.estimate)

    def new_importance(self, index: GroupIndex) -> ImportanceSampling | None:
        """Return what weighs the samples of a cell in one fit, if anything does; errors alone tell too little."""
        if self.importance is None:
            return None
        given = self.importance
        chosen = IMPORTANCES[given]() if isinstance(given, str) else copy.deepcopy(given)
        return ImportanceSampling(chosen, index, resolve_loss(None if self.loss == "error" else self.loss))

    def _check_estimate(self) -> None:
        if not isinstance(self.estimate, Estimate) and self.estimate not in list(ESTIMATES):
            raise ValueError(
                f"Expected argument `estimate` to be one of {list(ESTIMATES)} or an Estimate object but got"
                f" {self.estimate!r}."
            )
        validation = self.estimate == "validation" or isinstance(self.estimate, ValidationEstimate)
        if validation and self.update_every != "epoch":
            raise ValueError(
                'Expected argument `update_every` to be "epoch" with estimate="validation", which updates the shares'
                f" after every validation, but got {self.update_every!r}. Use Trainer(val_check_interval=...)."
            )

    def _check_criterion(self) -> None:
        known = isinstance(self.criterion, Criterion) or (
            isinstance(self.criterion, str) and self.criterion in CRITERIA
        )
        if not known:
            raise ValueError(
                f"Expected argument `criterion` to be one of {list(CRITERIA)} or a criterion object but got"
                f" {self.criterion!r}."
            )
        if isinstance(self.criterion, Criterion) and self.positive_label != 1:
            raise ValueError(
                "Expected argument `positive_label` to be left out with a criterion object, which has its own:"
                f" {self.criterion}."
            )


def positive_row(index: GroupIndex, positive_label: int | str) -> int:
    """Return the row of the positive label."""
    try:
        return index.row_of(positive_label)
    except ValueError as error:
        raise ValueError(
            f"Expected argument `positive_label` to be one of the data's labels {list(index.label_values)} but got"
            f" {positive_label!r}."
        ) from error
