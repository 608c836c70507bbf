"""The formulas against fairlearn and those of AIF360; against brute force: test_metrics.py."""

from functools import partial

import pytest
import torch
from helpers import needed
from predictions import rate, samples

from fairbatch_lightning.fairness import disparities as d


def test_against_fairlearn():
    fairlearn = needed("fairlearn.metrics")
    preds, target, groups = samples(seed=1)
    frame = partial(fairlearn.MetricFrame, y_true=target, y_pred=preds, sensitive_features=groups)
    confusion = d.group_confusion(preds, target, groups, 2, 4)
    selected = frame(metrics=fairlearn.selection_rate)
    recalled = frame(metrics=fairlearn.true_positive_rate)
    right = frame(metrics=needed("sklearn.metrics").accuracy_score)
    assert float(d.demographic_parity_disparity(confusion)) == pytest.approx(selected.difference(method="to_overall"))
    assert float(d.equal_opportunity_disparity(confusion)) == pytest.approx(recalled.difference(method="to_overall"))
    assert float(d.accuracy_disparity(confusion)) == pytest.approx(right.difference(method="to_overall"))
    assert float(d.accuracy_disparity(confusion, "ratio")) == pytest.approx(right.ratio())
    assert d.group_accuracy(confusion).tolist() == pytest.approx(right.by_group.tolist())
    assert float(d.worst_group_accuracy(confusion)) == pytest.approx(right.group_min())
    assert float(d.accuracy(confusion)) == pytest.approx(right.overall)
    given = {"y_true": target, "y_pred": preds, "sensitive_features": groups}
    for ours, theirs in (
        (d.demographic_parity_disparity, fairlearn.demographic_parity_ratio),
        (d.equal_opportunity_disparity, fairlearn.equal_opportunity_ratio),
        (d.equalized_odds_disparity, fairlearn.equalized_odds_ratio),
    ):
        assert float(ours(confusion, positive=1, form="ratio")) == pytest.approx(theirs(**given))


def test_against_the_formulas_of_aif360():
    """With a privileged and an unprivileged group: disparate impact is the ratio where the latter is selected less."""
    preds, target, groups = samples(num_groups=2, seed=2)
    privileged, unprivileged = groups == 1, groups == 0
    impact = rate(preds == 1, unprivileged) / rate(preds == 1, privileged)
    recall = [rate(preds == 1, (target == 1) & (groups == z)) for z in range(2)]
    fpr = [rate(preds == 1, (target == 0) & (groups == z)) for z in range(2)]
    confusion = d.group_confusion(preds, target, groups, 2, 2)
    assert float(d.demographic_parity_disparity(confusion, 1, "ratio")) == pytest.approx(min(impact, 1 / impact))
    assert float(d.equal_opportunity_disparity(confusion, 1, "ratio")) == pytest.approx(min(recall) / max(recall))
    odds = min(min(recall) / max(recall), min(fpr) / max(fpr))
    assert float(d.equalized_odds_disparity(confusion, 1, "ratio")) == pytest.approx(odds)
    # equal opportunity difference: the rate of everybody lies between the two groups', as their sizes say
    weight = rate(groups == 1, target == 1)
    expected = abs(recall[1] - recall[0]) * max(weight, 1 - weight)
    assert float(d.equal_opportunity_disparity(confusion)) == pytest.approx(expected)


def test_an_unknown_form_is_refused():
    with pytest.raises(ValueError, match="`form`"):
        d.equalized_odds_disparity(torch.ones(2, 2, 2), form="quotient")


def test_rates_stay_where_the_counts_are():
    assert d.equalized_odds_disparity(torch.ones(2, 2, 2, dtype=torch.long, device="meta")).device.type == "meta"
