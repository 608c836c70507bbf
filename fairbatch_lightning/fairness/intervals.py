"""How sure a disparity is: confidence intervals from counts of predictions.

A disparity is the largest of several differences, each with its own noise, so that on few samples it is never near 0,
however fair the model. Resampled values are larger still, and the usual interval, from their 2.5th to their 97.5th
percentile, never contains the truth then. What is resampled here is therefore how far all rates are off at once: if
none of them is off by more than `q` in 95% of the resamples, the largest of the differences is not either.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from statistics import NormalDist

import numpy as np
import torch
from torch import Tensor

from fairbatch_lightning.fairness.disparities import Form, Rates, disparity

_ENTRIES_AT_ONCE = 2**22


def bootstrap_interval(
    confusion: Tensor,
    rates: Callable[[Tensor], Rates],
    form: Form = "difference",
    *,
    level: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
) -> Tensor:
    """Return the ends of a confidence interval for a disparity, `(2,)`; NaN where the disparity is.

    Args:
        confusion: Counts of groups, labels and predictions `(Z, Y, Y)`.
        rates: What should be equal between groups, as a function of such counts.
        form: "difference" or "ratio".
        level: How often the interval is to contain the disparity that the model has on unlimited data.
        resamples: How many times to draw as many samples as there are, with replacement.
        seed: Decides what is drawn.
    """
    if not 0 < level < 1:
        raise ValueError(f"Expected argument `level` to be between 0 and 1 but got {level}.")
    if resamples < 1:
        raise ValueError(f"Expected argument `resamples` to be at least 1 but got {resamples}.")
    confusion = confusion.cpu()
    value = disparity(rates(confusion), form)
    if value.isnan():
        return value.expand(2).clone()
    likely = _smoothed(confusion)
    truth = rates(likely)
    off_by = torch.cat([_off_by(rates(drawn), truth, form) for drawn in _resampled(confusion, likely, resamples, seed)])
    margin = float(off_by.quantile(level, interpolation="higher"))
    if form == "difference":
        return torch.stack([value - margin, value + margin]).clamp(0, 1)
    centre = disparity(truth, form)
    low, high = (
        (centre * math.exp(-margin), centre * math.exp(margin)) if margin < math.inf else (0 * centre, centre + 1)
    )
    return torch.stack([torch.minimum(low, value), torch.maximum(high, value)]).clamp(0, 1)


def wilson_interval(hits: Tensor, total: Tensor, *, level: float = 0.95) -> Tensor:
    """Return the ends of Wilson's confidence interval for rates, `(2, ...)`; NaN where there is no sample.

    Unlike a bootstrap it does not shrink to a point where all of a few samples are predicted right.
    """
    z = NormalDist().inv_cdf((1 + level) / 2)
    hits, total = hits.double(), total.double()
    rate = hits / total
    centre = (rate + z**2 / (2 * total)) / (1 + z**2 / total)
    half = z / (1 + z**2 / total) * (rate * (1 - rate) / total + z**2 / (4 * total**2)).sqrt()
    return torch.stack([centre - half, centre + half]).clamp(0, 1)


def _smoothed(confusion: Tensor) -> Tensor:
    """Return counts with one sample more in every cell, spread over all predictions, scaled to the cell's number.

    Where all of five samples are predicted right, the next need not be.
    """
    number = confusion.double().sum(2, keepdim=True)
    return number * (confusion + 1 / confusion.shape[2]) / (number + 1)


def _resampled(confusion: Tensor, likely: Tensor, resamples: int, seed: int) -> Iterator[Tensor]:
    """Yield resampled counts, some `(R, Z, Y, Y)` at a time: drawing samples anew is drawing their counts."""
    random = np.random.default_rng(seed)
    chances = (likely / likely.sum()).flatten().numpy()
    at_once = max(1, _ENTRIES_AT_ONCE // len(chances))
    for start in range(0, resamples, at_once):
        drawn = random.multinomial(int(confusion.sum()), chances, min(at_once, resamples - start))
        yield torch.from_numpy(drawn).view(-1, *confusion.shape)


def _off_by(drawn: Rates, truth: Rates, form: Form) -> Tensor:
    """Return how far the drawn rates are off the true ones at most, `(R,)`: in what the disparity is made of."""
    if form == "difference":
        first, second = (rates.by_group - rates.overall.unsqueeze(-2) for rates in (drawn, truth))
        compared = (~truth.by_group.isnan()).sum(-2) > 1  # of the others the disparity knows nothing either
        return ((first - second).abs().nan_to_num(0) * compared).flatten(1).amax(1)
    shift = drawn.by_group.log() - truth.by_group.log()  # NaN where a cell is not drawn
    highest = shift.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf).amax(1)
    lowest = shift.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf).amin(1)
    return (highest - lowest).nan_to_num(nan=0, posinf=torch.inf).clamp(min=0).amax(1)
