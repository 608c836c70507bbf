"""Every odd or wrong input has a defined outcome: an error at once that says how to mend it, or one warning."""

import warnings

import lightning as L
import numpy as np
import pytest
import torch
from helpers import Toy, ToyModule, loader, trainer
from torch.nn import functional
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from fairbatch_lightning import DemographicParity, EqualOpportunity, FairBatch, FairBatchWarning


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


# ---- refused when the callback is made ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"criterion": "equal_odds"}, "`criterion` to be one of .'equal_opportunity', .* but got 'equal_odds'"),
        ({"criterion": ["equalized_odds"]}, "`criterion` to be one of"),
        ({"criterion": None}, "`criterion` to be one of .* but got None"),
        ({"alpha": 0}, "`alpha` to be a number above 0 but got 0"),
        ({"alpha": -1}, "`alpha` to be a number above 0 but got -1"),
        ({"threshold": -0.1}, "`threshold` to be a number of at least 0"),
        ({"min_share": 2}, "`min_share` to be between 0 and 1"),
        ({"min_samples": 0}, "`min_samples` to be an integer of at least 1 but got 0"),
        ({"compare": "mean"}, "`compare` to be one of"),
        ({"loss": "mse"}, '`loss` to be None, "error" or a function'),
        ({"logits": torch.nn.Linear(2, 2)}, "`logits` to be the name of a submodule but got Linear"),
        ({"estimate": "fast"}, "`estimate` to be one of .* or an Estimate object but got 'fast'"),
        ({"estimate": 3}, "`estimate` to be one of"),
        ({"update_every": 0}, '`update_every` to be "epoch" or a positive number of batches but got 0'),
        ({"update_every": "step"}, '`update_every` to be "epoch" or a positive number'),
        ({"seed": -1}, "`seed` to be an integer of at least 0 but got -1"),
        ({"criterion": EqualOpportunity(0), "positive_label": 2}, "`positive_label` to be left out with a criterion"),
    ],
)
def test_settings_are_checked_at_once(arguments, message):
    with pytest.raises(ValueError, match=message):
        FairBatch(**{"groups": "group", **arguments})


# ---- refused before training starts ---------------------------------------------------------------------------------


class Stream(IterableDataset):
    def __iter__(self):
        yield from Toy()


class OwnBatches:
    def __init__(self):
        self.sampler = range(240)

    def __iter__(self):
        yield from (list(range(i, i + 20)) for i in range(0, 240, 20))

    def __len__(self):
        return 12


@pytest.mark.parametrize(
    ("data", "arguments", "message"),
    [
        (lambda: DataLoader(Stream(), 20), {}, "cannot choose the samples of Stream: .* Use a map-style dataset"),
        (
            lambda: [loader(), loader()],
            {},
            r"got 2. Name it, FairBatch\(loader=0\), or join the datasets with .*ConcatDataset",
        ),
        (lambda: {"a": loader(), "b": loader()}, {}, "Name it, FairBatch.loader='a'."),
        (lambda: [loader(), loader()], {"loader": 2}, r"`loader` to be one of \[0, 1\] but got 2"),
        (lambda: DataLoader(Toy(), batch_size=None), {}, "has batch_size=None.* give the DataLoader a batch_size"),
        (lambda: DataLoader(Toy(), batch_sampler=OwnBatches()), {}, "OwnBatches but cannot tell its batch size. Give"),
        (lambda: DataLoader(Toy(), batch_sampler=SomeBatches()), {}, "all 240 samples, but your SomeBatches draws 60"),
        (lambda: {"a": [loader(), loader()], "b": loader()}, {"loader": "b"}, "but got containers inside of it"),
        (loader, {"criterion": DemographicParity(2)}, "`positive` of .* to be the row of a label, from 0 to 1"),
        (loader, {"criterion": EqualOpportunity(-1)}, "`positive` of .* to be the row of a label, from 0 to 1"),
        (lambda: Batches(), {}, "needs a torch.utils.data.DataLoader for training but got Batches"),
        (
            lambda: DataLoader(Toy(), 20, sampler=SubsetRandomSampler(range(100))),
            {},
            r"all 240 samples, but your SubsetRandomSampler draws 100. If it leaves some out, use .*Subset\(dataset",
        ),
        (
            loader,
            {"groups": ["a"] * 100},
            "`groups` to have one value for each of the 240 samples of .* but got 100",
        ),
        (loader, {"groups": np.linspace(0, 1, 240)}, "`groups` to be categories .* numbers such as 0.00"),
        (loader, {"groups": "ethnicity"}, "Found no groups in Toy: .* 'ethnicity'. Pass `groups` as the name"),
        (loader, {"groups": [0] * 240}, "at least two groups to compare, .* Check the arguments `groups`"),
        (loader, {"min_samples": 1000}, "Expected a label with 1000 samples of at least two groups"),
        (loader, {"min_share": 0.4}, "`min_share` to be at most 1/3 because a label has 3 groups, but got 0.4"),
        (loader, {"criterion": "equal_opportunity", "positive_label": 7}, r"`positive_label` to be one of .*\[0, 1\]"),
        (
            lambda: loader(toy([0, 1] * 60, ["a", "a", "b", "a"] * 30)),
            {"criterion": "equal_opportunity"},
            "at least two groups to compare",
        ),
        (loader, {"logits": "head"}, r"`logits` to name a submodule of ToyModule but got 'head'. It has \['net'\]"),
        (lambda: loader(batch_size=400, drop_last=True), {}, "240 samples on 1 process.* do not fill a batch of 400"),
    ],
)
def test_data_is_checked_before_training(data, arguments, message):
    module = ToyModule()
    with pytest.raises((ValueError, TypeError), match=message):
        fit(FairBatch(**{"groups": "group", **arguments}), data(), module)
    assert module.batches == []
    assert not module._forward_hooks


class SomeBatches:
    """Three batches of 20, of samples that its author chose."""

    batch_size = 20

    def __iter__(self):
        yield from (list(range(i, i + 20)) for i in range(0, 60, 20))

    def __len__(self):
        return 3


class Batches:
    def __iter__(self):
        yield from loader()


# ---- refused on the first batch -------------------------------------------------------------------------------------


class NoForward(ToyModule):
    def training_step(self, batch, batch_idx):
        x, y, index = batch
        self.batches.append(index.tolist())
        return functional.cross_entropy(self.net(x), y)


class ReturnsScalar(NoForward):
    def training_step(self, batch, batch_idx):
        return {"loss": super().training_step(batch, batch_idx), "logits": torch.zeros(())}


class ManualReturns(NoForward):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        x, _, index = batch
        self.batches.append(index.tolist())
        return {"logits": self.net(x)}


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (NoForward, r'found no logits for a batch of 20 samples.*FairBatch\(logits="net"\), or return'),
        (ReturnsScalar, "found no logits for a batch of 20 samples"),
        (ManualReturns, r"With manual optimization .* Call `self\(x\)` in it, or name the submodule"),
    ],
)
def test_logits_out_of_reach_are_noticed_on_the_first_batch(module, message):
    module = module()
    with pytest.raises(RuntimeError, match=message):
        fit(FairBatch(groups="group"), loader(), module)
    assert len(module.batches) == 1


def test_a_subclass_beside_it_is_refused():
    class Mine(FairBatch):
        pass

    with pytest.raises(ValueError, match="Expected one FairBatch callback but got several"):
        trainer(FairBatch(groups="group"), Mine(groups="group")).fit(ToyModule(), loader())


def test_two_callbacks_are_refused():
    with pytest.raises(RuntimeError, match="more than one stateful callback of type `FairBatch`"):
        trainer(FairBatch(groups="group"), FairBatch(groups="group"))


# ---- handled, with one warning --------------------------------------------------------------------------------------


def test_empty_cells_take_no_part():
    groups = ["a" if y == 0 else "abc"[i % 3] for i, y in enumerate(Toy().targets)]
    callback = FairBatch(groups=groups, alpha=0.05)
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

    callback = FairBatch(groups="group", loss=PerSample(), alpha=0.05, estimate="exact")
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


@pytest.mark.usefixtures("no_warning")
@pytest.mark.parametrize(
    ("labels", "positive"), [([-1, 1], 1), (["no", "yes"], "yes"), ([0, 1], 1), ([False, True], 1)]
)
@pytest.mark.parametrize("criterion", ["equal_opportunity", "equalized_odds", "demographic_parity"])
def test_labels_of_any_kind_are_the_same_training(labels, positive, criterion):
    expected = FairBatch(criterion, groups="group", alpha=0.05)
    batches = fit(expected, loader()).batches
    callback = FairBatch(criterion, groups="group", alpha=0.05, positive_label=positive)
    dataset = toy([labels[y] for y in Toy().targets], Toy().group)
    assert fit(callback, loader(dataset)).batches == batches
    assert callback.index.label_names == tuple(map(str, labels))
    assert torch.equal(callback.shares, expected.shares)


@pytest.mark.usefixtures("no_warning")
def test_cell_with_one_sample():
    groups = ["rare" if i == 3 else "ab"[i % 2] for i in range(240)]
    groups[int((Toy().targets != Toy().targets[3]).nonzero()[0])] = "rare"
    callback = FairBatch(groups=groups, alpha=0.3)
    module = fit(callback, loader(), max_epochs=5)
    assert (callback.counts == 1).sum() == 2
    assert {len(batch) for batch in module.batches} == {20}


@pytest.mark.usefixtures("no_warning")
def test_numbers_of_numpy_are_numbers():
    numbers = {"alpha": np.float32(0.05), "threshold": np.float64(0), "update_every": np.int64(6), "seed": np.int64(3)}
    callback = FairBatch(groups="group", **numbers)
    fit(callback, loader())
    assert len(callback.history) == 4


@pytest.mark.usefixtures("no_warning")
def test_one_label():
    callback = FairBatch(groups="group", labels=[0] * 240)
    fit(callback, loader())
    assert callback.shares.shape == (1, 3)


@pytest.mark.usefixtures("no_warning")
def test_more_cells_than_samples_in_a_batch():
    callback = FairBatch(groups=torch.arange(240) % 60 // 2, labels=torch.arange(240) % 2, alpha=0.05)
    module = fit(callback, loader(batch_size=8))
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
