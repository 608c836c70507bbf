"""Every odd input has a defined outcome: one warning, or none because it is fine."""

import warnings

import lightning as L
import numpy as np
import pytest
import torch
from helpers import Toy, ToyModule, loader, trainer
from torch.nn import functional
from torch.utils.data import DataLoader, RandomSampler, Subset, TensorDataset, WeightedRandomSampler

from fairbatch_lightning import (
    DemographicParity,
    EqualizedOdds,
    EqualOpportunity,
    FairBatch,
    FairBatchWarning,
    SignedSteps,
)


def fit(callback, data, module=None, **kwargs):
    module = ToyModule() if module is None else module
    trainer(callback, **{"max_epochs": 2, **kwargs}).fit(module, data)
    return module


def toy(labels, groups):
    """Return a dataset of (x, label, index) with the given labels and groups."""
    dataset = Toy(len(labels))
    dataset.targets, dataset.group = labels, groups
    dataset.__class__ = type("Given", (Toy,), {"__getitem__": lambda self, i: (self.x[i], class_of(labels, i), i)})
    return dataset


def class_of(labels, i):
    return sorted(set(labels)).index(labels[i])


# ---- handled, with one warning --------------------------------------------------------------------------------------


def test_empty_cells_take_no_part():
    groups = ["a" if y == 0 else "abc"[i % 3] for i, y in enumerate(Toy().targets)]
    callback = FairBatch(groups=groups, rule=SignedSteps(alpha=0.05))
    with pytest.warns(
        FairBatchWarning, match=r"no samples in the cells \(label 0, group b\), \(label 0, group c\)"
    ) as w:
        fit(callback, loader(), max_epochs=4)
    assert len([x for x in w if x.category is FairBatchWarning]) == 1
    assert callback.shares[0].tolist() == [1, 0, 0]
    assert (callback.history[-1].shares_after[1] - callback.history[0].shares_before[1]).abs().max() > 0.04
    assert callback.history[0].losses[0, 1:].isnan().all()
    assert callback.history[0].gaps.isnan().tolist() == [True, False]


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_broken_losses_take_no_part_and_training_goes_on(broken):
    """One sample's loss is broken: its cell is left out, and said so once; the others are balanced."""

    dataset = Toy()
    bad = int((dataset.targets * 3 + dataset.group_ids == 4).nonzero()[0])  # label 1, group b

    class PerSample:
        """Breaks the loss of one known sample."""

        def __init__(self):
            self.seen = 0

        def __call__(self, logits, labels):
            losses = functional.cross_entropy(logits, labels, reduction="none")
            if len(losses) == 20:  # the first training batch, for a check
                return losses
            position = bad - self.seen
            self.seen = (self.seen + len(losses)) % 240
            if 0 <= position < len(losses):
                losses[position] = broken
            return losses

    callback = FairBatch(groups="group", loss=PerSample(), rule=SignedSteps(alpha=0.05), estimate="exact")
    with pytest.warns(FairBatchWarning, match=r"NaN or infinite in the cells \(label 1, group b\)") as caught:
        module = fit(callback, loader(), max_epochs=4)
    assert len([x for x in caught if x.category is FairBatchWarning]) == 1
    assert all(not record.losses[1, 1].isfinite() for record in callback.history)
    assert all(record.gaps.isfinite().all() for record in callback.history)
    natural = callback.history[0].shares_before
    assert callback.shares[1, 1] == natural[1, 1]
    assert not torch.equal(callback.shares, natural)
    assert module.net.weight.isfinite().all()


def test_all_losses_broken_moves_nothing():
    callback = FairBatch(groups="group", loss=lambda x, y: torch.full((len(x),), torch.nan))
    with pytest.warns(FairBatchWarning, match="NaN or infinite"):
        fit(callback, loader())
    assert torch.equal(callback.shares, callback.history[0].shares_before)
    assert np.isnan(callback.history[0].gap_max)


def test_another_way_of_sampling_is_replaced_and_said_so():
    weighted = DataLoader(Toy(), 20, sampler=WeightedRandomSampler(torch.ones(240), 240))
    with pytest.warns(FairBatchWarning, match="replaces your WeightedRandomSampler"):
        fit(FairBatch(groups="group"), weighted)


class OwnBatches:
    def __init__(self):
        self.sampler = range(240)

    def __iter__(self):
        yield from (list(range(i, i + 20)) for i in range(0, 240, 20))

    def __len__(self):
        return 12


def test_a_batch_sampler_with_a_batch_size_is_replaced_and_said_so():
    own = OwnBatches()
    own.batch_size, own.drop_last = 20, False
    with pytest.warns(FairBatchWarning, match="replaces your OwnBatches"):
        module = fit(FairBatch(groups="group"), DataLoader(Toy(), batch_sampler=own), max_epochs=1)
    assert len(module.batches) == 12


def test_overfit_batches_leaves_it_inactive():
    callback = FairBatch(groups="group")
    with pytest.warns(FairBatchWarning, match="stays inactive"):
        fit(callback, loader(), overfit_batches=2)
    assert callback.shares is None


# ---- fine, without a word -------------------------------------------------------------------------------------------


@pytest.fixture
def no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error", FairBatchWarning)
        yield


CRITERIA = {
    "equal_opportunity": EqualOpportunity,
    "equalized_odds": EqualizedOdds,
    "demographic_parity": DemographicParity,
}


@pytest.mark.usefixtures("no_warning")
@pytest.mark.parametrize(
    ("labels", "positive"), [([-1, 1], 1), (["no", "yes"], "yes"), ([0, 1], 1), ([False, True], 1)]
)
@pytest.mark.parametrize("name", CRITERIA)
def test_labels_of_any_kind_are_the_same_training(labels, positive, name):
    expected = FairBatch(name, groups="group", rule=SignedSteps(alpha=0.05))
    batches = fit(expected, loader()).batches
    criterion = EqualizedOdds() if name == "equalized_odds" else CRITERIA[name](positive_label=positive)
    callback = FairBatch(criterion, groups="group", rule=SignedSteps(alpha=0.05))
    dataset = toy([labels[y] for y in Toy().targets], Toy().group)
    assert fit(callback, loader(dataset)).batches == batches
    assert callback.index.label_names == tuple(map(str, labels))
    assert torch.equal(callback.shares, expected.shares)


@pytest.mark.usefixtures("no_warning")
@pytest.mark.parametrize("name", CRITERIA)
def test_a_criterion_by_its_name_is_the_same_as_the_object(name):
    runs = []
    for criterion in (name, CRITERIA[name]()):
        callback = FairBatch(criterion, groups="group", rule=SignedSteps(alpha=0.05))
        runs.append((callback, fit(callback, loader(), max_epochs=3)))
    (by_name, one), (by_object, other) = runs
    assert one.batches == other.batches
    assert torch.equal(by_name.shares, by_object.shares)
    assert not torch.equal(by_name.shares, by_name.history[0].shares_before)
    for record, same in zip(by_name.history, by_object.history, strict=True):
        torch.testing.assert_close(record.losses, same.losses, rtol=0, atol=0)
        torch.testing.assert_close(record.gaps, same.gaps, rtol=0, atol=0, equal_nan=True)


@pytest.mark.usefixtures("no_warning")
def test_criteria_are_not_alike():
    """Or the test above would say nothing."""
    gaps = []
    for name in CRITERIA:
        callback = FairBatch(name, groups="group", estimate="exact")
        fit(callback, loader(), max_epochs=1)
        gaps.append(callback.history[0].gaps.nan_to_num(-1).tolist())
    assert len(set(map(tuple, gaps))) == 3


@pytest.mark.usefixtures("no_warning")
@pytest.mark.parametrize("rule", ["paper", SignedSteps()])
def test_the_papers_rule_by_its_name(rule):
    callback = FairBatch(groups="group", rule=rule)
    fit(callback, loader(), max_epochs=1)
    moved = (callback.shares - callback.history[0].shares_before).abs().sum()
    assert float(moved) == pytest.approx(2 * 0.005)


@pytest.mark.usefixtures("no_warning")
def test_cell_with_one_sample():
    groups = ["rare" if i == 3 else "ab"[i % 2] for i in range(240)]
    groups[int((Toy().targets != Toy().targets[3]).nonzero()[0])] = "rare"
    callback = FairBatch(groups=groups, rule=SignedSteps(alpha=0.3))
    module = fit(callback, loader(), max_epochs=5)
    assert (callback.counts == 1).sum() == 2
    assert {len(batch) for batch in module.batches} == {20}


@pytest.mark.usefixtures("no_warning")
def test_numbers_of_numpy_are_numbers():
    criterion, rule = EqualizedOdds(min_samples=np.int64(2)), SignedSteps(np.float32(0.05), tolerance=np.float64(0))
    callback = FairBatch(criterion, groups="group", rule=rule, update_every=np.int64(6), seed=np.int64(3))
    fit(callback, loader())
    assert len(callback.history) == 4


@pytest.mark.usefixtures("no_warning")
def test_one_label():
    toy = Toy()
    toy.targets = torch.zeros(240, dtype=torch.long)
    callback = FairBatch(groups="group", rule=SignedSteps(alpha=0.05))
    fit(callback, loader(toy))
    assert callback.shares.shape == (1, 3)


@pytest.mark.usefixtures("no_warning")
def test_more_cells_than_samples_in_a_batch():
    toy = Toy()
    toy.targets = torch.arange(240) % 2
    callback = FairBatch(groups=torch.arange(240) % 60 // 2, rule=SignedSteps(alpha=0.05))
    module = fit(callback, loader(toy, batch_size=8))
    assert callback.shares.shape == (2, 30)
    assert {len(batch) for batch in module.batches} == {8}


@pytest.mark.usefixtures("no_warning")
def test_shorter_epochs_stay_short():
    short = DataLoader(Toy(), 20, sampler=RandomSampler(Toy(), num_samples=60))
    assert len(fit(FairBatch(groups="group"), short, max_epochs=1).batches) == 3


@pytest.mark.usefixtures("no_warning")
def test_groups_of_the_whole_dataset_for_a_part_of_it():
    whole = Toy()
    part = Subset(whole, range(0, 240, 2))
    by_name, by_array = FairBatch(groups="group"), FairBatch(groups=whole.group)
    assert fit(by_name, loader(part)).batches == fit(by_array, loader(part)).batches
    assert by_array.counts.sum() == 120


@pytest.mark.usefixtures("no_warning")
def test_tensor_dataset_needs_no_names():
    toy_data = Toy()
    dataset = TensorDataset(toy_data.x, toy_data.targets, toy_data.group_ids)

    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Linear(4, 2)

        def forward(self, x):
            return self.net(x)

        def training_step(self, batch, batch_idx):
            x, y, _ = batch
            return functional.cross_entropy(self(x), y)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    callback = FairBatch()
    fit(callback, loader(dataset), Module())
    assert callback.counts.sum() == 240
