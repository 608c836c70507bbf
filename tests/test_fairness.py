"""Metrics of predictions against brute force, fairlearn and the formulas of AIF360; two processes: test_metrics.py."""

import pickle
import warnings
from functools import partial

import numpy as np
import pytest
import torch
from helpers import needed
from hypothesis import given, settings
from hypothesis import strategies as st
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy

from fairbatch_lightning import (
    Audit,
    DemographicParityDisparity,
    EqualizedOddsDisparity,
    EqualOpportunityDisparity,
    FairBatchWarning,
    GroupAccuracy,
    GroupConfusion,
)
from fairbatch_lightning import disparities as d
from fairbatch_lightning.intervals import bootstrap_interval, wilson_interval

DISPARITIES = [EqualOpportunityDisparity, EqualizedOddsDisparity, DemographicParityDisparity, GroupAccuracy]


def samples(num_labels=2, num_groups=4, num=400, seed=0, missing=()):
    """Random predictions, labels and groups, without the cells (label, group) in `missing`."""
    generator = torch.Generator().manual_seed(seed)
    preds, target, groups = (
        torch.randint(k, (num,), generator=generator) for k in (num_labels, num_labels, num_groups)
    )
    keep = torch.ones(num, dtype=torch.bool)
    for label, group in missing:
        keep &= (target != label) | (groups != group)
    return preds[keep], target[keep], groups[keep]


def rate(of, among):
    return int((of & among).sum()) / int(among.sum()) if among.any() else float("nan")


def brute_force(preds, target, groups, num_labels, num_groups):
    """The three disparities, word by word: {name: value}, of the rates that two groups or more have."""
    events = {
        "eo": [(preds == 1, target == 1)],
        "ed": [(preds == guess, target == y) for guess in range(num_labels) for y in range(num_labels)],
        "dp": [(preds == guess, target >= 0) for guess in range(num_labels)],
        "accuracy": [(preds == target, target >= 0)],
    }
    differences, ratios = {}, {}
    for name, pairs in events.items():
        found, divided = [], []
        for of, among in pairs:
            by_group = [rate(of, among & (groups == z)) for z in range(num_groups)]
            known = [r for r in by_group if r == r]
            if len(known) > 1:
                found.append(max(abs(r - rate(of, among)) for r in known))
                divided += [min(known) / max(known)] if max(known) else []
        differences[name] = max(found, default=float("nan"))
        ratios[name] = min(divided, default=float("nan"))
    return differences, ratios


@settings(max_examples=60, deadline=None)
@given(
    num_labels=st.integers(2, 4),
    num_groups=st.integers(1, 5),
    num=st.integers(1, 60),
    seed=st.integers(0, 10**6),
    missing=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), max_size=4),
)
def test_against_brute_force(num_labels, num_groups, num, seed, missing):
    """Small samples, so that many cells are missing or have rates of 0."""
    preds, target, groups = samples(num_labels, num_groups, num, seed, missing)
    expected = brute_force(preds, target, groups, num_labels, num_groups)
    metrics = {
        "eo": EqualOpportunityDisparity,
        "ed": EqualizedOddsDisparity,
        "dp": DemographicParityDisparity,
        "accuracy": GroupAccuracy,
    }
    for form, values in zip(("difference", "ratio"), expected, strict=True):
        for name, kind in metrics.items():
            metric = kind(num_labels, num_groups, form)
            for part in range(0, len(preds), 7):
                some = slice(part, part + 7)
                metric.update(preds[some], target[some], groups[some])
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = float(metric.compute())
            assert found == pytest.approx(values[name], nan_ok=True), (form, name)


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


def test_groups_are_never_relabelled():
    """A batch without group 1 must not count group 2 as 1."""
    metric = GroupAccuracy(2, 3)
    metric.update(torch.tensor([1, 0]), torch.tensor([1, 1]), torch.tensor([2, 2]))
    metric.update(torch.tensor([1]), torch.tensor([1]), torch.tensor([0]))
    with pytest.warns(
        FairBatchWarning, match=r"GroupAccuracy: there are no samples of the cells .*\(label 0, group 1\)"
    ):
        assert metric.compute().tolist() == pytest.approx([1, float("nan"), 0.5], nan_ok=True)


@pytest.mark.parametrize("kind", DISPARITIES[:3])
@pytest.mark.parametrize("form", ["difference", "ratio"])
def test_one_group_alone_is_not_fair_but_undefined(kind, form):
    metric = kind(2, 2, form)
    metric.update(torch.tensor([1, 0, 1]), torch.tensor([1, 1, 0]), torch.zeros(3, dtype=torch.long))
    with pytest.warns(FairBatchWarning, match="the result is NaN") as caught:
        assert metric.compute().isnan()
    metric.update(torch.tensor([1]), torch.tensor([1]), torch.tensor([0]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert metric.compute().isnan()
    assert len(caught) == 1


def test_a_batch_without_a_group_is_nothing_to_warn_of():
    metric = EqualizedOddsDisparity(2, 4)
    preds, target, groups = samples()
    for z in range(4):
        assert metric(preds[groups == z], target[groups == z], groups[groups == z]).isnan()
    assert float(metric.compute()) > 0
    alone = EqualizedOddsDisparity(2, 5)
    alone(preds, target, groups)
    with pytest.warns(FairBatchWarning, match="group 4"):
        alone.compute()


def test_ratio_of_nothing_is_undefined():
    """Nobody is predicted to be positive: 0 / 0. All groups are treated alike, so that the difference is 0."""
    preds, target, groups = samples()
    metric, difference = DemographicParityDisparity(2, 4, "ratio", positive=1), DemographicParityDisparity(2, 4)
    metric.update(torch.zeros_like(preds), target, groups)
    with pytest.warns(FairBatchWarning, match="DemographicParityDisparity: the ratio is NaN, 0 / 0, as the rate is 0"):
        assert metric.compute().isnan()
    assert difference(torch.zeros_like(preds), target, groups) == 0


@pytest.mark.parametrize(
    ("preds", "threshold"),
    [
        ([0, 1, 1], 0.5),
        ([0.2, 0.7, 0.6], 0.5),
        ([-3.0, 0.1, 2.0], 0),
        ([[2.0, 1.0], [-1.0, 0.0], [0.0, 5.0]], 0.5),
        ([[0.2], [0.7], [0.6]], 0.5),
    ],
    ids=["labels", "probabilities", "logits", "columns", "one column"],
)
def test_predictions_of_every_form(preds, threshold):
    metric = GroupConfusion(2, 1, threshold)
    metric.update(torch.tensor(preds), torch.tensor([0, 1, 0]), torch.zeros(3, dtype=torch.long))
    assert metric.compute().tolist() == [[[1, 1], [0, 1]]]


@pytest.mark.parametrize(
    ("preds", "target", "groups", "message"),
    [
        ([-1.0, 2.0], [0, 1], [0, 1], r"from 0 to 1 but got some from -1 to 2. For logits use .*threshold=0"),
        ([0.5, float("nan")], [0, 1], [0, 1], "`preds` to be numbers but 1 of 2 are NaN"),
        ([0, 2], [0, 1], [0, 1], "`preds` to be numbers from 0 to 1 but got some from 0 to 2"),
        ([0, 1], [0, -1], [0, 1], "`target` to be numbers from 0 to 1 but got some from -1 to 0"),
        ([0, 1], [0, 1], [0, 3], "`groups` to be numbers from 0 to 2 but got some from 0 to 3"),
        ([0, 1], [0.0, 1.0], [0, 1], "`target` to be integers but got torch.float32"),
        ([0, 1], [0, 1], [0], "same length"),
        ([[0.1, 0.2, 0.7]], [0], [0], "one column for each of the 2 labels but got the shape"),
    ],
)
def test_wrong_input_is_refused(preds, target, groups, message):
    with pytest.raises(ValueError, match=message):
        GroupConfusion(2, 3).update(torch.tensor(preds), torch.tensor(target), torch.tensor(groups))


def test_wrong_settings_are_refused():
    with pytest.raises(ValueError, match=r"`form` to be one of \('difference', 'ratio'\) but got 'quotient'"):
        EqualizedOddsDisparity(2, 2, "quotient")
    with pytest.raises(ValueError, match="`positive` to be from 0 to 1 but got 2"):
        EqualOpportunityDisparity(2, 2, positive=2)
    with pytest.raises(ValueError, match="`num_labels` to be at least 2 but got 1"):
        GroupConfusion(1, 2)
    with pytest.raises(ValueError, match="`form`"):
        d.equalized_odds_disparity(torch.ones(2, 2, 2), form="quotient")


def test_a_collection_of_them_shares_one_state():
    preds, target, groups = samples(seed=4)
    collection = MetricCollection(
        [EqualOpportunityDisparity(2, 4), EqualizedOddsDisparity(2, 4), MulticlassAccuracy(2, average="micro")]
    )
    collection.update(preds=preds, target=target, groups=groups)
    confusion = d.group_confusion(preds, target, groups, 2, 4)
    values = collection.compute()
    assert float(values["EqualizedOddsDisparity"]) == pytest.approx(float(d.equalized_odds_disparity(confusion)))
    assert float(values["MulticlassAccuracy"]) == pytest.approx(float(d.accuracy(confusion)))
    assert sorted(map(len, collection.compute_groups.values())) == [1, 2]


def test_state_lives_where_the_metric_is_moved():
    metric = GroupConfusion(2, 2).to("meta")
    zeros = torch.zeros(3, dtype=torch.long, device="meta")
    metric.add(zeros)
    assert {metric.confusion.device.type, d.equalized_odds_disparity(metric.confusion).device.type} == {"meta"}


def test_survives_pickle_reset_and_checkpoint():
    preds, target, groups = samples(seed=5)
    metric = EqualizedOddsDisparity(2, 4)
    metric.persistent(True)
    metric.update(preds, target, groups)
    copy = pickle.loads(pickle.dumps(metric))
    assert float(copy.compute()) == float(metric.compute())
    restored = EqualizedOddsDisparity(2, 4)
    restored.persistent(True)
    restored.load_state_dict(metric.state_dict())
    restored._update_count = 1
    assert float(restored.compute()) == float(metric.compute())
    metric.reset()
    assert metric.confusion.sum() == 0


# ---- confidence intervals -------------------------------------------------------------------------------------------


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


def test_intervals_of_metrics():
    preds, target, groups = samples(seed=7)
    for kind in DISPARITIES:
        for form in ("difference", "ratio"):
            metric = kind(2, 4, form)
            metric.update(preds, target, groups)
            low, high = metric.interval().tolist()
            assert 0 <= low < float(metric.compute()) < high <= 1
            assert metric.interval().tolist() == [low, high]
            narrow = metric.interval(level=0.5).tolist()
            assert low <= narrow[0] < narrow[1] <= high
    accuracy = GroupAccuracy(2, 4)
    accuracy.update(preds, target, groups)
    number = int((groups == 2).sum())
    rate_of_group = int((preds == target)[groups == 2].sum()) / number
    for end in accuracy.interval()[:, 2].tolist():  # Wilson's: the rates from which this one is 1.96 deviations away
        assert abs(rate_of_group - end) == pytest.approx(1.959964 * (end * (1 - end) / number) ** 0.5)


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


# ---- pictures --------------------------------------------------------------------------------------------------------


def test_metrics_draw_themselves():
    preds, target, groups = samples()
    values = []
    for kind in DISPARITIES:
        metric = kind(2, 4)
        metric.update(preds, target, groups)
        figure, axes = metric.plot()
        assert figure is not None
        assert axes.lines
        values.append(float(metric.compute().max()))
    figure, axes = EqualizedOddsDisparity(2, 4).plot([torch.tensor(0.3), torch.tensor(0.2)])
    assert axes.lines[0].get_ydata().tolist() == pytest.approx([0.3, 0.2])
    confusion = GroupConfusion(2, 4)
    confusion.update(preds, target, groups)
    figure, axes = confusion.plot(group_names=["a", "b", "c", "d"])
    assert [ax.get_title() for ax in axes] == [f"{n} ({int((groups == z).sum())})" for z, n in enumerate("abcd")]
    number = int(confusion.compute()[0, 1, 0])
    assert f"\n{number}" in axes[0].texts[2].get_text()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("positive", [None, 1])
def test_rates_of_few_samples_are_left_out(seed, positive):
    """Against the words: every rate of a group with enough samples for it, compared with everybody's."""
    random = np.random.default_rng(seed)
    confusion = random.integers(0, 12, (6, 3, 3)) * random.integers(0, 2, (6, 3, 1))
    audit = Audit(torch.from_numpy(confusion), tuple("abc"), tuple("uvwxyz"), positive, min_samples=15)
    rest = range(3) if positive is None else [positive]
    expected = {"equal_opportunity": [], "equalized_odds": [], "demographic_parity": []}
    for group in confusion:
        for guess in rest:
            if group.sum() >= 15:
                everybody = confusion[:, :, guess].sum() / confusion.sum()
                expected["demographic_parity"].append(abs(group[:, guess].sum() / group.sum() - everybody))
            for label in range(3):
                if group[label].sum() >= 15:
                    everybody = confusion[:, label, guess].sum() / confusion[:, label].sum()
                    off = abs(group[label, guess] / group[label].sum() - everybody)
                    expected["equalized_odds"].append((label, off))
                    if label == guess:
                        expected["equal_opportunity"].append((label, off))
    for name, found in expected.items():
        if name != "demographic_parity":  # of a label that only one group has enough samples of nothing is compared
            labels = [label for label, _ in found]
            per_group = len(rest) if name == "equalized_odds" else 1
            found = [off for label, off in found if labels.count(label) > per_group]
        assert audit.values()[name] == pytest.approx(max(found, default=np.nan), abs=1e-12, nan_ok=True)
        low, high = audit.intervals()[name]
        assert not found or low <= audit.values()[name] <= high


def test_few_samples_do_not_widen_intervals():
    confusion = torch.tensor([[[90, 10], [20, 80]], [[80, 20], [10, 90]], [[1, 1], [2, 0]]])
    whole, part = (Audit(confusion, tuple("ab"), tuple("xyz"), min_samples=least) for least in (1, 30))
    assert whole.values()["equalized_odds"] > 0.5
    assert part.values()["equalized_odds"] < 0.1
    (low, high), (lowest, highest) = part.intervals()["equalized_odds"], whole.intervals()["equalized_odds"]
    assert high - low < (highest - lowest) / 2
    assert part.values()["accuracy"] == whole.values()["accuracy"]


def test_labels_that_are_not_compared_do_not_widen_intervals():
    """Of label c only one group has enough samples: it might as well not be there."""
    both = torch.tensor([[900, 100, 0], [100, 900, 0]])
    few, none = torch.tensor([[1, 1, 28]]), torch.tensor([[0, 0, 0]])
    with_it = torch.stack([torch.cat([both, few]), torch.cat([both, torch.tensor([[0, 0, 2]])])])
    without = torch.stack([torch.cat([both, none]), torch.cat([both, none])])
    ends = [
        Audit(counts, tuple("abc"), tuple("xy"), None, min_samples=30).intervals()["equalized_odds"]
        for counts in (with_it, without)
    ]
    assert ends[0][1] == pytest.approx(ends[1][1], abs=0.01)


def test_nothing_left_to_compare_is_said():
    audit = Audit(torch.full((2, 2, 2), 3), tuple("ab"), tuple("xy"), min_samples=50)
    (problem,) = audit.problems("test")
    assert "no label has 50 test samples of two groups" in problem
