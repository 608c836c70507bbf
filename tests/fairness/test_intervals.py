"""Confidence intervals against the truth and against resampled data."""

from functools import partial

import numpy as np
import pytest
import torch
from predictions import samples

from fairbatch_lightning.fairness import EqualizedOddsDisparity
from fairbatch_lightning.fairness import disparities as d
from fairbatch_lightning.fairness.intervals import bootstrap_interval, wilson_interval


def test_resampled_counts_are_those_of_resampled_data():
    """Brute force: draw the samples themselves with replacement, and see how far their rates are off."""
    preds, target, groups = samples(num_groups=2, num=150, seed=6)
    rates = partial(d.demographic_parity_rates, positive=1)
    confusion = d.group_confusion(preds, target, groups, 2, 2)
    low, high = bootstrap_interval(confusion, rates, resamples=4000).tolist()
    measured = (rates(confusion).by_group - rates(confusion).overall).flatten()  # so many that smoothing hardly shows
    rng = np.random.default_rng(0)
    off = []
    for _ in range(4000):
        some = torch.from_numpy(rng.integers(len(preds), size=len(preds)))
        by_group = torch.tensor([(preds[some][groups[some] == z] == 1).double().mean() for z in range(2)])
        overall = (preds[some] == 1).double().mean()
        off.append(float((by_group - overall - measured).abs().max()))
    value = float(d.demographic_parity_disparity(confusion))
    margin = np.quantile(off, 0.95)
    assert high == pytest.approx(value + margin, abs=0.006)
    assert low == pytest.approx(max(0, value - margin), abs=0.006)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("errors", "sizes"),
    [
        ([[0.2, 0.2]] * 4, [3, 1, 1, 2]),
        ([[0.2, 0.1], [0.2, 0.2], [0.2, 0.4], [0.3, 0.2]], [3, 1, 1, 2]),
        ([[0.1, 0.1], [0.1, 0.1]], [50, 1]),  # cells of seven samples, in which there is often no error
        ([[0.02, 0.02], [0.1, 0.1]], [15, 1]),
    ],
    ids=["fair", "unfair", "small group", "small group, few errors"],
)
@pytest.mark.parametrize("form", ["difference", "ratio"])
def test_intervals_contain_the_truth(errors, sizes, form):
    """In 95% of data sets, also where the model is fair: a percentile interval would never contain that."""
    errors = torch.tensor(errors, dtype=torch.float64)
    truth = torch.stack([torch.stack([1 - errors, errors], 2)[:, 0], torch.stack([errors, 1 - errors], 2)[:, 1]], 1)
    truth = truth * torch.tensor(sizes)[:, None, None]
    rates = partial(d.equalized_odds_rates, positive=1)
    exact = float(d.disparity(rates(truth), form))
    rng = np.random.default_rng(0)
    inside = 0
    for _ in range(100):
        drawn = torch.from_numpy(rng.multinomial(700, (truth / truth.sum()).flatten().numpy())).view(truth.shape)
        low, high = bootstrap_interval(drawn, rates, form, resamples=200).tolist()
        inside += low - 1e-9 <= exact <= high + 1e-9
    assert inside >= 90  # 95 expected; fewer than 90 would happen once in eighty times by chance


def test_interval_of_few_samples_is_wide_and_of_none_undefined():
    all_right = torch.tensor([[[5, 0], [0, 5]], [[5, 0], [0, 5]]])
    low, high = bootstrap_interval(all_right, partial(d.equalized_odds_rates, positive=None)).tolist()
    assert low == 0
    assert high > 0.2
    never = torch.tensor([[[50, 0], [0, 50]], [[2, 0], [2, 0]]])
    low, high = bootstrap_interval(never, partial(d.demographic_parity_rates, positive=1), "ratio").tolist()
    assert low == 0
    assert high > 0.3
    low, high = wilson_interval(torch.tensor([3]), torch.tensor([3]))[:, 0].tolist()
    assert low < 0.5
    assert high == 1
    nothing = bootstrap_interval(torch.zeros(2, 2, 2), partial(d.equalized_odds_rates, positive=None))
    assert nothing.isnan().tolist() == [True, True]
    metric = EqualizedOddsDisparity(2, 2)
    with pytest.raises(ValueError, match="`level` to be between 0 and 1 but got 95"):
        metric.interval(level=95)
