"""How unfair predictions are, as torchmetrics `Metric`s. Their state is counts: exact under DDP, cheap to sync."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fairbatch_lightning._support.warn import warn
from fairbatch_lightning.fairness.audit import some_of
from fairbatch_lightning.fairness.counts import GroupConfusion
from fairbatch_lightning.fairness.disparities import (
    Form,
    Rates,
    accuracy_rates,
    demographic_parity_rates,
    disparity,
    equal_opportunity_rates,
    equalized_odds_rates,
)
from fairbatch_lightning.fairness.intervals import bootstrap_interval, wilson_interval


class _Disparity(GroupConfusion):
    """What the disparities have in common; they name the rates that should be equal."""

    plot_lower_bound = 0.0
    plot_upper_bound = 1.0
    _forms: tuple[str | None, ...] = ("difference", "ratio")

    def __init__(
        self,
        num_labels: int,
        num_groups: int,
        form: Form = "difference",
        positive: int | None = None,
        threshold: float = 0.5,
        **kwargs: Any,
    ) -> None:
        super().__init__(num_labels, num_groups, threshold, **kwargs)
        if form not in self._forms:
            raise ValueError(f"Expected argument `form` to be one of {self._forms} but got {form!r}.")
        if positive is not None and not 0 <= positive < num_labels:
            raise ValueError(f"Expected argument `positive` to be from 0 to {num_labels - 1} but got {positive}.")
        self.form, self.positive = form, positive
        self._in_forward = self._warned = False

    @property
    def higher_is_better(self) -> bool:  # type: ignore[override]
        """Whether more is better: of ratios, and of accuracies."""
        return self.form != "difference"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Add samples and return the value of these alone, in which undefined is nothing to warn of."""
        self._in_forward = True
        try:
            return super().forward(*args, **kwargs)
        finally:
            self._in_forward = False

    def compute(self) -> Tensor:
        """Return the disparity; NaN where there is nothing to compare."""
        rates = self._rates(self.confusion)
        value = self._value(rates)
        if not self._in_forward and not self._warned and bool(rates.by_group.isnan().any() or value.isnan().any()):
            self._warned = True
            warn(f"{type(self).__name__}: {_undefined(self.confusion)}")
        return value

    def interval(self, level: float = 0.95, resamples: int = 1000, seed: int = 0) -> Tensor:
        """Return the ends of the bootstrap confidence interval, `(2,)`, of all processes' samples."""
        with self.sync_context():
            confusion = self.confusion.clone()
        return bootstrap_interval(confusion, self._rates, self.form, level=level, resamples=resamples, seed=seed)

    def plot(self, val: Any = None, ax: Any = None) -> tuple[Any, Any]:
        """Draw the value, or several of them in a row, as all torchmetrics do."""
        return self._plot(val, ax)

    def _value(self, rates: Rates) -> Tensor:
        return disparity(rates, self.form)

    def _rates(self, confusion: Tensor) -> Rates:
        raise NotImplementedError


class EqualOpportunityDisparity(_Disparity):
    r"""How much groups differ in how often their samples of the positive label are recognised.

    As difference: `max over z of |P(yhat=1 | z, y=1) - P(yhat=1 | y=1)|`; as ratio: the smallest group's
    `P(yhat=1 | z, y=1)` divided by the largest. The input is that of
    [`GroupConfusion`][fairbatch_lightning.fairness.GroupConfusion]. `interval` gives a confidence interval.

    Args:
        num_labels: Number of labels, Y.
        num_groups: Number of groups, Z.
        form: "difference" (0 is fair) or "ratio" (1 is fair).
        positive: The positive label; None takes every label in turn, and the worst counts.
        threshold: Where scores `(B,)` are cut: 0.5 for probabilities, 0 for logits.
        kwargs: Arguments of every `torchmetrics.Metric`.

    >>> import torch
    >>> preds, target = torch.tensor([1, 1, 1, 0]), torch.tensor([1, 1, 1, 1])
    >>> metric = EqualOpportunityDisparity(num_labels=2, num_groups=2)
    >>> metric(preds, target, groups=torch.tensor([0, 0, 1, 1]))
    tensor(0.2500, dtype=torch.float64)
    """

    def __init__(
        self,
        num_labels: int,
        num_groups: int,
        form: Form = "difference",
        positive: int | None = 1,
        threshold: float = 0.5,
        **kwargs: Any,
    ) -> None:
        super().__init__(num_labels, num_groups, form, positive, threshold, **kwargs)

    def _rates(self, confusion: Tensor) -> Rates:
        return equal_opportunity_rates(confusion, self.positive)


class EqualizedOddsDisparity(_Disparity):
    r"""How much groups differ in what is predicted for samples of the same label.

    As difference: `max over z, y, yhat of |P(yhat | z, y) - P(yhat | y)|`; as ratio: the smallest, over y and yhat, of
    the smallest group's `P(yhat | z, y)` divided by the largest. The input is that of
    [`GroupConfusion`][fairbatch_lightning.fairness.GroupConfusion]. `interval` gives a confidence interval.

    Args:
        num_labels: Number of labels, Y.
        num_groups: Number of groups, Z.
        form: "difference" (0 is fair) or "ratio" (1 is fair).
        positive: Look at predictions of this label only; with two labels the ratio is then that of true and false
            positive rates. None looks at all.
        threshold: Where scores `(B,)` are cut: 0.5 for probabilities, 0 for logits.
        kwargs: Arguments of every `torchmetrics.Metric`.

    >>> import torch
    >>> preds, target = torch.tensor([1, 1, 1, 0]), torch.tensor([1, 1, 1, 1])
    >>> metric = EqualizedOddsDisparity(num_labels=2, num_groups=2, form="ratio", positive=1)
    >>> metric.update(preds, target, groups=torch.tensor([0, 0, 1, 1]))
    >>> metric.confusion[:, 0, :] = torch.tensor([[3, 1], [6, 2]])
    >>> metric.compute()
    tensor(0.5000, dtype=torch.float64)
    """

    def _rates(self, confusion: Tensor) -> Rates:
        return equalized_odds_rates(confusion, self.positive)


class DemographicParityDisparity(_Disparity):
    r"""How much groups differ in what is predicted for them.

    As difference: `max over z of |P(yhat=1 | z) - P(yhat=1)|`; as ratio: the smallest group's `P(yhat=1 | z)` divided
    by the largest, of which the four-fifths rule asks for 0.8. The input is that of
    [`GroupConfusion`][fairbatch_lightning.fairness.GroupConfusion]. `interval` gives a confidence interval.

    Args:
        num_labels: Number of labels, Y.
        num_groups: Number of groups, Z.
        form: "difference" (0 is fair) or "ratio" (1 is fair).
        positive: The positive label; None takes every label in turn, and the worst counts.
        threshold: Where scores `(B,)` are cut: 0.5 for probabilities, 0 for logits.
        kwargs: Arguments of every `torchmetrics.Metric`.

    >>> import torch
    >>> preds, target = torch.tensor([1, 1, 1, 0]), torch.tensor([1, 0, 1, 0])
    >>> metric = DemographicParityDisparity(num_labels=2, num_groups=2, form="ratio", positive=1)
    >>> metric(preds, target, groups=torch.tensor([0, 0, 1, 1]))
    tensor(0.5000, dtype=torch.float64)
    """

    def _rates(self, confusion: Tensor) -> Rates:
        return demographic_parity_rates(confusion, self.positive)


class GroupAccuracy(_Disparity):
    r"""How often predictions are right, group by group: `P(yhat=y | z)`.

    The input is that of [`GroupConfusion`][fairbatch_lightning.fairness.GroupConfusion]. `compute` returns the
    accuracies `(Z,)`, NaN for groups without samples, or one number if `form` is given.

    Args:
        num_labels: Number of labels, Y.
        num_groups: Number of groups, Z.
        form: "difference": `max over z of |P(yhat=y | z) - P(yhat=y)|`; "ratio": the smallest group's accuracy divided
            by the largest; None: the accuracy of every group.
        threshold: Where scores `(B,)` are cut: 0.5 for probabilities, 0 for logits.
        kwargs: Arguments of every `torchmetrics.Metric`.

    >>> import torch
    >>> preds, target = torch.tensor([1, 1, 1, 0]), torch.tensor([1, 1, 1, 1])
    >>> metric = GroupAccuracy(num_labels=2, num_groups=2)
    >>> metric(preds, target, groups=torch.tensor([0, 0, 1, 1]))
    tensor([1.0000, 0.5000], dtype=torch.float64)
    """

    plot_legend_name = "group"
    _forms = (None, "difference", "ratio")

    def __init__(
        self, num_labels: int, num_groups: int, form: Form | None = None, threshold: float = 0.5, **kwargs: Any
    ) -> None:
        super().__init__(num_labels, num_groups, form, None, threshold, **kwargs)  # type: ignore[arg-type]

    def interval(self, level: float = 0.95, resamples: int = 1000, seed: int = 0) -> Tensor:
        """Return the ends of the confidence intervals: Wilson's of each group's accuracy `(2, Z)`, or of `form`'s."""
        if self.form is not None:
            return super().interval(level, resamples, seed)
        with self.sync_context():
            right, number = self.confusion.diagonal(dim1=1, dim2=2).sum(1), self.confusion.sum((1, 2))
        return wilson_interval(right, number, level=level)

    def _value(self, rates: Rates) -> Tensor:
        return rates.by_group.squeeze(-1) if self.form is None else super()._value(rates)

    def _rates(self, confusion: Tensor) -> Rates:
        return accuracy_rates(confusion)


def _undefined(confusion: Tensor) -> str:
    """Return what to tell the user about rates that there are not."""
    empty = [f"(label {label}, group {group})" for group, label in (confusion.sum(2) == 0).nonzero().tolist()]
    if not empty:
        return "the ratio is NaN, 0 / 0, as the rate is 0 in all groups. Look at the difference, or train longer."
    return (
        f"there are no samples of the cells {some_of(empty)}. Their rates are undefined and left out; where fewer than"
        " two groups are left, the result is NaN. Evaluate on data that has all of them."
    )
