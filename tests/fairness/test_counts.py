"""Counts of predictions: of samples that are given, and of batches that are only told by their logits."""

import pytest
import torch
from helpers import Toy
from torch.utils.data import DataLoader, DistributedSampler

from fairbatch_lightning import GroupIndex
from fairbatch_lightning.cells.classes import ClassNumbers
from fairbatch_lightning.fairness import GroupConfusion, counts
from fairbatch_lightning.fairness.counts import HeldOutPass, HeldOutSet, Reading


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
    with pytest.raises(ValueError, match="`num_labels` to be at least 2 but got 1"):
        GroupConfusion(1, 2)


def test_state_lives_where_the_metric_is_moved():
    metric = GroupConfusion(2, 2).to("meta")
    metric.add(torch.zeros(3, dtype=torch.long, device="meta"))
    assert metric.confusion.device.type == "meta"


# ---- held-out data ---------------------------------------------------------------------------------------------------


def passing(data, reading=None, device="cpu", classes=None, **loading):
    """Return a pass over a dataset that is not shuffled."""
    index = GroupIndex.from_dataset(data, groups="group")
    loader = DataLoader(data, batch_size=33, **loading)
    return HeldOutPass(loader, index, torch.device(device), classes or ClassNumbers(), reading)


def counted(going_on, logits):
    """Add batch after batch what a model says about all samples; return the audit."""
    while len(samples := going_on.next_batch()):
        going_on.add(samples, logits[samples])
    return going_on.counts.audit()


def by_hand(data, guesses, number=2):
    confusion = torch.zeros(3, number, number, dtype=torch.long)
    for group, label, guess in zip(data.group_ids, data.targets, guesses, strict=True):
        confusion[group, label, guess] += 1
    return confusion


@pytest.mark.parametrize("columns", [None, 1, 2, 5], ids=["(B,)", "(B, 1)", "(B, 2)", "(B, 5)"])
def test_batches_are_counted_by_their_logits(columns):
    number = max(columns or 2, 2)
    data = Toy(seed=1, num_labels=number)
    logits = torch.randn(len(data), *([] if columns is None else [columns]))
    guesses = logits.argmax(1) if (columns or 0) > 1 else (logits.flatten() > 0).long()
    audit = counted(passing(data), logits)
    assert torch.equal(audit.confusion, by_hand(data, guesses, number))
    assert audit.label_names == tuple(map(str, range(number)))
    assert audit.group_names == ("a", "b", "c")
    assert audit.positive == (1 if number == 2 else None)
    assert not audit.like_probabilities


def test_single_outputs_are_cut_where_the_user_says():
    data, chances = Toy(seed=1), torch.rand(240)
    wrong, right = counted(passing(data), chances), counted(passing(data, Reading(threshold=0.5)), chances)
    assert torch.equal(right.confusion, by_hand(data, (chances > 0.5).long()))
    assert (wrong.like_probabilities, right.like_probabilities) == (True, False)
    assert "FairnessMonitor(threshold=0.5)" in wrong.problems("val")[-1]
    assert not counted(passing(data), torch.rand(240, 2)).like_probabilities


def test_broken_logits_are_counted():
    data, logits = Toy(seed=1), torch.randn(240, 2)
    logits[7, 1] = logits[100] = torch.nan
    assert counted(passing(data), logits).num_broken == 2


def test_counts_live_where_the_module_is():
    going_on = passing(Toy(seed=1), device="meta")
    samples = going_on.next_batch()
    going_on.add(samples, torch.zeros(len(samples), 2, device="meta"))
    assert going_on.counts.confusion.device.type == "meta"


def test_repeated_samples_of_a_distributed_sampler_count_once():
    data = Toy(num_samples=7, seed=1)
    number = [0, 0]
    for rank in range(2):
        sampler = DistributedSampler(data, num_replicas=2, rank=rank, shuffle=False)
        going_on = passing(data, sampler=sampler)
        samples = going_on.next_batch()
        going_on.add(samples, torch.zeros(len(samples), 2))
        number[rank] = going_on.counts.audit().num_samples
    assert number == [4, 3]


def test_processes_with_other_data_agree_on_names(monkeypatch):
    """The other process has a group and a label of its own, so that nothing is a copy of anything."""
    data = Toy(seed=1)
    other = GroupIndex.from_values(labels=[0, 2], groups=["z", "a"])
    monkeypatch.setattr(counts, "gathered", lambda own: [_known(other), own])
    audit = counted(passing(data), torch.randn(240, 3))
    assert audit.group_names == ("a", "z", "b", "c")
    assert audit.confusion[1].sum() == 0
    assert audit.num_samples == 240
    assert audit.label_names == ("0", "1", "2")


def test_processes_with_the_same_data_count_it_once(monkeypatch):
    data = Toy(seed=1)
    monkeypatch.setattr(counts, "gathered", lambda own: [own, own])
    known = HeldOutSet.of_loader(DataLoader(data, batch_size=33), GroupIndex.from_dataset(data, groups="group"))
    assert known.copies == 2
    halves = HeldOutSet.of_loader(
        DataLoader(data, batch_size=33, sampler=DistributedSampler(data, num_replicas=2, rank=0, shuffle=False)),
        GroupIndex.from_dataset(data, groups="group"),
    )
    assert halves.copies == 1


def _known(index):
    return index.label_values, index.label_names, index.group_names, 0


def test_positive_labels_by_value_or_name():
    data = Toy(seed=1, num_labels=3)
    data.classes = ["low", "middle", "high"]
    logits = torch.randn(240, 3)
    for label in (2, "2", "high"):
        assert counted(passing(data, Reading(positive_label=label)), logits).positive == 2
    with pytest.raises(ValueError, match=r"`positive_label` to be one of the data's labels \[0, 1, 2\] but got 'best'"):
        counted(passing(data, Reading(positive_label="best")), logits)


@pytest.mark.parametrize(
    ("labels", "num_classes"), [([0, 1], 2), (["no", "yes"], 2), ([-1, 1], 2), ([0, 2], 3), ([0, 1, 2], 3)]
)
def test_the_positive_label_is_that_of_the_criteria_by_default(labels, num_classes):
    """The second of two labels, whatever classes a model has besides; of more none."""
    index = GroupIndex.from_values(labels * 2, ["a"] * len(labels) + ["b"] * len(labels))
    held_out = HeldOutSet.of_loader(DataLoader(range(len(index))), index)
    numbers = ClassNumbers()
    if isinstance(labels[0], str):
        numbers.learn({"no": 0, "yes": 1})
    audit = counts.HeldOutCounts(held_out, torch.zeros(1, num_classes), numbers, Reading()).audit()
    row = index.positive_row(None)
    assert audit.positive == (None if row is None else numbers.find(labels, num_classes)[labels[row]])
