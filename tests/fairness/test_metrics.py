"""Metrics of predictions against brute force, and in two real processes."""

import pickle
import warnings
from contextlib import nullcontext

import pytest
import torch
import torch.multiprocessing as mp
from hypothesis import given, settings
from hypothesis import strategies as st
from predictions import rate, samples
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy

from fairbatch_lightning import FairBatchWarning
from fairbatch_lightning.fairness import (
    DemographicParityDisparity,
    EqualizedOddsDisparity,
    EqualOpportunityDisparity,
    GroupAccuracy,
)
from fairbatch_lightning.fairness import disparities as d

DISPARITIES = [EqualOpportunityDisparity, EqualizedOddsDisparity, DemographicParityDisparity, GroupAccuracy]


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


def test_wrong_settings_are_refused():
    with pytest.raises(ValueError, match=r"`form` to be one of \('difference', 'ratio'\) but got 'quotient'"):
        EqualizedOddsDisparity(2, 2, "quotient")
    with pytest.raises(ValueError, match="`positive` to be from 0 to 1 but got 2"):
        EqualOpportunityDisparity(2, 2, positive=2)


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


def uneven_parts(rank):
    """The predictions of one of two processes; no sample of label 1 is of group 2."""
    part = slice(0, 100) if rank == 0 else slice(100, None)  # unequal parts: each sample must count the same
    _, target, groups = (values[part] for values in samples(num_labels=3, num=1000, missing=[(1, 2)]))
    return target.flip(0), target, groups


def _in_process(rank, port, results):
    torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    metric = EqualizedOddsDisparity(3, 4)
    metric.update(*uneven_parts(rank))
    results[rank] = metric.compute(), metric.interval(resamples=50), metric.confusion
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_two_processes_are_exact(free_port):
    results = mp.get_context("spawn").Manager().dict()
    context = mp.spawn(_in_process, (free_port, results), nprocs=2, join=False)
    deadline = 60
    while not context.join(timeout=1):
        deadline -= 1
        assert deadline > 0, "the processes hang"
    alone = EqualizedOddsDisparity(3, 4)
    for rank in range(2):
        alone.update(*uneven_parts(rank))
    for rank in range(2):
        disparity, interval, own = results[rank]
        with pytest.warns(FairBatchWarning) if rank == 0 else nullcontext():  # a cell is missing
            assert float(disparity) == float(alone.compute())
        assert torch.equal(interval, alone.interval(resamples=50))
        assert own.sum() == len(uneven_parts(rank)[0])
